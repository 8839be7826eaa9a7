/* store/plan.h - splits one RAM budget: what must be there, then what saves most bytes a token.
 * Pure arithmetic on sizes that the parts report; all of them as counted by sl_mem_size. */
#ifndef SL_STORE_PLAN_H
#define SL_STORE_PLAN_H

#include "base/err.h"

/* What the planner needs to know of a model. The callbacks give memory for a context or chunk size. */
typedef struct {
    uint64_t budget;
    uint32_t context, prefill_chunk; /* chunk 0: to be chosen */
    uint32_t threads, sequences;     /* a chunk has a token of each sequence at least */
    uint64_t index;                  /* tensor index and resident vectors */
    uint64_t ring_min, ring_want;    /* memory of the chunk ring */
    uint64_t trunk_all;              /* memory to keep the whole trunk */
    uint64_t slot;                   /* bytes of one expert slot, 0: no experts */
    uint32_t slots_want;             /* slots in flight that keep the drive busy */
    uint64_t experts;                /* in all layers */
    uint64_t (*state)(const void *user, uint32_t context); /* of all sequences */
    uint64_t (*scratch)(const void *user, uint32_t context, uint32_t chunk);
    const void *user;
} sl_plan_input;

/* Fills all but the bytes read per token. SL_EBUDGET when it does not fit; plan->minimum and
 * plan->max_context are valid then too. *inflight_slots: slots beyond the cache. */
int sl_plan_make(sl_plan *plan, uint32_t *inflight_slots, const sl_plan_input *in, sl_err *err);

/* 90 % of what the memory cgroup and the system leave to this process. */
uint64_t sl_plan_default_budget(void);

#endif
