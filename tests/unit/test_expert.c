/* Routed experts: the outputs of a direct computation whatever is cached, in flight, threaded or failing. */
#include <errno.h>

#include "base/num.h"
#include "store/expert.h"
#include "tests/check.h"
#include "tests/unit/temp.h"

enum { FILES = 2, SIZE = 6 << 20, LAYERS = 3, MAX_EXPERTS = 12, TOKENS = 100, TOP_K = 4 };
static uint8_t *data[FILES];
static char path[FILES][256];
static sl_io_file files[2][FILES]; /* [direct] */

typedef struct {
    uint32_t experts, latent, width;
    sl_expert_place places[LAYERS * MAX_EXPERTS];
} model;

static uint64_t bytes_of(const model *m, int tensor) { return (uint64_t)m->latent * m->width / (tensor & 1 ? 32 : 2); }

/* Tensors in one run as released, with gaps, or scattered over both files; scales that keep sums small. */
static model random_model(void)
{
    model m = { .experts = (uint32_t)(TOP_K + rng_below(MAX_EXPERTS - TOP_K + 1)), .latent = (uint32_t)(32 * (1 + rng_below(3))),
                .width = (uint32_t)(32 * (1 + rng_below(3))) };
    uint64_t at[FILES] = { 1 + rng_below(5000), 1 + rng_below(5000) };
    const int kind = (int)rng_below(3);
    for (uint32_t i = 0; i < LAYERS * m.experts; i++) {
        const int first = (int)rng_below(6);
        for (int n = 0; n < SL_EXPERT_TENSORS; n++) {
            const int k = kind == 2 ? (n + first) % 6 : n, f = kind == 2 ? (int)rng_below(FILES) : (int)(i % FILES);
            m.places[i].file[k] = (uint16_t)f;
            m.places[i].offset[k] = at[f];
            for (uint64_t b = 0; k & 1 && b < bytes_of(&m, k); b++)
                data[f][at[f] + b] = (uint8_t)(116 + rng_below(8));
            at[f] += bytes_of(&m, k) + (kind ? rng_below(rng_below(8) ? 9000 : 90000) : 0);
        }
    }
    CHECK(at[0] < SIZE && at[1] < SIZE);
    return m;
}

static void write_files(void)
{
    for (int i = 0; i < FILES; i++) {
        FILE *f = fopen(path[i], "r+");
        CHECK(f && fwrite(data[i], 1, SIZE, f) == SIZE && fclose(f) == 0);
    }
}

/* What an expert is, from the bytes themselves, by the defining kernels. */
static void reference(const model *m, uint32_t index, const float *z, float *out)
{
    const sl_kernels *k = sl_kernels_for(0);
    const sl_expert_place *p = &m->places[index];
    const uint8_t *w[SL_EXPERT_TENSORS];
    float gate[128], up[128];
    for (int i = 0; i < SL_EXPERT_TENSORS; i++)
        w[i] = data[p->file[i]] + p->offset[i];
    k->mm_mxfp4(gate, m->width, w[SL_W1_PACKED], w[SL_W1_SCALE], z, m->latent, m->width, m->latent, 1);
    k->mm_mxfp4(up, m->width, w[SL_W3_PACKED], w[SL_W3_SCALE], z, m->latent, m->width, m->latent, 1);
    k->situ_glu(gate, gate, up, 4, 25, m->width);
    k->mm_mxfp4(out, m->latent, w[SL_W2_PACKED], w[SL_W2_SCALE], gate, m->width, m->latent, m->width, 1);
}

/* A batch of random choices, its input and its outputs. */
typedef struct {
    sl_expert_call calls[MAX_EXPERTS];
    size_t n;
    uint32_t tokens[TOKENS * TOP_K];
    float *out[TOKENS * TOP_K], z[TOKENS * 160], result[TOKENS * TOP_K * 128];
    size_t ldz;
} batch;

static void random_batch(batch *b, const model *m, uint32_t tokens)
{
    static uint32_t chosen[TOKENS][TOP_K];
    for (uint32_t t = 0; t < tokens; t++)
        for (uint32_t i = 0; i < TOP_K; i++) {
        again:
            chosen[t][i] = (uint32_t)rng_below(rng_below(2) ? m->experts : TOP_K);
            for (uint32_t j = 0; j < i; j++)
                if (chosen[t][j] == chosen[t][i])
                    goto again;
        }
    b->n = 0;
    b->ldz = m->latent + rng_below(33);
    for (size_t i = 0; i < tokens * b->ldz; i++)
        b->z[i] = (float)((double)rng() / 18446744073709551616.0 * 8 - 4);
    uint32_t at = 0;
    for (uint32_t e = 0; e < m->experts; e++) {
        sl_expert_call c = { .expert = e, .tokens = b->tokens + at, .out = b->out + at };
        for (uint32_t t = 0; t < tokens; t++)
            for (uint32_t i = 0; i < TOP_K; i++)
                if (chosen[t][i] == e) {
                    b->tokens[at] = t;
                    b->out[at] = b->result + (t * TOP_K + i) * (size_t)m->latent;
                    at++;
                    c.n++;
                }
        if (c.n)
            b->calls[b->n++] = c;
    }
    memset(b->result, 0xff, sizeof b->result);
}

static void check_batch(const batch *b, const model *m, uint32_t layer)
{
    float out[128];
    for (size_t i = 0; i < b->n; i++)
        for (uint32_t t = 0; t < b->calls[i].n; t++) {
            reference(m, layer * m->experts + b->calls[i].expert, b->z + b->calls[i].tokens[t] * b->ldz, out);
            CHECK_MSG(memcmp(out, b->calls[i].out[t], m->latent * sizeof *out) == 0, "layer %u expert %u token %u of %u",
                      layer, b->calls[i].expert, t, b->calls[i].n);
        }
}

/* What a layer must hold: of all experts the `quota` used last, of one batch those with most tokens. */
typedef struct { uint64_t used[MAX_EXPERTS], times[MAX_EXPERTS]; bool resident[MAX_EXPERTS]; } lru;

static uint32_t lru_use(lru *l, const batch *b, uint64_t now, uint32_t quota)
{
    uint32_t hits = 0;
    for (size_t i = 0; i < b->n; i++) {
        const uint32_t e = b->calls[i].expert;
        hits += l->resident[e];
        l->resident[e] = true;
        l->used[e] = now;
        l->times[e] += b->calls[i].n;
    }
    bool stays[MAX_EXPERTS] = { false };
    for (uint32_t n = 0; n < quota; n++) {
        int best = -1;
        for (int e = 0; e < MAX_EXPERTS; e++)
            if (l->resident[e] && !stays[e] &&
                (best < 0 || l->used[e] > l->used[best] || (l->used[e] == l->used[best] && l->times[e] >= l->times[best])))
                best = e;
        if (best >= 0)
            stays[best] = true;
    }
    memcpy(l->resident, stays, sizeof stays);
    return hits;
}

static void name_it(void *user, uint32_t layer, uint32_t expert, int tensor, char *buf, size_t size)
{
    (void)user;
    snprintf(buf, size, "L%u.E%u.T%d", layer, expert, tensor);
}

static uint64_t bad_offset[FILES];
static unsigned delay;
static long on_piece(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    (void)user;
    const uint64_t bad = __atomic_load_n(&bad_offset[f == &files[1][1] || f == &files[0][1]], __ATOMIC_RELAXED);
    const unsigned us = __atomic_load_n(&delay, __ATOMIC_RELAXED);
    if (us)
        usleep(us);
    return offset <= bad && bad < offset + length ? -EIO : 0;
}

static void no_faults(void) { bad_offset[0] = bad_offset[1] = UINT64_MAX; }

typedef struct {
    sl_io *io;
    sl_budget *budget;
    sl_pool *pool;
    sl_expert_options opt;
    sl_expert_store *store;
    sl_expert_sizes sizes;
} rig;

static rig open_rig(const model *m, enum sl_io_backend backend, bool direct, unsigned threads, uint32_t tokens,
                    uint32_t inflight, uint32_t cache)
{
    rig r = { 0 };
    sl_err err;
    CHECK_EQ(sl_io_open(&r.io, &(sl_io_options){ .backend = backend, .fault = on_piece, .piece = 8192 }, &err), 0);
    CHECK_EQ(sl_pool_open(&r.pool, threads, &err), 0);
    r.opt = (sl_expert_options){
        .io = r.io, .pool = r.pool, .kernels = sl_kernels_for(rng_below(2) ? sl_cpu_detect() : 0), .files = files[direct],
        .places = m->places, .layers = LAYERS, .experts = m->experts, .latent = m->latent, .width = m->width, .beta = 4,
        .linear_beta = 25, .max_calls = tokens * TOP_K, .inflight_slots = inflight, .cache_slots = cache,
    };
    CHECK_EQ(sl_expert_measure(&r.sizes, &r.opt, &err), 0);
    CHECK_EQ(sl_expert_scratch(&r.opt), r.sizes.scratch);
    r.budget = sl_budget_open(r.sizes.index + r.sizes.scratch + sl_mem_size(inflight * r.sizes.slot) +
                              (cache ? sl_mem_size(cache * r.sizes.slot) : 0));
    r.opt.budget = r.budget;
    CHECK_MSG(sl_expert_open(&r.store, &r.opt, &err) == 0, "%s", err.text);
    if (!r.store)
        exit(1);
    CHECK_EQ(sl_budget_used(r.budget, SL_MEM_INDEX), r.sizes.index);
    CHECK_EQ(sl_budget_used(r.budget, SL_MEM_SCRATCH), r.sizes.scratch);
    sl_expert_names(r.store, name_it, NULL);
    sl_budget_freeze(r.budget);
    return r;
}

static void close_rig(rig *r)
{
    sl_budget_thaw(r->budget);
    sl_expert_close(r->store);
    for (int c = 0; c < SL_MEM_CLASSES; c++)
        CHECK_EQ(sl_budget_used(r->budget, (sl_mem_class)c), 0);
    sl_budget_close(r->budget);
    sl_pool_close(r->pool);
    sl_io_close(r->io);
}

static void test_outputs(enum sl_io_backend backend, const model *m, batch *b)
{
    const uint32_t tokens = rng_below(6) ? (uint32_t)(1 + rng_below(3)) : (uint32_t)(1 + rng_below(TOKENS));
    const uint32_t cache = rng_below(4) ? (uint32_t)rng_below(LAYERS * m->experts + 3) : 0;
    rig r = open_rig(m, backend, rng_below(2), (unsigned)(1 + rng_below(4)), tokens, (uint32_t)(2 + rng_below(8)), cache);
    lru lists[LAYERS] = { { .used = { 0 } } };
    uint64_t requests = 0, hits = 0;
    sl_err err;
    for (int pass = 0; pass < (tokens > 3 ? 2 : 4); pass++)
        for (uint32_t layer = 0; layer < (tokens > 3 ? 1 : LAYERS); layer++) {
            random_batch(b, m, tokens);
            sl_expert_begin(r.store, layer, b->calls, b->n);
            CHECK_MSG(sl_expert_run(r.store, b->z, b->ldz, &err) == 0, "%s", err.text);
            check_batch(b, m, layer);
            requests += b->n;
            hits += lru_use(&lists[layer], b, (uint64_t)pass + 1, cache / LAYERS + (layer < cache % LAYERS));
            const sl_expert_counts n = sl_expert_count(r.store);
            CHECK_EQ(n.requests, requests);
            CHECK_EQ(n.hits, hits);
            CHECK(n.bytes <= (requests - hits) * r.sizes.slot && (n.bytes > 0) == (requests > hits));
        }
    close_rig(&r);
}

/* Failing reads and batches that are dropped; after each the next batch is right. */
static void test_errors(enum sl_io_backend backend, const model *m, batch *b)
{
    rig r = open_rig(m, backend, true, 2, 3, 3, (uint32_t)rng_below(12));
    sl_err err;
    for (int round = 0; round < 12; round++) {
        const uint32_t layer = (uint32_t)rng_below(LAYERS);
        random_batch(b, m, 3);
        const uint32_t e = b->calls[rng_below(b->n)].expert;
        const int k = (int)rng_below(SL_EXPERT_TENSORS);
        const sl_expert_place *p = &m->places[layer * m->experts + e];
        __atomic_store_n(&bad_offset[p->file[k]], p->offset[k], __ATOMIC_RELAXED);
        sl_expert_begin(r.store, layer, b->calls, b->n);
        if (round % 4 == 3) { /* never run */
            sl_expert_begin(r.store, (layer + 1) % LAYERS, b->calls, 1);
        } else {
            const int rc = sl_expert_run(r.store, b->z, b->ldz, &err);
            CHECK(rc == 0 || rc == SL_EIO); /* 0: it was resident */
            if (rc == SL_EIO)
                CHECK_MSG(strncmp(err.text, "L", 1) == 0 && strstr(err.text, path[p->file[k]]), "%s", err.text);
            else
                check_batch(b, m, layer);
        }
        sl_expert_begin(r.store, layer, b->calls, 0); /* settles: nothing is in flight while the fault is mended */
        no_faults();
        random_batch(b, m, 3);
        sl_expert_begin(r.store, layer, b->calls, b->n);
        CHECK_MSG(sl_expert_run(r.store, b->z, b->ldz, &err) == 0, "%s", err.text);
        check_batch(b, m, layer);
    }
    random_batch(b, m, 3);
    __atomic_store_n(&delay, 500, __ATOMIC_RELAXED);
    sl_expert_begin(r.store, 0, b->calls, b->n);
    close_rig(&r); /* with reads in flight */
    __atomic_store_n(&delay, 0, __ATOMIC_RELAXED);
}

static void expect(rig *r, batch *b, int code, const char *text)
{
    sl_err err = { 0 };
    sl_expert_begin(r->store, 1, b->calls, b->n);
    CHECK_EQ(sl_expert_run(r->store, b->z, b->ldz, &err), code);
    CHECK_STR(err.text, text);
}

/* Values that are not finite, in the file or made by the product. */
static void test_not_finite(const model *m, batch *b)
{
    const sl_expert_place *p = &m->places[m->experts]; /* layer 1, expert 0 */
    const uint64_t in = m->latent / 32, row = m->width - 1;
    char text[256];
    static const int scales[] = { SL_W1_SCALE, SL_W2_SCALE, SL_W3_SCALE };
    for (int i = 0; i < 3; i++)
        for (int s = 252; s <= 255; s++) {
            const int k = scales[i];
            const uint64_t in_row = k == SL_W2_SCALE ? m->width / 32 : in, at_row = k == SL_W2_SCALE ? m->latent - 1 : row;
            const uint64_t group = at_row * in_row + in_row - 1;
            uint8_t *scale = data[p->file[k]] + p->offset[k] + group;
            uint8_t *packed = data[p->file[k - 1]] + p->offset[k - 1] + 16 * group;
            uint8_t old[17];
            memcpy(old, packed, 16);
            old[16] = *scale;
            for (int high = 0; high < 2; high++) {
                static const uint8_t finite[] = { 7, 5, 3 }, not_finite[] = { 7, 6, 4, 0 };
                if (s == 252 ? high : s == 255 && !high)
                    continue;
                memset(packed, 0, 16);
                packed[rng_below(16)] = (uint8_t)(high ? not_finite[s - 252] | 8 : finite[s - 252] << 4);
                *scale = (uint8_t)s;
                write_files();
                rig r = open_rig(m, SL_IO_PREAD, true, 2, 1, 2, 2);
                random_batch(b, m, 1);
                b->calls[0].expert = 0; /* ascending already */
                for (size_t t = 0; t < m->latent; t++)
                    b->z[t] *= high ? 1 : 1e-9f;
                if (high)
                    snprintf(text, sizeof text, "L1.E0.T%d: weights not finite: scale %d in row %u, group %u", k, s,
                             (unsigned)at_row, (unsigned)in_row - 1);
                expect(&r, b, high ? SL_EFORMAT : 0, high ? text : "");
                if (!high) {
                    check_batch(b, m, 1);
                    if (k != SL_W2_SCALE) {
                        for (size_t t = 0; t < m->latent; t++)
                            b->z[t] = 1e9f;
                        snprintf(text, sizeof text, "L1.E0.T%d: the product overflowed, all weights are finite",
                                 SL_W1_PACKED);
                        expect(&r, b, SL_EFAIL, text);
                    }
                }
                close_rig(&r);
            }
            memcpy(packed, old, 16);
            *scale = old[16];
        }
    write_files();
}

static void test_refused(model m)
{
    sl_expert_sizes sizes;
    sl_err err;
    sl_expert_options o = { .files = files[1], .places = m.places, .layers = LAYERS, .experts = m.experts,
                            .latent = m.latent, .width = m.width, .max_calls = 1 };
    CHECK_EQ(sl_expert_measure(&sizes, &o, &err), 0);
    m.places[7].offset[3] = SIZE - bytes_of(&m, 3);
    CHECK_EQ(sl_expert_measure(&sizes, &o, &err), 0);
    m.places[7].offset[3]++;
    CHECK_EQ(sl_expert_measure(&sizes, &o, &err), SL_EFORMAT);
    m.places[7].offset[3] = UINT64_MAX;
    CHECK_EQ(sl_expert_measure(&sizes, &o, &err), SL_EFORMAT);
    m.places[7].offset[3] = 0;
    sl_expert_store *s = NULL;
    o.inflight_slots = 1;
    CHECK_EQ(sl_expert_open(&s, &o, &err), SL_EUSAGE);
    o.inflight_slots = 2;
    sl_expert_measure(&sizes, &o, &err);
    o.budget = sl_budget_open(sizes.index + sizes.scratch + sl_mem_size(2 * sizes.slot) - 1);
    CHECK_EQ(sl_expert_open(&s, &o, &err), SL_EBUDGET);
    for (int c = 0; c < SL_MEM_CLASSES; c++)
        CHECK_EQ(sl_budget_used(o.budget, (sl_mem_class)c), 0);
    sl_budget_close(o.budget);
    o.latent = 33;
    CHECK_EQ(sl_expert_measure(&sizes, &o, &err), SL_EUSAGE);
    sl_expert_close(NULL);
}

int main(void)
{
    rng_seed();
    no_faults();
    for (int i = 0; i < FILES; i++) {
        data[i] = random_bytes(SIZE);
        temp_file(path[i], data[i], SIZE);
        for (int direct = 0; direct < 2; direct++)
            CHECK_EQ(sl_io_file_open(&files[direct][i], path[i], direct, NULL), 0);
    }
    sl_io *io = NULL;
    const bool have_uring = sl_io_open(&io, &(sl_io_options){ .backend = SL_IO_URING }, NULL) == 0;
    sl_io_close(io);
    batch *b = malloc(sizeof *b);
    const int models = getenv("SL_QUICK") ? 2 : 8;
    for (int i = 0; i < models; i++) {
        const model m = random_model();
        write_files();
        for (int backend = have_uring ? SL_IO_URING : SL_IO_PREAD; backend <= SL_IO_PREAD; backend++) {
            for (int k = 0; k < 4; k++)
                test_outputs((enum sl_io_backend)backend, &m, b);
            test_errors((enum sl_io_backend)backend, &m, b);
        }
        test_refused(m);
        if (i == 0)
            test_not_finite(&m, b);
    }
    free(b);
    for (int i = 0; i < FILES; i++) {
        unlink(path[i]);
        free(data[i]);
        for (int direct = 0; direct < 2; direct++)
            sl_io_file_close(&files[direct][i]);
    }
    CHECK_DONE();
}
