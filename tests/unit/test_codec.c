/* Packed blocks: every weight comes back, sizes are what the format says, and what is inconsistent is refused.
 * Usage: test_codec [seed]. */
#include <inttypes.h>
#include <math.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "kernels/packed.h"
#include "store/codec.h"
#include "tests/check.h"

static uint64_t seed, state;
static const sl_kernels *kernels;

static uint64_t rnd(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static void *get(uint64_t n)
{
    void *p = malloc(n);
    if (!p)
        exit(1);
    return p;
}

enum { GAUSSIAN, ANY, SEVEN, EIGHT, ZERO, KINDS };

static uint16_t value(int kind, uint64_t i)
{
    const uint64_t r = rnd();
    if (kind == GAUSSIAN) {
        const double u = ((double)(r >> 32) + 1) * 0x1p-32, v = (double)(r & 0xffffffff) * 0x1p-32;
        const float g = (float)(0.02 * sqrt(-2 * log(u)) * cos(6.283185307179586 * v));
        return (uint16_t)(sl_f32_bits(g) >> 16);
    }
    if (kind == ANY)
        return (uint16_t)i;
    if (kind == ZERO)
        return 0;
    return (uint16_t)((r & 0x807f) | (r >> 8) % (kind == SEVEN ? 7 : 8) << 7); /* exponent 0 among them */
}

static uint8_t *weights(int kind, uint64_t count)
{
    uint8_t *w = get(2 * count);
    for (uint64_t i = 0; i < count; i++) {
        const uint16_t v = value(kind, i);
        w[2 * i] = (uint8_t)v;
        w[2 * i + 1] = (uint8_t)(v >> 8);
    }
    return w;
}

/* A block of exactly its size, so that a sanitizer sees a byte read outside. */
static uint8_t *pack(const uint8_t *w, uint32_t rows, uint64_t n, uint64_t *bytes)
{
    uint8_t *room = get(sl_codec_bound(rows, n));
    memset(room, 0xa5, sl_codec_bound(rows, n));
    *bytes = sl_codec_encode(room, w, rows, n);
    CHECK(*bytes <= sl_codec_bound(rows, n));
    uint8_t *block = get(*bytes);
    memcpy(block, room, *bytes);
    free(room);
    return block;
}

static void round_trip(int kind, uint32_t rows, uint64_t n)
{
    uint64_t bytes;
    uint8_t *w = weights(kind, rows * n), *block = pack(w, rows, n, &bytes), *back = get(2 * rows * n);
    const uint64_t exceptions = sl_packed_exceptions(block);
    CHECK_MSG(sl_codec_check(block, bytes, rows, n), "kind %d, rows %u, n %" PRIu64 ", seed %" PRIu64, kind, rows, n,
              seed);
    CHECK_EQ(bytes, (16 + 4 * (uint64_t)rows + exceptions + 63) / 64 * 64 + rows * ((n + 63) / 64) * 88);
    CHECK((kind != SEVEN && kind != ZERO) || exceptions == 0);
    CHECK(kind != EIGHT || rows * n < 10000 || (exceptions > rows * n / 10 && exceptions <= rows * n / 8));
    kernels->unpack_bf16(back, block, 0, rows, rows, n);
    CHECK_MSG(!memcmp(back, w, 2 * rows * n), "kind %d, rows %u, n %" PRIu64 ", seed %" PRIu64, kind, rows, n, seed);
    for (int i = 0; i < 3; i++) { /* some of the rows, and the checks of parts */
        const uint32_t first = (uint32_t)(rnd() % rows), count = (uint32_t)(1 + rnd() % (rows - first));
        memset(back, 0, 2 * rows * n);
        kernels->unpack_bf16(back, block, first, count, rows, n);
        CHECK(!memcmp(back, w + 2 * first * n, 2 * count * n));
        CHECK(sl_codec_check_rows(block, bytes, rows, n, first, count));
        CHECK(!sl_codec_check_rows(block, bytes, rows, n, first, rows - first + 1));
    }
    free(back);
    free(block);
    free(w);
}

/* No exponent is in the dictionary, the most that a block can hold; a dictionary is free to name other ones. */
static void all_exceptions(uint32_t rows, uint64_t n)
{
    const uint64_t bytes = sl_codec_bound(rows, n), row = (n + 63) / 64 * 88;
    uint8_t *block = get(bytes), *back = get(2 * rows * n);
    uint8_t *groups = block + bytes - rows * row;
    memset(block, 0, bytes);
    for (int i = 0; i < 4; i++)
        block[8 + i] = (uint8_t)(rows * n >> 8 * i);
    for (uint32_t r = 0; r < rows; r++) {
        for (int i = 0; i < 4; i++)
            block[16 + 4 * r + i] = (uint8_t)(r * n >> 8 * i);
        for (uint64_t i = 0; i < n; i++) {
            uint8_t *group = groups + r * row + i / 64 * 88;
            block[16 + 4 * rows + r * n + i] = (uint8_t)(r * n + i);
            group[i % 64] = (uint8_t)(3 * i);
            for (int p = 0; p < 3; p++)
                group[64 + 8 * p + i % 64 / 8] |= (uint8_t)(1 << i % 8);
        }
    }
    CHECK(sl_codec_check(block, bytes, rows, n));
    kernels->unpack_bf16(back, block, 0, rows, rows, n);
    for (uint64_t i = 0; i < rows * n; i++) {
        const unsigned sm = (uint8_t)(3 * (i % n)), want = (sm & 0x80) << 8 | (unsigned)(i & 0xff) << 7 | (sm & 0x7f);
        CHECK_EQ(back[2 * i] | back[2 * i + 1] << 8, want);
    }
    free(back);
    free(block);
}

static bool refused(uint8_t *block, uint64_t bytes, uint32_t rows, uint64_t n, uint64_t at, int flip)
{
    block[at] ^= (uint8_t)flip;
    const bool good = sl_codec_check(block, bytes, rows, n);
    block[at] ^= (uint8_t)flip;
    return !good;
}

static void corrupted(void)
{
    const uint32_t rows = 9;
    const uint64_t n = 200, row = 4 * 88;
    uint64_t bytes;
    uint8_t *w = weights(GAUSSIAN, rows * n), *block = pack(w, rows, n, &bytes);
    CHECK(sl_packed_exceptions(block) > 8);
    for (uint64_t at = 7; at < 16 + 4 * rows; at++) /* the dictionary's end, E, the zero, row_at */
        for (int bit = 1; bit < 256; bit *= 2)
            CHECK_MSG(refused(block, bytes, rows, n, at, bit), "byte %" PRIu64 ", bit %d", at, bit);
    for (uint32_t r = 0; r < rows; r++) {
        uint8_t *planes = block + bytes - (rows - r) * row + 3 * 88 + 64;
        for (unsigned i = 8; i < 64; i++) /* columns 200 to 255 are no weights */
            for (unsigned p = 0; p < 3; p++)
                CHECK(refused(block, bytes, rows, n, (uint64_t)(planes - block) + 8 * p + i / 8, 1 << i % 8));
    }
    for (uint64_t i = 0; i < rows * n; i++) { /* one exception more or less than the row has */
        const uint64_t at = bytes - (rows - i / n) * row + i % n / 64 * 88 + 64 + i % n % 64 / 8;
        int flips = 0;
        for (unsigned p = 0; p < 3; p++)
            flips += block[at + 8 * p] >> i % n % 8 & 1;
        for (unsigned p = 0; p < 3; p++)
            if (flips == 3 || (flips == 2 && !(block[at + 8 * p] >> i % n % 8 & 1)))
                CHECK(refused(block, bytes, rows, n, at + 8 * p, 1 << i % n % 8));
    }
    for (uint64_t less = 1; less <= bytes; less++) {
        uint8_t *shorter = get(bytes - less + !(bytes - less));
        memcpy(shorter, block, bytes - less);
        CHECK(!sl_codec_check(shorter, bytes - less, rows, n));
        free(shorter);
    }
    CHECK(!sl_codec_check(block, bytes + 1, rows, n) && !sl_codec_check(block, bytes, rows, n + 64));
    CHECK(!sl_codec_check(block, bytes, rows + 1, n) && !sl_codec_check(block, bytes, 0, n));
    CHECK(!sl_codec_check(block, bytes, rows, 0) && !sl_codec_check(block, bytes, rows, UINT64_MAX));
    CHECK(!sl_codec_check(block, bytes, UINT32_MAX, UINT32_MAX));
    CHECK(!sl_codec_check_rows(block, bytes, rows, n, UINT32_MAX, 2));
    free(block);
    free(w);
}

int main(int argc, char **argv)
{
    state = seed = argc > 1 ? strtoull(argv[1], NULL, 0) : 1;
    kernels = sl_kernels_for(0);
    for (int kind = 0; kind < KINDS; kind++) {
        static const uint64_t sizes[] = { 1, 2, 63, 64, 65, 127, 128, 129, 1000, 7168 };
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (uint32_t rows = 1; rows <= 18; rows += 1 + (uint32_t)(rnd() % 7))
                round_trip(kind, rows, sizes[i]);
        round_trip(kind, 16, 4096); /* of ANY: all 65,536 values */
        round_trip(kind, 1, 100000);
    }
    all_exceptions(3, 100);
    all_exceptions(1, 1);
    all_exceptions(5, 64 * 40);
    corrupted();
    CHECK_DONE();
}
