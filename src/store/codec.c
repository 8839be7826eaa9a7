/* store/codec.c - packs bf16 weights into blocks and checks blocks; src/kernels computes with them. */
#include "store/codec.h"

#include "kernels/packed.h"

enum { GROUP = SL_PACKED_GROUP, EXCEPTION = SL_PACKED_DICTIONARY };

static void put32(uint8_t *p, uint32_t v)
{
    for (int i = 0; i < 4; i++)
        p[i] = (uint8_t)(v >> 8 * i);
}

static unsigned exponent(const uint8_t *w) { return (w[1] & 0x7fu) << 1 | w[0] >> 7; }

/* Bytes of a block, or 0 when no block has that shape. */
static uint64_t block_bytes(uint32_t rows, uint64_t n, uint64_t exceptions)
{
    uint64_t weights, groups, bytes;
    if (!rows || !n || n > UINT32_MAX || !sl_mul_u64(rows, n, &weights) || exceptions > weights ||
        !sl_mul_u64(rows, sl_packed_row_bytes(n), &groups) ||
        !sl_add_u64(sl_packed_groups_at(rows, exceptions), groups, &bytes))
        return 0;
    return bytes;
}

uint64_t sl_codec_bound(uint32_t rows, uint64_t n) { return block_bytes(rows, n, rows * n); }

/* Fills the dictionary, commonest first and of equals the smallest; returns the exceptions. */
static uint32_t choose(uint8_t dictionary[8], const uint8_t *w, uint64_t weights)
{
    uint64_t count[4][256] = { { 0 } }, left = weights; /* four: neighbours often have the same exponent */
    for (uint64_t i = 0; i < weights; i++)
        count[i % 4][exponent(w + 2 * i)]++;
    for (int e = 0; e < 256; e++)
        count[0][e] += count[1][e] + count[2][e] + count[3][e];
    memset(dictionary, 0, 8);
    for (int k = 0; k < SL_PACKED_DICTIONARY; k++) {
        int best = 0;
        for (int e = 1; e < 256; e++)
            best = count[0][e] > count[0][best] ? e : best;
        if (!count[0][best])
            break;
        dictionary[k] = (uint8_t)best;
        left -= count[0][best];
        count[0][best] = 0;
    }
    return (uint32_t)left;
}

/* Packs `left` weights, at most a group, and appends to the exceptions. */
static uint8_t *encode_group(uint8_t *out, const uint8_t *w, unsigned left, const uint8_t code_of[256],
                             uint8_t *exception)
{
    uint8_t code[GROUP] = { 0 };
    memset(out, 0, SL_PACKED_BYTES);
    for (unsigned i = 0; i < left; i++) {
        const unsigned e = exponent(w + 2 * i);
        out[i] = (uint8_t)((w[2 * i + 1] & 0x80) | (w[2 * i] & 0x7f));
        code[i] = code_of[e];
        if (code[i] == EXCEPTION)
            *exception++ = (uint8_t)e;
    }
    for (unsigned i = 0; i < GROUP; i += 8) {
        const uint64_t codes = sl_le64(code + i);
        for (unsigned p = 0; p < 3; p++) /* the multiplication gathers bit 0 of each byte in the highest byte */
            out[SL_PACKED_PLANES + 8 * p + i / 8] =
                (uint8_t)((codes >> p & 0x0101010101010101u) * 0x0102040810204080u >> 56);
    }
    return exception;
}

uint64_t sl_codec_encode(uint8_t *out, const void *bf16, uint32_t rows, uint64_t n)
{
    const uint8_t *w = bf16;
    uint8_t code_of[256];
    const uint32_t exceptions = choose(out, w, rows * n);
    uint8_t *const first = out + SL_PACKED_HEADER + 4 * (uint64_t)rows, *exception = first;
    uint8_t *group = out + sl_packed_groups_at(rows, exceptions);
    memset(code_of, EXCEPTION, sizeof code_of);
    for (int k = SL_PACKED_DICTIONARY; k--;)
        code_of[out[k]] = (uint8_t)k; /* unused entries are 0, as a used one may be: the first one stays */
    put32(out + 8, exceptions);
    put32(out + 12, 0);
    memset(first + exceptions, 0, (size_t)(group - first) - exceptions);
    for (uint32_t r = 0; r < rows; r++) {
        put32(out + SL_PACKED_HEADER + 4 * (uint64_t)r, (uint32_t)(exception - first));
        for (uint64_t i = 0; i < n; i += GROUP, group += SL_PACKED_BYTES)
            exception =
                encode_group(group, w + 2 * (r * n + i), n - i < GROUP ? (unsigned)(n - i) : GROUP, code_of, exception);
    }
    return (uint64_t)(group - out);
}

/* Exceptions of a row, and whether the weights that fill its last group have code 0. Bits are counted in the bytes of
 * a word, for a machine may lack an instruction for it; after 31 groups a byte could overflow. */
static bool check_row(const uint8_t *row, uint64_t n, uint64_t exceptions)
{
    const uint64_t fives = 0x5555555555555555u, threes = 0x3333333333333333u, nibbles = 0x0f0f0f0f0f0f0f0fu;
    const uint64_t groups = (n + GROUP - 1) / GROUP;
    uint64_t found = 0, unused = n % GROUP ? ~(uint64_t)0 << n % GROUP : 0;
    const uint8_t *last = row + (groups - 1) * SL_PACKED_BYTES + SL_PACKED_PLANES;
    for (uint64_t g = 0; g < groups;) {
        uint64_t sum = 0;
        for (const uint64_t end = sl_min_u64(groups, g + 31); g < end; g++) {
            const uint8_t *planes = row + g * SL_PACKED_BYTES + SL_PACKED_PLANES;
            uint64_t v = sl_le64(planes) & sl_le64(planes + 8) & sl_le64(planes + 16);
            v -= v >> 1 & fives;
            v = (v & threes) + (v >> 2 & threes);
            sum += (v + (v >> 4)) & nibbles;
        }
        sum = (sum & 0x00ff00ff00ff00ffu) + (sum >> 8 & 0x00ff00ff00ff00ffu);
        found += sum * 0x0001000100010001u >> 48;
    }
    return found == exceptions && !((sl_le64(last) | sl_le64(last + 8) | sl_le64(last + 16)) & unused);
}

bool sl_codec_check_rows(const uint8_t *block, uint64_t bytes, uint32_t rows, uint64_t n, uint32_t first_row,
                         uint32_t count)
{
    if (bytes < SL_PACKED_HEADER || first_row > rows || count > rows - first_row)
        return false;
    const uint32_t exceptions = sl_packed_exceptions(block);
    if (bytes != block_bytes(rows, n, exceptions) || block[SL_PACKED_DICTIONARY] || sl_le32(block + 12) ||
        sl_packed_row_at(block, 0))
        return false;
    const uint8_t *row = block + sl_packed_groups_at(rows, exceptions) + first_row * sl_packed_row_bytes(n);
    for (uint32_t r = first_row; r < first_row + count; r++, row += sl_packed_row_bytes(n)) {
        const uint32_t at = sl_packed_row_at(block, r),
                       next = r + 1 < rows ? sl_packed_row_at(block, r + 1) : exceptions;
        if (at > next || next > exceptions || !check_row(row, n, next - at))
            return false;
    }
    return true;
}

bool sl_codec_check(const uint8_t *block, uint64_t bytes, uint32_t rows, uint64_t n)
{
    return sl_codec_check_rows(block, bytes, rows, n, 0, rows);
}
