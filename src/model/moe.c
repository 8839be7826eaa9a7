/* The feed-forward sub-layers: latent mixture of experts (spec 3.6, 3.7) and the dense MLP (3.8). */
#include <string.h>

#include "base/num.h"
#include "model/model.h"

/* ---- SiTU-GLU MLP from three streamed matrices: layer 0 and the shared experts ------------------ */

typedef struct {
    const sl_model *m;
    float *gate;
    const float *up;
} glu_job;

static void run_glu(void *arg, size_t begin, size_t end, unsigned thread)
{
    const glu_job *j = arg;
    const sl_config *c = &j->m->bind.config;
    (void)thread;
    j->m->k->situ_glu(j->gate + begin, j->gate + begin, j->up + begin, c->situ_beta, c->situ_linear_beta, end - begin);
}

static int mlp(sl_model *m, uint32_t layer, sl_kind gate_kind, size_t width, const float *x, float *y, size_t tokens,
               sl_err *err)
{
    const size_t hidden = m->bind.config.hidden;
    float *gate = sl_scratch_take(&m->scratch, tokens * width), *up = sl_scratch_take(&m->scratch, tokens * width);
    int rc;
    if ((rc = sl_matrix(m, layer, gate_kind, x, hidden, gate, width, tokens, err)) < 0 ||
        (rc = sl_matrix(m, layer, (sl_kind)(gate_kind + 1), x, hidden, up, width, tokens, err)) < 0)
        return rc;
    glu_job j = { .m = m, .gate = gate, .up = up };
    sl_pool_run(m->pool, tokens * width, 512, run_glu, &j);
    return sl_matrix(m, layer, (sl_kind)(gate_kind + 2), gate, width, y, hidden, tokens, err);
}

int sl_dense(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err)
{
    return mlp(m, layer, SL_DENSE_GATE, m->bind.config.intermediate, x, y, tokens, err);
}

size_t sl_dense_floats(const sl_config *c, size_t tokens) { return 2 * sl_scratch_floats(tokens * c->intermediate); }

/* ---- router ------------------------------------------------------------------------------------- */

void sl_route(const sl_config *c, const float *score, const float *bias, uint32_t *ids, float *weights)
{
    /* Insertion into a list sorted by biased score; a later equal one stays behind: the lower index wins. */
    for (uint32_t e = 0, n = 0; e < c->experts; e++) {
        const float s = score[e] + bias[e];
        uint32_t at = n;
        while (at > 0 && s > weights[at - 1])
            at--;
        if (at == c->top_k)
            continue;
        n += n < c->top_k;
        for (uint32_t i = n - 1; i > at; i--) {
            weights[i] = weights[i - 1];
            ids[i] = ids[i - 1];
        }
        weights[at] = s;
        ids[at] = e;
    }
    for (uint32_t i = 1; i < c->top_k; i++) /* ascending index: the order of all sums over experts */
        for (uint32_t j = i; j > 0 && ids[j - 1] > ids[j]; j--) {
            const uint32_t t = ids[j];
            ids[j] = ids[j - 1];
            ids[j - 1] = t;
        }
    float sum = 0;
    for (uint32_t i = 0; i < c->top_k; i++) {
        weights[i] = score[ids[i]]; /* the unbiased score */
        sum += weights[i];
    }
    for (uint32_t i = 0; i < c->top_k; i++) {
        if (c->renormalize && c->top_k > 1)
            weights[i] /= sum + 1e-20f;
        weights[i] *= c->routed_scale;
    }
}

/* ---- mixture ------------------------------------------------------------------------------------ */

static int route(sl_model *m, uint32_t layer, const float *x, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    float *score = sl_scratch_take(&m->scratch, tokens * c->experts);
    const int rc = sl_matrix(m, layer, SL_ROUTER, x, c->hidden, score, c->experts, tokens, err);
    if (rc < 0)
        return rc;
    m->k->sigmoid(score, score, tokens * c->experts);
    for (size_t t = 0; t < tokens; t++) {
        sl_route(c, score + t * c->experts, sl_vector(m, layer, SL_ROUTER_BIAS), m->chosen + t * c->top_k,
                 m->chosen_weight + t * c->top_k);
        if (m->on_routing)
            m->on_routing(m->routing_user, layer, (uint32_t)t, m->chosen + t * c->top_k, m->chosen_weight + t * c->top_k);
        if (m->probe) {
            m->probe(m->probe_user, SL_PROBE_CHOSEN, layer, (uint32_t)t, m->chosen + t * c->top_k, c->top_k);
            m->probe(m->probe_user, SL_PROBE_WEIGHTS, layer, (uint32_t)t, m->chosen_weight + t * c->top_k, c->top_k);
        }
    }
    return 0;
}

/* Turns the tokens' choices into one call per distinct expert, ascending. A token's outputs lie side by
 * side in `out` [tokens][top_k][latent], ascending by expert, so that they can be summed in that order. */
static size_t group_calls(sl_model *m, float *out, size_t tokens)
{
    const sl_config *c = &m->bind.config;
    const size_t pairs = tokens * c->top_k;
    memset(m->expert_count, 0, c->experts * sizeof *m->expert_count);
    for (size_t i = 0; i < pairs; i++)
        m->expert_count[m->chosen[i]]++;
    size_t n = 0;
    for (uint32_t e = 0, at = 0; e < c->experts; e++) {
        if (m->expert_count[e] == 0)
            continue;
        m->calls[n++] = (sl_expert_call){ .expert = e, .tokens = m->call_tokens + at, .out = m->call_out + at };
        at += m->expert_count[e];
        m->expert_count[e] = (uint32_t)n; /* from here on: 1 + the expert's call */
    }
    for (size_t i = 0; i < pairs; i++) {
        sl_expert_call *call = &m->calls[m->expert_count[m->chosen[i]] - 1];
        const size_t at = (size_t)(call->tokens - m->call_tokens) + call->n++;
        m->call_tokens[at] = (uint32_t)(i / c->top_k);
        m->call_out[at] = out + i * c->latent;
    }
    return n;
}

size_t sl_moe_floats(const sl_config *c, size_t tokens)
{
    const size_t shared = (size_t)c->shared_experts * c->moe_intermediate;
    return sl_scratch_floats(tokens * c->experts) + 2 * sl_scratch_floats(tokens * c->latent) +
           sl_scratch_floats(tokens * c->top_k * c->latent) + 2 * sl_scratch_floats(tokens * shared) +
           sl_scratch_floats(tokens * c->hidden);
}

int sl_moe(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const size_t hidden = c->hidden, latent = c->latent;
    sl_scratch *s = &m->scratch;
    float *down = sl_scratch_take(s, tokens * latent), *sum = sl_scratch_take(s, tokens * latent);
    float *out = sl_scratch_take(s, tokens * c->top_k * latent), *shared = sl_scratch_take(s, tokens * hidden);
    const float *z = c->latent_projection ? down : x;
    int rc = route(m, layer, x, tokens, err);
    if (rc < 0)
        return rc;
    /* The reads start here and go on behind the matrices that follow. */
    sl_expert_begin(m->experts, layer - c->dense_layers, m->calls, group_calls(m, out, tokens));
    if (c->latent_projection && (rc = sl_matrix(m, layer, SL_LATENT_DOWN, x, hidden, down, latent, tokens, err)) < 0)
        return rc;
    if (c->shared_experts && (rc = mlp(m, layer, SL_SHARED_GATE, (size_t)c->shared_experts * c->moe_intermediate, x,
                                       shared, tokens, err)) < 0)
        return rc;
    if ((rc = sl_expert_run(m->experts, z, latent, err)) < 0)
        return rc;
    memset(sum, 0, tokens * latent * sizeof *sum);
    for (size_t t = 0; t < tokens; t++) {
        m->k->row_sum(sum + t * latent, m->chosen_weight + t * c->top_k, out + t * c->top_k * latent, latent, c->top_k,
                      latent);
        if (!m->k->all_finite(sum + t * latent, latent))
            return sl_fail(err, SL_EFAIL, "layer %u: the sum of expert outputs overflowed", layer);
        if (c->latent_norm && (rc = sl_norm(m, layer, SL_LATENT_NORM, sum + t * latent, sum + t * latent, c->eps,
                                            latent, err)) < 0)
            return rc;
    }
    if (c->latent_projection) {
        if ((rc = sl_matrix(m, layer, SL_LATENT_UP, sum, latent, y, hidden, tokens, err)) < 0)
            return rc;
    } else {
        memcpy(y, sum, tokens * hidden * sizeof *y);
    }
    if (c->shared_experts)
        m->k->add(y, y, shared, tokens * hidden);
    return 0;
}
