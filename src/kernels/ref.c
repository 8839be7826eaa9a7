/* kernels/ref.c - the definition of every kernel, in scalar C. docs/contract.md refers to this file;
 * a variant is right when it returns the bits of this one. fmaf is written where the contract fuses;
 * the build forbids the compiler to fuse anything else. */
#include <math.h>

#include "base/num.h"
#include "kernels/impl.h"

enum { LANES = SL_LANES, GROUP = 32 };

/* ---- lanes and fold ------------------------------------------------------------------------ */

float sl_ref_fold(float lane[LANES])
{
    for (int apart = LANES / 2; apart > 0; apart /= 2)
        for (int i = 0; i < apart; i++)
            lane[i] += lane[i + apart];
    return lane[0];
}

static float ref_dot(const float *a, const float *b, size_t n)
{
    float lane[LANES] = { 0 };
    for (size_t i = 0; i < n; i++)
        lane[i % LANES] = fmaf(a[i], b[i], lane[i % LANES]);
    return sl_ref_fold(lane);
}

static float ref_sum(const float *x, size_t n)
{
    float lane[LANES] = { 0 };
    for (size_t i = 0; i < n; i++)
        lane[i % LANES] += x[i];
    return sl_ref_fold(lane);
}

static float ref_max(const float *x, size_t n)
{
    float max = -INFINITY;
    for (size_t i = 0; i < n; i++)
        max = max < x[i] ? x[i] : max;
    return max;
}

/* ---- matrix products ----------------------------------------------------------------------- */

static void ref_mm_bf16(float *restrict y, size_t ldy, const void *restrict w,
                        const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens)
{
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < rows; r++) {
            const uint8_t *row = (const uint8_t *)w + 2 * n * r;
            float lane[LANES] = { 0 };
            for (size_t i = 0; i < n; i++)
                lane[i % LANES] = fmaf(sl_bf16_load(row + 2 * i), x[t * ldx + i], lane[i % LANES]);
            y[t * ldy + r] = sl_ref_fold(lane);
        }
}

static void ref_mm_f32(float *restrict y, size_t ldy, const float *restrict w, size_t ldw,
                       const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens)
{
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < rows; r++)
            y[t * ldy + r] = ref_dot(w + r * ldw, x + t * ldx, n);
}

static float mxfp4_weight(unsigned code, unsigned scale)
{
    static const float e2m1[8] = { 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f };
    uint32_t two_to = scale == 0 ? 0x00400000u : scale == 255 ? 0x7fc00000u : (uint32_t)scale << 23;
    float magnitude = e2m1[code & 7] * sl_f32_from_bits(two_to);
    return code & 8 ? -magnitude : magnitude;
}

static void ref_mm_mxfp4(float *restrict y, size_t ldy, const uint8_t *restrict packed,
                         const uint8_t *restrict scale, const float *restrict x, size_t ldx,
                         size_t rows, size_t n, size_t tokens)
{
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < rows; r++) {
            float lane[LANES] = { 0 };
            for (size_t i = 0; i < n; i++) {
                unsigned pair = packed[(r * n + i) / 2], code = i % 2 ? pair >> 4 : pair & 15;
                float weight = mxfp4_weight(code, scale[(r * n + i) / GROUP]);
                lane[i % LANES] = fmaf(weight, x[t * ldx + i], lane[i % LANES]);
            }
            y[t * ldy + r] = sl_ref_fold(lane);
        }
}

static void ref_tmm_bf16(float *restrict y, const void *restrict w, const float *restrict x, size_t rows, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        float acc = 0;
        for (size_t i = 0; i < rows; i++)
            acc = fmaf(x[i], sl_bf16_load((const uint8_t *)w + 2 * (i * n + j)), acc);
        y[j] = acc;
    }
}

static void ref_row_sum(float *restrict acc, const float *restrict a, const float *restrict rows,
                        size_t ld, size_t count, size_t n)
{
    for (size_t j = 0; j < n; j++)
        for (size_t i = 0; i < count; i++)
            acc[j] = fmaf(a[i], rows[i * ld + j], acc[j]);
}

/* ---- element by element -------------------------------------------------------------------- */

static void ref_add(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] + b[i];
}

static void ref_mul(float *y, const float *a, const float *b, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] * b[i];
}

static void ref_scale(float *y, const float *a, float s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = a[i] * s;
}

static void ref_widen_bf16(float *restrict y, const void *restrict w, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = sl_bf16_load((const uint8_t *)w + 2 * i);
}

/* ---- one-input functions ------------------------------------------------------------------- */

static float two_to(uint32_t k) { return sl_f32_from_bits((k + 127) << 23); }

static float exp1(float x)
{
    x = EXP_MAX < x ? EXP_MAX : x; /* NaN passes both */
    x = x < EXP_MIN ? EXP_MIN : x;
    float t = fmaf(x, LOG2_E, ROUND_MAGIC);
    float k = t - ROUND_MAGIC;
    float hi = fmaf(k, -LN2_HI, x), lo = k * -LN2_LO, r = hi + lo;
    float q = fmaf(r, fmaf(r, fmaf(r, fmaf(r, E6, E5), E4), E3), E2);
    float one_hi = 1 + hi, rest = hi - (one_hi - 1); /* exact: 1 + hi = one_hi + rest */
    float p = one_hi + (rest + fmaf(r * r, q, lo));
    /* Two factors: the first product is exact, so a subnormal result is rounded once. */
    uint32_t i = sl_f32_bits(t) - sl_f32_bits(ROUND_MAGIC);
    uint32_t half = (uint32_t)((int32_t)i >> 1);
    return p * two_to(half) * two_to(i - half);
}

static float tanh1(float x)
{
    float a = fabsf(x), u = a * a, y;
    if (a < TANH_SMALL)
        y = fmaf(a * u, fmaf(u, fmaf(u, fmaf(u, fmaf(u, T11, T9), T7), T5), T3), a);
    else
        y = 1 - 2 / (exp1(a + a) + 1);
    return copysignf(y, x);
}

static float sigmoid1(float x)
{
    float e = exp1(-fabsf(x));
    return (x < 0 ? e : 1) / (1 + e);
}

static void ref_exp(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = exp1(x[i]);
}

static void ref_tanh(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = tanh1(x[i]);
}

static void ref_sigmoid(float *y, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = sigmoid1(x[i]);
}

static float ref_exp_sum(float *y, const float *x, float max, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = exp1(x[i] - max);
    return ref_sum(y, n);
}

/* ---- norms, gates, recurrence -------------------------------------------------------------- */

static void ref_rms_norm(float *y, const float *x, const float *w, float eps, size_t n)
{
    float r = 1 / sqrtf(ref_dot(x, x, n) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = w ? x[i] * r * w[i] : x[i] * r;
}

static void ref_l2_norm(float *y, const float *x, float eps, float scale, size_t n)
{
    float r = 1 / sqrtf(ref_dot(x, x, n) + eps);
    for (size_t i = 0; i < n; i++)
        y[i] = x[i] * r * scale;
}

static void ref_situ_glu(float *y, const float *g, const float *u, float beta, float linear_beta, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        float gate = beta * tanh1(g[i] / beta) * sigmoid1(g[i]);
        float up = linear_beta * tanh1(u[i] / linear_beta);
        y[i] = gate * up;
    }
}

static void ref_sigmoid_mul(float *y, const float *g, const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        y[i] = g[i] * sigmoid1(x[i]);
}

static void ref_conv_silu(float *restrict y, float *restrict past, const float *restrict x,
                          const float *restrict w, size_t taps, size_t n)
{
    for (size_t j = 0; j < n; j++) {
        float c = 0;
        for (size_t i = 0; i + 1 < taps; i++) {
            c = fmaf(w[j * taps + i], past[i * n + j], c);
            past[i * n + j] = i + 2 < taps ? past[(i + 1) * n + j] : x[j];
        }
        c = fmaf(w[j * taps + taps - 1], x[j], c);
        y[j] = c * sigmoid1(c);
    }
}

static void ref_kda_decay(float *alpha, const float *z, const float *dt_bias, float exp_a,
                          float lower_bound, size_t n)
{
    for (size_t i = 0; i < n; i++)
        alpha[i] = exp1(lower_bound * sigmoid1(exp_a * (z[i] + dt_bias[i])));
}

static void ref_kda_step(float *restrict out, float *restrict state, const float *restrict q,
                         const float *restrict k, const float *restrict v,
                         const float *restrict alpha, float beta, size_t dk, size_t dv)
{
    for (size_t j = 0; j < dv; j++) {
        float *row = state + j * dk;
        ref_mul(row, row, alpha, dk);
        float d = beta * (v[j] - ref_dot(row, k, dk));
        for (size_t i = 0; i < dk; i++)
            row[i] = fmaf(k[i], d, row[i]);
        out[j] = ref_dot(row, q, dk);
    }
}

static bool ref_all_finite(const float *x, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!sl_f32_finite(x[i]))
            return false;
    return true;
}

const sl_kernels sl_kernels_scalar = {
    .name = "scalar",
    .mm_bf16 = ref_mm_bf16,
    .mm_f32 = ref_mm_f32,
    .mm_mxfp4 = ref_mm_mxfp4,
    .mm_packed = sl_ref_mm_packed,
    .unpack_bf16 = sl_ref_unpack_bf16,
    .tmm_bf16 = ref_tmm_bf16,
    .row_sum = ref_row_sum,
    .dot = ref_dot,
    .sum = ref_sum,
    .max = ref_max,
    .add = ref_add,
    .mul = ref_mul,
    .scale = ref_scale,
    .widen_bf16 = ref_widen_bf16,
    .exp = ref_exp,
    .tanh = ref_tanh,
    .sigmoid = ref_sigmoid,
    .exp_sum = ref_exp_sum,
    .rms_norm = ref_rms_norm,
    .l2_norm = ref_l2_norm,
    .situ_glu = ref_situ_glu,
    .sigmoid_mul = ref_sigmoid_mul,
    .conv_silu = ref_conv_silu,
    .kda_decay = ref_kda_decay,
    .kda_step = ref_kda_step,
    .all_finite = ref_all_finite,
    .crc32c = sl_ref_crc32c,
};
