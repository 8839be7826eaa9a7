/* kernels/x86/avx2.c - v16 is two ymm (AVX2, FMA). */
#include <immintrin.h>

#include "kernels/impl.h"

enum { TILE_ROWS = 2, MV_ROWS = 4, MX_ROWS = 2, SUM_BLOCKS = 4 };
#define TILE_TOKENS 3
#define MV_TOKENS 2

typedef struct {
    __m256 a, b; /* lanes 0..7, 8..15 */
} v16;

static const int32_t below_table[32] = { -1, -1, -1, -1, -1, -1, -1, -1,
                                         -1, -1, -1, -1, -1, -1, -1, -1 };

/* Masks of lanes i .. i+7 below n. */
INLINE __m256i below(size_t n, int i)
{
    return _mm256_loadu_si256((const __m256i *)(below_table + 16 - n + i));
}

#define EACH2(op, x, y) ((v16){ op((x).a, (y).a), op((x).b, (y).b) })
#define INT2(op, ...) _mm256_castsi256_ps(op(__VA_ARGS__))
INLINE __m256i as_int(__m256 v) { return _mm256_castps_si256(v); }
INLINE __m256 iadd(__m256 a, __m256 b) { return INT2(_mm256_add_epi32, as_int(a), as_int(b)); }
INLINE __m256 isub(__m256 a, __m256 b) { return INT2(_mm256_sub_epi32, as_int(a), as_int(b)); }

INLINE v16 v16_set1(float f) { return (v16){ _mm256_set1_ps(f), _mm256_set1_ps(f) }; }
INLINE v16 v16_load(const float *p) { return (v16){ _mm256_loadu_ps(p), _mm256_loadu_ps(p + 8) }; }
INLINE v16 v16_add(v16 x, v16 y) { return EACH2(_mm256_add_ps, x, y); }
INLINE v16 v16_sub(v16 x, v16 y) { return EACH2(_mm256_sub_ps, x, y); }
INLINE v16 v16_mul(v16 x, v16 y) { return EACH2(_mm256_mul_ps, x, y); }
INLINE v16 v16_div(v16 x, v16 y) { return EACH2(_mm256_div_ps, x, y); }
INLINE v16 v16_and(v16 x, v16 y) { return EACH2(_mm256_and_ps, x, y); }
INLINE v16 v16_or(v16 x, v16 y) { return EACH2(_mm256_or_ps, x, y); }
INLINE v16 v16_iadd(v16 x, v16 y) { return EACH2(iadd, x, y); }
INLINE v16 v16_isub(v16 x, v16 y) { return EACH2(isub, x, y); }

INLINE v16 v16_loadn(const float *p, size_t n)
{
    return (v16){ _mm256_maskload_ps(p, below(n, 0)), _mm256_maskload_ps(p + 8, below(n, 8)) };
}

INLINE void v16_store(float *p, v16 v)
{
    _mm256_storeu_ps(p, v.a);
    _mm256_storeu_ps(p + 8, v.b);
}

INLINE void v16_storen(float *p, v16 v, size_t n)
{
    _mm256_maskstore_ps(p, below(n, 0), v.a);
    _mm256_maskstore_ps(p + 8, below(n, 8), v.b);
}

INLINE v16 v16_keep(size_t n, v16 x, v16 y)
{
    return (v16){ _mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(below(n, 0))),
                  _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(below(n, 8))) };
}

INLINE v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){ _mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b) };
}

INLINE v16 v16_lt(v16 a, v16 b, v16 x, v16 y)
{
    return (v16){ _mm256_blendv_ps(y.a, x.a, _mm256_cmp_ps(a.a, b.a, _CMP_LT_OQ)),
                  _mm256_blendv_ps(y.b, x.b, _mm256_cmp_ps(a.b, b.b, _CMP_LT_OQ)) };
}

INLINE v16 v16_sar1(v16 v)
{
    return (v16){ INT2(_mm256_srai_epi32, as_int(v.a), 1),
                  INT2(_mm256_srai_epi32, as_int(v.b), 1) };
}

INLINE v16 v16_shl23(v16 v)
{
    return (v16){ INT2(_mm256_slli_epi32, as_int(v.a), 23),
                  INT2(_mm256_slli_epi32, as_int(v.b), 23) };
}

INLINE __m256 widen8(const uint8_t *p)
{
    __m256i w = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
    return INT2(_mm256_slli_epi32, w, 16);
}

INLINE v16 v16_load_bf16(const void *p)
{
    return (v16){ widen8(p), widen8((const uint8_t *)p + 16) };
}

INLINE float v16_fold(v16 v)
{
    __m256 a8 = _mm256_add_ps(v.a, v.b);
    __m128 a4 = _mm_add_ps(_mm256_castps256_ps128(a8), _mm256_extractf128_ps(a8, 1));
    __m128 a2 = _mm_add_ps(a4, _mm_movehl_ps(a4, a4));
    return _mm_cvtss_f32(_mm_add_ss(a2, _mm_movehdup_ps(a2)));
}

INLINE void fold16(float sums[16], const float *lanes)
{
    for (int i = 0; i < 16; i++)
        sums[i] = v16_fold(v16_load(lanes + 16 * i));
}

typedef struct {
    v16 half[2];
} v16x2;

/* MXFP4. The 16 bytes are taken twice: even columns (low nibbles) in the low 128 bits, odd columns in the
 * high ones. Two byte shuffles look up the low and the high byte of each bf16 weight, which are
 * interleaved to words and widened: even words by a shift, odd ones by a mask. Physical lanes are thus
 * the 4 x 4 transpose of logical ones. */
INLINE v16 widen_words(__m256i w)
{
    return (v16){ INT2(_mm256_slli_epi32, w, 16),
                  INT2(_mm256_and_si256, w, _mm256_set1_epi32((int)0xffff0000u)) };
}

INLINE __m256i twice(const void *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}

INLINE v16x2 mxfp4_group(const uint8_t *p, const sl_mxfp4_row *row)
{
    const __m256i shift = _mm256_set_epi32(4, 4, 4, 4, 0, 0, 0, 0);
    __m256i code = _mm256_and_si256(_mm256_srlv_epi32(twice(p), shift), _mm256_set1_epi8(15));
    __m256i low = _mm256_shuffle_epi8(twice(row->low), code);
    __m256i high = _mm256_shuffle_epi8(twice(row->high), code);
    return (v16x2){ { widen_words(_mm256_unpacklo_epi8(low, high)),
                      widen_words(_mm256_unpackhi_epi8(low, high)) } };
}

INLINE v16 v16_physical(v16 v)
{
    const __m256i order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    return (v16){ _mm256_permutevar8x32_ps(_mm256_unpacklo_ps(v.a, v.b), order),
                  _mm256_permutevar8x32_ps(_mm256_unpackhi_ps(v.a, v.b), order) };
}

INLINE v16 v16_logical(v16 v) { return v16_physical(v); } /* a transpose undoes itself */

#include "kernels/simd.h"

const sl_kernels sl_kernels_avx2 = SIMD_TABLE("avx2");
