/* The streamed trunk: every chunk in order with its bytes, reads and memory exactly as measured. */
#include <errno.h>

#include "base/num.h"
#include "store/trunk.h"
#include "tests/check.h"
#include "tests/unit/temp.h"

enum { FILES = 2, SIZE = 2 << 20, MAX_MATRICES = 12 };
static uint8_t *data[FILES];
static char path[FILES][256];
static sl_io_file files[2][FILES]; /* [direct] */

typedef struct {
    sl_trunk_matrix m[MAX_MATRICES];
    size_t n;
    int file[MAX_MATRICES];
    uint64_t chunk_bytes;
} model;

/* Matrices at odd offsets, in no order of the file, of few and many rows; up to three head matrices. */
static model random_model(bool direct)
{
    model t = { .n = 1 + rng_below(MAX_MATRICES), .chunk_bytes = 1 + rng_below(60000) };
    const size_t heads = rng_below(sl_min_u64(t.n, 3) + (t.n > 1));
    for (size_t i = 0; i < t.n; i++) {
        sl_trunk_matrix *m = &t.m[i];
        t.file[i] = (int)rng_below(FILES);
        *m = (sl_trunk_matrix){ .file = &files[direct][t.file[i]], .row_bytes = 1 + rng_below(3000),
                                .rows = (uint32_t)(1 + rng_below(100)), .row_group = (uint32_t)(1 + rng_below(6)),
                                .head = i >= t.n - heads };
        m->offset = rng_below(8) ? rng_below(SIZE - m->rows * m->row_bytes) : SIZE - m->rows * m->row_bytes;
    }
    return t;
}

static uint64_t number(const sl_trunk_sizes *s) { return s->read_layers + s->read_head; }

/* One pass, left after `most` chunks; checks each and returns whether it went to its end. A chunk may be
 * held while the next one is asked for. */
static bool walk_pass(sl_trunk *t, const model *mo, bool head, uint64_t most, bool hold)
{
    sl_trunk_chunk held[2] = { { .slot = UINT32_MAX }, { .slot = UINT32_MAX } }, c;
    sl_err err;
    for (uint32_t i = 0; i < mo->n; i++) {
        const sl_trunk_matrix *m = &mo->m[i];
        if (m->head && !head)
            break;
        for (uint32_t row = 0; row < m->rows; row += c.rows) {
            if (most-- == 0)
                return false;
            const int rc = sl_trunk_next(t, &c, &err);
            CHECK_MSG(rc == 0, "%s", err.text);
            if (rc < 0)
                return false;
            if (hold)
                sl_trunk_release(t, &held[0]);
            CHECK(c.matrix == i && c.first_row == row && c.rows > 0 && row + c.rows <= m->rows);
            CHECK(c.rows % m->row_group == 0 || row + c.rows == m->rows);
            CHECK(c.rows * m->row_bytes <= mo->chunk_bytes || c.rows <= m->row_group);
            CHECK_MSG(memcmp(c.data, data[mo->file[i]] + m->offset + row * m->row_bytes, c.rows * m->row_bytes) == 0,
                      "matrix %u row %u", i, row);
            if (hold)
                held[0] = c;
            else
                sl_trunk_release(t, &c);
        }
    }
    if (hold)
        sl_trunk_release(t, &held[0]);
    return true;
}

static sl_trunk *open_trunk(sl_io *io, sl_budget *b, const model *mo, uint64_t ring, uint64_t resident)
{
    const sl_trunk_options opt = { .io = io, .budget = b, .matrices = mo->m, .n_matrices = mo->n,
                                   .chunk_bytes = mo->chunk_bytes, .ring_bytes = ring, .resident_bytes = resident };
    sl_trunk *t = NULL;
    sl_err err;
    CHECK_MSG(sl_trunk_open(&t, &opt, &err) == 0, "%s", err.text);
    if (!t)
        exit(1);
    return t;
}

/* Bytes handed to the drive, as the backend sees them. */
static uint64_t asked;
static long count_asked(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    (void)user;
    (void)f;
    (void)offset;
    __atomic_fetch_add(&asked, length, __ATOMIC_RELAXED);
    return 0;
}

static void test_passes(enum sl_io_backend backend, bool direct)
{
    const model mo = random_model(direct);
    sl_err err;
    sl_trunk_sizes size;
    CHECK_EQ(sl_trunk_measure(&size, mo.m, mo.n, mo.chunk_bytes, &err), 0);
    const uint64_t eighth = rng_below(10);
    const uint64_t resident = eighth == 9 ? rng_below(size.resident_all) : (size.resident_all * eighth + 7) / 8;
    const uint64_t ring = size.ring_min + (rng_below(3) ? 0 : rng_below(2 * size.resident_all));
    uint64_t layers, head;
    CHECK_EQ(sl_trunk_reads_for(mo.m, mo.n, mo.chunk_bytes, resident, &layers, &head, &err), 0);
    if (eighth == 0)
        CHECK(layers == size.read_layers && head == size.read_head);
    if (resident >= size.resident_all)
        CHECK(layers == 0 && head == 0);
    sl_io *io = NULL;
    const sl_io_options io_opt = { .backend = backend, .piece = 4096u << rng_below(5), .depth = (unsigned)rng_below(3),
                                   .fault = count_asked };
    asked = 0;
    CHECK_EQ(sl_io_open(&io, &io_opt, &err), 0);
    sl_budget *b = sl_budget_open(size.index + ring + resident); /* no byte more than promised */
    sl_trunk *t = open_trunk(io, b, &mo, ring, resident);
    CHECK_EQ(sl_budget_used(b, SL_MEM_INDEX), size.index);
    CHECK(sl_budget_used(b, SL_MEM_RING) <= ring && sl_budget_used(b, SL_MEM_TRUNK) <= resident);
    sl_budget_freeze(b);
    /* The first pass reads everything, the later ones what is not resident, whatever is read ahead. */
    bool all = true, seen_head = false;
    uint64_t expect_layers = 0, expect_head = 0;
    for (int pass = 0; pass < 6; pass++) {
        const bool want_head = rng_below(2), more = pass < 5 && rng_below(2);
        const bool leave = pass < 5 && rng_below(6) == 0;
        sl_trunk_pass(t, want_head, more);
        all &= walk_pass(t, &mo, want_head, leave ? rng_below(1 + number(&size) / mo.chunk_bytes) : UINT64_MAX,
                         rng_below(2));
        expect_layers += pass ? layers : size.read_layers;
        expect_head += want_head ? seen_head ? head : size.read_head : 0;
        seen_head |= want_head;
        const sl_trunk_counts n = sl_trunk_count(t);
        if (all && !more)
            CHECK_MSG(n.layers == expect_layers && n.head == expect_head,
                      "pass %d: read %llu and %llu, expected %llu and %llu", pass, (unsigned long long)n.layers,
                      (unsigned long long)n.head, (unsigned long long)expect_layers, (unsigned long long)expect_head);
        if (all && more)
            CHECK(n.layers >= expect_layers && n.layers <= expect_layers + layers && n.head == expect_head);
    }
    /* The last pass is whole and reads nothing ahead: all that was asked for has been counted. */
    CHECK_EQ(sl_trunk_count(t).layers + sl_trunk_count(t).head, __atomic_load_n(&asked, __ATOMIC_RELAXED));
    sl_budget_thaw(b);
    sl_trunk_close(t);
    for (int c = 0; c < SL_MEM_CLASSES; c++)
        CHECK_EQ(sl_budget_used(b, (sl_mem_class)c), 0);
    sl_budget_close(b);
    sl_io_close(io);
}

/* Sizes from 1 MiB and 4 MiB up are rounded in other ways: planned and used must agree there too. */
static void test_sizes(void)
{
    static const uint64_t units[] = { 1000, 300000, 700000, 1400000 };
    for (int i = 0; i < 4; i++) {
        sl_io_file f = files[1][0];
        f.size = 1ull << 40; /* nothing is read */
        const sl_trunk_matrix m[] = { { .file = &f, .offset = 77, .row_bytes = units[i], .rows = 19, .row_group = 1 } };
        sl_trunk_sizes size;
        sl_err err;
        CHECK_EQ(sl_trunk_measure(&size, m, 1, units[i], &err), 0);
        CHECK_EQ(size.n_chunks, 19);
        uint64_t before = size.read_layers;
        for (int k = 0; k <= 40; k++) {
            const uint64_t resident = size.resident_all * (uint64_t)k / 40;
            uint64_t layers, head;
            CHECK_EQ(sl_trunk_reads_for(m, 1, units[i], resident, &layers, &head, &err), 0);
            CHECK(layers <= before || layers - before <= units[i] + SL_IO_ALIGN); /* chunks differ by a page */
            before = layers;
            sl_budget *b = sl_budget_open(UINT64_MAX);
            const sl_trunk_options opt = { .budget = b, .matrices = m, .n_matrices = 1, .chunk_bytes = units[i],
                                           .ring_bytes = size.ring_min, .resident_bytes = resident };
            sl_trunk *t = NULL;
            CHECK_EQ(sl_trunk_open(&t, &opt, &err), 0);
            CHECK(sl_budget_used(b, SL_MEM_TRUNK) <= resident);
            CHECK(layers == 0 || sl_budget_used(b, SL_MEM_RING) == size.ring_min);
            sl_trunk_close(t);
            sl_budget_close(b);
        }
        CHECK_EQ(before, 0);
    }
}

static uint64_t bad_offset;
static long fail_at(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    (void)user;
    (void)f;
    const uint64_t bad = __atomic_load_n(&bad_offset, __ATOMIC_RELAXED);
    return offset <= bad && bad < offset + length ? -EIO : 0;
}

static void test_errors(enum sl_io_backend backend)
{
    sl_err err;
    model mo = { .n = 2, .chunk_bytes = 8192 };
    for (int i = 0; i < 2; i++)
        mo.m[i] = (sl_trunk_matrix){ .file = &files[1][0], .offset = 100000u * (unsigned)i, .row_bytes = 4096,
                                     .rows = 16, .row_group = 1 };
    sl_trunk_sizes size;
    CHECK_EQ(sl_trunk_measure(&size, mo.m, mo.n, mo.chunk_bytes, &err), 0);
    sl_io *io = NULL;
    const sl_io_options opt = { .backend = backend, .fault = fail_at };
    CHECK_EQ(sl_io_open(&io, &opt, &err), 0);
    sl_budget *b = sl_budget_open(UINT64_MAX);
    for (int resident = 0; resident < 3; resident++) {
        sl_trunk *t = open_trunk(io, b, &mo, size.ring_min, size.resident_all * (uint64_t)resident / 2);
        __atomic_store_n(&bad_offset, 130000, __ATOMIC_RELAXED);
        sl_trunk_pass(t, false, true);
        int rc = 0, n = 0;
        for (sl_trunk_chunk c; (rc = sl_trunk_next(t, &c, &err)) == 0; n++)
            sl_trunk_release(t, &c);
        CHECK_EQ(rc, SL_EIO);
        CHECK_EQ(n, 8 + (130000 - 100000) / 8192);
        CHECK_MSG(strstr(err.text, path[0]) != NULL, "%s", err.text);
        __atomic_store_n(&bad_offset, UINT64_MAX, __ATOMIC_RELAXED);
        for (int pass = 0; pass < 3; pass++) { /* the drive is well again */
            sl_trunk_pass(t, true, pass < 2);
            CHECK(walk_pass(t, &mo, true, UINT64_MAX, pass & 1));
        }
        sl_trunk_close(t);
    }
    sl_trunk *t = NULL;
    sl_trunk_options o = { .io = io, .budget = b, .matrices = mo.m, .n_matrices = 2, .chunk_bytes = 8192,
                           .ring_bytes = size.ring_min - 1 };
    CHECK_EQ(sl_trunk_open(&t, &o, &err), SL_EBUDGET);
    o.ring_bytes++;
    sl_budget *small = sl_budget_open(size.index + size.ring_min - 1);
    o.budget = small;
    CHECK_EQ(sl_trunk_open(&t, &o, &err), SL_EBUDGET);
    CHECK_EQ(sl_budget_used(small, SL_MEM_INDEX), 0);
    sl_budget_close(small);
    mo.m[1].offset = SIZE - 16 * 4096 + 1;
    CHECK_EQ(sl_trunk_measure(&size, mo.m, 2, 8192, &err), SL_EFORMAT);
    mo.m[1].offset = UINT64_MAX - 4096;
    CHECK_EQ(sl_trunk_measure(&size, mo.m, 2, 8192, &err), SL_EFORMAT);
    mo.m[0].head = true;
    mo.m[1].offset = 0;
    CHECK_EQ(sl_trunk_measure(&size, mo.m, 2, 8192, &err), SL_EUSAGE);
    CHECK_EQ(sl_trunk_measure(&size, mo.m, 0, 8192, &err), SL_EUSAGE);
    sl_trunk_close(NULL);
    sl_budget_close(b);
    sl_io_close(io);
}

int main(void)
{
    rng_seed();
    for (int i = 0; i < FILES; i++) {
        data[i] = random_bytes(SIZE);
        temp_file(path[i], data[i], SIZE);
        for (int direct = 0; direct < 2; direct++)
            CHECK_EQ(sl_io_file_open(&files[direct][i], path[i], direct, NULL), 0);
    }
    test_sizes();
    sl_io *io = NULL;
    const bool have_uring = sl_io_open(&io, &(sl_io_options){ .backend = SL_IO_URING }, NULL) == 0;
    sl_io_close(io);
    const int rounds = getenv("SL_QUICK") ? 60 : 150;
    for (int b = have_uring ? SL_IO_URING : SL_IO_PREAD; b <= SL_IO_PREAD; b++) {
        for (int i = 0; i < rounds; i++)
            test_passes((enum sl_io_backend)b, i & 1);
        test_errors((enum sl_io_backend)b);
    }
    for (int i = 0; i < FILES; i++) {
        unlink(path[i]);
        free(data[i]);
        for (int direct = 0; direct < 2; direct++)
            sl_io_file_close(&files[direct][i]);
    }
    CHECK_DONE();
}
