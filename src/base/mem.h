/* base/mem.h - every allocation, counted against one budget.
 * Owns: the accountant. Threads: all functions may be called from any thread.
 * Invariant: the sum of what is taken never exceeds the limit; a take that would is refused before
 * any memory is touched. */
#ifndef SL_BASE_MEM_H
#define SL_BASE_MEM_H

#include <stddef.h>
#include <stdint.h>

typedef enum {
    SL_MEM_RESERVE,  /* program, libraries, stacks, page tables: taken, never allocated */
    SL_MEM_INDEX,    /* tensor index and resident small vectors */
    SL_MEM_STATE,    /* recurrent state, convolution inputs, latent cache */
    SL_MEM_SCRATCH,  /* activations */
    SL_MEM_RING,     /* trunk chunks streaming through */
    SL_MEM_INFLIGHT, /* expert slots being read or used */
    SL_MEM_TRUNK,    /* resident trunk */
    SL_MEM_CACHE,    /* cached experts */
    SL_MEM_CLASSES
} sl_mem_class;

typedef struct sl_budget sl_budget;

sl_budget *sl_budget_open(uint64_t limit); /* NULL: out of memory. UINT64_MAX: no limit */
void sl_budget_close(sl_budget *b);
/* Sets the limit once the plan is known, and takes `reserve` bytes of SL_MEM_RESERVE. SL_EBUDGET when
 * that and what is taken already do not fit. */
int sl_budget_limit(sl_budget *b, uint64_t limit, uint64_t reserve);
/* Counts n bytes of class c. 0 or SL_EBUDGET. */
int sl_budget_take(sl_budget *b, sl_mem_class c, uint64_t n);
void sl_budget_give(sl_budget *b, sl_mem_class c, uint64_t n);
uint64_t sl_budget_used(const sl_budget *b, sl_mem_class c);
uint64_t sl_budget_peak(const sl_budget *b); /* of the sum over all classes */
/* While frozen, sl_mem_alloc aborts: decode and prefill allocate nothing. Counts, so it nests. */
void sl_budget_freeze(sl_budget *b);
void sl_budget_thaw(sl_budget *b);

/* Zeroed memory, 64-byte aligned, from 4 KiB up 4 KiB aligned (for O_DIRECT), from 1 MiB up in whole
 * pages (2 MiB pages from 4 MiB up); what sl_mem_size says is what is counted. NULL when the budget or the system refuses,
 * or for n = 0. b may be NULL for memory that a program keeps outside any budget. */
void *sl_mem_alloc(sl_budget *b, sl_mem_class c, uint64_t n);
void sl_mem_free(void *p); /* NULL is fine; gives back to the budget it came from */
uint64_t sl_mem_size(uint64_t n); /* bytes counted for an allocation of n */
/* Touches every page now, so that the page faults do not fall into the first token. */
void sl_mem_touch(void *p, uint64_t n);

#endif
