/* kernels/simd.h - the algorithms of all vector variants, written once over v16: the 16 lanes of the
 * contract as one zmm, two ymm or four NEON registers.
 *
 * Included by exactly one C file per instruction set, after it has defined the type v16 and:
 *   v16_load, v16_loadn (0 in lanes from n up, reads nothing there), v16_store, v16_storen, v16_set1,
 *   v16_load_bf16 (widens), v16_add, v16_sub, v16_mul, v16_div, v16_fma(a, b, c) = a * b + c,
 *   v16_lt(a, b, x, y) = a < b ? x : y, v16_keep(n, x, y) = x in lanes below n, else y,
 *   v16_and, v16_or, v16_iadd, v16_isub, v16_sar1, v16_shl23 (on the bits), v16_fold (8, 4, 2, 1 apart),
 *   fold16 (of 16 vectors that lie in a row),
 *   mxfp4_group(p, row) = the weights of 16 bytes as two v16 in lanes that suit the decoder
 *   ("physical"), v16_physical and v16_logical, which bring a vector into and out of that order;
 *   the sizes TILE_ROWS x TILE_TOKENS (a tile of accumulators in registers), MV_ROWS (rows at once for
 *   one token), MX_ROWS (the same for MXFP4 or up to MV_TOKENS tokens), SUM_BLOCKS.
 * Everything is static: code for one instruction set must never be linked into another's path. */
#include <math.h>
#include <string.h>

#include "base/num.h"

/* `left` elements remain, possibly more than 16: a full vector or the tail. */
INLINE v16 ld(const float *p, size_t left) { return left >= 16 ? v16_load(p) : v16_loadn(p, left); }

INLINE void st(float *p, v16 v, size_t left)
{
    if (left >= 16)
        v16_store(p, v);
    else
        v16_storen(p, v, left);
}

INLINE v16 ld_bf16(const void *p, size_t left)
{
    uint16_t tail[16] = { 0 };
    if (left >= 16)
        return v16_load_bf16(p);
    memcpy(tail, p, 2 * left);
    return v16_load_bf16(tail);
}

/* Lanes past the end keep what they have: adding a zero there could turn -0 into +0. */
INLINE v16 fma_left(v16 a, v16 b, v16 acc, size_t left)
{
    v16 sum = v16_fma(a, b, acc);
    return left >= 16 ? sum : v16_keep(left, sum, acc);
}

INLINE v16 add_left(v16 acc, v16 a, size_t left)
{
    v16 sum = v16_add(acc, a);
    return left >= 16 ? sum : v16_keep(left, sum, acc);
}

INLINE v16 bits16(uint32_t u) { return v16_set1(sl_f32_from_bits(u)); }

/* ---- reductions ---------------------------------------------------------------------------- */

static float simd_dot(const float *a, const float *b, size_t n)
{
    v16 acc = v16_set1(0);
    for (size_t i = 0; i < n; i += 16)
        acc = fma_left(ld(a + i, n - i), ld(b + i, n - i), acc, n - i);
    return v16_fold(acc);
}

static float simd_sum(const float *x, size_t n)
{
    v16 acc = v16_set1(0);
    for (size_t i = 0; i < n; i += 16)
        acc = add_left(acc, ld(x + i, n - i), n - i);
    return v16_fold(acc);
}

static float simd_max(const float *x, size_t n)
{
    float lane[16];
    v16 max = v16_set1(-INFINITY);
    for (size_t i = 0; i < n; i += 16) {
        v16 v = ld(x + i, n - i), m = v16_lt(max, v, v, max);
        max = n - i >= 16 ? m : v16_keep(n - i, m, max);
    }
    v16_store(lane, max);
    for (int i = 1; i < 16; i++)
        lane[0] = lane[0] < lane[i] ? lane[i] : lane[0];
    return lane[0];
}

static bool simd_all_finite(const float *x, size_t n)
{
    v16 zero = v16_set1(0), one = v16_set1(1), bad = zero;
    v16 abs_mask = bits16(0x7fffffffu), inf = v16_set1(INFINITY);
    for (size_t i = 0; i < n; i += 16) /* a NaN is not below infinity either */
        bad = v16_or(bad, v16_lt(v16_and(ld(x + i, n - i), abs_mask), inf, zero, one));
    return v16_fold(bad) == 0;
}

/* ---- one-input functions: the operations of ref.c, lane by lane ------------------------------ */

INLINE v16 exp16(v16 x)
{
    v16 min = v16_set1(EXP_MIN), max = v16_set1(EXP_MAX), magic = v16_set1(ROUND_MAGIC);
    v16 bias = bits16(127), one = v16_set1(1);
    x = v16_lt(max, x, max, x);
    x = v16_lt(x, min, min, x);
    v16 t = v16_fma(x, v16_set1(LOG2_E), magic);
    v16 k = v16_sub(t, magic);
    v16 hi = v16_fma(k, v16_set1(-LN2_HI), x), lo = v16_mul(k, v16_set1(-LN2_LO));
    v16 r = v16_add(hi, lo);
    v16 q = v16_fma(r, v16_set1(E6), v16_set1(E5));
    q = v16_fma(r, q, v16_set1(E4));
    q = v16_fma(r, q, v16_set1(E3));
    q = v16_fma(r, q, v16_set1(E2));
    v16 one_hi = v16_add(one, hi), rest = v16_sub(hi, v16_sub(one_hi, one));
    v16 p = v16_add(one_hi, v16_add(rest, v16_fma(v16_mul(r, r), q, lo)));
    v16 i = v16_isub(t, magic), half = v16_sar1(i);
    v16 scaled = v16_mul(p, v16_shl23(v16_iadd(half, bias)));
    return v16_mul(scaled, v16_shl23(v16_iadd(v16_isub(i, half), bias)));
}

INLINE v16 tanh16(v16 x)
{
    v16 one = v16_set1(1), two = v16_set1(2);
    v16 a = v16_and(x, bits16(0x7fffffffu)), sign = v16_and(x, bits16(0x80000000u));
    v16 u = v16_mul(a, a);
    v16 p = v16_fma(u, v16_set1(T11), v16_set1(T9));
    p = v16_fma(u, p, v16_set1(T7));
    p = v16_fma(u, p, v16_set1(T5));
    p = v16_fma(u, p, v16_set1(T3));
    v16 small = v16_fma(v16_mul(a, u), p, a);
    v16 large = v16_sub(one, v16_div(two, v16_add(exp16(v16_add(a, a)), one)));
    return v16_or(v16_lt(a, v16_set1(TANH_SMALL), small, large), sign);
}

INLINE v16 sigmoid16(v16 x)
{
    v16 one = v16_set1(1);
    v16 e = exp16(v16_or(x, bits16(0x80000000u)));
    return v16_div(v16_lt(x, v16_set1(0), e, one), v16_add(one, e));
}

/* ---- element by element: `body` gives the new vector at i, of which `left` elements count ------ */

#define EACH(n, y, body)                                                                           \
    for (size_t i = 0; i < (n); i += 16) {                                                         \
        const size_t left = (n)-i;                                                                 \
        st((y) + i, (body), left);                                                                 \
    }

static void simd_add(float *y, const float *a, const float *b, size_t n)
{
    EACH(n, y, v16_add(ld(a + i, left), ld(b + i, left)))
}

static void simd_mul(float *y, const float *a, const float *b, size_t n)
{
    EACH(n, y, v16_mul(ld(a + i, left), ld(b + i, left)))
}

static void simd_scale(float *y, const float *a, float s, size_t n)
{
    EACH(n, y, v16_mul(ld(a + i, left), v16_set1(s)))
}

static void simd_widen_bf16(float *restrict y, const void *restrict w, size_t n)
{
    EACH(n, y, ld_bf16((const uint8_t *)w + 2 * i, left))
}

static void simd_exp(float *y, const float *x, size_t n) { EACH(n, y, exp16(ld(x + i, left))) }
static void simd_tanh(float *y, const float *x, size_t n) { EACH(n, y, tanh16(ld(x + i, left))) }
static void simd_sigmoid(float *y, const float *x, size_t n)
{
    EACH(n, y, sigmoid16(ld(x + i, left)))
}

static float simd_exp_sum(float *y, const float *x, float max, size_t n)
{
    v16 sum = v16_set1(0);
    for (size_t i = 0; i < n; i += 16) {
        v16 e = exp16(v16_sub(ld(x + i, n - i), v16_set1(max)));
        st(y + i, e, n - i);
        sum = add_left(sum, e, n - i);
    }
    return v16_fold(sum);
}

static void simd_rms_norm(float *y, const float *x, const float *w, float eps, size_t n)
{
    v16 r = v16_set1(1 / sqrtf(simd_dot(x, x, n) / (float)n + eps));
    if (w) {
        EACH(n, y, v16_mul(v16_mul(ld(x + i, left), r), ld(w + i, left)))
    } else {
        EACH(n, y, v16_mul(ld(x + i, left), r))
    }
}

static void simd_l2_norm(float *y, const float *x, float eps, float scale, size_t n)
{
    v16 r = v16_set1(1 / sqrtf(simd_dot(x, x, n) + eps)), s = v16_set1(scale);
    EACH(n, y, v16_mul(v16_mul(ld(x + i, left), r), s))
}

static void simd_situ_glu(float *y, const float *g, const float *u, float beta, float linear_beta, size_t n)
{
    v16 b = v16_set1(beta), lb = v16_set1(linear_beta);
    for (size_t i = 0; i < n; i += 16) {
        v16 gate = ld(g + i, n - i), up = ld(u + i, n - i);
        gate = v16_mul(v16_mul(b, tanh16(v16_div(gate, b))), sigmoid16(gate));
        up = v16_mul(lb, tanh16(v16_div(up, lb)));
        st(y + i, v16_mul(gate, up), n - i);
    }
}

static void simd_sigmoid_mul(float *y, const float *g, const float *x, size_t n)
{
    EACH(n, y, v16_mul(ld(g + i, left), sigmoid16(ld(x + i, left))))
}

static void simd_kda_decay(float *alpha, const float *z, const float *dt_bias, float exp_a,
                           float lower_bound, size_t n)
{
    v16 a = v16_set1(exp_a), lb = v16_set1(lower_bound);
    for (size_t i = 0; i < n; i += 16) {
        v16 gate = sigmoid16(v16_mul(a, v16_add(ld(z + i, n - i), ld(dt_bias + i, n - i))));
        st(alpha + i, exp16(v16_mul(lb, gate)), n - i);
    }
}

/* ---- convolution and recurrence ------------------------------------------------------------ */

static void simd_conv_silu(float *restrict y, float *restrict past, const float *restrict x,
                           const float *restrict w, size_t taps, size_t n)
{
    float tap[8][16] = { { 0 } }; /* w of 16 channels, transposed */
    for (size_t j = 0; j < n; j += 16) {
        size_t left = n - j, channels = left < 16 ? left : 16;
        v16 c = v16_set1(0), now = ld(x + j, left);
        for (size_t ch = 0; ch < channels; ch++)
            for (size_t i = 0; i < taps; i++)
                tap[i][ch] = w[(j + ch) * taps + i];
        for (size_t i = 0; i + 1 < taps; i++) {
            float *p = past + i * n + j;
            c = v16_fma(v16_load(tap[i]), ld(p, left), c);
            st(p, i + 2 < taps ? ld(p + n, left) : now, left);
        }
        c = v16_fma(v16_load(tap[taps - 1]), now, c);
        st(y + j, v16_mul(c, sigmoid16(c)), left);
    }
}

/* One value row of the state, kept in registers: dk = 16 * blocks. */
INLINE float kda_row(float *row, const float *q, const float *k, const float *alpha, float v,
                     float beta, const size_t blocks)
{
    v16 s[8], acc = v16_set1(0);
    UNROLL for (size_t b = 0; b < blocks; b++) {
        s[b] = v16_mul(v16_load(row + 16 * b), v16_load(alpha + 16 * b));
        acc = v16_fma(s[b], v16_load(k + 16 * b), acc);
    }
    v16 d = v16_set1(beta * (v - v16_fold(acc)));
    acc = v16_set1(0);
    UNROLL for (size_t b = 0; b < blocks; b++) {
        s[b] = v16_fma(v16_load(k + 16 * b), d, s[b]);
        v16_store(row + 16 * b, s[b]);
        acc = v16_fma(s[b], v16_load(q + 16 * b), acc);
    }
    return v16_fold(acc);
}

static void simd_kda_step(float *restrict out, float *restrict state, const float *restrict q,
                          const float *restrict k, const float *restrict v,
                          const float *restrict alpha, float beta, size_t dk, size_t dv)
{
    for (size_t j = 0; j < dv; j++) {
        float *row = state + j * dk;
        if (dk == 128) {
            out[j] = kda_row(row, q, k, alpha, v[j], beta, 8);
            continue;
        }
        EACH(dk, row, v16_mul(ld(row + i, left), ld(alpha + i, left)))
        v16 d = v16_set1(beta * (v[j] - simd_dot(row, k, dk)));
        EACH(dk, row, v16_fma(ld(k + i, left), d, ld(row + i, left)))
        out[j] = simd_dot(row, q, dk);
    }
}

/* ---- sums over rows ------------------------------------------------------------------------ */

/* 16 * blocks columns (the last 16 with `left` remaining), in registers over all rows. */
INLINE void sum_block(float *acc, const float *a, const uint8_t *rows, size_t stride, size_t count,
                      const bool bf16, const size_t blocks, size_t left)
{
    v16 s[SUM_BLOCKS];
    const size_t step = bf16 ? 32 : 64;
    UNROLL for (size_t b = 0; b < blocks; b++)
        s[b] = ld(acc + 16 * b, left);
    for (size_t i = 0; i < count; i++) {
        const uint8_t *row = rows + i * stride;
        v16 ai = v16_set1(a[i]);
        UNROLL for (size_t b = 0; b < blocks; b++) {
            v16 v = bf16 ? ld_bf16(row + step * b, left)
                         : ld((const float *)(const void *)(row + step * b), left);
            s[b] = v16_fma(ai, v, s[b]);
        }
    }
    UNROLL for (size_t b = 0; b < blocks; b++)
        st(acc + 16 * b, s[b], left);
}

INLINE void sum_rows(float *acc, const float *a, const void *rows, size_t stride, size_t count,
                     const bool bf16, size_t n)
{
    const uint8_t *p = rows;
    size_t j = 0, size = bf16 ? 2 : 4;
    for (; n - j >= 16 * SUM_BLOCKS; j += 16 * SUM_BLOCKS)
        sum_block(acc + j, a, p + j * size, stride, count, bf16, SUM_BLOCKS, 16);
    for (; j < n; j += 16)
        sum_block(acc + j, a, p + j * size, stride, count, bf16, 1, n - j);
}

static void simd_row_sum(float *restrict acc, const float *restrict a, const float *restrict rows,
                         size_t ld_rows, size_t count, size_t n)
{
    sum_rows(acc, a, rows, 4 * ld_rows, count, false, n);
}

static void simd_tmm_bf16(float *restrict y, const void *restrict w, const float *restrict x, size_t rows, size_t n)
{
    memset(y, 0, n * sizeof *y);
    sum_rows(y, x, w, 2 * n, rows, true, n);
}

/* ---- matrix times few tokens: weights go from memory to registers once ------------------------- */

typedef struct {
    const uint8_t *w, *scale; /* scale: MXFP4 only */
    size_t stride, n;         /* bytes from row to row; columns */
    unsigned bits;            /* of a weight */
} matrix;

/* Some rows of the matrix for up to MV_TOKENS tokens; y and x belong to the first row and token. */
typedef void mv_fn(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                   size_t rows, size_t tokens);

/* How far ahead of its use a weight is asked for: a whole block of rows, unless they would push each
 * other out of the L1 cache, then a few lines of the same row. */
INLINE size_t prefetch_ahead(const matrix *m, size_t rows)
{
    return rows * m->stride <= 16384 ? rows * m->stride : 2048;
}

INLINE v16 mv_load(const uint8_t *p, const unsigned bits)
{
    return bits == 16 ? v16_load_bf16(p) : v16_load((const float *)(const void *)p);
}

INLINE v16 mv_loadn(const uint8_t *p, const unsigned bits, size_t left)
{
    return bits == 16 ? ld_bf16(p, left) : ld((const float *)(const void *)p, left);
}

INLINE void mv_block(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                     const unsigned bits, const size_t rows, const size_t tokens)
{
    const size_t step = 2 * bits, n = m->n, ahead = prefetch_ahead(m, rows);
    const uint8_t *w = m->w + row * m->stride;
    v16 acc[MV_ROWS][MV_TOKENS];
    size_t i = 0;
    UNROLL for (size_t r = 0; r < rows; r++)
        UNROLL for (size_t t = 0; t < tokens; t++)
            acc[r][t] = v16_set1(0);
    for (; n - i >= 32; i += 32, w += 2 * step)
        UNROLL for (size_t r = 0; r < rows; r++) {
            const uint8_t *p = w + r * m->stride;
            const v16 w0 = mv_load(p, bits), w1 = mv_load(p + step, bits);
            __builtin_prefetch(p + ahead); /* a line of bf16; fp32's second line follows by itself */
            UNROLL for (size_t t = 0; t < tokens; t++) {
                acc[r][t] = v16_fma(w0, v16_load(x + t * ldx + i), acc[r][t]);
                acc[r][t] = v16_fma(w1, v16_load(x + t * ldx + i + 16), acc[r][t]);
            }
        }
    for (; i < n; i += 16, w += step)
        UNROLL for (size_t r = 0; r < rows; r++) {
            const v16 wi = mv_loadn(w + r * m->stride, bits, n - i);
            UNROLL for (size_t t = 0; t < tokens; t++)
                acc[r][t] = fma_left(wi, ld(x + t * ldx + i, n - i), acc[r][t], n - i);
        }
    UNROLL for (size_t r = 0; r < rows; r++)
        UNROLL for (size_t t = 0; t < tokens; t++)
            y[t * ldy + r] = v16_fold(acc[r][t]);
}

INLINE void mv_tokens(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                      size_t rows, const unsigned bits, const size_t tokens)
{
    const size_t block = tokens == 1 ? MV_ROWS : MX_ROWS;
    size_t r = 0;
    for (; rows - r >= block; r += block)
        mv_block(y + r, ldy, m, x, ldx, row + r, bits, block, tokens);
    for (; r < rows; r++)
        mv_block(y + r, ldy, m, x, ldx, row + r, bits, 1, tokens);
}

/* Calls fn(..., 1 to MV_TOKENS) with the number of tokens as a constant. */
#define BY_TOKENS(fn, ...)                                                                         \
    switch (tokens) {                                                                              \
    case 1: fn(__VA_ARGS__, 1); break;                                                             \
    case 2: fn(__VA_ARGS__, 2); break;                                                             \
    case 3: if (MV_TOKENS > 2) fn(__VA_ARGS__, MV_TOKENS > 2 ? 3 : 2); break;                      \
    case 4: if (MV_TOKENS > 2) fn(__VA_ARGS__, MV_TOKENS > 2 ? 4 : 2); break;                      \
    }

static void mv_bf16(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                    size_t rows, size_t tokens)
{
    BY_TOKENS(mv_tokens, y, ldy, m, x, ldx, row, rows, 16)
}

static void mv_f32(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                   size_t rows, size_t tokens)
{
    BY_TOKENS(mv_tokens, y, ldy, m, x, ldx, row, rows, 32)
}

/* MXFP4: x is brought into physical lanes once for MX_BATCH rows, a stretch of columns at a time; the
 * sums of these rows wait in `acc` between stretches. */
enum { MX_COLS = 4096, MX_BATCH = 64 };

INLINE void mx_block(v16 *acc, const matrix *m, const float *x, size_t row, size_t col, size_t cols,
                     const size_t rows, const size_t tokens)
{
    const size_t scales = m->n / 32;
    const uint8_t *w = m->w + row * m->stride + col / 2;
    const uint8_t *scale = m->scale + row * scales + col / 32;
    const uint8_t *next = w + rows * m->stride; /* a block ahead, in the order of addresses */
    v16 a[MX_ROWS][MV_TOKENS];
    UNROLL for (size_t r = 0; r < rows; r++)
        UNROLL for (size_t t = 0; t < tokens; t++)
            a[r][t] = acc[r * tokens + t];
    for (size_t i = 0; i < cols / 2; i += 16, scale++) {
        __builtin_prefetch(next + rows * i);
        UNROLL for (size_t r = 0; r < rows; r++) {
            const v16x2 wi = mxfp4_group(w + r * m->stride + i, &sl_mxfp4_lut[scale[r * scales]]);
            UNROLL for (size_t t = 0; t < tokens; t++) {
                a[r][t] = v16_fma(wi.half[0], v16_load(x + t * MX_COLS + 2 * i), a[r][t]);
                a[r][t] = v16_fma(wi.half[1], v16_load(x + t * MX_COLS + 2 * i + 16), a[r][t]);
            }
        }
    }
    UNROLL for (size_t r = 0; r < rows; r++)
        UNROLL for (size_t t = 0; t < tokens; t++)
            acc[r * tokens + t] = a[r][t];
}

INLINE void mx_tokens(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                      size_t rows, const size_t tokens)
{
    float xp[MV_TOKENS * MX_COLS] __attribute__((aligned(64)));
    v16 acc[MX_BATCH * MV_TOKENS];
    for (size_t r0 = 0; r0 < rows; r0 += MX_BATCH) {
        const size_t nr = rows - r0 < MX_BATCH ? rows - r0 : MX_BATCH;
        for (size_t i = 0; i < nr * tokens; i++)
            acc[i] = v16_set1(0);
        for (size_t col = 0; col < m->n; col += MX_COLS) {
            const size_t cols = m->n - col < MX_COLS ? m->n - col : MX_COLS;
            size_t r = 0;
            for (size_t t = 0; t < tokens; t++)
                for (size_t i = 0; i < cols; i += 16)
                    v16_store(xp + t * MX_COLS + i, v16_physical(v16_load(x + t * ldx + col + i)));
            for (; nr - r >= MX_ROWS; r += MX_ROWS)
                mx_block(acc + r * tokens, m, xp, row + r0 + r, col, cols, MX_ROWS, tokens);
            for (; r < nr; r++)
                mx_block(acc + r * tokens, m, xp, row + r0 + r, col, cols, 1, tokens);
        }
        for (size_t r = 0; r < nr; r++)
            for (size_t t = 0; t < tokens; t++)
                y[t * ldy + r0 + r] = v16_fold(v16_logical(acc[r * tokens + t]));
    }
}

static void mv_mxfp4(float *y, size_t ldy, const matrix *m, const float *x, size_t ldx, size_t row,
                     size_t rows, size_t tokens)
{
    BY_TOKENS(mx_tokens, y, ldy, m, x, ldx, row, rows)
}

/* ---- matrix times several tokens ----------------------------------------------------------- *
 * Weights are widened once per batch of tokens, a panel of rows x columns at a time that fits the L1
 * cache beside the lanes and a tile's inputs (16, 18 and 12 KB of 48); tiles of TILE_ROWS x TILE_TOKENS
 * outputs, each with its own 16 lanes, run over the panel. Lanes wait in `acc` between panels: to store
 * and reload them changes no bit. */

enum { PANEL_ROWS = 8, PANEL_COLS = 512, BATCH = 36 };

/* Writes columns [col, col + cols) of a row; col is a multiple of PANEL_COLS. */
typedef void widen_fn(float *panel, const matrix *m, size_t row, size_t col, size_t cols);

static void widen_f32(float *panel, const matrix *m, size_t row, size_t col, size_t cols)
{
    memcpy(panel, m->w + row * m->stride + 4 * col, 4 * cols);
}

static void widen_bf16(float *panel, const matrix *m, size_t row, size_t col, size_t cols)
{
    simd_widen_bf16(panel, m->w + row * m->stride + 2 * col, cols);
}

static void widen_mxfp4(float *panel, const matrix *m, size_t row, size_t col, size_t cols)
{
    const uint8_t *p = m->w + row * m->stride + col / 2;
    const uint8_t *scale = m->scale + (row * m->n + col) / 32;
    for (size_t g = 0; g < cols / 32; g++) {
        const v16x2 wi = mxfp4_group(p + 16 * g, &sl_mxfp4_lut[scale[g]]);
        v16_store(panel + 32 * g, v16_logical(wi.half[0]));
        v16_store(panel + 32 * g + 16, v16_logical(wi.half[1]));
    }
}

INLINE void tile_of(float *acc, const float *panel, size_t ldp, const float *x, size_t ldx,
                    size_t cols, const size_t tokens)
{
    v16 a[TILE_TOKENS][TILE_ROWS], w[TILE_ROWS];
    size_t i = 0;
    UNROLL for (size_t t = 0; t < tokens; t++)
        UNROLL for (size_t r = 0; r < TILE_ROWS; r++)
            a[t][r] = v16_load(acc + 16 * (t * PANEL_ROWS + r));
    for (; cols - i >= 16; i += 16) {
        UNROLL for (size_t r = 0; r < TILE_ROWS; r++)
            w[r] = v16_load(panel + r * ldp + i);
        UNROLL for (size_t t = 0; t < tokens; t++) {
            v16 xt = v16_load(x + t * ldx + i);
            UNROLL for (size_t r = 0; r < TILE_ROWS; r++)
                a[t][r] = v16_fma(w[r], xt, a[t][r]);
        }
    }
    if (i < cols)
        UNROLL for (size_t t = 0; t < tokens; t++) {
            v16 xt = v16_loadn(x + t * ldx + i, cols - i);
            UNROLL for (size_t r = 0; r < TILE_ROWS; r++)
                a[t][r] = fma_left(v16_loadn(panel + r * ldp + i, cols - i), xt, a[t][r], cols - i);
        }
    UNROLL for (size_t t = 0; t < tokens; t++)
        UNROLL for (size_t r = 0; r < TILE_ROWS; r++)
            v16_store(acc + 16 * (t * PANEL_ROWS + r), a[t][r]);
}

static void tile(float *acc, const float *panel, size_t ldp, const float *x, size_t ldx, size_t cols, size_t tokens)
{
    switch (tokens) {
#if TILE_TOKENS >= 6
    case 6: tile_of(acc, panel, ldp, x, ldx, cols, 6); break;
    case 5: tile_of(acc, panel, ldp, x, ldx, cols, 5); break;
    case 4: tile_of(acc, panel, ldp, x, ldx, cols, 4); break;
#endif
    case 3: tile_of(acc, panel, ldp, x, ldx, cols, 3); break;
    case 2: tile_of(acc, panel, ldp, x, ldx, cols, 2); break;
    default: tile_of(acc, panel, ldp, x, ldx, cols, 1); break;
    }
}

/* Asks for the panel that follows: the next columns of these rows, or the first of the next rows. */
static void prefetch_panel(const matrix *m, size_t row, size_t rows, size_t col)
{
    const size_t bytes = PANEL_COLS * m->bits / 8;
    const uint8_t *p =
        col < m->n ? m->w + row * m->stride + col * m->bits / 8 : m->w + (row + rows) * m->stride;
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < bytes; i += 64)
            __builtin_prefetch(p + r * m->stride + i, 0, 2);
}

static void mm_tokens(float *y, size_t ldy, const matrix *m, widen_fn *widen, const float *x,
                      size_t ldx, size_t rows, size_t tokens)
{
    float panel[PANEL_ROWS * PANEL_COLS] __attribute__((aligned(64)));
    float acc[BATCH * PANEL_ROWS * 16] __attribute__((aligned(64)));
    if (rows % TILE_ROWS) /* the rows that complete the last tile: computed, not stored */
        memset(panel, 0, sizeof panel);
    for (size_t t0 = 0; t0 < tokens; t0 += BATCH) {
        const size_t nt = tokens - t0 < BATCH ? tokens - t0 : BATCH;
        for (size_t r0 = 0; r0 < rows; r0 += PANEL_ROWS) {
            const size_t nr = rows - r0 < PANEL_ROWS ? rows - r0 : PANEL_ROWS;
            memset(acc, 0, (nt + 1) / 2 * 2 * PANEL_ROWS * 16 * sizeof *acc);
            for (size_t col = 0; col < m->n; col += PANEL_COLS) {
                const size_t cols = m->n - col < PANEL_COLS ? m->n - col : PANEL_COLS;
                const float *w = panel;
                size_t ldp = PANEL_COLS;
                if (m->bits == 32 && nr % TILE_ROWS == 0) { /* fp32 rows serve as they lie */
                    w = (const float *)(const void *)(m->w + r0 * m->stride) + col;
                    ldp = m->stride / sizeof *w;
                } else {
                    for (size_t r = 0; r < nr; r++)
                        widen(panel + r * PANEL_COLS, m, r0 + r, col, cols);
                }
                prefetch_panel(m, r0, nr, col + cols);
                for (size_t t = 0; t < nt; t += TILE_TOKENS)
                    for (size_t r = 0; r < nr; r += TILE_ROWS)
                        tile(acc + 16 * (t * PANEL_ROWS + r), w + r * ldp, ldp,
                             x + (t0 + t) * ldx + col, ldx, cols,
                             nt - t < TILE_TOKENS ? nt - t : TILE_TOKENS);
            }
            for (size_t t = 0; t < nt; t += 2) { /* two tokens of eight rows are sixteen outputs */
                float sums[2 * PANEL_ROWS];
                fold16(sums, acc + 16 * t * PANEL_ROWS);
                for (size_t i = t; i < t + 2 && i < nt; i++)
                    memcpy(y + (t0 + i) * ldy + r0, sums + (i - t) * PANEL_ROWS, nr * sizeof *y);
            }
        }
    }
}

/* Few tokens take the direct way: all at once, or bf16, which is cheap to widen again, in two turns over
 * rows that are still in the cache. */
INLINE void mm(float *y, size_t ldy, const matrix *m, mv_fn *few, widen_fn *widen, const float *x,
               size_t ldx, size_t rows, size_t tokens)
{
    const size_t turns = tokens > MV_TOKENS && m->bits == 16 ? 2 : 1,
                 turn = (tokens + turns - 1) / turns;
    const size_t step = turns == 1 ? rows : 32;
    if (turn > MV_TOKENS) {
        mm_tokens(y, ldy, m, widen, x, ldx, rows, tokens);
        return;
    }
    for (size_t r = 0; r < rows; r += step)
        for (size_t t = 0; t < tokens; t += turn)
            few(y + t * ldy + r, ldy, m, x + t * ldx, ldx, r, rows - r < step ? rows - r : step,
                tokens - t < turn ? tokens - t : turn);
}

static void simd_mm_bf16(float *restrict y, size_t ldy, const void *restrict w,
                         const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens)
{
    const matrix m = { .w = w, .stride = 2 * n, .n = n, .bits = 16 };
    mm(y, ldy, &m, mv_bf16, widen_bf16, x, ldx, rows, tokens);
}

static void simd_mm_f32(float *restrict y, size_t ldy, const float *restrict w, size_t ldw,
                        const float *restrict x, size_t ldx, size_t rows, size_t n, size_t tokens)
{
    const matrix m = { .w = (const void *)w, .stride = 4 * ldw, .n = n, .bits = 32 };
    mm(y, ldy, &m, mv_f32, widen_f32, x, ldx, rows, tokens);
}

static void simd_mm_mxfp4(float *restrict y, size_t ldy, const uint8_t *restrict packed,
                          const uint8_t *restrict scale, const float *restrict x, size_t ldx,
                          size_t rows, size_t n, size_t tokens)
{
    const matrix m = { .w = packed, .scale = scale, .stride = n / 2, .n = n, .bits = 4 };
    mm(y, ldy, &m, mv_mxfp4, widen_mxfp4, x, ldx, rows, tokens);
}

#define SIMD_TABLE(set)                                                                            \
    {                                                                                              \
        .name = (set), .mm_bf16 = simd_mm_bf16, .mm_f32 = simd_mm_f32, .mm_mxfp4 = simd_mm_mxfp4,  \
        .tmm_bf16 = simd_tmm_bf16, .row_sum = simd_row_sum, .dot = simd_dot, .sum = simd_sum,      \
        .max = simd_max, .add = simd_add, .mul = simd_mul, .scale = simd_scale,                    \
        .widen_bf16 = simd_widen_bf16, .exp = simd_exp, .tanh = simd_tanh,                         \
        .sigmoid = simd_sigmoid, .exp_sum = simd_exp_sum, .rms_norm = simd_rms_norm,               \
        .l2_norm = simd_l2_norm, .situ_glu = simd_situ_glu, .sigmoid_mul = simd_sigmoid_mul,       \
        .conv_silu = simd_conv_silu, .kda_decay = simd_kda_decay, .kda_step = simd_kda_step,       \
        .all_finite = simd_all_finite, .mm_packed = sl_ref_mm_packed,                              \
        .unpack_bf16 = sl_ref_unpack_bf16, .crc32c = sl_ref_crc32c,                                \
    }
