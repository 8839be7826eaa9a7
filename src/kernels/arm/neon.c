/* kernels/arm/neon.c - v16 is four registers of four lanes (AArch64 Advanced SIMD). */
#include <arm_neon.h>
#include <string.h>

#include "kernels/impl.h"

enum { TILE_ROWS = 2, MV_ROWS = 4, MX_ROWS = 2, SUM_BLOCKS = 4 };
#define TILE_TOKENS 3
#define MV_TOKENS 2

typedef struct {
    float32x4_t q[4]; /* lanes 4 i .. 4 i + 3 */
} v16;

static const uint32_t below_table[32] = { ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u,
                                          ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u, ~0u };

#define QUADS(value) ((v16){ { value(0), value(1), value(2), value(3) } })
INLINE uint32x4_t below(size_t n, int i) { return vld1q_u32(below_table + 16 - n + 4 * i); }
INLINE uint32x4_t u(float32x4_t v) { return vreinterpretq_u32_f32(v); }
INLINE float32x4_t f(uint32x4_t v) { return vreinterpretq_f32_u32(v); }

INLINE v16 v16_set1(float s)
{
#define Q(i) vdupq_n_f32(s)
    return QUADS(Q);
#undef Q
}

INLINE v16 v16_load(const float *p)
{
#define Q(i) vld1q_f32(p + 4 * i)
    return QUADS(Q);
#undef Q
}

INLINE void v16_store(float *p, v16 v)
{
    for (int i = 0; i < 4; i++)
        vst1q_f32(p + 4 * i, v.q[i]);
}

INLINE v16 v16_loadn(const float *p, size_t n)
{
    float tail[16] = { 0 };
    memcpy(tail, p, 4 * n);
    return v16_load(tail);
}

INLINE void v16_storen(float *p, v16 v, size_t n)
{
    float tail[16];
    v16_store(tail, v);
    memcpy(p, tail, 4 * n);
}

/* One operation on the four quarters of its operands. */
#define V16_OP2(name, expr)                                                                        \
    INLINE v16 name(v16 x, v16 y) { return QUADS(expr); }
#define ADD(i) vaddq_f32(x.q[i], y.q[i])
#define SUB(i) vsubq_f32(x.q[i], y.q[i])
#define MUL(i) vmulq_f32(x.q[i], y.q[i])
#define DIV(i) vdivq_f32(x.q[i], y.q[i])
#define AND(i) f(vandq_u32(u(x.q[i]), u(y.q[i])))
#define OR(i) f(vorrq_u32(u(x.q[i]), u(y.q[i])))
#define IADD(i) f(vaddq_u32(u(x.q[i]), u(y.q[i])))
#define ISUB(i) f(vsubq_u32(u(x.q[i]), u(y.q[i])))
V16_OP2(v16_add, ADD)
V16_OP2(v16_sub, SUB)
V16_OP2(v16_mul, MUL)
V16_OP2(v16_div, DIV)
V16_OP2(v16_and, AND)
V16_OP2(v16_or, OR)
V16_OP2(v16_iadd, IADD)
V16_OP2(v16_isub, ISUB)

INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
#define Q(i) vfmaq_f32(c.q[i], a.q[i], b.q[i])
    return QUADS(Q);
#undef Q
}

INLINE v16 v16_lt(v16 a, v16 b, v16 x, v16 y)
{
#define Q(i) vbslq_f32(vcltq_f32(a.q[i], b.q[i]), x.q[i], y.q[i])
    return QUADS(Q);
#undef Q
}

INLINE v16 v16_keep(size_t n, v16 x, v16 y)
{
#define Q(i) vbslq_f32(below(n, i), x.q[i], y.q[i])
    return QUADS(Q);
#undef Q
}

INLINE v16 v16_sar1(v16 v)
{
#define Q(i) vreinterpretq_f32_s32(vshrq_n_s32(vreinterpretq_s32_f32(v.q[i]), 1))
    return QUADS(Q);
#undef Q
}

INLINE v16 v16_shl23(v16 v)
{
#define Q(i) f(vshlq_n_u32(u(v.q[i]), 23))
    return QUADS(Q);
#undef Q
}

INLINE float32x4_t widen4(uint16x4_t w) { return f(vshlq_n_u32(vmovl_u16(w), 16)); }

INLINE v16 v16_load_bf16(const void *p)
{
    const uint8_t *bytes = p;
#define Q(i) widen4(vreinterpret_u16_u8(vld1_u8(bytes + 8 * i)))
    return QUADS(Q);
#undef Q
}

INLINE float v16_fold(v16 v)
{
    float32x4_t a8 = vaddq_f32(v.q[0], v.q[2]), b8 = vaddq_f32(v.q[1], v.q[3]);
    float32x4_t a4 = vaddq_f32(a8, b8);
    float32x2_t a2 = vadd_f32(vget_low_f32(a4), vget_high_f32(a4));
    return vget_lane_f32(a2, 0) + vget_lane_f32(a2, 1);
}

INLINE void fold16(float sums[16], const float *lanes)
{
    for (int i = 0; i < 16; i++)
        sums[i] = v16_fold(v16_load(lanes + 16 * i));
}

typedef struct {
    v16 half[2];
} v16x2;

/* MXFP4: two table look-ups give the low and the high byte of each bf16 weight. */
INLINE v16 mxfp4_half(uint8x16_t code, const sl_mxfp4_row *row)
{
    uint8x16_t low = vqtbl1q_u8(vld1q_u8(row->low), code);
    uint8x16_t high = vqtbl1q_u8(vld1q_u8(row->high), code);
    uint16x8_t w0 = vreinterpretq_u16_u8(vzip1q_u8(low, high));
    uint16x8_t w1 = vreinterpretq_u16_u8(vzip2q_u8(low, high));
    return (v16){ { widen4(vget_low_u16(w0)), widen4(vget_high_u16(w0)), widen4(vget_low_u16(w1)),
                    widen4(vget_high_u16(w1)) } };
}

INLINE v16x2 mxfp4_group(const uint8_t *p, const sl_mxfp4_row *row)
{
    uint8x16_t bytes = vld1q_u8(p);
    uint8x16_t even = vandq_u8(bytes, vdupq_n_u8(15)), odd = vshrq_n_u8(bytes, 4);
    uint8x16_t first = vzip1q_u8(even, odd), second = vzip2q_u8(even, odd);
    return (v16x2){ { mxfp4_half(first, row), mxfp4_half(second, row) } };
}

INLINE v16 v16_physical(v16 v) { return v; }
INLINE v16 v16_logical(v16 v) { return v; }

#include "kernels/simd.h"

const sl_kernels sl_kernels_neon = SIMD_TABLE("neon");
