/* kernels/kernels.h - every numeric operation of the model, one table of functions per instruction set.
 *
 * docs/contract.md numbers the rules; ref.c is their definition and all variants return its bits
 * (NaN excepted: which NaN is not defined, since what is not finite stops the token). Nothing here
 * allocates, fails, does I/O or keeps state. Pointers need no alignment unless said; weights may lie
 * at any byte. Sizes may be any number from 1 up. Outputs never overlap inputs unless said. */
#ifndef SL_KERNELS_H
#define SL_KERNELS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* "dot": 16 lanes; element i goes to lane i mod 16 by one fused multiply-add, ascending; lanes start
 * at +0 and fold 8, 4, 2, 1 apart. "row sum": one accumulator per output, terms in ascending order by
 * one fused multiply-add each. */
typedef struct sl_kernels {
    const char *name; /* scalar, avx2, avx512, neon */

    /* Matrix products: y[t * ldy + r] = dot(W[r], x + t * ldx), r < rows, t < tokens, length n.
     * Each element is what a single row and token would give: any blocking, same bits. */
    void (*mm_bf16)(float *restrict y, size_t ldy, const void *restrict w /* bf16 [rows][n] */,
                    const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens);
    void (*mm_f32)(float *restrict y, size_t ldy, const float *restrict w, size_t ldw,
                   const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens);
    /* MXFP4: packed [rows][n/2], low nibble = even element; scale [rows][n/32]; n a multiple of 32.
     * The weight is E2M1[code] * 2^(scale-127) as fp32 (scale 255: NaN; 253, 254 may be infinite). */
    void (*mm_mxfp4)(float *restrict y, size_t ldy, const uint8_t *restrict packed,
                     const uint8_t *restrict scale, const float *restrict x, size_t ldx, size_t rows,
                     size_t n, size_t tokens);
    /* mm_bf16 over rows [first_row, first_row + rows) of a packed block of block_rows rows, and these rows as bf16
     * [rows][n]. The block has passed sl_codec_check: kernels trust what it holds. Nothing outside of it is read. */
    void (*mm_packed)(float *restrict y, size_t ldy, const uint8_t *restrict block, size_t first_row, size_t rows,
                      size_t block_rows, const float *restrict x, size_t ldx, size_t n, size_t tokens);
    void (*unpack_bf16)(void *restrict out, const uint8_t *restrict block, size_t first_row, size_t rows,
                        size_t block_rows, size_t n);
    /* y[j] = row sum over i < rows of x[i] * W[i][j], j < n, from +0: the transposed product. */
    void (*tmm_bf16)(float *restrict y, const void *restrict w /* bf16 [rows][n] */,
                     const float *restrict x, size_t rows, size_t n);
    /* acc[j] = fma(a[i], row[i][j], acc[j]) for i < count ascending; rows lie ld apart. */
    void (*row_sum)(float *restrict acc, const float *restrict a, const float *restrict rows, size_t ld,
                    size_t count, size_t n);

    float (*dot)(const float *a, const float *b, size_t n);
    float (*sum)(const float *x, size_t n); /* lanes and fold as dot, by plain addition */
    float (*max)(const float *x, size_t n); /* of finite values; -0 and +0 are equal, either may return */

    void (*add)(float *y, const float *a, const float *b, size_t n);   /* y may be a or b */
    void (*mul)(float *y, const float *a, const float *b, size_t n);   /* y may be a or b */
    void (*scale)(float *y, const float *a, float s, size_t n);        /* y may be a */
    void (*widen_bf16)(float *restrict y, const void *restrict w, size_t n);

    /* One-input functions, within 2 ulp of the correctly rounded result over all floats. y may be x. */
    void (*exp)(float *y, const float *x, size_t n);
    void (*tanh)(float *y, const float *x, size_t n);
    void (*sigmoid)(float *y, const float *x, size_t n);
    /* y = exp(x - max); returns their sum (lanes and fold as sum). y may be x. */
    float (*exp_sum)(float *y, const float *x, float max, size_t n);

    /* y = w * x / sqrt(mean(x^2) + eps): spec 3.1. r = 1 / sqrt(dot(x, x) / n + eps), each operation
     * rounded; y = (x * r) * w. w NULL: ones, no product. y may be x. */
    void (*rms_norm)(float *y, const float *x, const float *w, float eps, size_t n);
    /* y = (x * (1 / sqrt(dot(x, x) + eps))) * scale: spec 3.1, eps on the sum. y may be x. */
    void (*l2_norm)(float *y, const float *x, float eps, float scale, size_t n);
    /* y = (beta * tanh(g / beta) * sigmoid(g)) * (linear_beta * tanh(u / linear_beta)): spec 3.1,
     * products left to right as written. y may be g or u. */
    void (*situ_glu)(float *y, const float *g, const float *u, float beta, float linear_beta, size_t n);
    /* y = g * sigmoid(x): the output gates. y may be g or x. */
    void (*sigmoid_mul)(float *y, const float *g, const float *x, size_t n);

    /* One token of the depthwise causal convolution, then SiLU: spec 3.4 step 2. past [taps-1][n] holds
     * the inputs before, oldest first, and is shifted by one; w [n][taps], last tap on x.
     * c = row sum over taps ascending from +0, y = c * sigmoid(c). 2 <= taps <= 8. */
    void (*conv_silu)(float *restrict y, float *restrict past, const float *restrict x,
                      const float *restrict w, size_t taps, size_t n);
    /* KDA decay of one head: spec 3.4 step 4. alpha = exp(lower_bound * sigmoid(exp_a * (z + dt_bias))). */
    void (*kda_decay)(float *alpha, const float *z, const float *dt_bias, float exp_a, float lower_bound, size_t n);
    /* One step of the KDA recurrence of one head: spec 3.4 step 6. state [dv][dk] (value-major: each row
     * is updated whole). For each row j: row *= alpha; d = beta * (v[j] - dot(row, k));
     * row = fma(k, d, row); out[j] = dot(row, q). */
    void (*kda_step)(float *restrict out, float *restrict state, const float *restrict q,
                     const float *restrict k, const float *restrict v, const float *restrict alpha,
                     float beta, size_t dk, size_t dv);

    bool (*all_finite)(const float *x, size_t n);
    uint32_t (*crc32c)(const uint8_t *p, size_t n); /* CRC-32C: 0xe3069283 for "123456789" */
} sl_kernels;

/* Bits of the instruction sets found; sl_cpu_detect checks CPU and operating system. */
enum { SL_CPU_AVX2 = 1, SL_CPU_AVX512 = 2, SL_CPU_NEON = 4 };
unsigned sl_cpu_detect(void);
/* The table for the best set in `cpu`, else the scalar one. Static storage. */
const sl_kernels *sl_kernels_for(unsigned cpu);
/* The table to use: the best detected, or what SL_CPU (scalar, avx2, avx512, neon) names. NULL with a
 * one-line reason in *why when SL_CPU names something this machine lacks, or when the environment
 * (rounding mode, flushed subnormals) would change results. */
const sl_kernels *sl_kernels_choose(const char **why);

#endif
