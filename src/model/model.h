/* model/model.h - a model ready to run, and the states of its sequences.
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

enum { SL_SEQUENCES_MAX = 4096 };

/* One sequence: what is carried from one token to the next. Spec 2.3. */
typedef struct {
    bool taken;         /* somebody's, see sl_state_take */
    uint32_t position;  /* tokens fed */
    uint32_t context;   /* room for this many */
    float *kda;         /* [KDA layers][head][value][key] */
    float *conv;        /* [KDA layers][head][q, k, v][taps - 1][dim], oldest first */
    float *latent;      /* [MLA layers][context][kv_lora + rope]: normed latent, then the rope slice */
    uint64_t kda_floats, conv_floats;
} sl_state;

/* Consecutive tokens of one sequence within a pass. A pass has the rows of all its segments, one after the other: what
 * works on a token alone (matrices, experts, norms) takes them as one, what looks back takes each with its state. */
typedef struct {
    sl_state *state;    /* of no other segment of the pass */
    const int32_t *ids; /* borrowed during the pass */
    uint32_t tokens;    /* >= 1, as many as the state has room for */
    uint32_t logits;    /* wanted of the last so many of them */
} sl_segment;

/* A token of a pass. */
typedef struct {
    uint32_t segment, position;
} sl_row;

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

    sl_state *states;        /* [plan.sequences] */
    sl_segment *step_segments; /* [plan.sequences]: the caller's, for a pass to come */
    /* The pass that is on */
    const sl_segment *segments;
    uint32_t n_segments, n_rows;
    sl_row *rows;            /* [chunk] */
    int32_t *ids;            /* [chunk] */
    uint32_t *head_rows;     /* [logits rows]: the row whose logits they are, ascending */

    float *vectors;          /* all small vectors, fp32 */
    const float **vector;    /* [layers + 1][SL_KINDS]: into vectors; residual norms hold norm * proj */
    uint32_t *matrix;        /* [layers + 1][SL_KINDS]: number of the matrix in the trunk's order */
    uint16_t *layer_index;   /* [layers]: among the KDA or the MLA layers */

    sl_scratch scratch;
    float *residual;         /* [chunk][snapshots + 1][hidden]: the bank, then the running sum */
    float *mixed;            /* [chunk][hidden]: the mixture, then normed: input of a sub-layer */
    float *output;           /* [chunk][hidden]: of a sub-layer */
    float *logits;           /* [logits rows][vocab]: what the segments of the last pass wanted, in their order */
    uint32_t logits_rows;    /* at most in a pass */
    uint64_t passes;         /* begun so far: whose logits these are */
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
    uint32_t context, threads, prefill_chunk, sequences; /* prefill_chunk and sequences: see sl_options */
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

/* ---- state.c: the sequences */
uint64_t sl_state_size(const sl_config *c, uint32_t context); /* memory of one, as the accountant counts it */
int sl_state_open(sl_state *s, const sl_config *c, uint32_t context, sl_budget *budget, sl_err *err);
void sl_state_close(sl_state *s);
void sl_state_clear(sl_state *s);         /* begins a new sequence */
sl_state *sl_state_take(sl_model *m);     /* a cleared one that nobody has; NULL: all are taken */
static inline void sl_state_give(sl_state *s) { s->taken = false; }

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

/* ---- sub-layers: x [tokens][hidden] normed input, y [tokens][hidden]; the tokens are the pass's rows. Each says
 * how many floats of scratch it takes for a chunk. */
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
/* One pass over the model for n segments, plan.prefill_chunk tokens and logits_rows logits at most, which are in
 * m->logits then. more: see sl_trunk_pass. After an error all their states are between tokens. */
int sl_forward(sl_model *m, const sl_segment *segments, size_t n, bool more,
               void (*progress)(void *user, uint64_t layers), void *user, sl_err *err);
/* The part before the first layer: makes the rows of n segments the pass's. */
void sl_forward_rows(sl_model *m, const sl_segment *segments, size_t n);

#endif
