/* gen/sampler.h - the parts of sl_sample that tests look at.
 *
 * Every step is exact IEEE arithmetic in a stated order, with the engine's own exp and log: the same
 * logits, parameters and position give the same id, and the same log-probability, on every machine.
 *
 * Definition, with m the largest logit:
 *   1. temperature <= 0: the largest logit, the lowest id of equals. Otherwise each candidate's weight is
 *      exp((logit - m) / temperature), in fp32.
 *   2. min_p keeps weights >= min_p, the share of the largest weight, which is 1.
 *   3. top_k keeps the k largest logits, lower ids first among equals. (The usual order, top_k before
 *      min_p, gives the same set: weights fall with logits.)
 *   4. top_p keeps, in descending order, the shortest run whose weights reach top_p of what is left.
 *   5. u = sl_uniform(seed, position); the id is the first, in descending order, at which the running sum
 *      of weights exceeds u times their total.
 * Weights are added in double, in descending order, except that the total is added in ascending order of
 * ids where neither top_k nor top_p cuts. */
#ifndef SL_GEN_SAMPLER_H
#define SL_GEN_SAMPLER_H

#include <stdint.h>

/* A counter-based generator: two rounds of the SplitMix64 finaliser,
 *   x = mix(seed + G), r = mix(x + (position + 1) * G), G = 0x9e3779b97f4a7c15,
 *   mix(z): z ^= z >> 30; z *= 0xbf58476d1ce4e5b9; z ^= z >> 27; z *= 0x94d049bb133111eb; z ^= z >> 31
 * modulo 2^64. The top 53 bits of r, divided by 2^53: in [0, 1). */
double sl_uniform(uint64_t seed, uint64_t position);

/* Natural logarithm of a positive normal double, within 2 ulp for x >= 1. */
double sl_ln(double x);

#endif
