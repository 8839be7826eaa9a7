/* cmd/synth_write.c - writes the shards of a synthetic checkpoint and their index.
 *
 * Threads: shards are written one after the other; blocks of one are made and written by a pool.
 * Invariant: a file has its final name only when it is whole. */
#include "cmd.h"
#include "synth.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/fs.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "base/file.h"
#include "base/num.h"
#include "base/pool.h"

enum { BLOCK = 4 << 20, THREADS = 4 }; /* more threads than CPUs: some wait for the drive */

typedef struct {
    const char *dir;
    synth_model model;
    bool headers_only;
    uint32_t pool; /* distinct experts and layers of a kind; 0: all of them */
    synth_random *random;
    sl_pool *threads;
    uint8_t *buffer; /* THREADS x BLOCK */

    /* the shard being written */
    synth_shard shard;
    uint32_t index;
    int fd;
    atomic_bool direct;
    uint64_t begin, end; /* of the range that the threads are writing, in the data */
    atomic_uint_fast64_t next;
    atomic_int failed;   /* errno; EINTR: interrupted */

    /* of all layers, for clones */
    uint64_t *header_bytes;
    int *source; /* file descriptors, -1: not open */

    FILE *map;   /* the index, its entries written with the shards */
    uint64_t total, room; /* bytes of data, and those of them that will take room: clones do not */
    atomic_uint_fast64_t done;
    double start, shown;
} writer;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* A line that is rewritten on a terminal, else one every ten seconds; from the third second on. */
static void show_progress(writer *w)
{
    const bool tty = isatty(STDERR_FILENO);
    const double t = now(), spent = t - w->start;
    if (cmd_log_level() < SL_LOG_WARN || spent < 2 || t - w->shown < (tty ? 0.2 : 10))
        return;
    char done[32], total[32], rate[32];
    const uint64_t n = atomic_load(&w->done);
    w->shown = t;
    fprintf(stderr, "%ssluice: %s of %s, %s/s, %.0f s to go%s", tty ? "\r\033[K" : "", cmd_bytes(done, n),
            cmd_bytes(total, w->room), cmd_bytes(rate, (uint64_t)((double)n / spent)),
            n ? spent * (double)(w->room - n) / (double)n : 0.0, tty ? "" : "\n");
}

static void end_progress(const writer *w)
{
    if (w->shown > 0 && isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* ---- writing ---------------------------------------------------------------------------------- */

static int fail_write(const writer *w, int e, sl_err *err)
{
    char name[64];
    if (e == EINTR)
        return sl_fail(err, SL_EINTR, "interrupted");
    synth_shard_name(&w->model, w->index, name);
    return sl_fail(err, SL_EFAIL, "%s/%s: %s", w->dir, name, strerror(e));
}

static int write_at(writer *w, const uint8_t *p, uint64_t n, uint64_t offset)
{
    while (n) {
        const ssize_t k = pwrite(w->fd, p, n, (off_t)offset);
        if (k < 0 && errno == EINVAL && atomic_exchange(&w->direct, false)) {
            if (fcntl(w->fd, F_SETFL, 0) == 0) /* a unit larger than SYNTH_ALIGN: through the page cache */
                continue;
        }
        if (k < 0 && errno == EINTR && !cmd_interrupted(NULL))
            continue;
        if (k <= 0)
            return k < 0 ? errno : ENOSPC;
        p += k;
        n -= (uint64_t)k;
        offset += (uint64_t)k;
    }
    return 0;
}

/* Each thread takes the next block until none is left, so that writes stay nearly sequential. */
static void write_blocks(void *arg, size_t first, size_t end, unsigned thread)
{
    writer *w = arg;
    uint8_t *buffer = w->buffer + (size_t)thread * BLOCK;
    (void)first;
    (void)end;
    for (uint64_t at; (at = atomic_fetch_add(&w->next, BLOCK)) < w->end && !atomic_load(&w->failed);) {
        const uint64_t n = sl_min_u64(BLOCK, w->end - at);
        synth_fill(w->random, &w->shard, at, n, buffer);
        const int e = cmd_interrupted(NULL) ? EINTR : write_at(w, buffer, n, w->shard.header_bytes + at);
        if (e)
            atomic_store(&w->failed, e);
        atomic_fetch_add(&w->done, n);
        if (thread == 0)
            show_progress(w);
    }
}

/* Random bytes for [begin, end) of the data; begin is a multiple of SYNTH_ALIGN. What is left after the
 * last whole unit ends the file, so direct writes are over. */
static int write_range(writer *w, uint64_t begin, uint64_t end, sl_err *err)
{
    const uint64_t whole = sl_round_down(end, SYNTH_ALIGN);
    w->end = whole;
    atomic_store(&w->next, begin);
    atomic_store(&w->failed, 0);
    atomic_store(&w->direct, fcntl(w->fd, F_SETFL, O_DIRECT) == 0);
    sl_pool_run(w->threads, THREADS, 1, write_blocks, w);
    fcntl(w->fd, F_SETFL, 0);
    atomic_store(&w->direct, false);
    int e = atomic_load(&w->failed);
    if (!e && whole < end) {
        synth_fill(w->random, &w->shard, whole, end - whole, w->buffer);
        e = write_at(w, w->buffer, end - whole, w->shard.header_bytes + whole);
        atomic_fetch_add(&w->done, end - whole);
    }
    return e ? fail_write(w, e, err) : 0;
}

/* ---- cloning ---------------------------------------------------------------------------------- */

static int fail_clone(const writer *w, int e, sl_err *err)
{
    if (e == ENOSPC || e == EINTR || e == EIO)
        return fail_write(w, e, err);
    return sl_fail(err, SL_EFAIL, "%s: this file system cannot share blocks between files (%s): --reflink-pool "
                   "needs one that can, such as XFS or Btrfs", w->dir, strerror(e));
}

/* Tries it on a small file before anything large is written. */
static int probe_clone(writer *w, sl_err *err)
{
    char path[4096];
    int e = 0, rc = sl_path_join(path, sizeof path, w->dir, ".probe.tmp", err);
    if (rc < 0)
        return rc;
    const int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    struct file_clone_range r = { .src_fd = fd, .src_length = SYNTH_ALIGN, .dest_offset = SYNTH_ALIGN };
    if (fd < 0 || sl_write_all(fd, w->buffer, SYNTH_ALIGN) < 0 || ioctl(fd, FICLONERANGE, &r) < 0)
        e = errno;
    if (fd >= 0)
        close(fd);
    unlink(path);
    return e ? fail_clone(w, e, err) : 0;
}

/* Shares [begin, begin + n) of the data with the same bytes at `from` of layer `layer`; n 0: to the end. */
static int clone(writer *w, uint64_t begin, uint64_t n, uint32_t layer, uint64_t from, sl_err *err)
{
    if (layer != w->index && w->source[layer] < 0) {
        char path[4096], name[64];
        synth_shard_name(&w->model, layer, name);
        const int rc = sl_path_join(path, sizeof path, w->dir, name, err);
        if (rc < 0)
            return rc;
        if ((w->source[layer] = open(path, O_RDONLY | O_CLOEXEC)) < 0)
            return sl_fail(err, SL_EFAIL, "%s: %s", path, strerror(errno));
    }
    struct file_clone_range r = { .src_fd = layer == w->index ? w->fd : w->source[layer],
                                  .src_offset = w->header_bytes[layer] + from, .src_length = n,
                                  .dest_offset = w->shard.header_bytes + begin };
    if (ioctl(w->fd, FICLONERANGE, &r) < 0)
        return fail_clone(w, errno, err);
    show_progress(w);
    return cmd_interrupted(NULL) ? fail_write(w, EINTR, err) : 0;
}

static bool same_kind(const sl_config *c, uint32_t a, uint32_t b)
{
    return c->is_mla[a] == c->is_mla[b] && sl_config_is_moe(c, a) == sl_config_is_moe(c, b);
}

/* The layer whose trunk bytes this layer shares: itself for the first `pool` of its kind, and without a pool. */
static uint32_t trunk_source(const writer *w, uint32_t layer)
{
    const sl_config *c = &w->model.config;
    uint32_t before = 0, k = 0;
    for (uint32_t l = 0; l < layer; l++)
        before += same_kind(c, l, layer);
    if (w->pool == 0 || before < w->pool)
        return layer;
    for (uint32_t l = 0, want = before % w->pool;; l++)
        if (same_kind(c, l, layer) && k++ == want)
            return l;
}

static int share_layer(writer *w, sl_err *err)
{
    const sl_config *c = &w->model.config;
    const uint64_t expert = synth_expert_bytes(c);
    const uint32_t experts = sl_config_is_moe(c, w->index) ? c->experts : 0;
    int rc = 0;
    for (uint32_t e = 0; rc == 0 && e < experts; e++) {
        const uint64_t all = (uint64_t)(w->index - c->dense_layers) * c->experts + e, source = all % w->pool;
        rc = all < w->pool ? write_range(w, e * expert, (e + 1) * expert, err)
                           : clone(w, e * expert, expert, (uint32_t)(source / c->experts) + c->dense_layers,
                                   source % c->experts * expert, err);
    }
    if (rc < 0)
        return rc;
    const uint32_t source = trunk_source(w, w->index);
    if (source == w->index)
        return write_range(w, w->shard.trunk_begin, w->shard.data_bytes, err);
    return clone(w, w->shard.trunk_begin, 0, source, w->shard.trunk_begin, err);
}

/* ---- files ------------------------------------------------------------------------------------ */

static int write_shard(writer *w, uint32_t index, sl_err *err)
{
    const bool layer = index < w->model.config.layers;
    char path[4096], name[64];
    sl_atomic_file f;
    synth_shard_name(&w->model, index, name);
    int rc = sl_path_join(path, sizeof path, w->dir, name, err);
    if (rc < 0 || (rc = sl_atomic_open(&f, path, err)) < 0)
        return rc;
    if ((rc = synth_shard_init(&w->shard, &w->model, index, err)) < 0 ||
        (rc = synth_shard_header(&w->shard, w->map, name, index == 0, err)) < 0) {
        synth_shard_clear(&w->shard);
        sl_atomic_abort(&f);
        return rc;
    }
    w->index = index;
    w->fd = f.fd;
    if (layer)
        w->header_bytes[index] = w->shard.header_bytes;
    const uint64_t size = w->shard.header_bytes + w->shard.data_bytes;
    int e = 0;
    if (w->headers_only)
        e = ftruncate(f.fd, (off_t)size) < 0 ? errno : 0;
    else if (!w->pool && fallocate(f.fd, 0, 0, (off_t)size) < 0 && errno == ENOSPC)
        e = ENOSPC; /* other file systems find out while writing */
    if (!e)
        e = write_at(w, (const uint8_t *)w->shard.header, w->shard.header_bytes, 0);
    if (e)
        rc = fail_write(w, e, err);
    else if (!w->headers_only)
        rc = w->pool && layer ? share_layer(w, err) : write_range(w, 0, w->shard.data_bytes, err);
    synth_shard_clear(&w->shard);
    if (rc == 0)
        return sl_atomic_commit(&f, err);
    sl_atomic_abort(&f);
    return rc;
}

/* All shards, and the index that names them. */
static int write_shards(writer *w, sl_err *err)
{
    char path[4096];
    sl_atomic_file index;
    int rc = sl_path_join(path, sizeof path, w->dir, "model.safetensors.index.json", err);
    if (rc < 0 || (rc = sl_atomic_open(&index, path, err)) < 0)
        return rc;
    const int fd = dup(index.fd);
    w->map = fd < 0 ? NULL : fdopen(fd, "w");
    if (!w->map)
        rc = sl_fail(err, SL_EFAIL, "%s: %s", path, strerror(errno));
    else
        fprintf(w->map, "{\n\"metadata\": {\"total_size\": %" PRIu64 "},\n\"weight_map\": {\n", w->total);
    for (uint32_t i = 0; rc == 0 && i < w->model.shards; i++)
        rc = write_shard(w, i, err);
    if (w->map) {
        fputs("\n}}\n", w->map);
        const bool failed = ferror(w->map);
        if ((fclose(w->map) != 0 || failed) && rc == 0)
            rc = sl_fail(err, SL_EFAIL, "%s: %s", path, strerror(errno));
    }
    if (rc == 0)
        return sl_atomic_commit(&index, err);
    sl_atomic_abort(&index);
    return rc;
}

/* ---- the whole --------------------------------------------------------------------------------- */

/* Bytes of data in shard `index` that will take room on the drive. */
static uint64_t room_for(const writer *w, uint32_t index, const synth_shard *s)
{
    const sl_config *c = &w->model.config;
    if (w->headers_only)
        return 0;
    if (w->pool == 0 || index >= c->layers)
        return s->data_bytes;
    const uint64_t expert = synth_expert_bytes(c), before = sl_config_is_moe(c, index) ?
        (uint64_t)(index - c->dense_layers) * c->experts : w->pool;
    const uint64_t distinct = before < w->pool ? sl_min_u64(w->pool - before, c->experts) : 0;
    return distinct * expert + (trunk_source(w, index) == index ? s->data_bytes - s->trunk_begin : 0);
}

/* Sums sizes and compares them with what is free, so that a full drive is known before hours of writing. */
static int check_room(writer *w, uint64_t *tensors, sl_err *err)
{
    uint64_t need = 4u << 20; /* the small files; names are in header and index */
    synth_shard s;
    for (uint32_t i = 0; i < w->model.shards; i++) {
        const int rc = synth_shard_init(&s, &w->model, i, err);
        if (rc < 0)
            return rc;
        w->total += s.data_bytes;
        *tensors += s.n;
        w->room += room_for(w, i, &s);
        need += 320 * s.n + SYNTH_ALIGN;
        synth_shard_clear(&s);
    }
    struct statvfs v;
    if (statvfs(w->dir, &v) < 0)
        return sl_fail(err, SL_EFAIL, "%s: %s", w->dir, strerror(errno));
    const uint64_t room = (uint64_t)v.f_bavail * v.f_frsize;
    char a[32], b[32];
    if (need + w->room > room)
        return sl_fail(err, SL_EFAIL, "%s: needs %s, %s are free", w->dir, cmd_bytes(a, need + w->room),
                       cmd_bytes(b, room));
    return 0;
}

static int open_writer(writer *w, sl_err *err)
{
    const sl_config *c = &w->model.config;
    w->random = synth_random_open(&w->model);
    w->buffer = sl_mem_alloc(NULL, SL_MEM_SCRATCH, (uint64_t)THREADS * BLOCK);
    w->header_bytes = calloc(c->layers, sizeof *w->header_bytes);
    w->source = malloc(c->layers * sizeof *w->source);
    for (uint32_t l = 0; w->source && l < c->layers; l++)
        w->source[l] = -1;
    if (!w->random || !w->buffer || !w->header_bytes || !w->source)
        return sl_fail(err, SL_EFAIL, "out of memory");
    return sl_pool_open(&w->threads, THREADS, err);
}

static void close_writer(writer *w)
{
    for (uint32_t l = 0; w->source && l < w->model.config.layers; l++)
        if (w->source[l] >= 0)
            close(w->source[l]);
    sl_pool_close(w->threads);
    synth_random_close(w->random);
    sl_mem_free(w->buffer);
    free(w->header_bytes);
    free(w->source);
}

int synth_write(const synth_job *job, const synth_model *m, synth_totals *out, sl_err *err)
{
    writer w = { .dir = job->dir, .model = *m, .headers_only = job->headers_only, .pool = job->pool, .start = now() };
    int rc = open_writer(&w, err);
    *out = (synth_totals){ 0 };
    if (rc == 0)
        rc = check_room(&w, &out->tensors, err);
    out->bytes = w.total;
    if (rc == 0 && w.pool)
        rc = probe_clone(&w, err);
    if (rc == 0)
        rc = write_shards(&w, err);
    end_progress(&w);
    close_writer(&w);
    return rc;
}
