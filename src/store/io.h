/* store/io.h - all reads of weights go through here: one work-conserving scheduler, two classes.
 *
 * Owns: the queues, and the io_uring with its thread (ring.c) or a pool of reading threads (pread.c).
 * Threads: submit, wait and cancel from the engine thread; completions happen on I/O threads.
 * Order: whenever the drive can take another piece, the oldest DEMAND request is served first, then
 * the oldest STREAM one. Large requests are cut into pieces, so that a demand read never waits behind
 * a whole trunk chunk and the queue stays deep. Short reads are continued; a read that ends before
 * `need` bytes is an error, never a zero.
 * Drives: each has its own places in flight. A piece goes to the copy that will have read it first, by what is
 * in flight there and the rate of the last 200 ms; a drive that would hold up the rest of the queue is not given it,
 * but tried again now and then. A copy
 * that fails (error, too short, changed) costs a warning and its whole drive, or when it is the original, that
 * file; the piece is read again elsewhere, and only a piece that fails on every copy is an error. */
#ifndef SL_STORE_IO_H
#define SL_STORE_IO_H

#include <stdatomic.h>

#include "base/err.h"

/* The unit of direct reads, and the alignment of every buffer that is read into. A file system that
 * asks for more is read buffered. */
#define SL_IO_ALIGN 4096

typedef struct sl_io sl_io;

typedef enum { SL_IO_DEMAND, SL_IO_STREAM, SL_IO_CLASSES } sl_io_class;

/* What io_uring does unasked: pieces in flight on a drive, and bytes of one. */
enum { SL_IO_DEPTH = 64, SL_IO_PIECE = 512 << 10 };
/* Drives that hold copies, the model's own included. */
enum { SL_IO_DRIVES_MAX = 16 };

/* A file opened for reading weights. */
typedef struct sl_io_file {
    int fd;           /* O_DIRECT where the file system allows it */
    bool direct;
    bool drop;        /* direct reads were refused: what is read leaves the page cache at once */
    uint32_t align;   /* offset, length and address unit of reads: SL_IO_ALIGN, or 1 when not direct */
    uint64_t size;    /* when opened */
    int64_t mtime_ns; /* when opened */
    char *path;       /* owned */
    unsigned drive;   /* 0: the model's own; mirrors count from 1 */
    struct sl_io_copies *copies; /* on other drives; owned; NULL: none */
} sl_io_file;

typedef struct sl_io_copies {
    sl_io_file *file; /* n of them, same size and alignment or less */
    unsigned n;
    unsigned gone;    /* bit 0: the original, bit i + 1: file[i]: failed and avoided; the scheduler's */
} sl_io_copies;

/* Opens path for reading. `direct` asks for O_DIRECT; when it is refused, by the file system or by a
 * first read, the file is read buffered, *out says so and the first such file of a process is logged.
 * SL_EFORMAT when absent or not a regular file. */
int sl_io_file_open(sl_io_file *out, const char *path, bool direct, sl_err *err);
void sl_io_file_close(sl_io_file *f);
/* Opens `path`, a copy of f on drive `drive` > 0, as a further source of its bytes, which the caller has compared.
 * While f has copies every read is checked against a change of the file it came from, and what fails on one is
 * read from another. Before the first read. SL_EFORMAT when it is no file or not of f's size. */
int sl_io_file_mirror(sl_io_file *f, const char *path, unsigned drive, sl_err *err);
/* SL_EIO when the file's size or modification time is no longer what it was when opened. One with copies is
 * checked at each read instead. */
int sl_io_file_unchanged(const sl_io_file *f, sl_err *err);

/* One read. The caller fills the first part and keeps the struct and buffer alive until waited for. */
typedef struct sl_io_req {
    const sl_io_file *file;
    uint64_t offset;    /* multiple of file->align */
    uint64_t length;    /* multiple of file->align; may reach past the end of the file */
    uint64_t need;      /* bytes from `offset` that must exist, <= length */
    uint8_t *buffer;    /* room for length, aligned to file->align */
    sl_io_class class;
    /* private to the scheduler */
    struct sl_io_req *next;
    uint64_t submitted; /* bytes handed out as pieces */
    unsigned pieces;    /* in flight */
    int error;          /* the first failure, published once no piece is in flight */
    _Atomic int status; /* 1 queued or in flight, 0 done (as in a zeroed struct), -errno failed;
                           released by the I/O thread as its last touch, acquired by sl_io_done */
} sl_io_req;

/* Widens [offset, offset + n) of `f` to its alignment; *skip: where the data begins in the buffer. */
void sl_io_span(const sl_io_file *f, uint64_t offset, uint64_t n, uint64_t *begin, uint64_t *length, uint64_t *skip);
/* The largest length that sl_io_span can return for n bytes, at any offset and alignment in use. */
uint64_t sl_io_span_max(uint64_t n);

typedef struct {
    enum sl_io_backend backend; /* AUTO: io_uring, else pread with one warning in the log */
    unsigned depth;             /* pieces in flight on each drive; 0: SL_IO_DEPTH, or 32 threads */
    unsigned drives;            /* that files lie on, at most SL_IO_DRIVES_MAX; 0: 1 */
    uint64_t piece;             /* bytes a piece at most, a multiple of 4096; 0: SL_IO_PIECE */
    /* Fault injection for tests, NULL otherwise: called on an I/O thread before each piece and each
     * continuation of one; returns 0 to go on, -errno to fail it, or n > 0 to shorten it to n bytes
     * (rounded down to the file's alignment, but not to nothing). */
    long (*fault)(void *user, const sl_io_file *f, uint64_t offset, uint64_t length);
    void *fault_user;
} sl_io_options;

int sl_io_open(sl_io **out, const sl_io_options *opt, sl_err *err);
void sl_io_close(sl_io *io); /* cancels what is queued, waits for what is in flight; NULL is fine */
const char *sl_io_name(const sl_io *io); /* "io_uring" or "pread" */

/* Since open. The drive is busy while at least one piece is in flight: idle time is wall time less busy_ns, and
 * the mean depth of its queue while busy is depth_ns / busy_ns. */
typedef struct {
    uint64_t bytes, pieces; /* read */
    uint64_t busy_ns;       /* time with a piece in flight */
    uint64_t depth_ns;      /* pieces in flight, integrated over time */
    uint64_t mirror_bytes;  /* of bytes: not from drive 0 */
    unsigned dropped;       /* drives given up */
} sl_io_counts;
sl_io_counts sl_io_count(sl_io *io); /* any thread */

/* Tells that reads into this memory will be many, so that the kernel may keep its pages at hand: never
 * needed, silently nothing where it cannot (threads, a limit on locked memory). Forget it before it is freed or
 * unmapped; no read into it may be in flight then. */
void sl_io_remember(sl_io *io, void *memory, uint64_t size);
void sl_io_forget(sl_io *io, void *memory); /* NULL, and what was never remembered, is fine; so is io NULL */
void sl_io_submit(sl_io *io, sl_io_req *req);
bool sl_io_done(const sl_io_req *req); /* wait will not block */
/* Waits until req is finished. SL_EIO names file, offset and cause. */
int sl_io_wait(sl_io *io, sl_io_req *req, sl_err *err);
/* Waits until at least one of reqs[0..n) (entries may be NULL) is finished; returns its index. */
size_t sl_io_wait_any(sl_io *io, sl_io_req *const *reqs, size_t n);
/* Takes req back: what was not started is dequeued, the rest is waited for. Its result does not
 * matter. Returns the bytes that were never asked of the drive. */
uint64_t sl_io_cancel(sl_io *io, sl_io_req *req);

#endif
