/* store/speed.h - how fast this machine multiplies with weights that lie in memory, one token at a time.
 * That is a matter of memory bandwidth where the kernels are good, and of arithmetic where they are not: so the
 * kernels themselves are timed, over more bytes than caches hold. */
#ifndef SL_STORE_SPEED_H
#define SL_STORE_SPEED_H

#include "base/pool.h"
#include "kernels/kernels.h"

/* Bytes of weights a second by all threads of the pool; 0 where there is no memory to try it. Takes up to
 * `room` bytes, 256 MiB at most, for the time of the call. */
void sl_speed_measure(double *bf16, double *mxfp4, sl_pool *pool, const sl_kernels *k, uint64_t room);

#endif
