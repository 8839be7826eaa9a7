/* kernels/ref_packed.c - the definition of the kernels on packed bf16 weights, in scalar C. */
#include <math.h>

#include "kernels/impl.h"
#include "kernels/packed.h"

/* bf16 weight i of a group; takes the next exception when its code says so. */
static uint16_t weight(const uint8_t *group, unsigned i, const uint8_t *dictionary, const uint8_t **exception)
{
    const uint8_t *planes = group + SL_PACKED_PLANES + i / 8;
    unsigned code = 0;
    for (unsigned p = 0; p < 3; p++)
        code |= (planes[8 * p] >> i % 8 & 1u) << p;
    const unsigned exponent = code < SL_PACKED_DICTIONARY ? dictionary[code] : *(*exception)++;
    return (uint16_t)((group[i] & 0x80u) << 8 | exponent << 7 | (group[i] & 0x7fu));
}

void sl_ref_unpack_bf16(void *restrict out, const uint8_t *restrict block, size_t first_row, size_t rows,
                        size_t block_rows, size_t n)
{
    uint8_t *to = out;
    const uint8_t *groups = block + sl_packed_groups_at(block_rows, sl_packed_exceptions(block));
    for (size_t r = first_row; r < first_row + rows; r++) {
        const uint8_t *row = groups + r * sl_packed_row_bytes(n);
        const uint8_t *exception = sl_packed_row_exceptions(block, block_rows, r);
        for (size_t i = 0; i < n; i++, to += 2) {
            const uint8_t *group = row + i / SL_PACKED_GROUP * SL_PACKED_BYTES;
            const uint16_t w = weight(group, i % SL_PACKED_GROUP, block, &exception);
            to[0] = (uint8_t)w;
            to[1] = (uint8_t)(w >> 8);
        }
    }
}

void sl_ref_mm_packed(float *restrict y, size_t ldy, const uint8_t *restrict block, size_t first_row, size_t rows,
                      size_t block_rows, const float *restrict x, size_t ldx, size_t n, size_t tokens)
{
    const uint8_t *groups = block + sl_packed_groups_at(block_rows, sl_packed_exceptions(block));
    for (size_t t = 0; t < tokens; t++)
        for (size_t r = 0; r < rows; r++) {
            const uint8_t *row = groups + (first_row + r) * sl_packed_row_bytes(n);
            const uint8_t *exception = sl_packed_row_exceptions(block, block_rows, first_row + r);
            float lane[SL_LANES] = { 0 };
            for (size_t i = 0; i < n; i++) {
                const uint8_t *group = row + i / SL_PACKED_GROUP * SL_PACKED_BYTES;
                const uint32_t w = weight(group, i % SL_PACKED_GROUP, block, &exception);
                lane[i % SL_LANES] = fmaf(sl_f32_from_bits(w << 16), x[t * ldx + i], lane[i % SL_LANES]);
            }
            y[t * ldy + r] = sl_ref_fold(lane);
        }
}
