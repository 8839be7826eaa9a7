/* model/model.h - a model ready to run, and one sequence's state.
 *
 * Owns: everything opened on a model directory. Threads: engine thread, which splits work over the pool.
 * Invariant: after open, feeding tokens allocates nothing (the budget is frozen meanwhile).
 * Spec sections are those of the Kimi K3 specification named in ARCHITECTURE.md. */
#ifndef SL_MODEL_MODEL_H
#define SL_MODEL_MODEL_H

#include <stdatomic.h>

#include "base/mem.h"
#include "base/pool.h"
#include "kernels/kernels.h"
#include "model/bind.h"
#include "store/expert.h"
#include "store/plan.h"
#include "store/trunk.h"

/* Positions of the latent cache that attention takes at a time: part of the contract (docs/contract.md),
 * because the running maximum is updated once a block. */
enum { SL_ATTN_BLOCK = 64, SL_ATTN_GROUP = 16 /* heads that share a block while it is in cache */ };

/* One sequence: what is carried from one token to the next. Spec 2.3. */
typedef struct {
    uint32_t position;  /* tokens fed */
    uint32_t context;   /* room for this many */
    float *kda;         /* [KDA layers][head][value][key] */
    float *conv;        /* [KDA layers][head][q, k, v][taps - 1][dim], oldest first */
    float *latent;      /* [MLA layers][context][kv_lora + rope]: normed latent, then the rope slice */
    uint64_t kda_floats, conv_floats;
} sl_state;

/* A stack of float buffers for the activations of one chunk; top only moves within a sub-layer. */
typedef struct {
    float *base;
    size_t size, top;
} sl_scratch;

typedef struct sl_model {
    sl_binding bind;
    sl_budget *budget;
    sl_pool *pool;
    const sl_kernels *k;
    sl_io *io;
    sl_trunk *trunk;
    sl_expert_store *experts; /* NULL when all layers are dense */
    sl_plan plan;
    uint32_t inflight_slots;
    bool all_logits;
    bool (*cancel)(void *user);
    void *user;

    float *vectors;          /* all small vectors, fp32 */
    const float **vector;    /* [layers + 1][SL_KINDS]: into vectors; residual norms hold norm * proj */
    uint32_t *matrix;        /* [layers + 1][SL_KINDS]: number of the matrix in the trunk's order */
    uint16_t *layer_index;   /* [layers]: among the KDA or the MLA layers */

    sl_state state;
    sl_scratch scratch;
    float *residual;         /* [chunk][snapshots + 1][hidden]: the bank, then the running sum */
    float *mixed;            /* [chunk][hidden]: the mixture, then normed: input of a sub-layer */
    float *output;           /* [chunk][hidden]: of a sub-layer */
    float *logits;           /* [vocab], or [chunk][vocab] with all_logits */
    uint32_t last_row;       /* of logits with all_logits: the last position's */
    uint8_t *embed_buffer;   /* [chunk] spans of one embedding row */
    sl_io_req *embed_req;    /* [chunk] */
    uint64_t embed_bytes;    /* read so far */
    /* MoE: of the current layer */
    uint32_t *chosen;        /* [chunk][top_k], ascending */
    float *chosen_weight;    /* [chunk][top_k] */
    sl_expert_call *calls;   /* [experts] at most */
    uint32_t *call_tokens;   /* [chunk * top_k], grouped by expert */
    float **call_out;        /* the same order */
    uint32_t *expert_count;  /* [experts] */
    /* Told each token's choice, unless NULL; token: row of the chunk. */
    void (*on_routing)(void *user, uint32_t layer, uint32_t token, const uint32_t *experts, const float *weights);
    void *routing_user;
    /* Tests look at what passes between the parts; NULL otherwise. what: see sl_probe. */
    void (*probe)(void *user, int what, uint32_t layer, uint32_t token, const void *data, size_t n);
    void *probe_user;
} sl_model;

enum sl_probe { SL_PROBE_ATTN_INPUT, SL_PROBE_ATTN_OUTPUT, SL_PROBE_MLP_INPUT, SL_PROBE_MLP_OUTPUT,
                SL_PROBE_SUM, SL_PROBE_FINAL, SL_PROBE_CHOSEN /* uint32_t */, SL_PROBE_WEIGHTS };

static inline const float *sl_vector(const sl_model *m, uint32_t layer, sl_kind k)
{
    return m->vector[(size_t)(layer == SL_NO_LAYER ? m->bind.config.layers : layer) * SL_KINDS + k];
}

/* ---- open.c: from a directory to a model */
typedef struct {
    uint64_t ram;
    uint32_t context, threads, prefill_chunk;
    enum sl_io_backend io;
    const char *const *mirrors; /* n_mirrors further directories */
    size_t n_mirrors;
    long (*fault)(void *user, const sl_io_file *f, uint64_t offset, uint64_t length); /* sl_io_options.fault */
    void *fault_user;
    bool all_logits;
    bool (*cancel)(void *user);
    void *user;
} sl_model_options;
int sl_model_open(sl_model **out, const char *dir, const sl_model_options *opt, sl_err *err);
/* The plan alone; allocates nothing of it. */
int sl_model_plan(sl_plan *plan, const char *dir, const sl_model_options *opt, sl_err *err);
void sl_model_close(sl_model *m);
void sl_state_clear(sl_model *m); /* begins a new sequence */

/* ---- weights.c: matrices as they stream by */
/* y[t * ldy + r] = dot(W[r], x + t * ldx) for all rows of the next matrix of the pass, which must be
 * (layer, kind). Every result is finite, else SL_EFORMAT names the tensor (SL_EFAIL when its weights
 * are finite and the product overflowed). Polls cancel. */
int sl_matrix(sl_model *m, uint32_t layer, sl_kind k, const float *x, size_t ldx, float *y, size_t ldy,
              size_t tokens, sl_err *err);
/* Hands out the next chunk of (layer, kind) to code that uses it otherwise. */
int sl_matrix_chunk(sl_model *m, uint32_t layer, sl_kind k, sl_trunk_chunk *chunk, sl_err *err);
int sl_matrix_bad(const sl_model *m, uint32_t layer, sl_kind k, const sl_trunk_chunk *chunk, sl_err *err);
/* Embedding rows of n ids into out [n][ldo]. */
int sl_embed(sl_model *m, const int32_t *ids, size_t n, float *out, size_t ldo, sl_err *err);
int sl_load_vectors(sl_model *m, sl_err *err);
uint64_t sl_vectors_floats(const sl_config *c);
/* The trunk's matrices in order of use; *n of them, malloc'd. Numbers go to `number` (may be NULL). */
int sl_list_matrices(const sl_binding *b, sl_trunk_matrix **out, size_t *n, uint32_t *number, sl_err *err);

/* ---- scratch */
float *sl_scratch_take(sl_scratch *s, size_t n); /* 64-byte aligned, contents undefined */
static inline size_t sl_scratch_floats(size_t n) { return (n + 15) & ~(size_t)15; }

/* ---- sub-layers: x [tokens][hidden] normed input, y [tokens][hidden]; tokens at state.position on.
 * Each says how many floats of scratch it takes for a chunk. */
int sl_kda(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err);
size_t sl_kda_floats(const sl_config *c, size_t tokens, uint32_t threads);
int sl_mla(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err);
size_t sl_mla_floats(const sl_config *c, size_t tokens, uint32_t threads);
int sl_moe(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err);
size_t sl_moe_floats(const sl_config *c, size_t tokens);
int sl_dense(sl_model *m, uint32_t layer, const float *x, float *y, size_t tokens, sl_err *err);
size_t sl_dense_floats(const sl_config *c, size_t tokens);
/* Top-k of score + bias, ties to the lower index; ids ascending; weights spec 3.6. Pure. */
void sl_route(const sl_config *c, const float *score, const float *bias, uint32_t *ids, float *weights);
/* The mixture of n snapshots [n][hidden] and the running sum: spec 3.3, MIX. weight is norm * proj. Pure. */
void sl_mix(const sl_kernels *k, const float *bank, uint32_t n, const float *sum, const float *weight, float eps,
            size_t hidden, float *out);
/* Norms that refuse an input whose sum of squares overflows, naming the layer and the kind of norm. */
int sl_norm(const sl_model *m, uint32_t layer, sl_kind norm, const float *x, float *y, float eps, size_t n, sl_err *err);

/* ---- forward.c */
/* One pass over the model for `tokens` <= plan.prefill_chunk ids. want_logits: the last position's, or
 * all with all_logits, in m->logits. more: see sl_trunk_pass. */
int sl_forward(sl_model *m, const int32_t *ids, size_t tokens, bool want_logits, bool more,
               void (*progress)(void *user, uint64_t layers), void *user, sl_err *err);

#endif
