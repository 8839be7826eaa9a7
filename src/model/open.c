/* From a directory and a budget to a model ready to run: sizes, plan, allocations. */
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "model/model.h"
#include "store/disk.h"
#include "store/mirror.h"

enum { CHUNK_BYTES = 4 << 20 }; /* of the trunk stream: 0.1 ms of arithmetic, and enough reads in flight */
static const uint64_t RING_WANT = 256ull << 20;
enum { SLOTS_WANT = 16 };

/* ---- sizes ------------------------------------------------------------------------------------- */

static size_t sublayer_floats(const sl_config *c, size_t tokens, uint32_t threads)
{
    const size_t need[4] = { sl_kda_floats(c, tokens, threads), sl_mla_floats(c, tokens, threads), sl_moe_floats(c, tokens),
                             sl_dense_floats(c, tokens) };
    size_t most = 0;
    for (int i = 0; i < 4; i++)
        most = need[i] > most ? need[i] : most;
    return most;
}

/* The buffers of one pass over `tokens` tokens, besides the experts' own. The planner adds up the same list
 * that is allocated and freed, so that they cannot disagree. */
enum { BUFFERS = 16 };
typedef struct {
    void *pointer; /* the address of a pointer in the model */
    uint64_t bytes;
} buffer;

static void list_buffers(buffer out[BUFFERS], sl_model *m, const sl_config *c, uint64_t tokens, uint32_t threads,
                         uint64_t logits_rows)
{
    const uint64_t pairs = tokens * c->top_k, row = c->hidden * sizeof(float);
    const buffer list[BUFFERS] = {
        { &m->scratch.base, sublayer_floats(c, tokens, threads) * sizeof(float) },
        { &m->residual, tokens * (sl_config_snapshots(c) + 1) * row },
        { &m->mixed, tokens * row },
        { &m->output, tokens * row },
        { &m->logits, logits_rows * c->vocab * sizeof(float) },
        { &m->rows, tokens * sizeof *m->rows },
        { &m->ids, tokens * sizeof *m->ids },
        { &m->head_rows, logits_rows * sizeof *m->head_rows },
        { &m->embed_buffer, tokens * sl_io_span_max(2ull * c->hidden) + 4096 },
        { &m->embed_req, tokens * sizeof *m->embed_req },
        { &m->chosen, pairs * sizeof *m->chosen },
        { &m->chosen_weight, pairs * sizeof *m->chosen_weight },
        { &m->calls, c->experts * sizeof *m->calls },
        { &m->call_tokens, pairs * sizeof *m->call_tokens },
        { &m->call_out, pairs * sizeof *m->call_out },
        { &m->expert_count, c->experts * sizeof *m->expert_count },
    };
    memcpy(out, list, sizeof list);
}

typedef struct {
    const sl_config *c;
    const sl_binding *b;
    const sl_model_options *opt;
} sizing;

/* Rows of logits that a pass over `chunk` tokens may be asked for: the last of each sequence, or all. */
static uint32_t logits_rows(const sl_model_options *opt, uint32_t chunk) { return opt->all_logits ? chunk : opt->sequences; }

static sl_expert_options expert_options(const sl_binding *b, uint32_t max_calls)
{
    const sl_config *c = &b->config;
    return (sl_expert_options){
        .files = b->shards.file, .places = b->experts, .layers = c->layers - c->dense_layers, .experts = c->experts,
        .latent = c->latent, .width = c->moe_intermediate, .beta = c->situ_beta, .linear_beta = c->situ_linear_beta,
        .max_calls = max_calls,
    };
}

static uint64_t state_size(const void *user, uint32_t context)
{
    const sizing *s = user;
    return s->opt->sequences * sl_state_size(s->c, context);
}

static uint64_t scratch_size(const void *user, uint32_t context, uint32_t chunk)
{
    const sizing *s = user;
    (void)context; /* attention works in blocks of positions: its scratch does not grow with them */
    const sl_expert_options opt = expert_options(s->b, chunk * s->c->top_k);
    uint64_t bytes = s->b->experts ? sl_expert_scratch(&opt) : 0;
    sl_model none;
    buffer list[BUFFERS];
    list_buffers(list, &none, s->c, chunk, s->opt->threads, logits_rows(s->opt, chunk));
    for (int i = 0; i < BUFFERS; i++)
        bytes += sl_mem_size(list[i].bytes);
    return bytes;
}

static uint64_t tables_size(const sl_config *c, uint32_t sequences)
{
    const uint64_t n = (c->layers + 1ull) * SL_KINDS;
    return sl_mem_size(sl_vectors_floats(c) * sizeof(float)) + sl_mem_size(n * sizeof(float *)) +
           sl_mem_size(n * sizeof(uint32_t)) + sl_mem_size(c->layers * sizeof(uint16_t)) +
           sl_mem_size(sequences * sizeof(sl_state)) + sl_mem_size(sequences * sizeof(sl_segment));
}

/* ---- plan -------------------------------------------------------------------------------------- */

/* The binding is open, its index is counted in `budget` already. Fills plan and *slots. */
static int make_plan(sl_plan *plan, uint32_t *slots, const sl_binding *b, const sl_trunk_matrix *list, size_t n,
                     const sl_model_options *opt, uint64_t index, sl_err *err)
{
    const sl_config *c = &b->config;
    sizing s = { .c = c, .b = b, .opt = opt };
    sl_trunk_sizes trunk;
    sl_expert_sizes expert = { 0 };
    int rc = sl_trunk_measure(&trunk, list, n, CHUNK_BYTES, err);
    if (rc == 0 && b->experts) {
        const sl_expert_options eo = expert_options(b, c->top_k);
        rc = sl_expert_measure(&expert, &eo, err);
    }
    if (rc < 0)
        return rc;
    sl_plan_input in = {
        .budget = opt->ram, .context = opt->context, .prefill_chunk = opt->prefill_chunk, .threads = opt->threads,
        .sequences = opt->sequences, .index = index + tables_size(c, opt->sequences) + trunk.index + expert.index,
        .ring_min = trunk.ring_min, .ring_want = RING_WANT, .trunk_all = trunk.resident_all,
        .slot = expert.slot, .slots_want = SLOTS_WANT, .experts = (uint64_t)(c->layers - c->dense_layers) * c->experts,
        .state = state_size, .scratch = scratch_size, .user = &s,
    };
    rc = sl_plan_make(plan, slots, &in, err);
    plan->expert_bytes = (uint64_t)(c->layers - c->dense_layers) * c->top_k * expert.read;
    plan->embed_bytes = 2ull * c->hidden + SL_IO_ALIGN; /* on average, wherever a row begins */
    if (in.experts) /* by a list a layer; of n slots any expert is equally likely in one */
        plan->expert_expected = (uint64_t)((double)plan->expert_bytes * (1 - (double)plan->expert_slots / (double)in.experts));
    for (size_t i = 0; i < n; i++)
        plan->used_bf16 += list[i].rows * list[i].row_bytes;
    plan->used_bf16 += 2 * (sl_state_size(c, 0)); /* read and written */
    if (b->experts)
        plan->used_mxfp4 = (uint64_t)(c->layers - c->dense_layers) * c->top_k * 3 * c->latent * c->moe_intermediate / 32 * 17;
    const int reads = sl_trunk_reads_for(list, n, CHUNK_BYTES, plan->trunk, &plan->trunk_bytes, &plan->head_bytes,
                                         rc < 0 ? NULL : err);
    return rc < 0 ? rc : reads;
}

/* The binding and the plan, without its allocations. */
static int open_plan(sl_model *m, sl_trunk_matrix **list, size_t *n, const char *dir, sl_model_options *opt, sl_err *err)
{
    if (opt->ram == 0)
        opt->ram = sl_plan_default_budget();
    if (opt->sequences == 0)
        opt->sequences = 1;
    if (opt->sequences > SL_SEQUENCES_MAX)
        return sl_fail(err, SL_EUSAGE, "sequences: found %u, expected 1 to %d", opt->sequences, SL_SEQUENCES_MAX);
    if (opt->n_mirrors >= SL_IO_DRIVES_MAX)
        return sl_fail(err, SL_EUSAGE, "mirrors: found %zu, expected at most %d", opt->n_mirrors, SL_IO_DRIVES_MAX - 1);
    int rc = sl_binding_open(&m->bind, dir, SL_SHARDS_DIRECT, m->budget, err);
    for (size_t i = 0; rc == 0 && i < opt->n_mirrors; i++)
        rc = sl_mirror_open(&m->bind.shards, opt->mirrors[i], (unsigned)i + 1, err);
    if (rc < 0)
        return rc;
    if (opt->context > 1u << 30 || opt->prefill_chunk > 1u << 16)
        return sl_fail(err, SL_EUSAGE, "context %u or prefill chunk %u: too large", opt->context, opt->prefill_chunk);
    if ((rc = sl_list_matrices(&m->bind, list, n, m->matrix, err)) < 0)
        return rc;
    return make_plan(&m->plan, &m->inflight_slots, &m->bind, *list, *n, opt, sl_budget_used(m->budget, SL_MEM_INDEX), err);
}

int sl_model_plan(sl_plan *plan, const char *dir, const sl_model_options *opt, sl_err *err)
{
    sl_model m = { .budget = sl_budget_open(UINT64_MAX) };
    sl_model_options o = *opt;
    sl_trunk_matrix *list = NULL;
    size_t n = 0;
    if (!m.budget)
        return sl_fail(err, SL_EFAIL, "out of memory");
    const int rc = open_plan(&m, &list, &n, dir, &o, err);
    *plan = m.plan;
    free(list);
    sl_binding_close(&m.bind);
    sl_budget_close(m.budget);
    return rc;
}

/* ---- open -------------------------------------------------------------------------------------- */

static void *take(sl_model *m, sl_mem_class class, uint64_t bytes, bool *ok)
{
    void *p = sl_mem_alloc(m->budget, class, bytes);
    *ok = *ok && (p || bytes == 0);
    return p;
}

static int allocate_index(sl_model *m, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    const uint64_t n = (c->layers + 1ull) * SL_KINDS;
    bool ok = true;
    m->vectors = take(m, SL_MEM_INDEX, sl_vectors_floats(c) * sizeof(float), &ok);
    m->vector = take(m, SL_MEM_INDEX, n * sizeof *m->vector, &ok);
    m->matrix = take(m, SL_MEM_INDEX, n * sizeof *m->matrix, &ok);
    m->layer_index = take(m, SL_MEM_INDEX, c->layers * sizeof *m->layer_index, &ok);
    m->states = take(m, SL_MEM_INDEX, m->plan.sequences * sizeof *m->states, &ok);
    m->step_segments = take(m, SL_MEM_INDEX, m->plan.sequences * sizeof *m->step_segments, &ok);
    if (!ok)
        return sl_fail(err, SL_EBUDGET, "memory: the index does not fit as planned, or the system refused it");
    uint16_t kda = 0, mla = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        m->layer_index[l] = c->is_mla[l] ? mla++ : kda++;
    return 0;
}

static int allocate_pass(sl_model *m, sl_err *err)
{
    const sl_config *c = &m->bind.config;
    buffer list[BUFFERS];
    bool ok = true;
    list_buffers(list, m, c, m->plan.prefill_chunk, m->plan.threads, m->logits_rows);
    for (int i = 0; i < BUFFERS; i++) {
        void *block = take(m, SL_MEM_SCRATCH, list[i].bytes, &ok);
        memcpy(list[i].pointer, &block, sizeof block);
    }
    m->scratch.size = list[0].bytes / sizeof(float);

    if (!ok)
        return sl_fail(err, SL_EBUDGET, "memory: the plan's buffers do not fit, or the system refused them");
    sl_mem_touch(m->scratch.base, list[0].bytes);
    int rc = 0;
    for (uint32_t i = 0; rc == 0 && i < m->plan.sequences; i++)
        rc = sl_state_open(&m->states[i], c, m->plan.context, m->budget, err);
    return rc;
}

static void name_expert(void *user, uint32_t layer, uint32_t expert, int tensor, char *buf, size_t size)
{
    const sl_model *m = user;
    sl_expert_name(layer + m->bind.config.dense_layers, expert, tensor, buf, size);
}

static int open_store(sl_model *m, const sl_trunk_matrix *list, size_t n, sl_err *err)
{
    const sl_trunk_options trunk = { .io = m->io, .budget = m->budget, .matrices = list, .n_matrices = n,
                                     .chunk_bytes = CHUNK_BYTES, .ring_bytes = m->plan.ring,
                                     .resident_bytes = m->plan.trunk };
    int rc = sl_trunk_open(&m->trunk, &trunk, err);
    if (rc < 0 || !m->bind.experts)
        return rc;
    sl_expert_options experts = expert_options(&m->bind, m->plan.prefill_chunk * m->bind.config.top_k);
    experts.io = m->io;
    experts.budget = m->budget;
    experts.pool = m->pool;
    experts.kernels = m->k;
    experts.inflight_slots = m->inflight_slots;
    experts.cache_slots = m->plan.expert_slots;
    if ((rc = sl_expert_open(&m->experts, &experts, err)) == 0)
        sl_expert_names(m->experts, name_expert, m);
    return rc;
}

static int open_model(sl_model *m, const char *dir, sl_model_options *opt, sl_err *err)
{
    const char *why = "";
    m->k = sl_kernels_choose(&why);
    if (!m->k)
        return sl_fail(err, SL_EUSAGE, "%s", why);
    /* The index comes before the plan that bounds it, so it is counted without a limit first. */
    sl_trunk_matrix *list = NULL;
    size_t n = 0;
    sl_disk_profile disk = { 0 }; /* unmeasured: the scheduler's defaults */
    sl_disk_profile_load(&disk, dir);
    const sl_io_options io = { .backend = opt->io, .drives = 1 + (unsigned)opt->n_mirrors, .depth = disk.depth,
                               .piece = disk.piece, .fault = opt->fault, .fault_user = opt->fault_user };
    int rc = open_plan(m, &list, &n, dir, opt, err);
    if (rc == 0) {
        free(list); /* again below, with the numbers of its matrices */
        list = NULL;
        m->logits_rows = logits_rows(opt, m->plan.prefill_chunk);
        rc = sl_budget_limit(m->budget, opt->ram, m->plan.reserve) < 0
                 ? sl_fail(err, SL_EBUDGET, "memory: the index does not fit the budget")
                 : 0;
    }
    if (rc == 0 && (rc = allocate_index(m, err)) == 0 &&
        (rc = sl_list_matrices(&m->bind, &list, &n, m->matrix, err)) == 0 &&
        (rc = sl_pool_open(&m->pool, m->plan.threads, err)) == 0 && (rc = sl_io_open(&m->io, &io, err)) == 0 &&
        (rc = sl_load_vectors(m, err)) == 0 && (rc = allocate_pass(m, err)) == 0)
        rc = open_store(m, list, n, err);
    free(list);
    return rc;
}

int sl_model_open(sl_model **out, const char *dir, const sl_model_options *opt, sl_err *err)
{
    sl_model *m = calloc(1, sizeof *m);
    sl_model_options o = *opt;
    int rc = SL_EFAIL;
    if (!m || !(m->budget = sl_budget_open(UINT64_MAX)))
        sl_fail(err, SL_EFAIL, "out of memory");
    else {
        m->all_logits = o.all_logits;
        m->cancel = o.cancel;
        m->user = o.user;
        rc = open_model(m, dir, &o, err);
    }
    if (rc < 0) {
        sl_model_close(m);
        return rc;
    }
    *out = m;
    return 0;
}

void sl_model_close(sl_model *m)
{
    if (!m)
        return;
    sl_expert_close(m->experts);
    sl_trunk_close(m->trunk);
    sl_io_close(m->io);
    sl_pool_close(m->pool);
    for (uint32_t i = 0; m->states && i < m->plan.sequences; i++)
        sl_state_close(&m->states[i]);
    void *const blocks[] = { m->vectors, m->vector, m->matrix, m->layer_index, m->states, m->step_segments };
    for (size_t i = 0; i < sizeof blocks / sizeof *blocks; i++)
        sl_mem_free(blocks[i]);
    buffer list[BUFFERS];
    list_buffers(list, m, &m->bind.config, 1, 1, 1);
    for (int i = 0; i < BUFFERS; i++) {
        void *block;
        memcpy(&block, list[i].pointer, sizeof block);
        sl_mem_free(block);
    }
    sl_binding_close(&m->bind);
    sl_budget_close(m->budget);
    free(m);
}
