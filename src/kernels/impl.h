/* kernels/impl.h - what the variants share: constants of the one-input functions, the MXFP4 table. */
#ifndef SL_KERNELS_IMPL_H
#define SL_KERNELS_IMPL_H

#include "kernels/kernels.h"

extern const sl_kernels sl_kernels_scalar;
#if defined(__x86_64__)
extern const sl_kernels sl_kernels_avx2, sl_kernels_avx512;
#elif defined(__aarch64__)
extern const sl_kernels sl_kernels_neon;
#endif

/* What the definition in scalar C shares between its files, and what serves where a set of instructions has
 * nothing better. */
enum { SL_LANES = 16 };
float sl_ref_fold(float lane[SL_LANES]);
void sl_ref_mm_packed(float *restrict y, size_t ldy, const uint8_t *restrict block, size_t first_row, size_t rows,
                      size_t block_rows, const float *restrict x, size_t ldx, size_t n, size_t tokens);
void sl_ref_unpack_bf16(void *restrict out, const uint8_t *restrict block, size_t first_row, size_t rows,
                        size_t block_rows, size_t n);
uint32_t sl_ref_crc32c(const uint8_t *p, size_t n);
void sl_crc32c_fill(void); /* its tables, before any table of functions is handed out */

/* For the vector variants: every function is inlined into the one that a table names. */
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* The weights of all 16 codes under one scale byte: as fp32, and as the two bytes of bf16, which holds
 * them exactly (two significant bits, exponents from -128 up). Filled before any table of functions is
 * handed out. */
typedef struct {
    float f32[16];
    uint8_t low[16], high[16];
} __attribute__((aligned(64))) sl_mxfp4_row;
extern sl_mxfp4_row sl_mxfp4_lut[256];

/* exp(x) = 2^k * p(r), k = round(x / ln 2), r = x - k ln 2 = hi + lo. LN2_HI has 16 bits, so k * LN2_HI
 * and hi = x - k * LN2_HI are exact. p(r) = 1 + hi + (lo + r^2 (E2 + r (E3 + r (E4 + r (E5 + r E6))))),
 * minimax in relative error (2^-28) over |r| <= ln 2 / 2; 1 + hi is kept unrounded in two parts, so that
 * little but the last rounding is left of the error. Outside [EXP_MIN, EXP_MAX] the result is 0 or
 * infinity anyway. */
#define EXP_MIN (-104.0f)
#define EXP_MAX 89.0f
#define LOG2_E 0x1.715476p+0f
#define LN2_HI 0x1.62e4p-1f
#define LN2_LO 0x1.7f7d1cp-20f
#define ROUND_MAGIC 0x1.8p+23f /* x + ROUND_MAGIC has x, rounded to an integer, in its low bits */
#define E2 0x1.fffffcp-2f
#define E3 0x1.55549p-3f
#define E4 0x1.5558f4p-5f
#define E5 0x1.123a6cp-7f
#define E6 0x1.6a234ap-10f

/* tanh(x) = x + x^3 (T3 + x^2 (T5 + ...)) for |x| < TANH_SMALL, minimax in relative error (2^-29). */
#define TANH_SMALL 0.55f
#define T3 (-0x1.55554cp-2f)
#define T5 0x1.110d5ap-3f
#define T7 (-0x1.b92718p-5f)
#define T9 0x1.58fa72p-6f
#define T11 (-0x1.98de76p-8f)

#endif
