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
    bool session_open;
};

struct sl_session {
    sl_engine *engine;
    bool failed; /* the state is between tokens */
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
        .threads = o.threads ? o.threads : cpu_count(), .prefill_chunk = o.prefill_chunk, .io = o.io,
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
    sl_assert(!e->session_open);
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
    if (e->session_open)
        return sl_fail(err, SL_EUSAGE, "session: the engine was planned for one, and it is open");
    sl_session *s = calloc(1, sizeof *s);
    if (!s)
        return sl_fail(err, SL_EFAIL, "out of memory");
    s->engine = e;
    e->session_open = true;
    sl_state_clear(e->model);
    *out = s;
    return 0;
}

void sl_session_close(sl_session *s)
{
    if (!s)
        return;
    s->engine->session_open = false;
    free(s);
}

uint32_t sl_session_position(const sl_session *s) { return s->engine->model->state.position; }
const float *sl_session_logits(const sl_session *s)
{
    const sl_model *m = s->engine->model;
    return m->logits + (m->all_logits ? (size_t)m->last_row * m->bind.config.vocab : 0);
}

typedef struct {
    const sl_feed *feed;
    uint64_t before, total; /* in layers */
} progress;

static void report(void *user, uint64_t layers)
{
    const progress *p = user;
    p->feed->on_progress(p->feed->user, p->before + layers, p->total);
}

typedef struct {
    const sl_feed *feed;
    uint32_t pass, first, top_k; /* first: position of the pass's first token */
} routing;

static void pass_routing_on(void *user, uint32_t layer, uint32_t token, const uint32_t *experts, const float *weights)
{
    const routing *r = user;
    r->feed->on_routing(r->feed->user, r->pass, r->first + token, layer, experts, weights, r->top_k);
}

/* Checked before the first weight is read, so that a refused call leaves the session usable. */
static int check_feed(const sl_session *s, const int32_t *ids, size_t n, sl_err *err)
{
    const sl_model *m = s->engine->model;
    const uint32_t vocab = m->bind.config.vocab;
    if (s->failed)
        return sl_fail(err, SL_EUSAGE, "session: an earlier call failed, its state cannot be continued");
    if (n == 0)
        return sl_fail(err, SL_EUSAGE, "session: no tokens to feed");
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (uint32_t)ids[i] >= vocab)
            return sl_fail(err, SL_EUSAGE, "token %zu: found id %d, expected 0 to %u (the vocabulary)", i, ids[i], vocab - 1);
    if (n > m->state.context - m->state.position)
        return sl_fail(err, SL_EUSAGE, "context: %zu tokens do not fit the %u of %u positions that are left", n,
                       m->state.context - m->state.position, m->state.context);
    return 0;
}

static int deliver(const sl_model *m, const sl_feed *feed, uint32_t first, size_t tokens, sl_err *err)
{
    for (size_t t = 0; t < tokens; t++) {
        const int rc = feed->on_logits(feed->user, first + (uint32_t)t, m->logits + t * m->bind.config.vocab);
        if (rc != 0)
            return err && err->code == rc ? rc : sl_fail(err, rc, "stopped by the receiver of logits");
    }
    return 0;
}

int sl_session_feed(sl_session *s, const int32_t *ids, size_t n, const sl_feed *feed, sl_err *err)
{
    static const sl_feed none = { 0 };
    sl_model *m = s->engine->model;
    int rc = check_feed(s, ids, n, err);
    if (rc < 0)
        return rc;
    if (!feed)
        feed = &none;
    const size_t chunk = m->plan.prefill_chunk;
    progress p = { .feed = feed, .total = (n + chunk - 1) / chunk * m->bind.config.layers };
    routing r = { .feed = feed, .top_k = m->bind.config.top_k };
    m->on_routing = feed->on_routing ? pass_routing_on : NULL;
    m->routing_user = &r;
    for (size_t at = 0; at < n && rc == 0; at += chunk, p.before += m->bind.config.layers, r.pass++) {
        const size_t tokens = sl_min_u64(chunk, n - at);
        const bool last = at + tokens == n;
        const uint32_t first = r.first = m->state.position;
        rc = sl_forward(m, ids + at, tokens, last || m->all_logits, !last || !feed->last,
                        feed->on_progress ? report : NULL, &p, err);
        m->last_row = (uint32_t)tokens - 1;
        if (rc == 0 && m->all_logits && feed->on_logits)
            rc = deliver(m, feed, first, tokens, err);
    }
    m->on_routing = NULL;
    s->failed = rc < 0;
    return rc;
}
