/* Kimi Delta Attention: spec 3.4. All steps between the projections are per head, so a thread takes whole
 * heads of a sequence through all its tokens in the pass and the 64 KB state of a head stays in its cache. */
#include <math.h>
#include <string.h>

#include "base/num.h"
#include "model/model.h"

typedef struct {
    const sl_model *m;
    uint32_t layer;
    size_t width;           /* heads * dim */
    float *q, *k, *v, *z;   /* [tokens][width]; z: decay input, replaced by the normed output */
    const float *beta;      /* [tokens][heads], before the sigmoid */
    float *private;         /* [threads][6 * dim] */
    atomic_bool bad;
} heads_job;

/* One head of a segment, whose rows begin at `row`. */
static void run_head(heads_job *j, const sl_segment *segment, size_t row, uint32_t head, float *tmp)
{
    const sl_model *m = j->m;
    const sl_kernels *k = m->k;
    const sl_config *c = &m->bind.config;
    const size_t dim = c->kda_dim, taps = c->conv_taps, at = head * dim;
    const size_t index = (size_t)m->layer_index[j->layer] * c->kda_heads + head;
    float *state = segment->state->kda + index * dim * dim, *conv = segment->state->conv + index * 3 * (taps - 1) * dim;
    float *qh = tmp, *kh = tmp + dim, *vh = tmp + 2 * dim, *alpha = tmp + 3 * dim, *out = tmp + 4 * dim;
    const float *streams[3] = { j->q, j->k, j->v };
    float *conv_out[3] = { qh, kh, vh };
    const float q_scale = 1.0f / sqrtf((float)dim), exp_a = sl_vector(m, j->layer, SL_A_LOG)[head];
    for (size_t t = row; t < row + segment->tokens; t++) {
        for (int s = 0; s < 3; s++)
            k->conv_silu(conv_out[s], conv + s * (taps - 1) * dim, streams[s] + t * j->width + at,
                         sl_vector(m, j->layer, (sl_kind)(SL_Q_CONV + s)) + at * taps, taps, dim);
        k->l2_norm(qh, qh, 1e-6f, q_scale, dim);
        k->l2_norm(kh, kh, 1e-6f, 1.0f, dim);
        float *z = j->z + t * j->width + at, beta;
        k->kda_decay(alpha, z, sl_vector(m, j->layer, SL_DT_BIAS) + at, exp_a, c->gate_lower_bound, dim);
        k->sigmoid(&beta, j->beta + t * c->kda_heads + head, 1);
        k->kda_step(out, state, qh, kh, vh, alpha, beta, dim, dim);
        if (!k->all_finite(out, dim) || !isfinite(k->dot(out, out, dim)))
            atomic_store_explicit(&j->bad, true, memory_order_relaxed);
        k->rms_norm(z, out, sl_vector(m, j->layer, SL_O_NORM), c->eps, dim);
    }
}

static void run_heads(void *arg, size_t begin, size_t end, unsigned thread)
{
    heads_job *j = arg;
    const sl_model *m = j->m;
    const uint32_t heads = m->bind.config.kda_heads;
    float *tmp = j->private + thread * 6 * sl_scratch_floats(m->bind.config.kda_dim);
    size_t row = 0;
    for (uint32_t s = 0; s < m->n_segments; row += m->segments[s++].tokens)
        for (size_t i = sl_max_u64(begin, s * heads); i < sl_min_u64(end, (s + 1ul) * heads); i++) /* [segment][head] */
            run_head(j, &m->segments[s], row, (uint32_t)(i - s * heads), tmp);
}

size_t sl_kda_floats(const sl_config *c, size_t tokens, uint32_t threads)
{
    const size_t width = (size_t)c->kda_heads * c->kda_dim;
    return 4 * sl_scratch_floats(tokens * width) + sl_scratch_floats(tokens * c->kda_heads) +
           sl_scratch_floats(tokens * c->kda_dim) + threads * 6 * sl_scratch_floats(c->kda_dim);
}

int sl_kda(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const size_t width = (size_t)c->kda_heads * c->kda_dim, hidden = c->hidden;
    const unsigned threads = sl_pool_threads(m->pool);
    sl_scratch *s = &m->scratch;
    float *q = sl_scratch_take(s, tokens * width), *k = sl_scratch_take(s, tokens * width);
    float *v = sl_scratch_take(s, tokens * width), *z = sl_scratch_take(s, tokens * width);
    float *beta = sl_scratch_take(s, tokens * c->kda_heads), *low = sl_scratch_take(s, tokens * c->kda_dim);
    float *private = sl_scratch_take(s, threads * 6 * sl_scratch_floats(c->kda_dim));
    int rc;
    if ((rc = sl_matrix(m, layer, SL_KDA_Q, x, hidden, q, width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_KDA_K, x, hidden, k, width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_KDA_V, x, hidden, v, width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_KDA_F_A, x, hidden, low, c->kda_dim, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_KDA_F_B, low, c->kda_dim, z, width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, SL_KDA_BETA, x, hidden, beta, c->kda_heads, tokens, err)) < 0)
        return rc;
    heads_job heads = {
        .m = m, .layer = layer, .width = width, .q = q, .k = k, .v = v, .z = z, .beta = beta, .private = private,
    };
    sl_pool_run(m->pool, (size_t)m->n_segments * c->kda_heads, 1, run_heads, &heads);
    if (atomic_load_explicit(&heads.bad, memory_order_relaxed))
        return sl_fail(err, SL_EFAIL, "layer %u: the recurrent state overflowed", layer);
    float *gate = q; /* the queries are used up */
    if (c->full_rank_gate)
        rc = sl_matrix(m, layer, SL_KDA_GATE, x, hidden, gate, width, tokens, err);
    else if ((rc = sl_matrix(m, layer, SL_KDA_GATE_A, x, hidden, low, c->kda_dim, tokens, err)) == 0)
        rc = sl_matrix(m, layer, SL_KDA_GATE_B, low, c->kda_dim, gate, width, tokens, err);
    if (rc < 0)
        return rc;
    m->k->sigmoid_mul(z, z, gate, tokens * width);
    return sl_matrix(m, layer, SL_KDA_OUT, z, width, y, hidden, tokens, err);
}
