/* kernels/x86/avx512.c - v16 is one zmm (AVX-512 F, BW, VL, DQ). */
#include <immintrin.h>

#include "kernels/impl.h"

#define INLINE static inline __attribute__((always_inline))

enum { TILE_ROWS = 4, MV_ROWS = 4, SUM_BLOCKS = 8 };
#define TILE_TOKENS 6

typedef __m512 v16;

INLINE __mmask16 below(size_t n) { return (__mmask16)((1u << n) - 1); } /* n < 16 */
INLINE __m512i as_int(v16 v) { return _mm512_castps_si512(v); }
INLINE v16 as_v16(__m512i v) { return _mm512_castsi512_ps(v); }

INLINE v16 v16_set1(float f) { return _mm512_set1_ps(f); }
INLINE v16 v16_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE v16 v16_loadn(const float *p, size_t n) { return _mm512_maskz_loadu_ps(below(n), p); }
INLINE void v16_store(float *p, v16 v) { _mm512_storeu_ps(p, v); }
INLINE void v16_storen(float *p, v16 v, size_t n) { _mm512_mask_storeu_ps(p, below(n), v); }
INLINE v16 v16_keep(size_t n, v16 x, v16 y) { return _mm512_mask_mov_ps(y, below(n), x); }
INLINE v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
INLINE v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
INLINE v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
INLINE v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
INLINE v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
INLINE v16 v16_and(v16 a, v16 b) { return _mm512_and_ps(a, b); }
INLINE v16 v16_or(v16 a, v16 b) { return _mm512_or_ps(a, b); }
INLINE v16 v16_iadd(v16 a, v16 b) { return as_v16(_mm512_add_epi32(as_int(a), as_int(b))); }
INLINE v16 v16_isub(v16 a, v16 b) { return as_v16(_mm512_sub_epi32(as_int(a), as_int(b))); }
INLINE v16 v16_sar1(v16 a) { return as_v16(_mm512_srai_epi32(as_int(a), 1)); }
INLINE v16 v16_shl23(v16 a) { return as_v16(_mm512_slli_epi32(as_int(a), 23)); }

INLINE v16 v16_lt(v16 a, v16 b, v16 x, v16 y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

INLINE v16 v16_load_bf16(const void *p)
{
    __m256i w = _mm256_loadu_si256((const __m256i *)p);
    return as_v16(_mm512_slli_epi32(_mm512_cvtepu16_epi32(w), 16));
}

INLINE float v16_fold(v16 v)
{
    __m256 a8 = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_add_ss(a2, _mm_movehdup_ps(a2)));
}

/* Lane i takes nibble i: the dword that holds it, shifted down; the permutation reads 4 bits. */
INLINE v16 mxfp4_half(const uint8_t *p, const sl_mxfp4_row *lut)
{
    const __m512i dword = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i shift = _mm512_set_epi32(28, 24, 20, 16, 12, 8, 4, 0, 28, 24, 20, 16, 12, 8, 4, 0);
    __m512i bytes = _mm512_castsi128_si512(_mm_loadl_epi64((const __m128i *)p));
    __m512i index = _mm512_srlv_epi32(_mm512_permutexvar_epi32(dword, bytes), shift);
    return _mm512_permutexvar_ps(index, _mm512_load_ps(lut->f32));
}

#include "kernels/simd.h"

/* MXFP4 matrix times vector. What limits it is the two ports that execute 512-bit instructions, so two
 * rows A and B share their index: a dword holds four codes of A in its low half and the four codes of
 * the same columns of B in its high half, and one shift by 4 j brings code j of A to bits 0..3, which
 * vpermps looks up in A's fp32 row, and code j of B to bits 16..19, which vpermw looks up in B's bf16
 * row, in place for widening once the even words are zeroed. Per 32 weights: one shift, two look-ups,
 * two multiply-adds. The words of A and B are interleaved ahead, 128 columns at a time, in a buffer:
 * broadcasts from there cost only load ports.
 * Physical lane 4 j + w holds logical lane 4 w + j, so x is transposed likewise, once for many rows. */
enum { MV_COLS = 4096, MV_BATCH = 128, QUAD = 4 };

INLINE __m512i transposed(void)
{
    return _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
}

/* Four rows from w[i] and scale[i], `groups` groups of 32 columns. acc and x have physical lanes. */
INLINE void mv_quad(__m512 acc[QUAD], const uint8_t *const w[QUAD], const uint8_t *const scale[QUAD],
                    const float *x, size_t groups, size_t ahead)
{
    const __m512i shift = _mm512_set_epi32(12, 12, 12, 12, 8, 8, 8, 8, 4, 4, 4, 4, 0, 0, 0, 0);
    __m512 a[QUAD] = { acc[0], acc[1], acc[2], acc[3] };
    for (size_t g = 0; g < groups; g += 4) {
        uint8_t words[2][128] __attribute__((aligned(64))); /* [rows AB, CD][8 half groups of 16] */
        const size_t count = groups - g < 4 ? groups - g : 4;
        const __mmask8 have = (__mmask8)((1u << 2 * count) - 1);
        __m512i v[QUAD];
        UNROLL for (int r = 0; r < QUAD; r++) {
            v[r] = _mm512_maskz_loadu_epi64(have, w[r] + 16 * g);
            __builtin_prefetch(w[r] + 16 * g + ahead);
        }
        UNROLL for (int r = 0; r < QUAD; r += 2) {
            _mm512_store_si512(words[r / 2], _mm512_unpacklo_epi16(v[r], v[r + 1]));
            _mm512_store_si512(words[r / 2] + 64, _mm512_unpackhi_epi16(v[r], v[r + 1]));
        }
        for (size_t i = 0; i < count; i++) {
            const sl_mxfp4_row *lut[QUAD];
            UNROLL for (int r = 0; r < QUAD; r++)
                lut[r] = &sl_mxfp4_lut[scale[r][g + i]];
            UNROLL for (int h = 0; h < 2; h++) {
                const __m512 xi = _mm512_load_ps(x + 32 * (g + i) + 16 * h);
                UNROLL for (int r = 0; r < QUAD; r += 2) {
                    const void *four = words[r / 2] + 16 * i + 64 * h;
                    __m512i index = _mm512_broadcast_i32x4(_mm_load_si128(four));
                    index = _mm512_srlv_epi32(index, shift);
                    __m512 wa = _mm512_permutexvar_ps(index, _mm512_load_ps(lut[r]->f32));
                    __m512i wb = _mm512_maskz_permutexvar_epi16(
                        0xaaaaaaaa, index, _mm512_load_si512(lut[r + 1]->bf16));
                    a[r] = _mm512_fmadd_ps(wa, xi, a[r]);
                    a[r + 1] = _mm512_fmadd_ps(as_v16(wb), xi, a[r + 1]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < QUAD; r++)
        acc[r] = a[r];
}

static void mv_mxfp4(float *y, const matrix *m, const float *x, size_t rows)
{
    float xt[MV_COLS] __attribute__((aligned(64)));
    __m512 acc[MV_BATCH];
    const size_t scales = m->n / 32;
    for (size_t r0 = 0; r0 < rows; r0 += MV_BATCH) {
        const size_t nr = rows - r0 < MV_BATCH ? rows - r0 : MV_BATCH;
        for (size_t r = 0; r < MV_BATCH; r++)
            acc[r] = _mm512_setzero_ps();
        for (size_t col = 0; col < m->n; col += MV_COLS) {
            const size_t cols = m->n - col < MV_COLS ? m->n - col : MV_COLS;
            for (size_t i = 0; i < cols; i += 16)
                _mm512_store_ps(xt + i, _mm512_permutexvar_ps(transposed(), _mm512_loadu_ps(x + col + i)));
            for (size_t r = 0; r < nr; r += QUAD) {
                const uint8_t *w[QUAD], *scale[QUAD];
                for (size_t i = 0; i < QUAD; i++) { /* past the end: the last row again, not stored */
                    size_t row = r0 + (r + i < nr ? r + i : nr - 1);
                    w[i] = m->w + row * m->stride + col / 2;
                    scale[i] = m->scale + row * scales + col / 32;
                }
                mv_quad(acc + r, w, scale, xt, cols / 32, QUAD * m->stride);
            }
        }
        for (size_t r = 0; r < nr; r++)
            y[r0 + r] = v16_fold(_mm512_permutexvar_ps(transposed(), acc[r]));
    }
}

const sl_kernels sl_kernels_avx512 = SIMD_TABLE("avx512");
