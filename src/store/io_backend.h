/* store/io_backend.h - what the scheduler (io.c) and its backends (ring.c, pread.c) share.
 *
 * A backend only takes pieces, reads them and settles the results; order, splitting, short reads,
 * faults and completion live in io.c, so both backends behave alike. */
#ifndef SL_STORE_IO_BACKEND_H
#define SL_STORE_IO_BACKEND_H

#include <pthread.h>

#include "store/io.h"

typedef struct {
    sl_io_req *req;
    const sl_io_file *from;  /* req->file or a copy of it */
    unsigned tried;          /* bits as in sl_io_copies.gone: copies that failed it */
    uint64_t offset, length; /* in the file */
    uint64_t got;            /* bytes read; the next read begins behind them */
    uint64_t ask;            /* bytes of the next read */
    unsigned tries;          /* interrupted reads in a row */
} sl_io_piece;

static inline uint8_t *sl_io_piece_buffer(const sl_io_piece *p)
{
    return p->req->buffer + (p->offset - p->req->offset) + p->got;
}

/* The piece to read next. False when nothing is queued, with `wait` only once the scheduler closes. */
bool sl_io_take(sl_io *io, sl_io_piece *p, bool wait);
/* Takes a read's result, bytes or -errno. True: read p on, as it says now; false: p is over. */
bool sl_io_settle(sl_io *io, sl_io_piece *p, long result);

typedef struct {
    const char *name;
    unsigned depth;                                      /* pieces in flight unless told otherwise */
    int (*open)(void **self, sl_io *io, unsigned depth); /* 0 or -errno */
    void (*wake)(void *self);  /* something was queued after take found nothing; NULL: not needed */
    void (*remember)(void *self, uint8_t *memory, uint64_t size); /* sl_io_remember and forget; NULL: not done */
    void (*forget)(void *self, uint8_t *memory);
    void (*close)(void *self); /* nothing is queued any more; waits for what is in flight */
} sl_io_driver;

extern const sl_io_driver sl_io_ring, sl_io_pread;

/* Starts a thread that no signal reaches: signals are the program's. 0 or -errno. */
int sl_io_thread(pthread_t *t, void *(*fn)(void *), void *arg);

#endif
