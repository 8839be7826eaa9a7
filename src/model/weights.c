/* Weights on their way from the store to the kernels: streamed matrices, resident vectors, embedding rows. */
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "model/model.h"

/* ---- matrices ---------------------------------------------------------------------------------- */

typedef struct {
    const sl_model *m;
    const uint8_t *w;
    uint64_t row_bytes;
    const float *x;
    float *y;
    size_t ldx, ldy, n, tokens;
    atomic_bool bad;
} product;

static void product_rows(void *arg, size_t begin, size_t end, unsigned thread)
{
    product *p = arg;
    (void)thread;
    p->m->k->mm_bf16(p->y + begin, p->ldy, p->w + begin * p->row_bytes, p->x, p->ldx, end - begin, p->n, p->tokens);
    for (size_t t = 0; t < p->tokens; t++)
        if (!p->m->k->all_finite(p->y + t * p->ldy + begin, end - begin))
            atomic_store_explicit(&p->bad, true, memory_order_relaxed); /* read after the pool's barrier */
}

int sl_matrix_chunk(sl_model *m, uint32_t layer, sl_kind k, sl_trunk_chunk *chunk, sl_err *err)
{
    if (m->cancel && m->cancel(m->user))
        return sl_fail(err, SL_EINTR, "interrupted");
    const int rc = sl_trunk_next(m->trunk, chunk, err);
    if (rc < 0) {
        char name[SL_ST_NAME_MAX];
        sl_kind_name(layer, k, name, sizeof name);
        return sl_err_prefix(err, "%s", name);
    }
    const size_t row = layer == SL_NO_LAYER ? m->bind.config.layers : layer;
    sl_assert(chunk->matrix == m->matrix[row * SL_KINDS + k]);
    return 0;
}

/* A product came out infinite or NaN: whose fault is it? */
int sl_matrix_bad(const sl_model *m, uint32_t layer, sl_kind k, const sl_trunk_chunk *chunk, sl_err *err)
{
    char name[SL_ST_NAME_MAX];
    uint64_t dim[3];
    sl_kind_name(layer, k, name, sizeof name);
    sl_kind_shape(&m->bind.config, k, dim);
    for (uint64_t i = 0; i < chunk->rows * dim[1]; i++) {
        const float w = sl_bf16_load(chunk->data + 2 * i);
        if (!sl_f32_finite(w))
            return sl_fail(err, SL_EFORMAT, "%s: row %llu, column %llu: found %g, expected a finite weight", name,
                           (unsigned long long)(chunk->first_row + i / dim[1]), (unsigned long long)(i % dim[1]), (double)w);
    }
    return sl_fail(err, SL_EFAIL, "%s: the product of finite weights overflowed", name);
}

int sl_matrix(sl_model *m, uint32_t layer, sl_kind k, const float *x, size_t ldx, float *y, size_t ldy,
              size_t tokens, sl_err *err)
{
    uint64_t dim[3];
    sl_kind_shape(&m->bind.config, k, dim);
    for (uint64_t done = 0; done < dim[0];) {
        sl_trunk_chunk chunk;
        int rc = sl_matrix_chunk(m, layer, k, &chunk, err);
        if (rc < 0)
            return rc;
        product p = { .m = m, .w = chunk.data, .row_bytes = 2 * dim[1], .x = x, .y = y + chunk.first_row,
                      .ldx = ldx, .ldy = ldy, .n = dim[1], .tokens = tokens };
        sl_pool_run(m->pool, chunk.rows, 8, product_rows, &p);
        if (atomic_load_explicit(&p.bad, memory_order_relaxed))
            rc = sl_matrix_bad(m, layer, k, &chunk, err);
        done += chunk.rows;
        sl_trunk_release(m->trunk, &chunk);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Rows that a chunk must not split: kv_b holds the key and value rows of one head after another. */
static uint32_t row_group(const sl_config *c, sl_kind k) { return k == SL_MLA_KV_B ? c->nope + c->v_dim : 1; }

int sl_list_matrices(const sl_binding *b, sl_trunk_matrix **out, size_t *n, uint32_t *number, sl_err *err)
{
    const sl_config *c = &b->config;
    sl_trunk_matrix *list = calloc((size_t)c->layers * (SL_LAYER_KINDS - SL_VECTORS) + 1, sizeof *list);
    if (!list)
        return sl_fail(err, SL_EFAIL, "trunk: no memory for its list of matrices");
    *n = 0;
    for (uint32_t i = 0; i <= c->layers; i++) {
        const uint32_t layer = i < c->layers ? i : SL_NO_LAYER;
        for (unsigned k = SL_VECTORS; k < SL_KINDS; k++) {
            if (!sl_kind_present(c, layer, (sl_kind)k) || (layer == SL_NO_LAYER && k != SL_HEAD))
                continue;
            const sl_place *p = sl_binding_place(b, layer, (sl_kind)k);
            uint64_t dim[3];
            sl_kind_shape(c, (sl_kind)k, dim);
            if (number)
                number[(size_t)i * SL_KINDS + k] = (uint32_t)*n;
            list[(*n)++] = (sl_trunk_matrix){
                .file = &b->shards.file[p->shard], .offset = p->offset, .row_bytes = 2 * dim[1],
                .rows = (uint32_t)dim[0], .row_group = row_group(c, (sl_kind)k), .head = k == SL_HEAD,
            };
        }
    }
    *out = list;
    return 0;
}

/* ---- vectors ----------------------------------------------------------------------------------- */

static bool is_vector(const sl_config *c, uint32_t layer, unsigned k)
{
    return (k < SL_VECTORS || k == SL_OUT_RES_NORM || k == SL_OUT_RES_PROJ || k == SL_FINAL_NORM) &&
           sl_kind_present(c, layer, (sl_kind)k);
}

uint64_t sl_vectors_floats(const sl_config *c)
{
    uint64_t n = 0;
    for (uint32_t i = 0; i <= c->layers; i++)
        for (unsigned k = 0; k < SL_KINDS; k++)
            if (is_vector(c, i < c->layers ? i : SL_NO_LAYER, k))
                n += sl_scratch_floats(sl_kind_elements(c, (sl_kind)k));
    return n;
}

static int widen(const sl_model *m, uint32_t layer, sl_kind k, const uint8_t *raw, float *out, sl_err *err)
{
    const uint64_t n = sl_kind_elements(&m->bind.config, k);
    if (sl_kind_dtype(k) == SL_DTYPE_BF16)
        m->k->widen_bf16(out, raw, n);
    else
        for (uint64_t i = 0; i < n; i++)
            out[i] = sl_f32_from_bits(sl_le32(raw + 4 * i));
    for (uint64_t i = 0; i < n; i++)
        if (!sl_f32_finite(out[i])) {
            char name[SL_ST_NAME_MAX];
            sl_kind_name(layer, k, name, sizeof name);
            return sl_fail(err, SL_EFORMAT, "%s: element %llu: found %g, expected a finite weight", name,
                           (unsigned long long)i, (double)out[i]);
        }
    return 0;
}

/* All vectors of one layer in one batch of reads. */
static int load_layer(sl_model *m, uint32_t row, float **at, uint8_t *bounce, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const uint32_t layer = row < c->layers ? row : SL_NO_LAYER;
    sl_io_req req[SL_KINDS] = { { 0 } };
    const uint8_t *data[SL_KINDS];
    int rc = 0;
    for (unsigned k = 0; k < SL_KINDS; k++) {
        if (!is_vector(c, layer, k))
            continue;
        const sl_place *p = sl_binding_place(&m->bind, layer, (sl_kind)k);
        const uint64_t bytes = sl_kind_elements(c, (sl_kind)k) * (sl_kind_dtype((sl_kind)k) == SL_DTYPE_BF16 ? 2 : 4);
        sl_io_req *r = &req[k];
        uint64_t skip;
        *r = (sl_io_req){ .file = &m->bind.shards.file[p->shard], .buffer = bounce, .class = SL_IO_DEMAND };
        sl_io_span(r->file, p->offset, bytes, &r->offset, &r->length, &skip);
        r->need = skip + bytes;
        data[k] = bounce + skip;
        bounce += sl_io_span_max(bytes);
        sl_io_submit(m->io, r);
    }
    for (unsigned k = 0; k < SL_KINDS; k++) {
        if (!is_vector(c, layer, k))
            continue;
        if (rc < 0) { /* settle what is in flight before the buffer goes */
            sl_io_cancel(m->io, &req[k]);
            continue;
        }
        rc = sl_io_wait(m->io, &req[k], err);
        if (rc == 0 && (rc = widen(m, layer, (sl_kind)k, data[k], *at, err)) == 0) {
            m->vector[(size_t)row * SL_KINDS + k] = *at;
            *at += sl_scratch_floats(sl_kind_elements(c, (sl_kind)k));
        }
    }
    return rc;
}

/* The mixture's score needs norm_w * proj_w only (spec 3.3): folded once, into the norm's place. */
static void fold(sl_model *m, uint32_t row, sl_kind norm, sl_kind proj)
{
    float *a = (float *)m->vector[(size_t)row * SL_KINDS + norm];
    const float *b = m->vector[(size_t)row * SL_KINDS + proj];
    if (a && b)
        m->k->mul(a, a, b, m->bind.config.hidden);
}

/* exp(A_log) per head; what lies beyond the heads is padding (spec 2.2). */
static int exp_a_log(sl_model *m, uint32_t layer, sl_err *err)
{
    float *a = (float *)sl_vector(m, layer, SL_A_LOG);
    if (!a)
        return 0;
    const uint32_t heads = m->bind.config.kda_heads;
    m->k->exp(a, a, heads);
    if (m->k->all_finite(a, heads))
        return 0;
    char name[SL_ST_NAME_MAX];
    sl_kind_name(layer, SL_A_LOG, name, sizeof name);
    return sl_fail(err, SL_EFORMAT, "%s: found a value whose exponential overflows", name);
}

int sl_load_vectors(sl_model *m, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    uint64_t largest = 0;
    for (uint32_t i = 0; i <= c->layers; i++) {
        uint64_t n = 0;
        for (unsigned k = 0; k < SL_KINDS; k++)
            if (is_vector(c, i < c->layers ? i : SL_NO_LAYER, k))
                n += sl_io_span_max(sl_kind_elements(c, (sl_kind)k) * 4);
        largest = sl_max_u64(largest, n);
    }
    /* Before the scratch of the pass is allocated, so the budget has room for it. */
    uint8_t *raw = sl_mem_alloc(m->budget, SL_MEM_SCRATCH, largest + 4096);
    if (!raw)
        return sl_fail(err, SL_EBUDGET, "vectors: no room for %llu bytes while loading", (unsigned long long)largest);
    uint8_t *bounce = (uint8_t *)(uintptr_t)sl_round_up((uintptr_t)raw, 4096);
    float *at = m->vectors;
    int rc = 0;
    for (uint32_t row = 0; row <= c->layers && rc == 0; row++) {
        rc = m->cancel && m->cancel(m->user) ? sl_fail(err, SL_EINTR, "interrupted")
                                             : load_layer(m, row, &at, bounce, err);
        if (rc < 0)
            break;
        fold(m, row, SL_ATTN_RES_NORM, SL_ATTN_RES_PROJ);
        fold(m, row, SL_MLP_RES_NORM, SL_MLP_RES_PROJ);
        fold(m, row, SL_OUT_RES_NORM, SL_OUT_RES_PROJ);
        if (row < c->layers)
            rc = exp_a_log(m, row, err);
    }
    sl_mem_free(raw);
    return rc;
}

/* ---- embedding --------------------------------------------------------------------------------- */

int sl_embed(sl_model *m, const int32_t *ids, size_t n, float *out, size_t ldo, sl_err *err)
{
    const sl_place *p = sl_binding_place(&m->bind, SL_NO_LAYER, SL_EMBED);
    const uint64_t bytes = 2ull * m->bind.config.hidden, span = sl_io_span_max(bytes);
    uint8_t *buffer = (uint8_t *)(uintptr_t)sl_round_up((uintptr_t)m->embed_buffer, 4096);
    int rc = 0;
    for (size_t i = 0; i < n; i++) {
        sl_io_req *r = &m->embed_req[i];
        uint64_t skip;
        *r = (sl_io_req){ .file = &m->bind.shards.file[p->shard], .class = SL_IO_DEMAND,
                          .buffer = buffer + i * span };
        sl_io_span(r->file, p->offset + (uint64_t)ids[i] * bytes, bytes, &r->offset, &r->length, &skip);
        r->need = skip + bytes;
        m->embed_bytes += r->length;
        sl_io_submit(m->io, r);
    }
    for (size_t i = 0; i < n; i++) {
        if (rc < 0) {
            sl_io_cancel(m->io, &m->embed_req[i]);
            continue;
        }
        const sl_io_req *r = &m->embed_req[i];
        if ((rc = sl_io_wait(m->io, &m->embed_req[i], err)) < 0) {
            sl_err_prefix(err, "language_model.model.embed_tokens.weight");
            continue;
        }
        m->k->widen_bf16(out + i * ldo, r->buffer + (r->need - bytes), m->bind.config.hidden);
        if (!m->k->all_finite(out + i * ldo, m->bind.config.hidden))
            rc = sl_fail(err, SL_EFORMAT, "language_model.model.embed_tokens.weight: row %d: found a weight that is "
                         "not finite", ids[i]);
    }
    return rc;
}
