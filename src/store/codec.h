/* store/codec.h - bf16 weights without loss in 11 bits and a few: docs/formats.md describes a block.
 * The exponents of trained weights take few values. A block of whole rows keeps the seven commonest in a dictionary
 * and codes each weight's in three bits, beside its sign and mantissa as they are; the others' exponents follow in a
 * list of exceptions. Any bits come back, NaN and infinities included.
 * rows and n are from 1 up, and rows * n is below 2^32. */
#ifndef SL_STORE_CODEC_H
#define SL_STORE_CODEC_H

#include <stdbool.h>
#include <stdint.h>

/* The most bytes a block can have. */
uint64_t sl_codec_bound(uint32_t rows, uint64_t n);
/* Packs bf16 [rows][n], any alignment; `out` has room for the bound. Returns the bytes written, a multiple of 8 that is
 * a function of the weights alone. */
uint64_t sl_codec_encode(uint8_t *out, const void *bf16, uint32_t rows, uint64_t n);
/* Whether the kernels can work on the block without leaving it, and all of them the same. Says nothing about whether
 * these are the weights that were packed: that is for a checksum. Any bytes may be given. */
bool sl_codec_check(const uint8_t *block, uint64_t bytes, uint32_t rows, uint64_t n);
/* The same for the header and `count` rows from first_row: a block is good when each of its rows was in a call that
 * returned true. */
bool sl_codec_check_rows(const uint8_t *block, uint64_t bytes, uint32_t rows, uint64_t n, uint32_t first_row,
                         uint32_t count);

#endif
