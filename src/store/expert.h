/* store/expert.h - routed experts: where they lie, what is cached, and how they run.
 *
 * The model above says only which experts each token chose and gets their outputs back, unweighted and
 * unsummed; whether they come from cache, drive or (later) another machine is decided here. An expert
 * call is a pure function of its input vector and its weights.
 *
 * Each layer keeps the experts it used last, up to its share of the cache slots: a pass visits the layers
 * in turn, so one list over all layers would hold none of the next one's. Of those used by the same batch
 * the ones with most tokens so far stay. The order in which reads arrive does not matter.
 *
 * Owns: slot memory (SL_MEM_INFLIGHT, SL_MEM_CACHE), residency, counters.
 * Threads: engine thread; the arithmetic is split over the pool.
 * Invariant: a slot in use or being read is never evicted. */
#ifndef SL_STORE_EXPERT_H
#define SL_STORE_EXPERT_H

#include "base/mem.h"
#include "base/pool.h"
#include "kernels/kernels.h"
#include "store/io.h"

/* The six tensors of an expert, in the order in which the release stores them. */
enum { SL_W1_PACKED, SL_W1_SCALE, SL_W2_PACKED, SL_W2_SCALE, SL_W3_PACKED, SL_W3_SCALE, SL_EXPERT_TENSORS };

typedef struct {
    uint64_t offset[SL_EXPERT_TENSORS]; /* in the file */
    uint16_t file[SL_EXPERT_TENSORS];   /* index into options.files */
} sl_expert_place;

typedef struct {
    sl_io *io;
    sl_budget *budget;
    sl_pool *pool;
    const sl_kernels *kernels;
    const sl_io_file *files;
    const sl_expert_place *places;     /* [layers][experts], borrowed for the store's life */
    uint32_t layers, experts;          /* MoE layers, counted from 0 here; experts in each */
    uint32_t latent, width;            /* input/output length and hidden width of an expert */
    float beta, linear_beta;           /* SiTU-GLU */
    uint32_t max_calls;                /* (token, expert) pairs of one batch at most */
    uint32_t inflight_slots;           /* slots beyond the cache, >= 2 */
    uint32_t cache_slots;              /* slots that keep experts; may be 0 */
} sl_expert_options;

typedef struct sl_expert_store sl_expert_store;

/* For the planner: bytes of one slot (n of them are one allocation: sl_mem_size(n * slot)); memory for
 * max_calls pairs (SL_MEM_SCRATCH) and for bookkeeping (SL_MEM_INDEX) as counted by the accountant, whatever
 * the slots; and the bytes one expert costs to read (the mean over all experts). Only files, places,
 * layers, experts, latent, width and max_calls are looked at. SL_EFORMAT when a tensor is not within its file. */
typedef struct { uint64_t slot, scratch, index, read; } sl_expert_sizes;
int sl_expert_measure(sl_expert_sizes *out, const sl_expert_options *opt, sl_err *err);
uint64_t sl_expert_scratch(const sl_expert_options *opt); /* the scratch alone: quick, does not walk the experts */

int sl_expert_open(sl_expert_store **out, const sl_expert_options *opt, sl_err *err);
void sl_expert_close(sl_expert_store *s); /* NULL is fine */

/* One expert and the tokens that chose it. Calls of a batch come in ascending expert index, one for each. */
typedef struct {
    uint32_t expert;
    uint32_t n;             /* tokens, >= 1 */
    const uint32_t *tokens; /* ascending rows of the input, borrowed until run returns */
    float *const *out;      /* out[i]: where token i's result goes, [latent]; borrowed likewise */
} sl_expert_call;

/* Starts the reads of a batch as soon as the router has chosen; returns at once. `calls` is borrowed
 * until run returns. A batch begun before and not run is dropped. */
void sl_expert_begin(sl_expert_store *s, uint32_t layer, const sl_expert_call *calls, size_t n_calls);
/* Runs the batch begun last on z [tokens][ldz], resident experts first, the others as they arrive.
 * SL_EIO on a failed read, SL_EFORMAT naming the tensor when a weight is not finite ("not finite"
 * products of finite weights are SL_EFAIL); the batch is over then too, outputs are not to be used.
 * Messages name layer-local position; the caller's `name` callback in sl_expert_names makes them say
 * the tensor's own name. */
int sl_expert_run(sl_expert_store *s, const float *z, size_t ldz, sl_err *err);

/* Maps (MoE layer, expert, tensor) to its name in the checkpoint, for messages. */
typedef void sl_expert_name_fn(void *user, uint32_t layer, uint32_t expert, int tensor, char *buf, size_t size);
void sl_expert_names(sl_expert_store *s, sl_expert_name_fn *fn, void *user);

/* Bytes asked of the drive; experts called for, and of them those that were resident. */
typedef struct { uint64_t bytes, requests, hits; } sl_expert_counts;
sl_expert_counts sl_expert_count(const sl_expert_store *s);

#endif
