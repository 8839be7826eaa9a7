/* kernels/x86/avx2.c - v16 is two ymm (AVX2, FMA). */
#include <immintrin.h>

#include "base/num.h"
#include "kernels/impl.h"

#define INLINE static inline __attribute__((always_inline))

enum { TILE_ROWS = 2, MV_ROWS = 4, SUM_BLOCKS = 4 };
#define TILE_TOKENS 3
#define MV_ROWS_MXFP4 2

typedef struct {
    __m256 a, b; /* lanes 0..7, 8..15 */
} v16;

static const int32_t below_table[32] = { -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1 };

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
    return (v16){ INT2(_mm256_srai_epi32, as_int(v.a), 1), INT2(_mm256_srai_epi32, as_int(v.b), 1) };
}

INLINE v16 v16_shl23(v16 v)
{
    return (v16){ INT2(_mm256_slli_epi32, as_int(v.a), 23), INT2(_mm256_slli_epi32, as_int(v.b), 23) };
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

/* Eight codes from one dword: the permutation reads the three magnitude bits, the fourth is the sign. */
INLINE __m256 mxfp4_eight(const uint8_t *p, __m256 magnitude)
{
    const __m256i shift = _mm256_set_epi32(28, 24, 20, 16, 12, 8, 4, 0);
    __m256i code = _mm256_srlv_epi32(_mm256_set1_epi32((int)sl_le32(p)), shift);
    __m256 sign = _mm256_and_ps(INT2(_mm256_slli_epi32, code, 28), _mm256_set1_ps(-0.0f));
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitude, code), sign);
}

INLINE v16 mxfp4_half(const uint8_t *p, const sl_mxfp4_row *lut)
{
    __m256 magnitude = _mm256_load_ps(lut->f32);
    return (v16){ mxfp4_eight(p, magnitude), mxfp4_eight(p + 4, magnitude) };
}

#include "kernels/simd.h"

const sl_kernels sl_kernels_avx2 = SIMD_TABLE("avx2");
