/* Gated multi-head latent attention in absorbed form: spec 3.5. Only the normed latent and the rope slice
 * are cached; the key half of kv_b is applied to the query, the value half to the mixed latent.
 *
 * Attention runs over blocks of SL_ATTN_BLOCK positions, aligned in absolute position, with a running
 * maximum: so a result depends on the position alone, not on how the prompt was cut, memory does not
 * grow with the context, and a block is read once for a group of heads. */
#include <math.h>
#include <string.h>

#include "model/model.h"

/* Private to a thread: per head of a group the absorbed query, the mixed latent and the block's scores. */
typedef struct {
    float *query;  /* [SL_ATTN_GROUP][row] */
    float *mixed;  /* [SL_ATTN_GROUP][kv_lora] */
    float *score;  /* [SL_ATTN_GROUP][SL_ATTN_BLOCK] */
} group_scratch;

static size_t group_floats(const sl_config *c)
{
    return SL_ATTN_GROUP * (sl_scratch_floats((size_t)c->kv_lora + c->rope) + sl_scratch_floats(c->kv_lora) +
                            SL_ATTN_BLOCK);
}

typedef struct {
    const sl_model *m;
    size_t row, heads;        /* row: kv_lora + rope; heads: in this chunk of kv_b */
    uint32_t first_head;
    uint32_t layer;
    const float *q;           /* [tokens][all heads][nope + rope] */
    float *o;                 /* [tokens][all heads][v_dim] */
    const uint8_t *kv_b;      /* rows of the chunk's heads */
    float *private;
    atomic_bool bad;
} attention_job;

static float *layer_cache(const sl_model *m, uint32_t layer, const sl_state *s)
{
    return s->latent + (size_t)m->layer_index[layer] * s->context * (m->bind.config.kv_lora + m->bind.config.rope);
}

/* One token, `n` heads that follow each other: mixed = softmax(query . cache) . cache over positions
 * 0..last. Contract: docs/contract.md, attention. */
static void attend(const attention_job *j, const group_scratch *g, size_t n, const float *cache, uint32_t last)
{
    const sl_kernels *k = j->m->k;
    const sl_config *c = &j->m->bind.config;
    const size_t ldq = sl_scratch_floats(j->row), ldm = sl_scratch_floats(c->kv_lora);
    const float scale = 1.0f / sqrtf((float)(c->nope + c->rope));
    float max[SL_ATTN_GROUP], sum[SL_ATTN_GROUP];
    for (size_t h = 0; h < n; h++) {
        max[h] = -INFINITY;
        sum[h] = 0;
        memset(g->mixed + h * ldm, 0, c->kv_lora * sizeof(float));
    }
    for (uint32_t at = 0; at <= last; at += SL_ATTN_BLOCK) {
        const size_t count = last - at + 1 < SL_ATTN_BLOCK ? last - at + 1 : SL_ATTN_BLOCK;
        const float *block = cache + at * j->row;
        k->mm_f32(g->score, SL_ATTN_BLOCK, block, j->row, g->query, ldq, count, j->row, n);
        for (size_t h = 0; h < n; h++) {
            float *s = g->score + h * SL_ATTN_BLOCK, correction;
            k->scale(s, s, scale, count);
            const float top = fmaxf(max[h], k->max(s, count)), drop = max[h] - top;
            k->exp(&correction, &drop, 1); /* exp(-inf) = 0 at the first block */
            max[h] = top;
            sum[h] = sum[h] * correction + k->exp_sum(s, s, top, count);
            k->scale(g->mixed + h * ldm, g->mixed + h * ldm, correction, c->kv_lora);
            k->row_sum(g->mixed + h * ldm, s, block, j->row, count, c->kv_lora);
        }
    }
    for (size_t h = 0; h < n; h++)
        k->scale(g->mixed + h * ldm, g->mixed + h * ldm, 1.0f / sum[h], c->kv_lora);
}

static void run_attention(void *arg, size_t begin, size_t end, unsigned thread)
{
    attention_job *j = arg;
    const sl_kernels *k = j->m->k;
    const sl_config *c = &j->m->bind.config;
    const size_t ldq = sl_scratch_floats(j->row), ldm = sl_scratch_floats(c->kv_lora), row_bytes = 2ul * c->kv_lora;
    group_scratch g = { .query = j->private + thread * group_floats(c) };
    g.mixed = g.query + SL_ATTN_GROUP * ldq;
    g.score = g.mixed + SL_ATTN_GROUP * ldm;
    while (begin < end) { /* items are [token][head of the chunk] */
        const size_t token = begin / j->heads, first = begin % j->heads;
        size_t n = j->heads - first < end - begin ? j->heads - first : end - begin;
        n = n < SL_ATTN_GROUP ? n : SL_ATTN_GROUP;
        for (size_t h = 0; h < n; h++) {
            const uint8_t *key = j->kv_b + (first + h) * (c->nope + c->v_dim) * row_bytes;
            const float *q = j->q + (token * c->heads + j->first_head + first + h) * (c->nope + c->rope);
            k->tmm_bf16(g.query + h * ldq, key, q, c->nope, c->kv_lora);
            memcpy(g.query + h * ldq + c->kv_lora, q + c->nope, c->rope * sizeof(float));
        }
        const sl_row *row = &j->m->rows[token];
        attend(j, &g, n, layer_cache(j->m, j->layer, j->m->segments[row->segment].state), row->position);
        for (size_t h = 0; h < n; h++) {
            const uint8_t *value = j->kv_b + ((first + h) * (c->nope + c->v_dim) + c->nope) * row_bytes;
            float *o = j->o + (token * c->heads + j->first_head + first + h) * c->v_dim;
            k->mm_bf16(o, c->v_dim, value, g.mixed + h * ldm, ldm, c->v_dim, c->kv_lora, 1);
            if (!k->all_finite(o, c->v_dim))
                atomic_store_explicit(&j->bad, true, memory_order_relaxed);
        }
        begin += n;
    }
}

/* Through kv_b chunk by chunk: a chunk holds whole heads. */
static int attention(sl_model *m, uint32_t layer, const float *q, float *o, float *private, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const uint32_t head_rows = c->nope + c->v_dim;
    for (uint32_t head = 0; head < c->heads;) {
        sl_trunk_chunk chunk;
        int rc = sl_matrix_chunk(m, layer, SL_MLA_KV_B, &chunk, err);
        if (rc < 0)
            return rc;
        attention_job j = { .m = m, .row = (size_t)c->kv_lora + c->rope, .heads = chunk.rows / head_rows,
                            .first_head = head, .layer = layer, .q = q, .o = o, .kv_b = chunk.data,
                            .private = private };
        sl_pool_run(m->pool, tokens * j.heads, 1, run_attention, &j);
        if (atomic_load_explicit(&j.bad, memory_order_relaxed))
            rc = sl_matrix_bad(m, layer, SL_MLA_KV_B, &chunk, err);
        head += chunk.rows / head_rows;
        sl_trunk_release(m->trunk, &chunk);
        if (rc < 0)
            return rc;
    }
    return 0;
}

size_t sl_mla_floats(const sl_config *c, size_t tokens, uint32_t threads)
{
    return sl_scratch_floats(tokens * c->q_lora) + sl_scratch_floats(tokens * c->heads * (c->nope + c->rope)) +
           2 * sl_scratch_floats(tokens * c->heads * c->v_dim) + sl_scratch_floats(tokens * (c->kv_lora + c->rope)) +
           threads * group_floats(c);
}

int sl_mla(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const size_t hidden = c->hidden, row = (size_t)c->kv_lora + c->rope, q_width = (size_t)c->heads * (c->nope + c->rope);
    const size_t o_width = (size_t)c->heads * c->v_dim;
    sl_scratch *s = &m->scratch;
    float *q_a = sl_scratch_take(s, tokens * c->q_lora), *q = sl_scratch_take(s, tokens * q_width);
    float *o = sl_scratch_take(s, tokens * o_width), *gate = sl_scratch_take(s, tokens * o_width);
    float *private = sl_scratch_take(s, sl_pool_threads(m->pool) * group_floats(c));
    float *latent = sl_scratch_take(s, tokens * row);
    int rc;
    if ((rc = sl_matrix(m, layer, SL_MLA_Q_A, x, hidden, q_a, c->q_lora, tokens, err)) < 0)
        return rc;
    for (size_t t = 0; t < tokens; t++)
        if ((rc = sl_norm(m, layer, SL_Q_A_NORM, q_a + t * c->q_lora, q_a + t * c->q_lora, c->mla_norm_eps, c->q_lora,
                          err)) < 0)
            return rc;
    if ((rc = sl_matrix(m, layer, SL_MLA_Q_B, q_a, c->q_lora, q, q_width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_MLA_KV_A, x, hidden, latent, row, tokens, err)) < 0)
        return rc;
    for (size_t t = 0; t < tokens; t++) { /* the latent is normed, the rope slice is not */
        float *x_t = latent + t * row, *cache = layer_cache(m, layer, m->segments[m->rows[t].segment].state);
        if ((rc = sl_norm(m, layer, SL_KV_A_NORM, x_t, x_t, c->mla_norm_eps, c->kv_lora, err)) < 0)
            return rc;
        memcpy(cache + m->rows[t].position * row, x_t, row * sizeof *x_t);
    }
    if ((rc = attention(m, layer, q, o, private, tokens, err)) < 0)
        return rc;
    if (c->mla_gate) {
        if ((rc = sl_matrix(m, layer, SL_MLA_GATE, x, hidden, gate, o_width, tokens, err)) < 0)
            return rc;
        m->k->sigmoid_mul(o, o, gate, tokens * o_width);
    }
    return sl_matrix(m, layer, SL_MLA_OUT, o, o_width, y, hidden, tokens, err);
}
