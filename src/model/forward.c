/* One pass over the model for a chunk of tokens: spec 3.3 is the outline, 3.9 the end. Prefill and decode are the
 * same pass with more or fewer tokens, of one sequence or of several. */
#include <math.h>
#include <string.h>

#include "model/model.h"

float *sl_scratch_take(sl_scratch *s, size_t n)
{
    float *p = s->base + s->top;
    s->top += sl_scratch_floats(n);
    sl_assert(s->top <= s->size);
    return p;
}

int sl_norm(const sl_model *m, uint32_t layer, sl_kind norm, const float *x, float *y, float eps, size_t n, sl_err *err)
{
    /* A sum of squares past the largest float would turn the vector into zeros without a NaN. */
    if (!isfinite(m->k->dot(x, x, n))) {
        char name[SL_ST_NAME_MAX];
        sl_kind_name(layer, norm, name, sizeof name);
        return sl_fail(err, SL_EFAIL, "%s: its input overflowed", name);
    }
    m->k->rms_norm(y, x, sl_vector(m, layer, norm), eps, n);
    return 0;
}

typedef struct {
    size_t stride;  /* floats from one token's sources to the next */
    size_t sum_at;  /* where the running sum lies among them */
    size_t hidden;
} residual_layout;

static residual_layout layout(const sl_config *c)
{
    const size_t snapshots = sl_config_snapshots(c);
    return (residual_layout){ .stride = (snapshots + 1) * c->hidden, .sum_at = snapshots * c->hidden, .hidden = c->hidden };
}

void sl_mix(const sl_kernels *k, const float *bank, uint32_t n, const float *sum, const float *weight, float eps,
            size_t hidden, float *out)
{
    float score[SL_LAYERS_MAX + 1];
    for (uint32_t i = 0; i <= n; i++) {
        const float *s = i < n ? bank + i * hidden : sum;
        const float r = 1.0f / sqrtf(k->dot(s, s, hidden) / (float)hidden + eps);
        score[i] = k->dot(weight, s, hidden) * r;
    }
    const float total = k->exp_sum(score, score, k->max(score, n + 1), n + 1);
    k->scale(score, score, 1.0f / total, n + 1);
    memset(out, 0, hidden * sizeof *out);
    k->row_sum(out, score, bank, hidden, n, hidden);
    k->row_sum(out, score + n, sum, hidden, 1, hidden);
}

typedef struct {
    sl_model *m;
    uint32_t layer, bank;
    sl_kind res, norm;
    const uint32_t *rows; /* of the pass, in the order of m->mixed; NULL: all */
    atomic_bool bad;
} input_job;

static void norm_input(input_job *j, size_t t)
{
    const size_t hidden = j->m->bind.config.hidden;
    float *x = j->m->mixed + t * hidden;
    if (sl_norm(j->m, j->layer, j->norm, x, x, j->m->bind.config.eps, hidden, NULL) < 0)
        atomic_store_explicit(&j->bad, true, memory_order_relaxed); /* read after the pool's barrier */
}

static void run_input(void *arg, size_t begin, size_t end, unsigned thread)
{
    input_job *j = arg;
    sl_model *m = j->m;
    const residual_layout lay = layout(&m->bind.config);
    (void)thread;
    for (size_t t = begin; t < end; t++) {
        const float *sources = m->residual + (j->rows ? j->rows[t] : t) * lay.stride;
        float *out = m->mixed + t * lay.hidden;
        if (j->bank)
            sl_mix(m->k, sources, j->bank, sources + lay.sum_at, sl_vector(m, j->layer, j->res), m->bind.config.eps,
                   lay.hidden, out);
        else
            memcpy(out, sources + lay.sum_at, lay.hidden * sizeof *out);
        if (!m->probe)
            norm_input(j, t);
    }
}

/* m->mixed = RMSNorm(MIX(...)) for `rows` of the pass: the input of a sub-layer, or of the head. */
static int sublayer_input(sl_model *m, uint32_t layer, sl_kind res, sl_kind norm, uint32_t bank, const uint32_t *rows,
                          size_t n, int what, sl_err *err)
{
    input_job j = { .m = m, .layer = layer, .bank = bank, .res = res, .norm = norm, .rows = rows };
    const size_t hidden = m->bind.config.hidden;
    sl_pool_run(m->pool, n, 1, run_input, &j);
    for (size_t t = 0; m->probe && t < n; t++) { /* the mixture exists only before its norm */
        m->probe(m->probe_user, what, layer, rows ? rows[t] : (uint32_t)t, m->mixed + t * hidden, hidden);
        norm_input(&j, t);
    }
    if (!atomic_load_explicit(&j.bad, memory_order_relaxed))
        return 0;
    char name[SL_ST_NAME_MAX];
    sl_kind_name(layer, norm, name, sizeof name);
    return sl_fail(err, SL_EFAIL, "%s: its input overflowed", name);
}

/* The running sum takes in a sub-layer's output, or starts anew from it. */
static void add_output(sl_model *m, uint32_t layer, size_t tokens, bool restart, int what)
{
    const residual_layout lay = layout(&m->bind.config);
    for (size_t t = 0; t < tokens; t++) {
        float *sum = m->residual + t * lay.stride + lay.sum_at;
        const float *y = m->output + t * lay.hidden;
        if (restart)
            memcpy(sum, y, lay.hidden * sizeof *sum);
        else
            m->k->add(sum, sum, y, lay.hidden);
        if (m->probe)
            m->probe(m->probe_user, what, layer, (uint32_t)t, y, lay.hidden);
    }
}

static void save_snapshot(sl_model *m, uint32_t bank, size_t tokens)
{
    const residual_layout lay = layout(&m->bind.config);
    for (size_t t = 0; t < tokens; t++) {
        float *sources = m->residual + t * lay.stride;
        memcpy(sources + bank * lay.hidden, sources + lay.sum_at, lay.hidden * sizeof *sources);
    }
}

static int run_layer(sl_model *m, uint32_t layer, uint32_t *bank, size_t tokens, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    int rc = sublayer_input(m, layer, SL_ATTN_RES_NORM, SL_INPUT_NORM, *bank, NULL, tokens, SL_PROBE_ATTN_INPUT, err);
    if (rc < 0)
        return rc;
    const bool reset = sl_config_is_reset(c, layer);
    if (reset)
        save_snapshot(m, (*bank)++, tokens); /* the running sum as it entered, not the mixture */
    m->scratch.top = 0;
    rc = c->is_mla[layer] ? sl_mla(m, layer, m->mixed, m->output, tokens, err)
                          : sl_kda(m, layer, m->mixed, m->output, tokens, err);
    if (rc < 0)
        return rc;
    add_output(m, layer, tokens, reset, SL_PROBE_ATTN_OUTPUT);

    rc = sublayer_input(m, layer, SL_MLP_RES_NORM, SL_POST_NORM, *bank, NULL, tokens, SL_PROBE_MLP_INPUT, err);
    if (rc < 0)
        return rc;
    m->scratch.top = 0;
    rc = sl_config_is_moe(c, layer) ? sl_moe(m, layer, m->mixed, m->output, tokens, err)
                                    : sl_dense(m, layer, m->mixed, m->output, tokens, err);
    if (rc < 0)
        return rc;
    add_output(m, layer, tokens, false, SL_PROBE_MLP_OUTPUT);
    const residual_layout lay = layout(c);
    for (size_t t = 0; m->probe && t < tokens; t++)
        m->probe(m->probe_user, SL_PROBE_SUM, layer, (uint32_t)t, m->residual + t * lay.stride + lay.sum_at, lay.hidden);
    return 0;
}

void sl_forward_rows(sl_model *m, const sl_segment *segments, size_t n)
{
    m->segments = segments;
    m->n_segments = (uint32_t)n;
    m->n_rows = 0;
    for (uint32_t i = 0; i < n; i++) {
        const sl_segment *s = &segments[i];
        sl_assert(s->tokens >= 1 && s->tokens <= m->plan.prefill_chunk - m->n_rows);
        sl_assert(s->tokens <= s->state->context - s->state->position);
        for (uint32_t t = 0; t < s->tokens; t++, m->n_rows++) {
            m->rows[m->n_rows] = (sl_row){ .segment = i, .position = s->state->position + t };
            m->ids[m->n_rows] = s->ids[t];
        }
    }
}

/* The rows whose logits are wanted; returns how many. */
static size_t list_head_rows(sl_model *m)
{
    size_t n = 0;
    for (uint32_t i = 0, end = 0; i < m->n_segments; i++) {
        const sl_segment *s = &m->segments[i];
        end += s->tokens;
        sl_assert(s->logits <= s->tokens && s->logits <= m->logits_rows - n);
        for (uint32_t row = end - s->logits; row < end; row++)
            m->head_rows[n++] = row;
    }
    return n;
}

static int forward(sl_model *m, size_t n_head, void (*progress)(void *user, uint64_t layers), void *user, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const residual_layout lay = layout(c);
    int rc = sl_embed(m, m->ids, m->n_rows, m->residual + lay.sum_at, lay.stride, err);
    uint32_t bank = 0;
    for (uint32_t l = 0; rc == 0 && l < c->layers; l++) {
        rc = run_layer(m, l, &bank, m->n_rows, err);
        if (rc == 0 && progress)
            progress(user, l + 1);
    }
    if (rc < 0 || n_head == 0)
        return rc;
    rc = sublayer_input(m, SL_NO_LAYER, SL_OUT_RES_NORM, SL_FINAL_NORM, bank, m->head_rows, n_head, SL_PROBE_FINAL, err);
    if (rc < 0)
        return rc;
    return sl_matrix(m, SL_NO_LAYER, SL_HEAD, m->mixed, lay.hidden, m->logits, c->vocab, n_head, err);
}

/* Bytes that changed on disk since the model was opened are not the model that was asked for. */
static int check_files(const sl_model *m, sl_err *err)
{
    for (uint16_t i = 0; i < m->bind.shards.n; i++) {
        const int rc = sl_io_file_unchanged(&m->bind.shards.file[i], err);
        if (rc < 0)
            return rc;
    }
    return 0;
}

int sl_forward(sl_model *m, const sl_segment *segments, size_t n, bool more,
               void (*progress)(void *user, uint64_t layers), void *user, sl_err *err)
{
    sl_forward_rows(m, segments, n);
    const size_t n_head = list_head_rows(m);
    sl_budget_freeze(m->budget);
    m->passes++;
    sl_trunk_pass(m->trunk, n_head > 0, more);
    int rc = forward(m, n_head, progress, user, err);
    if (rc == 0)
        rc = check_files(m, err);
    sl_budget_thaw(m->budget);
    for (size_t i = 0; rc == 0 && i < n; i++)
        segments[i].state->position += segments[i].tokens;
    return rc;
}
