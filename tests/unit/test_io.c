/* The read scheduler: right bytes for any pattern of requests, short reads, faults and backends. */
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "base/num.h"
#include "store/io.h"
#include "tests/check.h"
#include "tests/unit/temp.h"

enum { SIZE = (3 << 20) + 777 };
static uint8_t *data;
static char path[256];
static bool have_uring;
static const char *const names[] = { "auto", "io_uring", "pread" };

static sl_io *must_open(const sl_io_options *opt)
{
    sl_io *io = NULL;
    sl_err err;
    CHECK_MSG(sl_io_open(&io, opt, &err) == 0, "%s", err.text);
    if (!io)
        exit(1);
    return io;
}

static sl_io_file must_open_file(bool direct)
{
    sl_io_file f;
    sl_err err;
    if (sl_io_file_open(&f, path, direct, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    return f;
}

static void test_span(void)
{
    sl_io_file f = { .align = 1 };
    uint64_t begin, length, skip;
    for (int i = 0; i < 100000; i++) {
        const uint64_t offset = rng() >> (2 + rng_below(60)), n = 1 + (rng() >> (20 + rng_below(44)));
        f.align = i & 1 ? 1 : SL_IO_ALIGN;
        sl_io_span(&f, offset, n, &begin, &length, &skip);
        CHECK(begin % f.align == 0 && length % f.align == 0 && skip < f.align);
        CHECK(begin + skip == offset && skip + n <= length && length < skip + n + f.align);
        CHECK(length <= sl_io_span_max(n));
    }
    f.align = SL_IO_ALIGN;
    sl_io_span(&f, SL_IO_ALIGN - 1, 2, &begin, &length, &skip);
    CHECK_EQ(length, sl_io_span_max(2));
}

/* ---- fault hooks ---------------------------------------------------------------------------- */

enum { LOG = 4096 };
static struct hook {
    atomic_int n;             /* pieces seen */
    uint64_t offset[LOG];     /* of piece i */
    atomic_bool shut;         /* pieces wait for it to open */
    atomic_ulong seed;
    int mode;
    uint64_t bad_begin, bad_end; /* offsets that fail */
    unsigned delay_us;
} hook;
enum { PLAIN, ONE_UNIT, RANDOM_SHORT, ODD_SHORT };

static long on_piece(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    struct hook *h = user;
    const int i = atomic_fetch_add(&h->n, 1);
    if (i < LOG)
        h->offset[i] = offset;
    while (atomic_load(&h->shut))
        usleep(200);
    if (h->delay_us)
        usleep(h->delay_us);
    if (offset < h->bad_end && offset + length > h->bad_begin)
        return -EIO;
    const unsigned long r = atomic_fetch_add(&h->seed, 0x9e3779b97f4a7c15u) * 0xbf58476d1ce4e5b9u >> 33;
    (void)f;
    switch (h->mode) {
    case ONE_UNIT: return 1;
    case RANDOM_SHORT: return (long)(r % (2 * length));
    case ODD_SHORT: return r & 1 ? (long)(length / 2 + 1) : 0;
    }
    return 0;
}

static sl_io_options hooked(enum sl_io_backend backend, unsigned depth, uint64_t piece)
{
    hook = (struct hook){ .seed = rng() };
    return (sl_io_options){ .backend = backend, .depth = depth, .piece = piece, .fault = on_piece, .fault_user = &hook };
}

/* ---- tests ---------------------------------------------------------------------------------- */

enum { REQS = 24 };

static void random_req(sl_io_req *q, const sl_io_file *f)
{
    const uint64_t offset = rng_below(SIZE), most = SIZE - offset;
    const uint64_t n = 1 + rng_below(rng_below(4) ? sl_min_u64(most, 100000) : most);
    uint64_t skip;
    *q = (sl_io_req){ .file = f, .class = rng_below(2) };
    sl_io_span(f, offset, n, &q->offset, &q->length, &skip);
    if (rng_below(8) == 0)
        q->length += 3 * f->align; /* may reach past the end of the file */
    q->need = skip + n;
    q->buffer = aligned(q->length);
    memset(q->buffer, 0xee, q->length);
}

static void test_patterns(enum sl_io_backend backend, bool direct, unsigned depth, uint64_t piece, int mode)
{
    sl_io_options opt = hooked(backend, depth, piece);
    hook.mode = mode;
    if (mode == PLAIN)
        opt.fault = NULL;
    sl_io *io = must_open(&opt);
    CHECK_STR(sl_io_name(io), names[backend]);
    sl_io_file f = must_open_file(direct);
    sl_io_req q[REQS], *list[REQS];
    sl_err err;
    for (int round = 0; round < 4; round++) {
        for (int i = 0; i < REQS; i++) {
            random_req(&q[i], &f);
            list[i] = &q[i];
            sl_io_submit(io, &q[i]);
        }
        for (int left = REQS; left; left--) {
            const size_t i = round & 1 ? sl_io_wait_any(io, list, REQS) : (size_t)(left - 1);
            CHECK_MSG(sl_io_wait(io, &q[i], &err) == 0, "%s", err.text);
            CHECK(sl_io_done(&q[i]));
            CHECK_MSG(memcmp(q[i].buffer, data + q[i].offset, q[i].need) == 0,
                      "%s direct %d depth %u piece %llu mode %d: wrong bytes at %llu+%llu", names[backend], direct,
                      depth, (unsigned long long)piece, mode, (unsigned long long)q[i].offset,
                      (unsigned long long)q[i].need);
            list[i] = NULL;
            free(q[i].buffer);
        }
    }
    sl_io_file_close(&f);
    sl_io_close(io);
}

static sl_io_req req_of(const sl_io_file *f, uint64_t offset, uint64_t n, sl_io_class class)
{
    return (sl_io_req){ .file = f, .offset = offset, .length = n, .need = n, .buffer = aligned(n), .class = class };
}

static void await_pieces(int n)
{
    while (atomic_load(&hook.n) < n)
        usleep(100);
}

/* One place, which a stream piece holds until all is queued: then the order is exact. */
static void test_order(enum sl_io_backend backend)
{
    const uint64_t K = 65536;
    const sl_io_options opt = hooked(backend, 1, K);
    atomic_store(&hook.shut, true);
    sl_io *io = must_open(&opt);
    sl_io_file f = must_open_file(true);
    sl_io_req s[2] = { req_of(&f, 0, 4 * K, SL_IO_STREAM), req_of(&f, 8 * K, 2 * K, SL_IO_STREAM) };
    sl_io_req d[2] = { req_of(&f, 16 * K, 3 * K, SL_IO_DEMAND), req_of(&f, 24 * K, K, SL_IO_DEMAND) };
    for (int i = 0; i < 2; i++)
        sl_io_submit(io, &s[i]);
    await_pieces(1);
    for (int i = 0; i < 2; i++)
        sl_io_submit(io, &d[i]);
    CHECK(!sl_io_done(&s[0]) && !sl_io_done(&d[1]));
    atomic_store(&hook.shut, false);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ(sl_io_wait(io, &s[i], NULL), 0);
        CHECK_EQ(sl_io_wait(io, &d[i], NULL), 0);
    }
    const uint64_t expect[] = { 0, 16, 17, 18, 24, 1, 2, 3, 8, 9 };
    CHECK_EQ(hook.n, 10);
    for (int i = 0; i < 10; i++)
        CHECK_EQ(hook.offset[i], expect[i] * K);
    for (int i = 0; i < 2; i++) {
        free(s[i].buffer);
        free(d[i].buffer);
    }
    sl_io_file_close(&f);
    sl_io_close(io);
}

static void test_errors(enum sl_io_backend backend, bool direct)
{
    const sl_io_options opt = hooked(backend, 4, 8192);
    sl_io *io = must_open(&opt);
    sl_io_file f = must_open_file(direct);
    sl_err err = { 0 };
    hook.bad_begin = 100 * 4096;
    hook.bad_end = hook.bad_begin + 1;
    sl_io_req good = req_of(&f, 0, 40 * 4096, SL_IO_STREAM), bad = req_of(&f, 80 * 4096, 80 * 4096, SL_IO_DEMAND);
    sl_io_submit(io, &bad);
    sl_io_submit(io, &good);
    CHECK_EQ(sl_io_wait(io, &bad, &err), SL_EIO);
    CHECK_EQ(err.code, SL_EIO);
    char text[512];
    snprintf(text, sizeof text, "%s: reading 327680 bytes at offset 327680: %s", path, strerror(EIO));
    CHECK_STR(err.text, text);
    CHECK_EQ(sl_io_wait(io, &good, NULL), 0);
    CHECK(memcmp(good.buffer, data, good.length) == 0);
    hook.bad_end = 0; /* the same request again, now that the drive is well */
    sl_io_submit(io, &bad);
    CHECK_EQ(sl_io_wait(io, &bad, NULL), 0);
    CHECK(memcmp(bad.buffer, data + bad.offset, bad.length) == 0);
    free(bad.buffer);
    /* past the end of the file */
    bad = req_of(&f, sl_round_down(SIZE, 4096), 8192, SL_IO_DEMAND);
    bad.need = SIZE - bad.offset;
    sl_io_submit(io, &bad);
    CHECK_EQ(sl_io_wait(io, &bad, NULL), 0);
    CHECK(memcmp(bad.buffer, data + bad.offset, bad.need) == 0);
    bad.need++;
    sl_io_submit(io, &bad);
    CHECK_EQ(sl_io_wait(io, &bad, &err), SL_EIO);
    snprintf(text, sizeof text, "%s: file is %d bytes, needed %d: truncated?", path, SIZE, SIZE + 1);
    CHECK_STR(err.text, text);
    sl_io_req nothing = { .file = &f };
    sl_io_submit(io, &nothing);
    CHECK(sl_io_done(&nothing));
    free(good.buffer);
    free(bad.buffer);
    sl_io_file_close(&f);
    sl_io_close(io);
}

/* A file that shrinks after it was opened, at every kind of place. */
static void test_truncated(enum sl_io_backend backend, bool direct)
{
    const sl_io_options opt = { .backend = backend, .piece = 16384 };
    sl_io *io = must_open(&opt);
    char own[256];
    temp_file(own, data, 200000);
    sl_io_file f;
    sl_err err;
    CHECK_EQ(sl_io_file_open(&f, own, direct, &err), 0);
    CHECK_EQ(sl_io_file_unchanged(&f, &err), 0);
    static const int sizes[] = { 199999, 196608, 150000, 81920, 4097, 4096, 1, 0 };
    sl_io_req q = req_of(&f, 0, 200704, SL_IO_DEMAND);
    for (unsigned i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        CHECK_EQ(truncate(own, sizes[i]), 0);
        CHECK_EQ(sl_io_file_unchanged(&f, &err), SL_EIO);
        q.need = (uint64_t)sizes[i] + 1;
        sl_io_submit(io, &q);
        CHECK_EQ(sl_io_wait(io, &q, &err), SL_EIO);
        CHECK_MSG(strstr(err.text, "truncated?") != NULL, "%s", err.text);
        q.need--;
        memset(q.buffer, 0xee, q.length);
        sl_io_submit(io, &q);
        CHECK_MSG(sl_io_wait(io, &q, &err) == 0, "%d: %s", sizes[i], err.text);
        CHECK(memcmp(q.buffer, data, q.need) == 0);
    }
    free(q.buffer);
    sl_io_file_close(&f);
    unlink(own);
    sl_io_close(io);
}

static void test_cancel(enum sl_io_backend backend)
{
    const uint64_t K = 65536;
    const sl_io_options opt = hooked(backend, 1, K);
    atomic_store(&hook.shut, true);
    sl_io *io = must_open(&opt);
    sl_io_file f = must_open_file(true);
    sl_io_req a = req_of(&f, 0, 2 * K, SL_IO_STREAM), b = req_of(&f, 8 * K, 4 * K, SL_IO_STREAM);
    sl_io_req c = req_of(&f, 16 * K, 4 * K, SL_IO_STREAM);
    sl_io_submit(io, &a);
    await_pieces(1);
    sl_io_submit(io, &b);
    sl_io_submit(io, &c);
    CHECK_EQ(sl_io_cancel(io, &c), 4 * K); /* the last of the queue */
    CHECK_EQ(sl_io_cancel(io, &c), 0);     /* done: nothing to take back */
    sl_io_submit(io, &c);
    CHECK_EQ(sl_io_cancel(io, &b), 4 * K); /* in its middle */
    CHECK(!sl_io_done(&c));
    atomic_store(&hook.shut, false);
    CHECK_EQ(sl_io_wait(io, &a, NULL), 0);
    CHECK_EQ(sl_io_wait(io, &c, NULL), 0);
    CHECK(memcmp(c.buffer, data + c.offset, c.length) == 0);
    hook.delay_us = 3000;
    for (int i = 0; i < 5; i++) { /* while its pieces are in flight */
        const int before = atomic_load(&hook.n);
        sl_io_submit(io, &b);
        await_pieces(before + 1);
        const uint64_t unread = sl_io_cancel(io, &b);
        CHECK_EQ((uint64_t)(atomic_load(&hook.n) - before) * K, b.length - unread);
    }
    sl_io_submit(io, &a);
    sl_io_submit(io, &b);
    sl_io_close(io); /* cancels what is queued */
    CHECK(sl_io_done(&a) && sl_io_done(&b));
    free(a.buffer);
    free(b.buffer);
    free(c.buffer);
    sl_io_file_close(&f);
}

/* What is counted while two places are held, and that an idle drive counts nothing. */
static void test_counts(enum sl_io_backend backend)
{
    const uint64_t K = 65536;
    const sl_io_options opt = hooked(backend, 2, K);
    sl_io *io = must_open(&opt);
    sl_io_file f = must_open_file(true);
    sl_io_req q = req_of(&f, 0, 4 * K, SL_IO_STREAM);
    CHECK_EQ(sl_io_count(io).busy_ns, 0);
    atomic_store(&hook.shut, true);
    sl_io_submit(io, &q);
    await_pieces(1);
    const sl_io_counts a = sl_io_count(io);
    usleep(1000);
    const sl_io_counts b = sl_io_count(io);
    CHECK(b.busy_ns > a.busy_ns && b.depth_ns - a.depth_ns >= b.busy_ns - a.busy_ns);
    CHECK_EQ(b.bytes, 0);
    atomic_store(&hook.shut, false);
    CHECK_EQ(sl_io_wait(io, &q, NULL), 0);
    const sl_io_counts c = sl_io_count(io);
    CHECK_EQ(c.bytes, 4 * K);
    CHECK_EQ(c.pieces, 4);
    CHECK(c.depth_ns >= c.busy_ns && c.depth_ns <= 2 * c.busy_ns);
    usleep(1000);
    CHECK_EQ(sl_io_count(io).busy_ns, c.busy_ns);
    free(q.buffer);
    sl_io_file_close(&f);
    sl_io_close(io);
}

static uint8_t *map_at(void *where, size_t n)
{
    uint8_t *p = mmap(where, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | (where ? MAP_FIXED : 0), -1, 0);
    if (p == MAP_FAILED) {
        perror("mmap");
        exit(1);
    }
    return p;
}

/* Reads inside, across the ends of and outside memory that is remembered; then the same addresses with other
 * pages behind them, which what was remembered must not be mistaken for. */
static void test_remember(enum sl_io_backend backend)
{
    enum { N = 1 << 20, READ = 65536 };
    sl_io *io = must_open(&(sl_io_options){ .backend = backend, .piece = 16384 });
    sl_io_file f = must_open_file(true);
    uint8_t *memory = map_at(NULL, 2 * N);
    sl_io_forget(io, memory);
    sl_io_forget(io, NULL);
    sl_io_remember(io, NULL, N);
    for (int round = 0; round < 12; round++) { /* more often than there is room for, were it not given back */
        sl_io_remember(io, memory, N);
        sl_io_remember(io, memory + N + READ, N / 2);
        static const size_t places[] = { 0, READ, N - READ, N - READ / 2, N, N + READ, 2 * N - READ };
        for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
            sl_io_req q = { .file = &f, .offset = 4096 * rng_below(256), .length = READ, .need = READ,
                            .buffer = memory + places[i], .class = SL_IO_DEMAND };
            memset(q.buffer, 0xee, READ);
            sl_io_submit(io, &q);
            CHECK_EQ(sl_io_wait(io, &q, NULL), 0);
            CHECK_MSG(memcmp(q.buffer, data + q.offset, READ) == 0, "round %d, place %zu: wrong bytes", round, i);
        }
        sl_io_forget(io, memory);
        sl_io_forget(io, memory + N + READ);
        memory = map_at(memory, 2 * N);
    }
    sl_io_remember(io, memory, N); /* and closes with it */
    sl_io_close(io);
    munmap(memory, 2 * N);
    sl_io_file_close(&f);
}

/* A child that may lock no memory. */
static void test_no_locked_memory(void)
{
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        const struct rlimit none = { 0, 0 };
        sl_io_file f = must_open_file(true); /* before it becomes nobody */
        if (setrlimit(RLIMIT_MEMLOCK, &none) != 0 || (geteuid() == 0 && setuid(65534) != 0))
            _exit(0);
        sl_io *io = must_open(&(sl_io_options){ .backend = SL_IO_AUTO });
        sl_io_req q = req_of(&f, 4096, 8192, SL_IO_DEMAND);
        sl_io_remember(io, q.buffer, 8192);
        sl_io_submit(io, &q);
        CHECK_EQ(sl_io_wait(io, &q, NULL), 0);
        CHECK(memcmp(q.buffer, data + 4096, 8192) == 0);
        sl_io_forget(io, q.buffer);
        sl_io_close(io);
        _exit(check_failures != 0);
    }
    int status = 1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "no locked memory: child failed, status %d", status);
}

/* ---- mirrors -------------------------------------------------------------------------------- */

/* What happens to reads of the original [0] and of the mirror [1]. */
static struct {
    uint64_t begin[2], end[2]; /* offsets that fail */
    atomic_bool shut[2];
    unsigned delay_us[2];
    atomic_int n[2];           /* pieces seen */
} sides;
static atomic_int mirror_warnings;

static long on_side(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    (void)user;
    const int k = f->drive != 0;
    atomic_fetch_add(&sides.n[k], 1);
    while (atomic_load(&sides.shut[k]))
        usleep(200);
    if (sides.delay_us[k])
        usleep(sides.delay_us[k]);
    return offset < sides.end[k] && offset + length > sides.begin[k] ? -EIO : 0;
}

static void count_mirror_warning(void *user, int level, const char *line)
{
    (void)user;
    mirror_warnings += level == SL_LOG_WARN && (strstr(line, "mirror") != NULL);
}

typedef struct {
    sl_io *io;
    sl_io_file f;
    char copy[256];
    bool threads;
} mirrored;

static mirrored open_mirrored(enum sl_io_backend backend, unsigned depth, bool direct)
{
    mirrored m = { .f = must_open_file(direct), .threads = backend == SL_IO_PREAD };
    sl_err err;
    memset(&sides, 0, sizeof sides);
    mirror_warnings = 0;
    m.io = must_open(&(sl_io_options){ .backend = backend, .depth = depth, .drives = 2, .piece = 16384,
                                       .fault = on_side });
    temp_file(m.copy, data, SIZE);
    CHECK_MSG(sl_io_file_mirror(&m.f, m.copy, 1, &err) == 0, "%s", err.text);
    return m;
}

static void close_mirrored(mirrored *m)
{
    sl_io_close(m->io);
    sl_io_file_close(&m->f);
    unlink(m->copy);
}

/* Reads all of the file in several requests of both classes; the first error, or 0 and the right bytes. both: the mirror
 * too is asked for a piece at least. io_uring's thread does so by itself, as it fills both queues before it looks
 * at either; one fast thread of several may serve all from the original, which is held up then. */
static int read_all(mirrored *m, bool both, sl_err *err)
{
    enum { N = 12 };
    const int before = atomic_load(&sides.n[1]);
    atomic_store(&sides.shut[0], both && m->threads);
    sl_io_req q[N];
    const uint64_t each = sl_round_up(SIZE / N, 4096);
    int rc = 0;
    for (int i = 0; i < N; i++) {
        const uint64_t at = i * each, n = sl_min_u64(each, SIZE - at);
        q[i] = req_of(&m->f, at, sl_round_up(n, 4096), i & 1 ? SL_IO_STREAM : SL_IO_DEMAND);
        q[i].need = n;
        sl_io_submit(m->io, &q[i]);
    }
    while (sides.shut[0] && atomic_load(&sides.n[1]) == before)
        usleep(100);
    atomic_store(&sides.shut[0], false);
    for (int i = 0; i < N; i++) {
        const int one = sl_io_wait(m->io, &q[i], rc ? NULL : err);
        rc = rc ? rc : one;
        CHECK_MSG(one < 0 || memcmp(q[i].buffer, data + q[i].offset, q[i].need) == 0, "wrong bytes at %llu",
                  (unsigned long long)q[i].offset);
        free(q[i].buffer);
    }
    return rc;
}

static void overwrite(const char *name, uint64_t at)
{
    const int fd = open(name, O_WRONLY);
    uint8_t other[4096];
    for (int i = 0; i < 4096; i++)
        other[i] = (uint8_t)~data[at + (uint64_t)i];
    CHECK(fd >= 0 && pwrite(fd, other, sizeof other, (off_t)at) == sizeof other);
    close(fd);
}

/* Reads until one side is asked for less (most) or more (least) than that part of the pieces of one reading. */
static void read_until(mirrored *m, int side, double least, double most)
{
    sl_err err;
    for (int i = 0; i < 2000; i++) {
        const int before[] = { sides.n[0], sides.n[1] };
        CHECK_EQ(read_all(m, false, &err), 0);
        const int n[] = { sides.n[0] - before[0], sides.n[1] - before[1] };
        const double part = (double)n[side] / (n[0] + n[1]);
        if (part >= least && part <= most)
            return;
    }
    CHECK_MSG(0, "side %d never had between %g and %g of the pieces", side, least, most);
}

static void test_mirrors(enum sl_io_backend backend, bool direct)
{
    sl_err err = { 0 };
    sl_log_set(count_mirror_warning, NULL, SL_LOG_WARN);
    for (unsigned depth = 1; depth <= 8; depth *= 8) { /* both share the work */
        mirrored m = open_mirrored(backend, depth, direct);
        for (int i = 0; i < 3; i++)
            CHECK_EQ(read_all(&m, i == 0, &err), 0);
        const sl_io_counts c = sl_io_count(m.io);
        CHECK(c.mirror_bytes > 0 && c.mirror_bytes < c.bytes && c.dropped == 0);
        CHECK_EQ(mirror_warnings, 0);
        close_mirrored(&m);
    }
    { /* the mirror fails in one place: it is dropped, and not asked again */
        mirrored m = open_mirrored(backend, 2, direct);
        sides.end[1] = SIZE;
        CHECK_EQ(read_all(&m, true, &err), 0);
        const int seen = sides.n[1];
        CHECK_EQ(sl_io_count(m.io).dropped, 1);
        CHECK_EQ(read_all(&m, false, &err), 0);
        sl_io_file second = must_open_file(direct); /* nor for another file */
        CHECK_EQ(sl_io_file_mirror(&second, m.copy, 1, &err), 0);
        sl_io_req q = req_of(&second, 0, 1 << 20, SL_IO_DEMAND);
        sl_io_submit(m.io, &q);
        CHECK_EQ(sl_io_wait(m.io, &q, &err), 0);
        free(q.buffer);
        sl_io_file_close(&second);
        CHECK_EQ(sides.n[1], seen);
        CHECK_EQ(mirror_warnings, 1);
        close_mirrored(&m);
    }
    { /* the original fails in one place, then the mirror in another: each piece has a good copy */
        mirrored m = open_mirrored(backend, 2, direct);
        sides.begin[0] = 1 << 20;
        sides.end[0] = sides.begin[0] + 5000;
        sides.begin[1] = 2 << 20;
        sides.end[1] = sides.begin[1] + 5000;
        for (int i = 0; i < 4; i++)
            CHECK_EQ(read_all(&m, false, &err), 0);
        CHECK(mirror_warnings <= 2);
        sides.begin[1] = sides.begin[0]; /* now one has none */
        sides.end[1] = sides.end[0];
        CHECK_EQ(read_all(&m, false, &err), SL_EIO);
        CHECK_MSG(strstr(err.text, path) && strstr(err.text, strerror(EIO)), "%s", err.text);
        sides.end[0] = 0; /* and the original recovers */
        CHECK_EQ(read_all(&m, false, &err), 0);
        close_mirrored(&m);
    }
    for (int change = 0; change < 3; change++) { /* a mirror that is cut, emptied or written to */
        mirrored m = open_mirrored(backend, 2, direct);
        CHECK_EQ(read_all(&m, false, &err), 0);
        if (change < 2)
            CHECK_EQ(truncate(m.copy, change ? 0 : SIZE / 2), 0);
        else
            for (uint64_t at = 0; at + 4096 <= SIZE; at += 4096)
                overwrite(m.copy, at);
        for (int i = 0; i < 4; i++)
            CHECK_MSG(read_all(&m, i == 0, &err) == 0, "change %d: %s", change, err.text);
        CHECK_EQ(sl_io_count(m.io).dropped, 1);
        CHECK_EQ(mirror_warnings, 1);
        CHECK_EQ(sl_io_file_unchanged(&m.f, &err), 0);
        close_mirrored(&m);
    }
    { /* the original is written to: the mirror has what was opened; then both are: an error */
        mirrored m = open_mirrored(backend, 2, direct);
        overwrite(path, 1 << 20);
        for (int i = 0; i < 4; i++)
            CHECK_EQ(read_all(&m, false, &err), 0);
        CHECK_EQ(sl_io_count(m.io).dropped, 0);
        CHECK_EQ(mirror_warnings, 1);
        overwrite(m.copy, 0);
        CHECK_EQ(read_all(&m, false, &err), SL_EIO);
        close_mirrored(&m);
        const int fd = open(path, O_WRONLY);
        CHECK(fd >= 0 && pwrite(fd, data, SIZE, 0) == SIZE);
        close(fd);
    }
    { /* a file without a mirror waits for its drive; behind it, one with a mirror does not */
        mirrored m = open_mirrored(backend, 2, direct);
        sl_io_file single = must_open_file(direct);
        atomic_store(&sides.shut[0], true);
        sl_io_req a = req_of(&single, 0, 1 << 20, SL_IO_DEMAND), b = req_of(&m.f, 1 << 20, 1 << 20, SL_IO_DEMAND);
        sl_io_submit(m.io, &a);
        sl_io_submit(m.io, &b);
        /* The original's places are taken by the first, if the hook held them; ring.c calls it on its one thread. */
        if (backend == SL_IO_PREAD) {
            CHECK_EQ(sl_io_wait(m.io, &b, &err), 0);
            CHECK(!sl_io_done(&a));
        }
        atomic_store(&sides.shut[0], false);
        CHECK_EQ(sl_io_wait(m.io, &a, &err), 0);
        CHECK_EQ(sl_io_wait(m.io, &b, &err), 0);
        CHECK(memcmp(a.buffer, data, 1 << 20) == 0 && memcmp(b.buffer, data + (1 << 20), 1 << 20) == 0);
        free(a.buffer);
        free(b.buffer);
        sl_io_file_close(&single);
        close_mirrored(&m);
    }
    /* A mirror hundreds of times slower gets little, of a short queue nothing; the hook holds ring.c up as a whole. */
    if (backend == SL_IO_PREAD) {
        mirrored m = open_mirrored(backend, 4, direct);
        sides.delay_us[0] = 100;
        sides.delay_us[1] = 30000;
        for (int i = 0; i < 100 && sides.n[1] < 40; i++) /* until its rate is known */
            CHECK_EQ(read_all(&m, false, &err), 0);
        const sl_io_counts c = sl_io_count(m.io);
        CHECK_MSG(c.mirror_bytes < c.bytes / 3, "%llu of %llu bytes", (unsigned long long)c.mirror_bytes,
                  (unsigned long long)c.bytes);
        const int seen = sides.n[1];
        sl_io_req q = req_of(&m.f, 0, 8 * 16384, SL_IO_DEMAND);
        sl_io_submit(m.io, &q);
        CHECK_EQ(sl_io_wait(m.io, &q, &err), 0);
        CHECK_EQ(sides.n[1], seen);
        sides.delay_us[1] = 100; /* it recovers, which is noticed even if no queue is ever long */
        for (int i = 0; i < 20000 && sides.n[1] < seen + 20; i++) {
            sl_io_submit(m.io, &q);
            CHECK_EQ(sl_io_wait(m.io, &q, &err), 0);
        }
        CHECK(sides.n[1] >= seen + 20);
        free(q.buffer);
        read_until(&m, 1, 0.3, 1);
        sides.delay_us[0] = 30000; /* then the original becomes slow */
        read_until(&m, 0, 0, 0.2);
        sides.delay_us[0] = 100;
        read_until(&m, 0, 0.3, 1);
        close_mirrored(&m);
    }
    sl_io_file f = must_open_file(direct); /* not of its size */
    char other[256];
    temp_file(other, data, SIZE - 1);
    CHECK_EQ(sl_io_file_mirror(&f, other, 1, &err), SL_EFORMAT);
    CHECK_MSG(strstr(err.text, "found 3146504 bytes, expected 3146505 as of"), "%s", err.text);
    CHECK_EQ(sl_io_file_mirror(&f, "tests", 1, &err), SL_EFORMAT);
    sl_io_file_close(&f);
    unlink(other);
    sl_log_set(NULL, NULL, 0);
}

static void test_files(void)
{
    sl_io_file f;
    sl_err err;
    char own[256], text[512];
    CHECK_EQ(sl_io_file_open(&f, "build/absent-file", true, &err), SL_EFORMAT);
    CHECK_EQ(sl_io_file_open(&f, "tests", true, &err), SL_EFORMAT);
    CHECK_STR(err.text, "tests: not a regular file");
    temp_file(own, "", 0);
    unlink(own);
    CHECK_EQ(mkfifo(own, 0600), 0);
    CHECK_EQ(sl_io_file_open(&f, own, true, &err), SL_EFORMAT);
    unlink(own);
    temp_file(own, "0123456789", 10);
    CHECK_EQ(sl_io_file_open(&f, own, true, &err), 0);
    CHECK_EQ(f.size, 10);
    CHECK_STR(f.path, own);
    CHECK_EQ(sl_io_file_unchanged(&f, &err), 0);
    const struct timespec then[2] = { { .tv_sec = 1000 }, { .tv_sec = 1000 } };
    CHECK_EQ(utimensat(AT_FDCWD, own, then, 0), 0);
    CHECK_EQ(sl_io_file_unchanged(&f, &err), SL_EIO);
    snprintf(text, sizeof text, "%s: changed while in use: written to since it was opened", own);
    CHECK_STR(err.text, text);
    sl_io_file_close(&f);
    sl_io_file_close(&f);
    unlink(own);
    sl_io_close(NULL);
}

static int warnings;
static void count_warning(void *user, int level, const char *line)
{
    (void)user;
    warnings += level == SL_LOG_WARN && strstr(line, "io_uring refused") != NULL;
}

/* A child in which the kernel refuses one call, as container filters do. */
static void test_refused(long call, int error)
{
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        struct sock_filter code[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)call, 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | (unsigned)error),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        const struct sock_fprog prog = { .len = 4, .filter = code };
        if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &prog))
            _exit(0); /* no filters here: nothing to test */
        sl_log_set(count_warning, NULL, SL_LOG_WARN);
        sl_io *io = NULL;
        sl_err err;
        CHECK_EQ(sl_io_open(&io, &(sl_io_options){ .backend = SL_IO_URING }, &err), SL_EFAIL);
        CHECK_EQ(warnings, 0);
        io = must_open(&(sl_io_options){ .backend = SL_IO_AUTO });
        CHECK_STR(sl_io_name(io), "pread");
        CHECK_EQ(warnings, 1);
        sl_io_file f = must_open_file(true);
        sl_io_req q = req_of(&f, 4096, 8192, SL_IO_DEMAND);
        sl_io_submit(io, &q);
        CHECK_EQ(sl_io_wait(io, &q, NULL), 0);
        CHECK(memcmp(q.buffer, data + 4096, 8192) == 0);
        sl_io_close(io);
        _exit(check_failures != 0);
    }
    int status = 1;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "call %ld refused: child failed, status %d", call, status);
}

int main(void)
{
    rng_seed();
    data = random_bytes(SIZE + 16384);
    temp_file(path, data, SIZE);
    test_span();
    test_files();
    /* Before any thread is started: a child of a threaded process is at the mercy of its locks. */
    test_refused(SYS_io_uring_setup, EPERM);
    test_refused(SYS_io_uring_setup, ENOSYS);
    test_refused(SYS_io_uring_enter, EPERM);
    test_refused(SYS_io_uring_register, EPERM);
    test_no_locked_memory();
    sl_io *io = NULL;
    have_uring = sl_io_open(&io, &(sl_io_options){ .backend = SL_IO_URING }, NULL) == 0;
    sl_io_close(io);
    if (!have_uring)
        printf("no io_uring here: threads only\n");
    for (int b = have_uring ? SL_IO_URING : SL_IO_PREAD; b <= SL_IO_PREAD; b++) {
        static const uint64_t pieces[] = { 4096, 65536, 0 };
        static const unsigned depths[] = { 1, 3, 0 };
        for (int i = 0; i < 3; i++)
            for (int mode = PLAIN; mode <= ODD_SHORT; mode++)
                for (int direct = 0; direct < 2; direct++)
                    if (direct || mode != ONE_UNIT) /* a byte a read takes too long */
                        test_patterns((enum sl_io_backend)b, direct, depths[rng_below(3)], pieces[i], mode);
        test_order((enum sl_io_backend)b);
        test_cancel((enum sl_io_backend)b);
        test_counts((enum sl_io_backend)b);
        test_remember((enum sl_io_backend)b);
        for (int direct = 0; direct < 2; direct++) {
            test_errors((enum sl_io_backend)b, direct);
            test_truncated((enum sl_io_backend)b, direct);
            test_mirrors((enum sl_io_backend)b, direct);
        }
    }
    unlink(path);
    free(data);
    CHECK_DONE();
}
