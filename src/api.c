/* Implements the engine and session part of sluice.h. */
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/num.h"
#include "model/model.h"
#include "store/disk.h"
#include "store/speed.h"

struct sl_engine {
    sl_model *model;
    uint32_t sessions; /* open ones */
};

struct sl_session {
    sl_engine *engine;
    sl_state *state;
    bool failed;      /* the state is between tokens */
    uint32_t logits;  /* row of the model's logits that is this session's last, */
    uint64_t pass;    /* as long as this is the model's last pass */
};

static const uint32_t CONTEXT_DEFAULT = 4096;

sl_options sl_options_default(void) { return (sl_options){ .context = CONTEXT_DEFAULT }; }

static uint32_t cpu_count(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (uint32_t)CPU_COUNT(&set);
    const long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (uint32_t)n : 1;
}

static int model_options(sl_model_options *out, const sl_options *opt, sl_err *err)
{
    const sl_options o = opt ? *opt : sl_options_default();
    *out = (sl_model_options){
        .ram = o.ram_bytes, .context = o.context ? o.context : CONTEXT_DEFAULT,
        .threads = o.threads ? o.threads : cpu_count(), .prefill_chunk = o.prefill_chunk, .sequences = o.sequences, .io = o.io,
        .mirrors = o.mirrors, .n_mirrors = o.n_mirrors, .all_logits = o.all_logits, .cancel = o.cancel, .user = o.user,
    };
    if (out->threads > 1024)
        return sl_fail(err, SL_EUSAGE, "threads: found %u, expected 1 to 1024", out->threads);
    return 0;
}

int sl_engine_plan(const char *dir, const sl_options *opt, sl_plan *plan, sl_err *err)
{
    sl_model_options o;
    const int rc = model_options(&o, opt, err);
    *plan = (sl_plan){ 0 };
    return rc < 0 ? rc : sl_model_plan(plan, dir, &o, err);
}

int sl_measure_speed(const char *dir, const sl_options *opt, sl_speed *out, sl_err *err)
{
    sl_model_options o;
    sl_disk_profile disk;
    sl_pool *pool;
    const char *why = "";
    const sl_kernels *k = sl_kernels_choose(&why);
    int rc = model_options(&o, opt, err);
    *out = (sl_speed){ 0 };
    if (rc == 0 && !k)
        rc = sl_fail(err, SL_EUSAGE, "%s", why);
    if (rc < 0 || (rc = sl_pool_open(&pool, o.threads, err)) < 0)
        return rc;
    if (sl_disk_profile_load(&disk, dir)) {
        out->stream = disk.stream;
        out->experts = disk.experts;
    }
    sl_speed_measure(&out->bf16, &out->mxfp4, pool, k, sl_plan_default_budget() / 2);
    sl_pool_close(pool);
    return 0;
}

/* Experts are known only when the computation has come to them, so the time to read them is added; the trunk is read
 * ahead, so of reading it and of computing only the longer counts. */
double sl_plan_seconds(const sl_plan *p, const sl_speed *s)
{
    const double trunk = (double)(p->trunk_bytes + p->head_bytes + p->embed_bytes), experts = (double)p->expert_expected;
    if ((trunk > 0 && s->stream <= 0) || (experts > 0 && s->experts <= 0) || s->bf16 <= 0 || s->mxfp4 <= 0)
        return 0;
    const double compute = (double)p->used_bf16 / s->bf16 + (double)p->used_mxfp4 / s->mxfp4;
    const double stream = trunk > 0 ? trunk / s->stream : 0;
    return (experts > 0 ? experts / s->experts : 0) + (stream > compute ? stream : compute);
}

int sl_engine_open(sl_engine **out, const char *dir, const sl_options *opt, sl_err *err)
{
    sl_model_options o;
    int rc = model_options(&o, opt, err);
    if (rc < 0)
        return rc;
    sl_engine *e = calloc(1, sizeof *e);
    if (!e)
        return sl_fail(err, SL_EFAIL, "out of memory");
    if ((rc = sl_model_open(&e->model, dir, &o, err)) < 0) {
        free(e);
        return rc;
    }
    *out = e;
    return 0;
}

void sl_engine_close(sl_engine *e)
{
    if (!e)
        return;
    sl_assert(e->sessions == 0);
    sl_model_close(e->model);
    free(e);
}

const sl_plan *sl_engine_get_plan(const sl_engine *e) { return &e->model->plan; }
uint32_t sl_engine_vocab(const sl_engine *e) { return e->model->bind.config.vocab; }
int32_t sl_engine_eos(const sl_engine *e) { return e->model->bind.config.eos; }
const char *sl_engine_cpu(const sl_engine *e) { return e->model->k->name; }

void sl_engine_stats(const sl_engine *e, sl_stats *out)
{
    const sl_trunk_counts trunk = sl_trunk_count(e->model->trunk);
    const sl_expert_counts experts = e->model->experts ? sl_expert_count(e->model->experts) : (sl_expert_counts){ 0 };
    const sl_io_counts io = sl_io_count(e->model->io);
    struct rusage usage;
    *out = (sl_stats){ .trunk = trunk.layers, .head = trunk.head, .embed = e->model->embed_bytes,
                       .experts = experts.bytes, .cache_requests = experts.requests, .cache_hits = experts.hits,
                       .drive_busy_ns = io.busy_ns, .drive_depth_ns = io.depth_ns, .drive_reads = io.pieces,
                       .mirror_bytes = io.mirror_bytes, .mirrors_dropped = io.dropped };
    if (getrusage(RUSAGE_SELF, &usage) == 0)
        out->peak_rss = (uint64_t)usage.ru_maxrss << 10;
}

int sl_session_open(sl_session **out, sl_engine *e, sl_err *err)
{
    const uint32_t most = e->model->plan.sequences;
    if (e->sessions == most)
        return sl_fail(err, SL_EUSAGE, "session: found %u open, expected at most %u, for which the engine was planned", most, most);
    sl_session *s = calloc(1, sizeof *s);
    if (!s)
        return sl_fail(err, SL_EFAIL, "out of memory");
    s->engine = e;
    s->state = sl_state_take(e->model);
    e->sessions++;
    *out = s;
    return 0;
}

void sl_session_close(sl_session *s)
{
    if (!s)
        return;
    s->engine->sessions--;
    sl_state_give(s->state);
    free(s);
}

uint32_t sl_session_position(const sl_session *s) { return s->state->position; }
const float *sl_session_logits(const sl_session *s)
{
    const sl_model *m = s->engine->model;
    return s->pass && s->pass == m->passes ? m->logits + (size_t)s->logits * m->bind.config.vocab : NULL;
}

/* One pass for some steps, each of which gets its session's next tokens. */
typedef struct {
    sl_model *model;
    const sl_step *steps;
    uint64_t before, total; /* layers, for progress */
    uint32_t pass;
} pass;

static void report(void *user, uint64_t layers)
{
    const pass *p = user;
    for (uint32_t i = 0; i < p->model->n_segments; i++)
        if (p->steps[i].feed && p->steps[i].feed->on_progress)
            p->steps[i].feed->on_progress(p->steps[i].feed->user, p->before + layers, p->total);
}

static void pass_routing_on(void *user, uint32_t layer, uint32_t token, const uint32_t *experts, const float *weights)
{
    const pass *p = user;
    const sl_row row = p->model->rows[token];
    const sl_feed *feed = p->steps[row.segment].feed;
    if (feed && feed->on_routing)
        feed->on_routing(feed->user, p->pass, row.position, layer, experts, weights, p->model->bind.config.top_k);
}

/* Checked before the first weight is read, so that a refused call leaves the session usable. */
static int check_feed(const sl_session *s, const int32_t *ids, size_t n, sl_err *err)
{
    const uint32_t vocab = s->engine->model->bind.config.vocab;
    if (s->failed)
        return sl_fail(err, SL_EUSAGE, "session: an earlier call failed, its state cannot be continued");
    if (n == 0)
        return sl_fail(err, SL_EUSAGE, "session: no tokens to feed");
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return sl_fail(err, SL_EUSAGE, "token %zu: found id %d, expected 0 to %u (the vocabulary)", i, ids[i], vocab - 1);
    if (n > s->state->context - s->state->position)
        return sl_fail(err, SL_EUSAGE, "context: %zu tokens do not fit the %u of %u positions that are left", n,
                       s->state->context - s->state->position, s->state->context);
    return 0;
}

/* All logits of a step go to its feed; the rows of a pass are in the order of its steps. */
static int deliver(const sl_model *m, const sl_feed *feed, uint32_t row, uint32_t first, size_t tokens, sl_err *err)
{
    for (size_t t = 0; t < tokens; t++) {
        const int rc = feed->on_logits(feed->user, first + (uint32_t)t, m->logits + (row + t) * m->bind.config.vocab);
        if (rc != 0)
            return err && err->code == rc ? rc : sl_fail(err, rc, "stopped by the receiver of logits");
    }
    return 0;
}

/* The tokens of all steps in one pass; segment: room for n. */
static int run_pass(pass *p, sl_segment *segment, size_t n, bool logits, bool more, sl_err *err)
{
    sl_model *m = p->model;
    bool progress = false;
    m->on_routing = NULL;
    m->routing_user = p;
    for (size_t i = 0; i < n; i++) {
        const sl_step *s = &p->steps[i];
        segment[i] = (sl_segment){ .state = s->session->state, .ids = s->ids, .tokens = (uint32_t)s->n,
                                   .logits = m->all_logits ? (uint32_t)s->n : logits };
        progress = progress || (s->feed && s->feed->on_progress);
        if (s->feed && s->feed->on_routing)
            m->on_routing = pass_routing_on;
    }
    int rc = sl_forward(m, segment, n, more, progress ? report : NULL, p, err);
    m->on_routing = NULL;
    uint32_t row = 0;
    for (size_t i = 0; i < n; row += segment[i++].logits) {
        const sl_step *s = &p->steps[i];
        s->session->logits = row + segment[i].logits - 1;
        s->session->pass = segment[i].logits ? m->passes : 0;
        if (rc == 0 && m->all_logits && s->feed && s->feed->on_logits)
            rc = deliver(m, s->feed, row, s->session->state->position - segment[i].tokens, segment[i].tokens, err);
    }
    for (size_t i = 0; rc < 0 && i < n; i++) {
        p->steps[i].session->failed = true;
        p->steps[i].session->pass = 0;
    }
    return rc;
}

int sl_session_feed(sl_session *s, const int32_t *ids, size_t n, const sl_feed *feed, sl_err *err)
{
    sl_model *m = s->engine->model;
    int rc = check_feed(s, ids, n, err);
    const size_t chunk = m->plan.prefill_chunk;
    sl_segment segment;
    sl_step step = { .session = s, .feed = feed };
    pass p = { .model = m, .steps = &step, .total = (n + chunk - 1) / chunk * m->bind.config.layers };
    for (size_t at = 0; rc == 0 && at < n; at += step.n, p.before += m->bind.config.layers, p.pass++) {
        step.ids = ids + at;
        step.n = sl_min_u64(chunk, n - at);
        const bool last = at + step.n == n;
        rc = run_pass(&p, &segment, 1, last, !last || !feed || !feed->last, err);
    }
    return rc;
}

int sl_engine_step(sl_engine *e, const sl_step *steps, size_t n, bool last, sl_err *err)
{
    sl_model *m = e->model;
    const uint32_t chunk = m->plan.prefill_chunk;
    size_t total = 0;
    if (n == 0 || n > m->plan.sequences)
        return sl_fail(err, SL_EUSAGE, "step: found %zu sessions, expected 1 to %u", n, m->plan.sequences);
    for (size_t i = 0; i < n; i++) {
        const int rc = check_feed(steps[i].session, steps[i].ids, steps[i].n, err);
        if (rc < 0)
            return rc;
        for (size_t j = 0; j < i; j++)
            if (steps[j].session == steps[i].session)
                return sl_fail(err, SL_EUSAGE, "step %zu: its session is that of step %zu too", i, j);
        total += steps[i].n;
        if (total > chunk)
            return sl_fail(err, SL_EUSAGE, "step: found more than %u tokens, which a pass can take", chunk);
    }
    pass p = { .model = m, .steps = steps, .total = m->bind.config.layers };
    return run_pass(&p, m->step_segments, n, true, !last, err);
}
