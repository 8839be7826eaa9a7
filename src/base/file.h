/* base/file.h - whole small files in, atomic files out. */
#ifndef SL_BASE_FILE_H
#define SL_BASE_FILE_H

#include <stddef.h>
#include <stdint.h>

#include "base/err.h"

/* Reads all of dir/name (name NULL: dir is the path) with a NUL after its end; free with free().
 * A file above `max` bytes is refused as SL_EFORMAT; absent or unreadable is SL_EFORMAT too, since
 * what is missing is part of a model; a read that fails is SL_EIO. */
int sl_file_read(char **out, size_t *len, const char *dir, const char *name, uint64_t max, sl_err *err);

/* dir/name in buf; SL_EUSAGE when it does not fit. */
int sl_path_join(char *buf, size_t size, const char *dir, const char *name, sl_err *err);

/* Writes all, through short writes and EINTR. 0 or -errno. */
int sl_write_all(int fd, const void *data, size_t n);
/* Reads exactly n bytes at offset, through short reads and EINTR. 0, -errno, or -ENODATA at the end. */
int sl_pread_all(int fd, void *data, size_t n, uint64_t offset);

/* A file that appears whole or not at all: written under a temporary name beside it, then fsync and
 * rename. Every path through ends in commit or abort. */
typedef struct {
    int fd;
    char path[4096], tmp[4096];
} sl_atomic_file;
int sl_atomic_open(sl_atomic_file *f, const char *path, sl_err *err);
int sl_atomic_commit(sl_atomic_file *f, sl_err *err); /* aborts on failure */
void sl_atomic_abort(sl_atomic_file *f);

#endif
