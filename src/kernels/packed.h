/* kernels/packed.h - where things lie in a packed block of bf16 weights: docs/formats.md has the format,
 * store/codec.h makes and checks blocks. */
#ifndef SL_KERNELS_PACKED_H
#define SL_KERNELS_PACKED_H

#include "base/num.h"

enum {
    SL_PACKED_HEADER = 16,
    SL_PACKED_GROUP = 64,     /* weights of a group */
    SL_PACKED_BYTES = 88,     /* its bytes: sign and mantissa of each weight, then three planes of code bits */
    SL_PACKED_PLANES = 64,    /* where the planes begin in it */
    SL_PACKED_DICTIONARY = 7, /* exponents that have a code; the next code is the exception's */
    SL_PACKED_ALIGN = 64
};

static inline uint64_t sl_packed_row_bytes(uint64_t n)
{
    return (n + SL_PACKED_GROUP - 1) / SL_PACKED_GROUP * SL_PACKED_BYTES;
}

static inline uint32_t sl_packed_exceptions(const uint8_t *block) { return sl_le32(block + 8); }

/* Where the first group of row 0 lies. */
static inline uint64_t sl_packed_groups_at(uint64_t rows, uint64_t exceptions)
{
    return sl_round_up(SL_PACKED_HEADER + 4 * rows + exceptions, SL_PACKED_ALIGN);
}

/* Exceptions before `row`. */
static inline uint32_t sl_packed_row_at(const uint8_t *block, size_t row)
{
    return sl_le32(block + SL_PACKED_HEADER + 4 * row);
}

/* The exceptions of `row` and of those after it. */
static inline const uint8_t *sl_packed_row_exceptions(const uint8_t *block, size_t rows, size_t row)
{
    return block + SL_PACKED_HEADER + 4 * rows + sl_packed_row_at(block, row);
}

#endif
