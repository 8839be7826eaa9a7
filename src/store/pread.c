/* Threads that pread: where io_uring is forbidden. */
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

#include "store/io_backend.h"

enum { MAX_THREADS = 64 };

struct readers {
    sl_io *io;
    unsigned n;
    pthread_t thread[MAX_THREADS];
};

static void *work(void *arg)
{
    struct readers *r = arg;
    sl_io_piece p;
    while (sl_io_take(r->io, &p, true)) {
        long n;
        do {
            n = pread(p.from->fd, sl_io_piece_buffer(&p), p.ask, (off_t)(p.offset + p.got));
        } while (sl_io_settle(r->io, &p, n < 0 ? -errno : n));
    }
    return NULL;
}

static int pread_open(void **self, sl_io *io, unsigned depth)
{
    struct readers *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->io = io;
    int rc = 0;
    while (r->n < depth && r->n < MAX_THREADS && rc == 0)
        if ((rc = sl_io_thread(&r->thread[r->n], work, r)) == 0)
            r->n++;
    if (r->n == 0) {
        free(r);
        return rc;
    }
    *self = r; /* with fewer threads than asked for it is slower, not wrong */
    return 0;
}

static void pread_close(void *self)
{
    struct readers *r = self;
    for (unsigned i = 0; i < r->n; i++)
        pthread_join(r->thread[i], NULL);
    free(r);
}

const sl_io_driver sl_io_pread = { .name = "pread", .depth = 32, .open = pread_open, .close = pread_close };
