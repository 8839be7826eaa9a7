#include "base/pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/num.h"

/* How long a thread looks for work before it sleeps. A matrix chunk takes 0.1 ms and the next one
 * follows at once, so a short spin saves two wake-ups a chunk; with more threads than CPUs spinning
 * only takes time from the thread that has the work, so it is switched off. */
enum { SPINS = 2000 };

struct worker {
    sl_pool *pool;
    pthread_t thread;
    unsigned index;
};

struct sl_pool {
    pthread_mutex_t lock; /* guards the sleeping on both conditions; the job fields are published by epoch */
    pthread_cond_t start, done;
    atomic_uint epoch;   /* release by sl_pool_run, acquire by workers: a new job is in the fields below */
    atomic_uint running; /* workers still in the job; release by workers, acquire by sl_pool_run */
    bool stop;
    unsigned threads, started, spins;
    sl_pool_fn *fn;
    void *arg;
    size_t n, grain;
    struct worker *workers;
};

static void pause_cpu(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void run_share(sl_pool *p, unsigned index)
{
    const size_t units = (p->n + p->grain - 1) / p->grain;
    size_t begin = units * index / p->threads * p->grain;
    size_t end = units * (index + 1) / p->threads * p->grain;
    if (end > p->n)
        end = p->n;
    if (begin < end)
        p->fn(p->arg, begin, end, index);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    sl_pool *p = w->pool;
    unsigned seen = 0;
    for (;;) {
        unsigned i = 0;
        while (atomic_load_explicit(&p->epoch, memory_order_acquire) == seen && i++ < p->spins)
            pause_cpu();
        if (atomic_load_explicit(&p->epoch, memory_order_acquire) == seen) {
            pthread_mutex_lock(&p->lock);
            while (atomic_load_explicit(&p->epoch, memory_order_acquire) == seen)
                pthread_cond_wait(&p->start, &p->lock);
            pthread_mutex_unlock(&p->lock);
        }
        seen++;
        if (p->stop)
            return NULL;
        run_share(p, w->index);
        if (atomic_fetch_sub_explicit(&p->running, 1, memory_order_acq_rel) == 1) {
            pthread_mutex_lock(&p->lock);
            pthread_cond_signal(&p->done);
            pthread_mutex_unlock(&p->lock);
        }
    }
}

static void publish(sl_pool *p)
{
    pthread_mutex_lock(&p->lock);
    atomic_fetch_add_explicit(&p->epoch, 1, memory_order_release);
    pthread_cond_broadcast(&p->start);
    pthread_mutex_unlock(&p->lock);
}

int sl_pool_open(sl_pool **out, unsigned threads, sl_err *err)
{
    sl_pool *p = calloc(1, sizeof *p);
    if (!p || threads == 0 || !(p->workers = calloc(threads, sizeof *p->workers))) {
        free(p);
        return sl_fail(err, SL_EFAIL, "threads: no memory for %u workers", threads);
    }
    pthread_mutex_init(&p->lock, NULL);
    pthread_cond_init(&p->start, NULL);
    pthread_cond_init(&p->done, NULL);
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    p->threads = threads;
    p->spins = cpus > 0 && threads <= (unsigned long)cpus ? SPINS : 0;
    p->started = 1; /* the caller is thread 0 */
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setstacksize(&attr, 1 << 20); /* kernels keep panels on it: 80 KB, in a sanitizer build 400 */
    sigset_t all, old; /* signals are the program's: they must reach its own thread */
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &old);
    int rc = 0;
    for (; p->started < threads && rc == 0; p->started += rc == 0) {
        struct worker *w = &p->workers[p->started];
        *w = (struct worker){ .pool = p, .index = p->started };
        rc = pthread_create(&w->thread, &attr, work, w);
    }
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    if (rc != 0) {
        const unsigned n = p->started;
        sl_pool_close(p);
        return sl_fail(err, SL_EFAIL, "threads: started %u of %u", n, threads);
    }
    *out = p;
    return 0;
}

void sl_pool_close(sl_pool *p)
{
    if (!p)
        return;
    p->stop = true;
    publish(p);
    for (unsigned i = 1; i < p->started; i++)
        pthread_join(p->workers[i].thread, NULL);
    pthread_mutex_destroy(&p->lock);
    pthread_cond_destroy(&p->start);
    pthread_cond_destroy(&p->done);
    free(p->workers);
    free(p);
}

unsigned sl_pool_threads(const sl_pool *p) { return p->threads; }

void sl_pool_run(sl_pool *p, size_t n, size_t grain, sl_pool_fn *fn, void *arg)
{
    if (n == 0)
        return;
    if (grain == 0)
        grain = 1;
    if (p->threads == 1 || n <= grain) {
        fn(arg, 0, n, 0);
        return;
    }
    p->fn = fn;
    p->arg = arg;
    p->n = n;
    p->grain = grain;
    atomic_store_explicit(&p->running, p->threads - 1, memory_order_relaxed);
    publish(p);
    run_share(p, 0);
    unsigned i = 0;
    while (atomic_load_explicit(&p->running, memory_order_acquire) && i++ < p->spins)
        pause_cpu();
    if (atomic_load_explicit(&p->running, memory_order_acquire)) {
        pthread_mutex_lock(&p->lock);
        while (atomic_load_explicit(&p->running, memory_order_acquire))
            pthread_cond_wait(&p->done, &p->lock);
        pthread_mutex_unlock(&p->lock);
    }
}
