/* io_uring: one thread owns the ring, keeps its places full and settles what completes. */
#include <errno.h>
#include <liburing.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "store/io_backend.h"

enum { MAX_DEPTH = 1024, REGIONS = 8, BUFFERS = 256 };
static const uint64_t BUFFER = 1 << 30; /* the kernel's limit for one registered buffer */
static const uint64_t WAKE = UINT64_MAX; /* user_data of the read that waits for sl_io_submit */

/* Memory whose pages the kernel holds: registered buffers [first, first + n) of it, a GiB each. */
typedef struct {
    uint8_t *base;
    uint64_t size;
    unsigned first, n;
} region;

struct ring {
    sl_io *io;
    struct io_uring uring;
    pthread_t thread;
    int wake_fd;
    uint64_t wake_count; /* what the eventfd held */
    bool wake_armed;
    atomic_bool stop;    /* released before the last wake-up, acquired by the owner */
    unsigned depth, free; /* places; free ones are listed in idle[0..free) */
    unsigned *idle;
    sl_io_piece *piece;
    pthread_mutex_t lock;    /* guards regions */
    region regions[REGIONS]; /* size 0: unused */
};

static struct io_uring_sqe *get_sqe(struct ring *r)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(&r->uring);
    sl_assert(sqe); /* one entry a place and one for the wake-up */
    return sqe;
}

/* The registered buffer that [at, at + n) lies in, or -1. */
static int find_buffer(struct ring *r, const uint8_t *at, uint64_t n)
{
    int found = -1;
    pthread_mutex_lock(&r->lock);
    for (const region *g = r->regions; g < r->regions + REGIONS && found < 0; g++) {
        const uint64_t begin = (uint64_t)((uintptr_t)at - (uintptr_t)g->base);
        if (begin < g->size && n <= g->size - begin && begin / BUFFER == (begin + n - 1) / BUFFER)
            found = (int)(g->first + begin / BUFFER);
    }
    pthread_mutex_unlock(&r->lock);
    return found;
}

static void ask(struct ring *r, unsigned place)
{
    const sl_io_piece *p = &r->piece[place];
    struct io_uring_sqe *sqe = get_sqe(r);
    uint8_t *to = sl_io_piece_buffer(p);
    const int buffer = find_buffer(r, to, p->ask);
    if (buffer >= 0)
        io_uring_prep_read_fixed(sqe, p->from->fd, to, (unsigned)p->ask, p->offset + p->got, buffer);
    else
        io_uring_prep_read(sqe, p->from->fd, to, (unsigned)p->ask, p->offset + p->got);
    io_uring_sqe_set_data64(sqe, place);
}

static void arm_wake(struct ring *r)
{
    struct io_uring_sqe *sqe = get_sqe(r);
    io_uring_prep_read(sqe, r->wake_fd, &r->wake_count, sizeof r->wake_count, 0);
    io_uring_sqe_set_data64(sqe, WAKE);
    r->wake_armed = true;
}

static void reap(struct ring *r)
{
    struct io_uring_cqe *cqe;
    unsigned head, n = 0;
    io_uring_for_each_cqe(&r->uring, head, cqe) {
        n++;
        if (cqe->user_data == WAKE) {
            r->wake_armed = false;
            continue;
        }
        const unsigned place = (unsigned)cqe->user_data;
        if (sl_io_settle(r->io, &r->piece[place], cqe->res))
            ask(r, place);
        else
            r->idle[r->free++] = place;
    }
    io_uring_cq_advance(&r->uring, n);
}

static void *own(void *arg)
{
    struct ring *r = arg;
    for (;;) {
        const bool stop = atomic_load_explicit(&r->stop, memory_order_acquire);
        if (stop && r->free == r->depth && !r->wake_armed)
            return NULL;
        if (!stop && !r->wake_armed)
            arm_wake(r);
        while (r->free && sl_io_take(r->io, &r->piece[r->idle[r->free - 1]], false))
            ask(r, r->idle[--r->free]);
        const int rc = io_uring_submit_and_wait(&r->uring, 1);
        sl_assert(rc >= 0 || rc == -EINTR || rc == -EAGAIN || rc == -EBUSY);
        reap(r);
    }
}

/* A filter may let the ring be made and refuse its use, and old kernels lack plain reads. */
static int probe(struct ring *r)
{
    struct io_uring_probe *ops = io_uring_get_probe_ring(&r->uring);
    const bool can_read = ops && io_uring_opcode_supported(ops, IORING_OP_READ);
    io_uring_free_probe(ops);
    if (!can_read)
        return -ENOSYS;
    io_uring_prep_nop(get_sqe(r));
    struct io_uring_cqe *cqe;
    int rc = io_uring_submit(&r->uring);
    if (rc >= 0 && (rc = io_uring_wait_cqe(&r->uring, &cqe)) >= 0)
        io_uring_cqe_seen(&r->uring, cqe);
    return rc < 0 ? rc : 0;
}

/* Fills or, with memory NULL, empties registered buffers [first, first + n). */
static int set_buffers(struct ring *r, unsigned first, unsigned n, uint8_t *memory, uint64_t size)
{
    for (unsigned i = 0; i < n; i++) {
        const uint64_t at = i * BUFFER, length = size - at < BUFFER ? size - at : BUFFER;
        const struct iovec v = { .iov_base = memory ? memory + at : NULL, .iov_len = memory ? length : 0 };
        const int rc = io_uring_register_buffers_update_tag(&r->uring, first + i, &v, NULL, 1);
        if (rc != 1)
            return rc < 0 ? rc : -EAGAIN;
    }
    return 0;
}

static void ring_remember(void *self, uint8_t *memory, uint64_t size)
{
    struct ring *r = self;
    unsigned first = 0, n = (unsigned)((size + BUFFER - 1) / BUFFER);
    region *free_one = NULL;
    for (region *g = r->regions; g < r->regions + REGIONS; g++) {
        if (!g->size)
            free_one = g;
        else if (g->first + g->n > first)
            first = g->first + g->n; /* behind all others: those that come and go are few */
    }
    if (!free_one || size == 0 || size > BUFFERS * BUFFER || first + n > BUFFERS)
        return;
    const int rc = set_buffers(r, first, n, memory, size);
    if (rc < 0) { /* most often a limit on locked memory */
        sl_log(SL_LOG_DEBUG, "io: %llu bytes not registered: %s", (unsigned long long)size, strerror(-rc));
        set_buffers(r, first, n, NULL, 0);
        return;
    }
    pthread_mutex_lock(&r->lock);
    *free_one = (region){ .base = memory, .size = size, .first = first, .n = n };
    pthread_mutex_unlock(&r->lock);
}

static void ring_forget(void *self, uint8_t *memory)
{
    struct ring *r = self;
    for (region *g = r->regions; g < r->regions + REGIONS; g++) {
        if (!g->size || g->base != memory)
            continue;
        pthread_mutex_lock(&r->lock);
        const region gone = *g;
        *g = (region){ .size = 0 };
        pthread_mutex_unlock(&r->lock);
        set_buffers(r, gone.first, gone.n, NULL, 0);
    }
}

static void ring_free(struct ring *r)
{
    pthread_mutex_destroy(&r->lock);
    if (r->wake_fd >= 0)
        close(r->wake_fd);
    free(r->idle);
    free(r->piece);
    free(r);
}

static int ring_open(void **self, sl_io *io, unsigned depth)
{
    struct ring *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    pthread_mutex_init(&r->lock, NULL);
    r->io = io;
    r->depth = r->free = depth < MAX_DEPTH ? depth : MAX_DEPTH;
    r->wake_fd = eventfd(0, EFD_CLOEXEC);
    r->idle = calloc(r->depth, sizeof *r->idle);
    r->piece = calloc(r->depth, sizeof *r->piece);
    int rc = -ENOMEM;
    if (r->wake_fd < 0 || !r->idle || !r->piece)
        goto fail;
    for (unsigned i = 0; i < r->depth; i++)
        r->idle[i] = i;
    if ((rc = io_uring_queue_init(r->depth + 1, &r->uring, 0)) < 0)
        goto fail;
    io_uring_register_buffers_sparse(&r->uring, BUFFERS); /* refused: then nothing can be registered later */
    if ((rc = probe(r)) < 0 || (rc = sl_io_thread(&r->thread, own, r)) < 0) {
        io_uring_queue_exit(&r->uring);
        goto fail;
    }
    *self = r;
    return 0;
fail:
    ring_free(r);
    return rc;
}

static void ring_wake(void *self)
{
    const struct ring *r = self;
    const uint64_t one = 1;
    ssize_t n;
    do
        n = write(r->wake_fd, &one, sizeof one);
    while (n < 0 && errno == EINTR);
    sl_assert(n == sizeof one);
}

static void ring_close(void *self)
{
    struct ring *r = self;
    atomic_store_explicit(&r->stop, true, memory_order_release);
    ring_wake(r);
    pthread_join(r->thread, NULL);
    io_uring_queue_exit(&r->uring);
    ring_free(r);
}

const sl_io_driver sl_io_ring = {
    .name = "io_uring", .depth = SL_IO_DEPTH, .open = ring_open, .wake = ring_wake, .remember = ring_remember,
    .forget = ring_forget, .close = ring_close,
};
