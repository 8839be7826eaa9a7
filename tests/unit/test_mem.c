/* The accountant: nothing beyond the limit, exact counts, alignment, the freeze. */
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

#include "base/err.h"
#include "base/mem.h"
#include "base/num.h"
#include "tests/check.h"
#include "tests/unit/temp.h"

static void test_budget(void)
{
    sl_budget *b = sl_budget_open(1000);
    CHECK_EQ(sl_budget_take(b, SL_MEM_STATE, 600), 0);
    CHECK_EQ(sl_budget_take(b, SL_MEM_RING, 401), SL_EBUDGET);
    CHECK_EQ(sl_budget_take(b, SL_MEM_RING, UINT64_MAX), SL_EBUDGET);
    CHECK_EQ(sl_budget_take(b, SL_MEM_RING, 400), 0);
    CHECK_EQ(sl_budget_take(b, SL_MEM_RING, 1), SL_EBUDGET);
    CHECK_EQ(sl_budget_take(b, SL_MEM_RING, 0), 0);
    CHECK_EQ(sl_budget_used(b, SL_MEM_STATE), 600);
    CHECK_EQ(sl_budget_used(b, SL_MEM_RING), 400);
    sl_budget_give(b, SL_MEM_STATE, 600);
    CHECK_EQ(sl_budget_used(b, SL_MEM_STATE), 0);
    CHECK_EQ(sl_budget_peak(b), 1000);
    CHECK_EQ(sl_budget_take(b, SL_MEM_TRUNK, 600), 0);
    CHECK_EQ(sl_budget_peak(b), 1000);
    CHECK_EQ(sl_budget_limit(b, 999, 0), SL_EBUDGET);
    CHECK_EQ(sl_budget_limit(b, 1100, 101), SL_EBUDGET);
    CHECK_EQ(sl_budget_limit(b, 1100, 100), 0);
    CHECK_EQ(sl_budget_used(b, SL_MEM_RESERVE), 100);
    sl_budget_close(b);
    sl_budget_close(NULL);
    b = sl_budget_open(UINT64_MAX);
    CHECK_EQ(sl_budget_take(b, SL_MEM_STATE, UINT64_MAX - 1), 0);
    CHECK_EQ(sl_budget_take(b, SL_MEM_STATE, 2), SL_EBUDGET); /* the sum must not wrap */
    sl_budget_close(b);
}

static void test_alloc(void)
{
    static const uint64_t edges[] = { 1, 64, 4095, 4096, (1 << 20) - 1, 1 << 20, (4 << 20) - 1, 4 << 20, 5 << 20 };
    sl_budget *b = sl_budget_open(64 << 20);
    CHECK(sl_mem_alloc(b, SL_MEM_STATE, 0) == NULL);
    CHECK(sl_mem_alloc(b, SL_MEM_STATE, UINT64_MAX) == NULL);
    CHECK(sl_mem_alloc(b, SL_MEM_STATE, UINT64_MAX / 2) == NULL);
    for (int i = 0; i < 300; i++) {
        const uint64_t n = i < 9 ? edges[i] : 1 + (rng() >> (41 + rng_below(23)));
        const uint64_t size = sl_mem_size(n);
        CHECK(size >= n && (n < 1 << 20 || size % 4096 == 0) && (n < 4 << 20 || size % (2 << 20) == 0));
        uint8_t *p = sl_mem_alloc(b, SL_MEM_SCRATCH, n);
        CHECK(p != NULL);
        if (!p)
            return;
        CHECK_EQ((uintptr_t)p % (n < 4096 ? 64 : 4096), 0);
        CHECK_EQ(sl_budget_used(b, SL_MEM_SCRATCH), size);
        uint8_t any = 0;
        for (uint64_t k = 0; k < n; k++)
            any |= p[k];
        CHECK_EQ(any, 0);
        memset(p, 0xee, n);
        sl_mem_touch(p, n);
        CHECK(p[0] == 0xee && p[n - 1] == 0xee);
        sl_mem_free(p);
        CHECK_EQ(sl_budget_used(b, SL_MEM_SCRATCH), 0);
        sl_budget *tight = sl_budget_open(size - 1);
        CHECK(sl_mem_alloc(tight, SL_MEM_RING, n) == NULL);
        CHECK_EQ(sl_budget_limit(tight, size, 0), 0);
        p = sl_mem_alloc(tight, SL_MEM_RING, n);
        CHECK(p != NULL);
        CHECK_EQ(sl_budget_peak(tight), size);
        sl_mem_free(p);
        sl_budget_close(tight);
    }
    void *p = sl_mem_alloc(NULL, SL_MEM_INDEX, 5000); /* outside any budget */
    CHECK(p != NULL);
    sl_mem_free(p);
    sl_mem_free(NULL);
    sl_budget_close(b);
}

/* Frozen, an allocation is a bug and aborts; thawed as often as frozen, it works again. */
static void test_freeze(void)
{
    sl_budget *b = sl_budget_open(1 << 20);
    sl_budget_freeze(b);
    sl_budget_freeze(b);
    sl_budget_thaw(b);
    fflush(NULL);
    const pid_t pid = fork();
    if (pid == 0) {
        if (!freopen("/dev/null", "w", stderr))
            _exit(1);
        signal(SIGABRT, SIG_DFL);
        sl_mem_alloc(b, SL_MEM_STATE, 100);
        _exit(0);
    }
    int status = 0;
    CHECK(pid > 0 && waitpid(pid, &status, 0) == pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    sl_budget_thaw(b);
    void *p = sl_mem_alloc(b, SL_MEM_STATE, 100);
    CHECK(p != NULL);
    sl_mem_free(p);
    sl_budget_close(b);
}

static void *take_and_give(void *arg)
{
    for (int i = 0; i < 20000; i++) {
        const uint64_t n = 1 + (uint64_t)i % 100;
        if (sl_budget_take(arg, SL_MEM_STATE, n) == 0)
            sl_budget_give(arg, SL_MEM_STATE, n);
    }
    return NULL;
}

static void test_threads(void)
{
    sl_budget *b = sl_budget_open(250);
    pthread_t t[4];
    for (int i = 0; i < 4; i++)
        CHECK_EQ(pthread_create(&t[i], NULL, take_and_give, b), 0);
    for (int i = 0; i < 4; i++)
        pthread_join(t[i], NULL);
    CHECK_EQ(sl_budget_used(b, SL_MEM_STATE), 0);
    CHECK(sl_budget_peak(b) <= 250);
    sl_budget_close(b);
}

int main(void)
{
    rng_seed();
    test_budget();
    test_alloc();
    test_freeze();
    test_threads();
    CHECK_DONE();
}
