#include "base/mem.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "base/err.h"
#include "base/num.h"

/* A header in front of each block says how to give it back. One cache line for small blocks; a
 * whole page for those from a page up, so that what follows is aligned for O_DIRECT. */
enum { SMALL_HEAD = 64, PAGE_HEAD = 4096 };
static const uint64_t MAP_FROM = 1 << 20, HUGE_FROM = 4 << 20, HUGE_PAGE = 2 << 20;

typedef struct {
    sl_budget *budget;
    uint64_t counted;  /* bytes in the budget */
    void *base;        /* what malloc or mmap returned */
    uint64_t map_size; /* 0: from malloc */
    sl_mem_class class;
} block_head;

struct sl_budget {
    pthread_mutex_t lock; /* guards all below */
    uint64_t limit, used[SL_MEM_CLASSES], total, peak;
    int frozen;
};

sl_budget *sl_budget_open(uint64_t limit)
{
    sl_budget *b = calloc(1, sizeof *b);
    if (!b)
        return NULL;
    pthread_mutex_init(&b->lock, NULL);
    b->limit = limit;
    return b;
}

void sl_budget_close(sl_budget *b)
{
    if (!b)
        return;
    pthread_mutex_destroy(&b->lock);
    free(b);
}

int sl_budget_take(sl_budget *b, sl_mem_class c, uint64_t n)
{
    int rc = SL_EBUDGET;
    pthread_mutex_lock(&b->lock);
    if (n <= b->limit && b->total <= b->limit - n) {
        b->used[c] += n;
        b->total += n;
        if (b->total > b->peak)
            b->peak = b->total;
        rc = 0;
    }
    pthread_mutex_unlock(&b->lock);
    return rc;
}

int sl_budget_limit(sl_budget *b, uint64_t limit, uint64_t reserve)
{
    pthread_mutex_lock(&b->lock);
    const bool fits = b->total <= limit;
    b->limit = limit;
    pthread_mutex_unlock(&b->lock);
    return fits ? sl_budget_take(b, SL_MEM_RESERVE, reserve) : SL_EBUDGET;
}

void sl_budget_give(sl_budget *b, sl_mem_class c, uint64_t n)
{
    pthread_mutex_lock(&b->lock);
    sl_assert(b->used[c] >= n);
    b->used[c] -= n;
    b->total -= n;
    pthread_mutex_unlock(&b->lock);
}

uint64_t sl_budget_used(const sl_budget *b, sl_mem_class c)
{
    sl_budget *m = (sl_budget *)b; /* the lock is not part of the value */
    pthread_mutex_lock(&m->lock);
    uint64_t n = b->used[c];
    pthread_mutex_unlock(&m->lock);
    return n;
}

uint64_t sl_budget_peak(const sl_budget *b)
{
    sl_budget *m = (sl_budget *)b;
    pthread_mutex_lock(&m->lock);
    uint64_t n = b->peak;
    pthread_mutex_unlock(&m->lock);
    return n;
}

static void add_frozen(sl_budget *b, int n)
{
    pthread_mutex_lock(&b->lock);
    b->frozen += n;
    pthread_mutex_unlock(&b->lock);
}

void sl_budget_freeze(sl_budget *b) { add_frozen(b, 1); }
void sl_budget_thaw(sl_budget *b) { add_frozen(b, -1); }

uint64_t sl_mem_size(uint64_t n)
{
    if (n < MAP_FROM)
        return n + (n < PAGE_HEAD ? SMALL_HEAD : PAGE_HEAD);
    return sl_round_up(n + PAGE_HEAD, n < HUGE_FROM ? 4096 : HUGE_PAGE);
}

static void *map_block(uint64_t size, void **base, uint64_t *map_size)
{
    const uint64_t align = size % HUGE_PAGE == 0 ? HUGE_PAGE : 4096;
    const uint64_t want = size + (align > 4096 ? align : 0);
    char *p = mmap(NULL, want, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return NULL;
    char *start = (char *)sl_round_up((uint64_t)(uintptr_t)p, align);
    /* The unaligned ends are unmapped, so that only `size` bytes can ever become resident. */
    if (start > p)
        munmap(p, (size_t)(start - p));
    if (p + want > start + size)
        munmap(start + size, (size_t)(p + want - (start + size)));
    if (align == HUGE_PAGE)
        madvise(start, size, MADV_HUGEPAGE); /* advice: a kernel without it only has more TLB misses */
    *base = start;
    *map_size = size;
    return start;
}

void *sl_mem_alloc(sl_budget *b, sl_mem_class c, uint64_t n)
{
    if (n == 0 || n > UINT64_MAX / 2)
        return NULL;
    const uint64_t size = sl_mem_size(n);
    if (b) {
        sl_assert(b->frozen == 0);
        if (sl_budget_take(b, c, size) < 0)
            return NULL;
    }
    block_head head = { .budget = b, .counted = size, .class = c };
    const uint64_t head_size = n < PAGE_HEAD ? SMALL_HEAD : PAGE_HEAD;
    char *p;
    if (n >= MAP_FROM) {
        p = map_block(size, &head.base, &head.map_size);
    } else {
        const uint64_t whole = sl_round_up(size, head_size);
        p = aligned_alloc(head_size, whole);
        if (p)
            memset(p, 0, whole);
        head.base = p;
    }
    if (!p) {
        if (b)
            sl_budget_give(b, c, size);
        return NULL;
    }
    p += head_size;
    memcpy(p - sizeof head, &head, sizeof head);
    return p;
}

void sl_mem_free(void *p)
{
    if (!p)
        return;
    block_head head;
    memcpy(&head, (char *)p - sizeof head, sizeof head);
    if (head.budget)
        sl_budget_give(head.budget, head.class, head.counted);
    if (head.map_size)
        munmap(head.base, head.map_size);
    else
        free(head.base);
}

void sl_mem_touch(void *p, uint64_t n)
{
    volatile char *c = p;
    for (uint64_t i = 0; i < n; i += 4096)
        c[i] = c[i]; /* cppcheck-suppress selfAssignment */
}

void sl_free(void *p) { free(p); }
