/* store/disk.h - how fast a drive is when it is read as the engine reads it, and the file that remembers it.
 *
 * A profile belongs to a device: the depth and piece size that saturate it, and the bandwidth reached then.
 * It only changes speed. docs/formats.md describes the file. */
#ifndef SL_STORE_DISK_H
#define SL_STORE_DISK_H

#include "store/io.h"

typedef struct {
    unsigned depth;  /* pieces in flight, 1 to SL_DISK_DEPTH_MAX */
    uint64_t piece;  /* bytes, a multiple of SL_IO_ALIGN, at most SL_DISK_PIECE_MAX */
    double stream;   /* bytes a second: trunk chunks, in file order */
    double experts;  /* bytes a second: expert-sized reads at random places */
} sl_disk_profile;

enum { SL_DISK_DEPTH_MAX = 1024, SL_DISK_PIECE_MAX = 64 << 20 };

/* Where the profile of the device that holds `path` is kept: under $XDG_CACHE_HOME or ~/.cache. SL_EFORMAT when
 * path cannot be looked at, SL_EUSAGE when neither variable is set. */
int sl_disk_profile_path(char *buf, size_t size, const char *path, sl_err *err);
/* The profile of that device. False when there is none, or one of another file system, or one that makes no
 * sense, which is logged. */
bool sl_disk_profile_load(sl_disk_profile *out, const char *path);
/* Writes it atomically, making the directories; `file` as from sl_disk_profile_path. */
int sl_disk_profile_save(const sl_disk_profile *p, const char *file, const char *path, sl_err *err);

/* What is read, and where to. */
typedef struct {
    const sl_io_file *files; /* each at least SL_IO_ALIGN long */
    size_t n_files;
    uint8_t *buffer;         /* aligned to SL_IO_ALIGN */
    uint64_t buffer_size;
    size_t file;             /* place and random state: carried on, so that nothing is read twice in a row */
    uint64_t at, random;
} sl_disk_source;

typedef struct {
    enum sl_io_backend backend;
    unsigned depth;
    uint64_t piece, request; /* bytes; a request is cut into pieces by the scheduler */
    bool scattered;          /* requests at random places, class DEMAND; else in file order, class STREAM */
    double seconds;
} sl_disk_setting;

/* Reads for that long with as many requests queued as the buffer holds; *rate in bytes a second. */
int sl_disk_measure(double *rate, sl_disk_source *src, const sl_disk_setting *set, sl_err *err);

#endif
