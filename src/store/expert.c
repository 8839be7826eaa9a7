#include "store/expert.h"

#include <stdatomic.h>
#include <stdio.h>

#include "base/num.h"

enum {
    PAIRS = 64,      /* (token, expert) pairs computed at once at most: one bit each in `bad` */
    GRAIN = 16,      /* rows: the least share of a thread */
    GAP = 64 << 10,  /* tensors no further apart are read as one */
};
#define NONE UINT32_MAX

/* Residency of one expert. It is in its layer's list when resident and not in use. */
typedef struct {
    uint64_t used;         /* the batch that called for it last */
    uint32_t times;        /* tokens that ever called for it */
    uint32_t slot;         /* NONE: not resident */
    uint32_t newer, older; /* experts of the layer, NONE at the ends */
} entry;

typedef struct {
    uint32_t newest, oldest, n, quota;
} layer_list;

/* How an expert's tensors are read and where they then lie in the slot. */
typedef struct {
    struct { uint64_t begin, length, need, at; uint16_t file; } read[SL_EXPERT_TENSORS];
    unsigned n;
    uint64_t tensor[SL_EXPERT_TENSORS];
    uint64_t memory, bytes; /* of the slot; read */
} layout;

enum { WAITING, READING, READY, OVER };

typedef struct {
    const sl_expert_call *call;
    uint32_t slot;
    uint8_t state;
    uint8_t n_reqs, n_arrived; /* reqs[0..n_arrived) are done */
    sl_io_req reqs[SL_EXPERT_TENSORS];
} job;

/* Some tokens of one call. */
typedef struct {
    const job *job;
    const uint8_t *w[SL_EXPERT_TENSORS];
    const float *x;         /* [n][ldx] */
    size_t ldx;
    float *gate, *up, *sum; /* [n][width], [n][width], [n][latent] */
    float *const *out;
    uint32_t n;
} part;

struct sl_expert_store {
    sl_expert_options opt;
    sl_expert_name_fn *name;
    void *name_user;
    uint64_t slot_size, clock;
    uint8_t *cache, *inflight;
    uint32_t free;    /* first free slot; each holds the number of the next in its memory */
    entry *entries;   /* [layers][experts] */
    layer_list *lists; /* [layers] */
    /* The batch: jobs[next..) may still have to be submitted, `left` are not over. */
    job *jobs;
    sl_io_req **waiting; /* [max_jobs] */
    uint32_t layer, max_jobs, n_jobs, next, left;
    float *floats;    /* see scratch_floats */
    part parts[PAIRS];
    unsigned n_parts;
    atomic_ullong bad; /* parts with a result that is not finite; relaxed, the pool orders it */
    sl_expert_counts counts;
};

/* ---- sizes ---------------------------------------------------------------------------------- */

static bool is_scale(int tensor) { return tensor & 1; }

static uint64_t tensor_bytes(const sl_expert_options *o, int tensor)
{
    return (uint64_t)o->latent * o->width / (is_scale(tensor) ? 32 : 2);
}

static void lay_out(layout *l, const sl_expert_options *o, const sl_expert_place *p)
{
    int order[SL_EXPERT_TENSORS] = { 0 };
    for (int i = 0; i < SL_EXPERT_TENSORS; i++) {
        int at = i;
        for (; at > 0 && (p->file[order[at - 1]] > p->file[i] ||
                          (p->file[order[at - 1]] == p->file[i] && p->offset[order[at - 1]] > p->offset[i])); at--)
            order[at] = order[at - 1];
        order[at] = i;
    }
    *l = (layout){ .n = 0 };
    for (int i = 0, next; i < SL_EXPERT_TENSORS; i = next) {
        const uint16_t file = p->file[order[i]];
        const uint64_t start = p->offset[order[i]];
        uint64_t end = start, skip;
        for (next = i; next < SL_EXPERT_TENSORS && p->file[order[next]] == file &&
                       (next == i || p->offset[order[next]] <= end + GAP); next++)
            end = sl_max_u64(end, p->offset[order[next]] + tensor_bytes(o, order[next]));
        sl_io_span(&o->files[file], start, end - start, &l->read[l->n].begin, &l->read[l->n].length, &skip);
        l->read[l->n].need = skip + end - start;
        l->read[l->n].at = l->memory;
        l->read[l->n].file = file;
        for (int k = i; k < next; k++)
            l->tensor[order[k]] = l->memory + p->offset[order[k]] - l->read[l->n].begin;
        l->memory += sl_round_up(l->read[l->n].length, SL_IO_ALIGN);
        l->bytes += l->read[l->n].length;
        l->n++;
    }
}

static uint32_t max_jobs(const sl_expert_options *o) { return o->max_calls < o->experts ? o->max_calls : o->experts; }

static uint32_t max_pairs(const sl_expert_options *o) { return o->max_calls < PAIRS ? o->max_calls : PAIRS; }

/* Inputs and outputs [pairs][latent], gate and up [pairs][width]. */
static uint64_t scratch_floats(const sl_expert_options *o)
{
    return max_pairs(o) * 2 * ((uint64_t)o->latent + o->width);
}

uint64_t sl_expert_scratch(const sl_expert_options *o)
{
    return sl_mem_size(scratch_floats(o) * sizeof(float)) + sl_mem_size(max_jobs(o) * sizeof(job)) +
           sl_mem_size(max_jobs(o) * sizeof(sl_io_req *));
}

int sl_expert_measure(sl_expert_sizes *out, const sl_expert_options *o, sl_err *err)
{
    const uint64_t n = (uint64_t)o->layers * o->experts;
    if (n == 0 || n >= NONE || o->max_calls == 0 || !o->latent || !o->width || o->latent % 32 || o->width % 32)
        return sl_fail(err, SL_EUSAGE, "experts: %u x %u of latent %u, width %u for %u calls", o->layers, o->experts,
                       o->latent, o->width, o->max_calls);
    *out = (sl_expert_sizes){
        .scratch = sl_expert_scratch(o),
        .index = sl_mem_size(sizeof(sl_expert_store)) + sl_mem_size(n * sizeof(entry)) +
                 sl_mem_size(o->layers * sizeof(layer_list)),
    };
    uint64_t read = 0;
    for (uint64_t i = 0; i < n; i++) {
        const sl_expert_place *p = &o->places[i];
        for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
            const sl_io_file *f = &o->files[p->file[k]];
            const uint64_t bytes = tensor_bytes(o, k);
            if (bytes > f->size || p->offset[k] > f->size - bytes)
                return sl_fail(err, SL_EFORMAT, "%s: file is %llu bytes, an expert's %llu at offset %llu are beyond",
                               f->path, (unsigned long long)f->size, (unsigned long long)bytes,
                               (unsigned long long)p->offset[k]);
        }
        layout l;
        lay_out(&l, o, p);
        out->slot = sl_max_u64(out->slot, l.memory);
        read += l.bytes;
    }
    out->read = read / n;
    return 0;
}

/* ---- slots and residency -------------------------------------------------------------------- */

static uint8_t *slot_memory(const sl_expert_store *s, uint32_t slot)
{
    return slot < s->opt.cache_slots ? s->cache + slot * s->slot_size
                                     : s->inflight + (slot - s->opt.cache_slots) * s->slot_size;
}

static void free_slot(sl_expert_store *s, uint32_t slot)
{
    memcpy(slot_memory(s, slot), &s->free, sizeof s->free);
    s->free = slot;
}

static uint32_t take_slot(sl_expert_store *s)
{
    const uint32_t slot = s->free;
    if (slot != NONE)
        memcpy(&s->free, slot_memory(s, slot), sizeof s->free);
    return slot;
}

static entry *entry_of(const sl_expert_store *s, uint32_t layer, uint32_t expert)
{
    return &s->entries[(size_t)layer * s->opt.experts + expert];
}

static void list_remove(sl_expert_store *s, uint32_t layer, uint32_t expert)
{
    layer_list *l = &s->lists[layer];
    const entry *e = entry_of(s, layer, expert);
    *(e->newer == NONE ? &l->newest : &entry_of(s, layer, e->newer)->older) = e->older;
    *(e->older == NONE ? &l->oldest : &entry_of(s, layer, e->older)->newer) = e->newer;
    l->n--;
}

/* Whether a was used after b; of one batch, what more tokens have called for counts as later, which on the
 * recorded routing of K3 keeps 19 instead of 16 % of the experts with 8 slots a layer, and in a prefill
 * chunk, which calls for nearly all, keeps the busiest. A total order: the time of arrival has no say. */
static bool later(const entry *a, const entry *b)
{
    if (a->used != b->used)
        return a->used > b->used;
    return a->times != b->times ? a->times > b->times : a > b;
}

/* Puts it at its place in the list; then the last ones leave. */
static void list_add(sl_expert_store *s, uint32_t layer, uint32_t expert)
{
    layer_list *l = &s->lists[layer];
    entry *e = entry_of(s, layer, expert);
    e->newer = NONE;
    e->older = l->newest;
    while (e->older != NONE && later(entry_of(s, layer, e->older), e)) {
        e->newer = e->older;
        e->older = entry_of(s, layer, e->older)->older;
    }
    *(e->newer == NONE ? &l->newest : &entry_of(s, layer, e->newer)->older) = expert;
    *(e->older == NONE ? &l->oldest : &entry_of(s, layer, e->older)->newer) = expert;
    l->n++;
    while (l->n > l->quota) {
        entry *gone = entry_of(s, layer, l->oldest);
        list_remove(s, layer, l->oldest);
        free_slot(s, gone->slot);
        gone->slot = NONE;
    }
}

/* ---- open and close ------------------------------------------------------------------------- */

static void *take_memory(const sl_expert_options *o, sl_mem_class class, uint64_t n, bool *ok)
{
    void *p = n ? sl_mem_alloc(o->budget, class, n) : NULL;
    *ok = *ok && (p || n == 0);
    return p;
}

int sl_expert_open(sl_expert_store **out, const sl_expert_options *opt, sl_err *err)
{
    sl_expert_sizes sizes;
    const int rc = sl_expert_measure(&sizes, opt, err);
    if (rc < 0)
        return rc;
    uint64_t cache, inflight;
    const uint32_t slots = opt->cache_slots + opt->inflight_slots;
    if (opt->inflight_slots < 2 || slots < opt->cache_slots || slots == NONE ||
        !sl_mul_u64(opt->cache_slots, sizes.slot, &cache) || !sl_mul_u64(opt->inflight_slots, sizes.slot, &inflight))
        return sl_fail(err, SL_EUSAGE, "experts: %u cache slots and %u in flight", opt->cache_slots, opt->inflight_slots);
    bool ok = true;
    sl_expert_store *s = take_memory(opt, SL_MEM_INDEX, sizeof *s, &ok);
    if (s) {
        s->opt = *opt;
        s->slot_size = sizes.slot;
        s->max_jobs = max_jobs(opt);
        s->entries = take_memory(opt, SL_MEM_INDEX, (uint64_t)opt->layers * opt->experts * sizeof *s->entries, &ok);
        s->lists = take_memory(opt, SL_MEM_INDEX, opt->layers * sizeof *s->lists, &ok);
        s->jobs = take_memory(opt, SL_MEM_SCRATCH, s->max_jobs * sizeof *s->jobs, &ok);
        s->waiting = take_memory(opt, SL_MEM_SCRATCH, s->max_jobs * sizeof(sl_io_req *), &ok);
        s->floats = take_memory(opt, SL_MEM_SCRATCH, scratch_floats(opt) * sizeof *s->floats, &ok);
        s->inflight = take_memory(opt, SL_MEM_INFLIGHT, inflight, &ok);
        s->cache = take_memory(opt, SL_MEM_CACHE, cache, &ok);
    }
    if (!ok) {
        sl_expert_close(s);
        return sl_fail(err, SL_EBUDGET, "experts: no room for %u slots of %llu bytes", slots, (unsigned long long)sizes.slot);
    }
    sl_mem_touch(s->inflight, inflight);
    sl_mem_touch(s->cache, cache);
    s->free = NONE;
    for (uint32_t i = slots; i-- > 0;)
        free_slot(s, i);
    for (uint64_t i = 0; i < (uint64_t)opt->layers * opt->experts; i++)
        s->entries[i].slot = NONE;
    for (uint32_t i = 0; i < opt->layers; i++)
        s->lists[i] = (layer_list){ .newest = NONE, .oldest = NONE,
                                    .quota = opt->cache_slots / opt->layers + (i < opt->cache_slots % opt->layers) };
    sl_io_remember(opt->io, s->inflight, inflight); /* not the cache: what holds its pages would grow with it */
    *out = s;
    return 0;
}

void sl_expert_names(sl_expert_store *s, sl_expert_name_fn *fn, void *user)
{
    s->name = fn;
    s->name_user = user;
}

sl_expert_counts sl_expert_count(const sl_expert_store *s) { return s->counts; }

/* ---- reads ---------------------------------------------------------------------------------- */

static void finish_job(sl_expert_store *s, job *j)
{
    j->state = OVER;
    s->left--;
    list_add(s, s->layer, j->call->expert);
}

/* Ends the batch wherever it stands. */
static void settle(sl_expert_store *s)
{
    for (job *j = s->jobs; j < s->jobs + s->n_jobs; j++) {
        if (j->state == READY)
            finish_job(s, j);
        if (j->state != READING)
            continue;
        for (unsigned i = 0; i < j->n_reqs; i++)
            s->counts.bytes -= sl_io_cancel(s->opt.io, &j->reqs[i]);
        entry_of(s, s->layer, j->call->expert)->slot = NONE;
        free_slot(s, j->slot);
    }
    s->n_jobs = s->next = s->left = 0;
}

void sl_expert_close(sl_expert_store *s)
{
    if (!s)
        return;
    settle(s);
    sl_io_forget(s->opt.io, s->inflight);
    sl_mem_free(s->cache);
    sl_mem_free(s->inflight);
    sl_mem_free(s->floats);
    sl_mem_free(s->waiting);
    sl_mem_free(s->jobs);
    sl_mem_free(s->lists);
    sl_mem_free(s->entries);
    sl_mem_free(s);
}

/* Submits what is absent, in order, while slots are free. */
static void submit_reads(sl_expert_store *s)
{
    for (; s->next < s->n_jobs; s->next++) {
        job *j = &s->jobs[s->next];
        if (j->state != WAITING)
            continue;
        if ((j->slot = take_slot(s)) == NONE)
            return;
        layout l;
        entry *e = entry_of(s, s->layer, j->call->expert);
        lay_out(&l, &s->opt, &s->opt.places[e - s->entries]);
        e->slot = j->slot;
        j->state = READING;
        j->n_reqs = (uint8_t)l.n;
        j->n_arrived = 0;
        s->counts.bytes += l.bytes;
        for (unsigned i = 0; i < l.n; i++) {
            j->reqs[i] = (sl_io_req){
                .file = &s->opt.files[l.read[i].file], .offset = l.read[i].begin, .length = l.read[i].length,
                .need = l.read[i].need, .buffer = slot_memory(s, j->slot) + l.read[i].at, .class = SL_IO_DEMAND,
            };
            sl_io_submit(s->opt.io, &j->reqs[i]);
        }
    }
}

void sl_expert_begin(sl_expert_store *s, uint32_t layer, const sl_expert_call *calls, size_t n_calls)
{
    settle(s);
    sl_assert(layer < s->opt.layers && n_calls <= s->max_jobs);
    s->layer = layer;
    s->clock++;
    s->n_jobs = s->left = (uint32_t)n_calls;
    for (uint32_t i = 0; i < s->n_jobs; i++) {
        sl_assert(calls[i].expert < s->opt.experts && (i == 0 || calls[i].expert > calls[i - 1].expert) && calls[i].n);
        entry *e = entry_of(s, layer, calls[i].expert);
        const bool hit = e->slot != NONE;
        if (hit)
            list_remove(s, layer, calls[i].expert);
        s->jobs[i].call = &calls[i];
        s->jobs[i].slot = e->slot;
        s->jobs[i].state = hit ? READY : WAITING;
        e->used = s->clock;
        e->times += calls[i].n;
        s->counts.requests++;
        s->counts.hits += hit;
    }
    submit_reads(s);
}

/* ---- arithmetic ----------------------------------------------------------------------------- */

static void name_tensor(const sl_expert_store *s, uint32_t expert, int tensor, char *buf, size_t size)
{
    if (s->name)
        s->name(s->name_user, s->layer, expert, tensor, buf, size);
    else
        snprintf(buf, size, "layer %u, expert %u, w%d %s", s->layer, expert, tensor / 2 + 1, is_scale(tensor) ? "scale" : "codes");
}

static uint64_t bit_of(const sl_expert_store *s, const part *p) { return 1ull << (p - s->parts); }

/* Rows [begin, end) of gate and up, and of SiTU-GLU, which is element-wise, over them. Every thread
 * takes the same rows of every part, so calls with few and many tokens share out evenly. Gate and up
 * are checked before: tanh and sigmoid would hide an infinity. */
static void run_gate_up(void *arg, size_t begin, size_t end, unsigned thread)
{
    sl_expert_store *s = arg;
    const sl_kernels *k = s->opt.kernels;
    const size_t latent = s->opt.latent, width = s->opt.width, rows = end - begin;
    (void)thread;
    for (const part *p = s->parts; p < s->parts + s->n_parts; p++) {
        k->mm_mxfp4(p->gate + begin, width, p->w[SL_W1_PACKED] + begin * (latent / 2),
                    p->w[SL_W1_SCALE] + begin * (latent / 32), p->x, p->ldx, rows, latent, p->n);
        k->mm_mxfp4(p->up + begin, width, p->w[SL_W3_PACKED] + begin * (latent / 2),
                    p->w[SL_W3_SCALE] + begin * (latent / 32), p->x, p->ldx, rows, latent, p->n);
        for (size_t t = 0; t < p->n; t++) {
            float *gate = p->gate + t * width + begin;
            const float *up = p->up + t * width + begin;
            if (!k->all_finite(gate, rows) || !k->all_finite(up, rows))
                atomic_fetch_or_explicit(&s->bad, bit_of(s, p), memory_order_relaxed);
            k->situ_glu(gate, gate, up, s->opt.beta, s->opt.linear_beta, rows);
        }
    }
}

static void run_down(void *arg, size_t begin, size_t end, unsigned thread)
{
    sl_expert_store *s = arg;
    const sl_kernels *k = s->opt.kernels;
    const size_t latent = s->opt.latent, width = s->opt.width, rows = end - begin;
    (void)thread;
    for (const part *p = s->parts; p < s->parts + s->n_parts; p++) {
        k->mm_mxfp4(p->sum + begin, latent, p->w[SL_W2_PACKED] + begin * (width / 2),
                    p->w[SL_W2_SCALE] + begin * (width / 32), p->gate, width, rows, width, p->n);
        for (size_t t = 0; t < p->n; t++) {
            if (!k->all_finite(p->sum + t * latent + begin, rows))
                atomic_fetch_or_explicit(&s->bad, bit_of(s, p), memory_order_relaxed);
            memcpy(p->out[t] + begin, p->sum + t * latent + begin, rows * sizeof(float));
        }
    }
}

/* The first group of 32 with a weight that is not finite, or NONE. Scale 255 is NaN; of E2M1's magnitudes
 * 0 .5 1 1.5 2 3 4 6, those from 2 on overflow with 2^127 (scale 254), those from 4 on with 2^126. */
static uint32_t find_not_finite(const uint8_t *packed, const uint8_t *scale, uint32_t groups)
{
    for (uint32_t g = 0; g < groups; g++) {
        if (scale[g] < 253)
            continue;
        const unsigned least = scale[g] == 255 ? 0 : scale[g] == 254 ? 4 : 6;
        for (unsigned i = 0; i < 16; i++) {
            const uint8_t two = packed[16 * (size_t)g + i];
            if ((two & 7u) >= least || (two >> 4 & 7u) >= least)
                return g;
        }
    }
    return NONE;
}

/* Says why a product with these matrices (their packed tensors, first and last) is not finite. */
static int explain(const sl_expert_store *s, const part *p, int first, int last, sl_err *err)
{
    const sl_expert_options *o = &s->opt;
    const uint32_t expert = p->job->call->expert;
    char name[256];
    for (int k = first; k <= last; k += SL_W3_PACKED - SL_W1_PACKED) {
        const uint32_t in_row = (k == SL_W2_PACKED ? o->width : o->latent) / 32;
        const uint32_t g = find_not_finite(p->w[k], p->w[k + 1], (uint32_t)tensor_bytes(o, k + 1));
        if (g == NONE)
            continue;
        name_tensor(s, expert, k + 1, name, sizeof name);
        return sl_fail(err, SL_EFORMAT, "%s: weights not finite: scale %u in row %u, group %u", name,
                       p->w[k + 1][g], g / in_row, g % in_row);
    }
    name_tensor(s, expert, first, name, sizeof name);
    return sl_fail(err, SL_EFAIL, "%s: the product overflowed, all weights are finite", name);
}

static int run_parts(sl_expert_store *s, sl_err *err)
{
    atomic_store_explicit(&s->bad, 0, memory_order_relaxed);
    sl_pool_run(s->opt.pool, s->opt.width, GRAIN, run_gate_up, s);
    unsigned long long bad = atomic_load_explicit(&s->bad, memory_order_relaxed);
    if (bad)
        return explain(s, &s->parts[__builtin_ctzll(bad)], SL_W1_PACKED, SL_W3_PACKED, err);
    sl_pool_run(s->opt.pool, s->opt.latent, GRAIN, run_down, s);
    bad = atomic_load_explicit(&s->bad, memory_order_relaxed);
    return bad ? explain(s, &s->parts[__builtin_ctzll(bad)], SL_W2_PACKED, SL_W2_PACKED, err) : 0;
}

/* Adds n tokens of j from `first` on behind the `pairs` that the parts hold. */
static void add_part(sl_expert_store *s, const job *j, uint32_t first, uint32_t n, uint32_t pairs, const float *z, size_t ldz)
{
    const sl_expert_options *o = &s->opt;
    const size_t most = max_pairs(o), latent = o->latent, width = o->width;
    const uint32_t *tokens = j->call->tokens + first;
    float *gather = s->floats + pairs * latent, *sum = s->floats + (most + pairs) * latent;
    float *gate = s->floats + 2 * most * latent + pairs * width;
    layout l;
    part *p = &s->parts[s->n_parts++];
    *p = (part){ .job = j, .x = z + tokens[0] * ldz, .ldx = ldz, .gate = gate, .up = gate + most * width, .sum = sum,
                 .out = j->call->out + first, .n = n };
    lay_out(&l, o, &o->places[(size_t)s->layer * o->experts + j->call->expert]);
    for (int k = 0; k < SL_EXPERT_TENSORS; k++)
        p->w[k] = slot_memory(s, j->slot) + l.tensor[k];
    if (tokens[n - 1] - tokens[0] == n - 1)
        return; /* neighbouring rows need no copy */
    for (uint32_t i = 0; i < n; i++)
        memcpy(gather + i * latent, z + tokens[i] * ldz, latent * sizeof *z);
    p->x = gather;
    p->ldx = latent;
}

/* ---- the batch ------------------------------------------------------------------------------ */

/* Takes note of what has arrived of j. 0, or what a failed read says. */
static int poll_job(sl_expert_store *s, job *j, sl_err *err)
{
    while (j->n_arrived < j->n_reqs && sl_io_done(&j->reqs[j->n_arrived])) {
        const sl_io_req *req = &j->reqs[j->n_arrived];
        const int rc = sl_io_wait(s->opt.io, &j->reqs[j->n_arrived++], err);
        if (rc == 0)
            continue;
        char name[256];
        layout l;
        int tensor = 0;
        lay_out(&l, &s->opt, &s->opt.places[entry_of(s, s->layer, j->call->expert) - s->entries]);
        while ((uint64_t)(slot_memory(s, j->slot) + l.tensor[tensor] - req->buffer) >= req->length)
            tensor++; /* the first one that lies in this read */
        name_tensor(s, j->call->expert, tensor, name, sizeof name);
        sl_err_prefix(err, "%s", name);
        return rc;
    }
    if (j->n_arrived == j->n_reqs)
        j->state = READY;
    return 0;
}

/* Waits for the first request that is missing of any job. */
static void wait_for_any(sl_expert_store *s)
{
    size_t n = 0;
    for (job *j = s->jobs; j < s->jobs + s->n_jobs; j++)
        if (j->state == READING)
            s->waiting[n++] = &j->reqs[j->n_arrived];
    sl_io_wait_any(s->opt.io, s->waiting, n);
}

/* Runs some of the jobs that are ready; *ran: how many. */
static int run_ready(sl_expert_store *s, const float *z, size_t ldz, uint32_t *ran, sl_err *err)
{
    /* While jobs wait for slots, take half of them at most, so that the drive reads into the others. */
    const uint32_t most = s->next < s->n_jobs ? s->opt.inflight_slots / 2 : NONE, pairs_max = max_pairs(&s->opt);
    uint32_t pairs = 0, large = 0;
    job *group[PAIRS];
    *ran = 0;
    s->n_parts = 0;
    for (job *j = s->jobs; j < s->jobs + s->n_jobs && *ran < most && pairs < pairs_max && !large; j++) {
        const int rc = j->state == READING ? poll_job(s, j, err) : 0;
        if (rc < 0)
            return rc;
        if (j->state != READY || (*ran && j->call->n > pairs_max - pairs))
            continue;
        group[(*ran)++] = j;
        if (j->call->n > pairs_max) {
            large = j->call->n;
        } else {
            add_part(s, j, 0, j->call->n, pairs, z, ldz);
            pairs += j->call->n;
        }
    }
    int rc = pairs ? run_parts(s, err) : 0;
    for (uint32_t first = 0; first < large && rc == 0; first += pairs_max) { /* then it is alone */
        s->n_parts = 0;
        add_part(s, group[0], first, (uint32_t)sl_min_u64(large - first, pairs_max), 0, z, ldz);
        rc = run_parts(s, err);
    }
    for (uint32_t i = 0; i < *ran && rc == 0; i++)
        finish_job(s, group[i]);
    return rc;
}

int sl_expert_run(sl_expert_store *s, const float *z, size_t ldz, sl_err *err)
{
    int rc = 0;
    while (s->left && rc == 0) {
        uint32_t ran;
        if ((rc = run_ready(s, z, ldz, &ran, err)) < 0)
            break;
        submit_reads(s);
        if (ran == 0)
            wait_for_any(s);
    }
    settle(s);
    return rc;
}
