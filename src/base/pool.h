/* base/pool.h - a fixed set of threads that split ranges.
 * Threads: sl_pool_run belongs to one calling thread, which works too. Splits are by range, never by
 * sum, so the thread count cannot change a result. */
#ifndef SL_BASE_POOL_H
#define SL_BASE_POOL_H

#include <stddef.h>

#include "base/err.h"

typedef struct sl_pool sl_pool;
/* Works on items [begin, end); `thread` in [0, threads) picks private scratch. */
typedef void sl_pool_fn(void *arg, size_t begin, size_t end, unsigned thread);

int sl_pool_open(sl_pool **out, unsigned threads, sl_err *err);
void sl_pool_close(sl_pool *p);
unsigned sl_pool_threads(const sl_pool *p);
/* Splits [0, n) into one contiguous range a thread, in multiples of `grain` items, and returns when
 * all are done. */
void sl_pool_run(sl_pool *p, size_t n, size_t grain, sl_pool_fn *fn, void *arg);

#endif
