/* The pool: every item once, ranges in multiples of the grain, any number of threads, many runs. */
#include "base/pool.h"
#include "tests/check.h"
#include "tests/unit/temp.h"

enum { ITEMS = 300, THREADS = 9 };

/* Items are not atomic: two threads on one item is what the test (and TSan) must see. */
typedef struct {
    size_t n, grain;
    unsigned threads;
    unsigned char item[ITEMS], thread[THREADS];
    unsigned wrong[THREADS];
} ranges;

static void mark(void *arg, size_t begin, size_t end, unsigned thread)
{
    ranges *r = arg;
    if (thread >= r->threads)
        abort();
    r->thread[thread]++;
    r->wrong[thread] += begin >= end || end > r->n || begin % r->grain || (end % r->grain && end != r->n);
    for (size_t i = begin; i < end && i < ITEMS; i++)
        r->item[i]++;
}

static void one_run(sl_pool *p, unsigned threads, size_t n, size_t grain)
{
    ranges r = { .n = n, .grain = grain ? grain : 1, .threads = threads };
    sl_pool_run(p, n, grain, mark, &r);
    for (size_t i = 0; i < ITEMS; i++)
        CHECK_MSG(r.item[i] == (i < n), "threads %u n %zu grain %zu: item %zu done %d times", threads, n, grain, i, r.item[i]);
    for (unsigned t = 0; t < threads; t++)
        CHECK_MSG(r.thread[t] <= 1 && r.wrong[t] == 0, "threads %u n %zu grain %zu", threads, n, grain);
}

static void count(void *arg, size_t begin, size_t end, unsigned thread)
{
    ((uint64_t (*)[8])arg)[thread][0] += end - begin; /* a cache line each */
}

int main(void)
{
    rng_seed();
    const bool quick = getenv("SL_QUICK") != NULL;
    for (unsigned threads = 1; threads <= THREADS; threads++) {
        sl_pool *p = NULL;
        CHECK_EQ(sl_pool_open(&p, threads, NULL), 0);
        if (!p)
            return 1;
        CHECK_EQ(sl_pool_threads(p), threads);
        for (size_t n = 0; n <= 40; n++)
            for (size_t grain = 0; grain <= 12; grain += quick ? 3 : 1)
                one_run(p, threads, n, grain);
        for (int i = 0; i < 300; i++)
            one_run(p, threads, rng_below(ITEMS + 1), rng_below(64));
        sl_pool_close(p);
    }
    /* Runs that follow each other at once, so that waking, spinning and sleeping meet in every way. */
    for (unsigned threads = 2; threads <= 3; threads++) {
        const uint64_t runs = quick ? 10000 : 50000;
        uint64_t done[THREADS][8] = { { 0 } }, sum = 0;
        sl_pool *p = NULL;
        CHECK_EQ(sl_pool_open(&p, threads, NULL), 0);
        for (uint64_t i = 0; i < runs; i++)
            sl_pool_run(p, 64, 1, count, done);
        for (unsigned t = 0; t < THREADS; t++)
            sum += done[t][0];
        CHECK_EQ(sum, 64 * runs);
        sl_pool_close(p);
    }
    sl_pool *p = NULL;
    sl_err err;
    CHECK_EQ(sl_pool_open(&p, 0, &err), SL_EFAIL);
    sl_pool_close(NULL);
    CHECK_DONE();
}
