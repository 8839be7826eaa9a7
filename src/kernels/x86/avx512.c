/* kernels/x86/avx512.c - v16 is one zmm (AVX-512 F, BW, VL, DQ). */
#include <immintrin.h>

#include "kernels/impl.h"

enum { TILE_ROWS = 4, MV_ROWS = 4, MX_ROWS = 4, SUM_BLOCKS = 8 };
#define TILE_TOKENS 6
#define MV_TOKENS 4

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

/* The 16 folds side by side: each step adds what is 8, 4, 2, 1 apart and packs two vectors into one. */
INLINE void fold16(float sums[16], const float *lanes)
{
    v16 v[16];
    UNROLL for (int i = 0; i < 16; i++)
        v[i] = v16_load(lanes + 16 * i);
    UNROLL for (int i = 0; i < 8; i++)
        v[i] = v16_add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44),
                       _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
    UNROLL for (int i = 0; i < 4; i++)
        v[i] = v16_add(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88),
                       _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
    UNROLL for (int i = 0; i < 2; i++) {
        __m512d a = _mm512_castps_pd(v[2 * i]), b = _mm512_castps_pd(v[2 * i + 1]);
        v[i] = v16_add(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    /* Quads of the result hold vectors i, i + 4, i + 8, i + 12. */
    v16 sum = v16_add(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    v16_store(sums, _mm512_permutexvar_ps(order, sum));
}

typedef struct {
    v16 half[2];
} v16x2;

/* MXFP4. Two ports execute 512-bit instructions, and they are the limit: a shift, a look-up (which reads
 * four bits of its index) and a multiply-add per 16 weights is all they are given. A broadcast of 8
 * bytes, done by a load port, has columns 0..7 in even lanes and 8..15 in odd ones, so physical lane p
 * holds logical lane 8 (p mod 2) + p / 2. vpermw would look up two rows at once, but is two operations
 * on Sapphire Rapids. */
INLINE v16 mxfp4_half(const uint8_t *p, const sl_mxfp4_row *row)
{
    const __m512i shift =
        _mm512_set_epi32(28, 28, 24, 24, 20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
    __m512i codes = _mm512_broadcastq_epi64(_mm_loadl_epi64((const __m128i *)p));
    return _mm512_permutexvar_ps(_mm512_srlv_epi32(codes, shift), _mm512_load_ps(row->f32));
}

INLINE v16x2 mxfp4_group(const uint8_t *p, const sl_mxfp4_row *row)
{
    return (v16x2){ { mxfp4_half(p, row), mxfp4_half(p + 8, row) } };
}

INLINE v16 v16_physical(v16 v)
{
    const __m512i from = _mm512_set_epi32(15, 7, 14, 6, 13, 5, 12, 4, 11, 3, 10, 2, 9, 1, 8, 0);
    return _mm512_permutexvar_ps(from, v);
}

INLINE v16 v16_logical(v16 v)
{
    const __m512i from = _mm512_set_epi32(15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutexvar_ps(from, v);
}

#include "kernels/simd.h"

const sl_kernels sl_kernels_avx512 = SIMD_TABLE("avx512");
