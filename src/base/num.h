/* base/num.h - checked arithmetic and little-endian loads for numbers that come from files. */
#ifndef SL_BASE_NUM_H
#define SL_BASE_NUM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

static inline bool sl_add_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

static inline bool sl_mul_u64(uint64_t a, uint64_t b, uint64_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

static inline uint64_t sl_round_up(uint64_t n, uint64_t unit) /* unit: a power of two */
{
    return (n + unit - 1) & ~(unit - 1);
}

static inline uint64_t sl_round_down(uint64_t n, uint64_t unit)
{
    return n & ~(unit - 1);
}

static inline uint64_t sl_min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t sl_max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

static inline uint32_t sl_le32(const void *p)
{
    const uint8_t *b = p;
    return (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
}

static inline uint64_t sl_le64(const void *p)
{
    return sl_le32(p) | (uint64_t)sl_le32((const uint8_t *)p + 4) << 32;
}

/* The bf16 at p, any alignment, widened exactly. */
static inline float sl_bf16_load(const void *p)
{
    const uint8_t *b = p;
    uint32_t bits = (uint32_t)b[0] << 16 | (uint32_t)b[1] << 24;
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static inline uint32_t sl_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float sl_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline bool sl_f32_finite(float f) { return (sl_f32_bits(f) & 0x7f800000u) != 0x7f800000u; }

#endif
