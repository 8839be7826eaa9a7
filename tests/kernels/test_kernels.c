/* tests/kernels/test_kernels.c - every variant this machine can run returns the bits of scalar.
 *
 * Inputs end right before an unreadable page, outputs lie between canaries, weights at every byte
 * alignment. Values: ordinary, all exponents, and salted with zeros, subnormals, extremes, infinities
 * and NaN (any NaN equals any NaN). Usage: test_kernels [seed]. No libraries beyond libc. */
#include <inttypes.h>
#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "kernels/packed.h"
#include "tests/check.h"

enum { SLOTS = 8, SLOT = 8 << 20, OUT = 1 << 20, CANARY = 64 };
enum { ORDINARY, WIDE, SALTED, FINITE, KINDS };

static uint64_t seed, state;
static const sl_kernels *ref, *var;
static uint8_t *slot_end[SLOTS];
static float *out[2]; /* scalar's, the variant's; CANARY floats before and OUT + CANARY after */
static char what[128];

static uint64_t rnd(void)
{
    uint64_t z = state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, 4);
    return f;
}

static uint32_t bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}

static float value(int kind)
{
    static const uint32_t salt[] = { 0,           0x80000000u, 1,           0x80000001u,
                                     0x007fffffu, 0x00800000u, 0x7f7fffffu, 0xff7fffffu,
                                     0x7f800000u, 0xff800000u, 0x7fc00000u, 0x3f800000u };
    uint64_t r = rnd();
    if (kind == SALTED && r % 8 == 0)
        return from_bits(salt[(r >> 8) % (sizeof salt / sizeof salt[0])]);
    if (kind == WIDE || kind == FINITE) {
        uint32_t u = (uint32_t)(r >> 32);
        return (u & 0x7f800000u) == 0x7f800000u ? 1.0f : from_bits(u);
    }
    return (float)((double)(r >> 11) * 0x1p-52 - 1.0) * 4.0f;
}

/* n bytes that end `before` bytes ahead of an unreadable page. */
static void *edge(int slot, size_t n, size_t before) { return slot_end[slot] - n - before; }

static float *floats(int slot, size_t n, int kind)
{
    float *p = edge(slot, n * 4, 0);
    for (size_t i = 0; i < n; i++)
        p[i] = value(kind);
    return p;
}

static uint8_t *bf16s(int slot, size_t n, size_t before, int kind)
{
    uint8_t *p = edge(slot, n * 2, before);
    for (size_t i = 0; i < n; i++) {
        uint32_t u = bits(value(kind)) >> 16;
        p[2 * i] = (uint8_t)u;
        p[2 * i + 1] = (uint8_t)(u >> 8);
    }
    return p;
}

static bool same(float a, float b) { return bits(a) == bits(b) || (isnan(a) && isnan(b)); }

static void setup(void)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int i = 0; i < SLOTS; i++) {
        uint8_t *p =
            mmap(NULL, SLOT + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED || mprotect(p + SLOT, page, PROT_NONE)) {
            perror("mmap");
            exit(1);
        }
        slot_end[i] = p + SLOT;
    }
    for (int i = 0; i < 2; i++)
        if (!(out[i] = malloc((OUT + 2 * CANARY) * sizeof(float))))
            exit(1);
}

/* Both outputs start from the same n floats (init NULL: canaries), with canaries around them. */
static void prepare(const float *init, size_t n)
{
    for (int k = 0; k < 2; k++)
        for (size_t i = 0; i < n + 2 * CANARY; i++)
            out[k][i] =
                init && i >= CANARY && i < CANARY + n ? init[i - CANARY] : from_bits(0x5a5a5a5au);
}

static void compare(const char *name, size_t n)
{
    for (size_t i = 0; i < n + 2 * CANARY; i++)
        if (!same(out[0][i], out[1][i]) ||
            ((i < CANARY || i >= n + CANARY) && bits(out[1][i]) != 0x5a5a5a5au)) {
            CHECK_MSG(false, "%s %s, %s, seed %" PRIu64 ", index %td: %a, scalar %a", var->name,
                      name, what, seed, (ptrdiff_t)i - CANARY, (double)out[1][i],
                      (double)out[0][i]);
            return;
        }
}

/* Runs `call` with K one table and Y its output, for both tables, then compares n floats. */
#define BOTH(name, init, n, call)                                                                  \
    do {                                                                                           \
        prepare(init, n);                                                                          \
        for (int side = 0; side < 2; side++) {                                                     \
            const sl_kernels *K = side ? var : ref;                                                \
            float *Y = out[side] + CANARY;                                                         \
            call;                                                                                  \
        }                                                                                          \
        compare(name, n);                                                                          \
    } while (0)

static void vectors(size_t n, int kind)
{
    const float *a = floats(0, n, kind), *b = floats(1, n, kind), *c = floats(2, n, kind);
    snprintf(what, sizeof what, "n %zu, kind %d", n, kind);
    BOTH("dot", NULL, 1, Y[0] = K->dot(a, b, n));
    BOTH("sum", NULL, 1, Y[0] = K->sum(a, n));
    BOTH("add", NULL, n, K->add(Y, a, b, n));
    BOTH("add in place", a, n, K->add(Y, Y, b, n));
    BOTH("add to itself", a, n, K->add(Y, Y, Y, n));
    BOTH("mul", NULL, n, K->mul(Y, a, b, n));
    BOTH("mul in place", a, n, K->mul(Y, b, Y, n));
    BOTH("scale", NULL, n, K->scale(Y, a, 0.3f, n));
    BOTH("scale in place", a, n, K->scale(Y, Y, 0.3f, n));
    BOTH("exp", NULL, n, K->exp(Y, a, n));
    BOTH("exp in place", a, n, K->exp(Y, Y, n));
    BOTH("tanh", NULL, n, K->tanh(Y, a, n));
    BOTH("sigmoid", NULL, n, K->sigmoid(Y, a, n));
    BOTH("exp_sum", NULL, n + 1, Y[n] = K->exp_sum(Y, a, 2.5f, n));
    BOTH("rms_norm", NULL, n, K->rms_norm(Y, a, b, 1e-5f, n));
    BOTH("rms_norm of ones, in place", a, n, K->rms_norm(Y, Y, NULL, 1e-5f, n));
    BOTH("l2_norm", NULL, n, K->l2_norm(Y, a, 1e-6f, 0.088388346f, n));
    BOTH("situ_glu", NULL, n, K->situ_glu(Y, a, b, 4.0f, 25.0f, n));
    BOTH("situ_glu in place", a, n, K->situ_glu(Y, b, Y, 4.0f, 25.0f, n));
    BOTH("sigmoid_mul", NULL, n, K->sigmoid_mul(Y, a, b, n));
    BOTH("sigmoid_mul in place", a, n, K->sigmoid_mul(Y, b, Y, n));
    BOTH("kda_decay", NULL, n, K->kda_decay(Y, a, c, 0.7f, -5.0f, n));
    BOTH("all_finite", NULL, 1, Y[0] = K->all_finite(a, n));
    if (kind == ORDINARY || kind == FINITE)
        BOTH("max", NULL, 1, Y[0] = K->max(a, n) + 0.0f); /* + 0: which zero is not defined */
    for (int i = 0; i < 4 && n; i++) {
        float *f = floats(0, n, FINITE);
        CHECK(var->all_finite(f, n));
        f[rnd() % n] = i % 2 ? INFINITY : i ? NAN : -INFINITY;
        CHECK(!var->all_finite(f, n));
    }
}

static void rows_and_taps(size_t n, int kind)
{
    const size_t mis = rnd() % 64, ld = n + rnd() % 5, count = 1 + rnd() % 20;
    const float *init = floats(0, n, kind), *a = floats(1, count, kind),
                *rows = floats(2, count * ld, kind);
    const uint8_t *w = bf16s(3, count * n, mis, kind);
    snprintf(what, sizeof what, "n %zu, rows %zu, ld %zu, bytes before the page %zu, kind %d", n,
             count, ld, mis, kind);
    BOTH("row_sum", init, n, K->row_sum(Y, a, rows, ld, count, n));
    BOTH("tmm_bf16", NULL, n, K->tmm_bf16(Y, w, a, count, n));
    BOTH("widen_bf16", NULL, count * n, K->widen_bf16(Y, w, count * n));
    for (size_t taps = 2; taps <= 8; taps += n > 100 ? 2 : 1) {
        const float *past = floats(4, taps * n, kind), *tap = floats(5, taps * n, kind);
        snprintf(what, sizeof what, "n %zu, taps %zu, kind %d", n, taps, kind);
        BOTH("conv_silu", past, taps * n, K->conv_silu(Y + (taps - 1) * n, Y, init, tap, taps, n));
    }
}

static void recurrence(size_t dk, size_t dv, int kind)
{
    const float *s = floats(0, dk * dv + dv, kind), *q = floats(1, dk, kind),
                *k = floats(2, dk, kind);
    const float *v = floats(3, dv, kind), *alpha = floats(4, dk, kind);
    snprintf(what, sizeof what, "dk %zu, dv %zu, kind %d", dk, dv, kind);
    BOTH("kda_step", s, dk * dv + dv, K->kda_step(Y + dk * dv, Y, q, k, v, alpha, 0.7f, dk, dv));
}

static void products(size_t rows, size_t n, size_t tokens, size_t mis, int kind)
{
    const size_t ldx = n + rnd() % 3 * 5, ldy = rows + rnd() % 3, ldw = n + rnd() % 2 * 3;
    const float *x = floats(0, (tokens - 1) * ldx + n, kind);
    const size_t ny = (tokens - 1) * ldy + rows;
    snprintf(what, sizeof what,
             "rows %zu, n %zu, tokens %zu, ldx %zu, bytes before the page %zu, kind %d", rows, n,
             tokens, ldx, mis, kind);
    const uint8_t *w = bf16s(1, rows * n, mis, kind);
    BOTH("mm_bf16", NULL, ny, K->mm_bf16(Y, ldy, w, x, ldx, rows, n, tokens));
    const float *f = floats(2, (rows - 1) * ldw + n, kind);
    BOTH("mm_f32", NULL, ny, K->mm_f32(Y, ldy, f, ldw, x, ldx, rows, n, tokens));
    if (n % 32)
        return;
    uint8_t *packed = edge(3, rows * n / 2, mis), *scale = edge(4, rows * n / 32, mis / 2);
    for (size_t i = 0; i < rows * n / 2; i++)
        packed[i] = (uint8_t)rnd();
    for (size_t i = 0; i < rows * n / 32; i++) /* scales near 255 would hide the others: seldom */
        scale[i] = (uint8_t)(kind == ORDINARY ? 110 + rnd() % 20
                             : rnd() % 64     ? rnd() % 253
                                              : rnd());
    BOTH("mm_mxfp4", NULL, ny, K->mm_mxfp4(Y, ldy, packed, scale, x, ldx, rows, n, tokens));
}

/* A packed block of any codes that ends `before` bytes ahead of the unreadable page. Of `seldom` weights one is an
 * exception, all for 1. The dictionary holds what the kind says, exponents 0 and 255 among them. */
static const uint8_t *packed_block(int slot, size_t rows, size_t n, size_t before, int kind, unsigned seldom)
{
    const size_t row = sl_packed_row_bytes(n);
    size_t exceptions = 0;
    uint8_t *groups = edge(slot, rows * row, before);
    memset(groups, 0, rows * row);
    for (size_t i = 0; i < rows * n; i++) {
        uint8_t *group = groups + i / n * row + i % n / 64 * 88;
        const size_t at = i % n % 64;
        const unsigned code = rnd() % seldom ? (unsigned)(rnd() % 7) : 7;
        group[at] = (uint8_t)rnd();
        for (unsigned p = 0; p < 3; p++)
            group[64 + 8 * p + at / 8] |= (uint8_t)((code >> p & 1) << at % 8);
        exceptions += code == 7;
    }
    uint8_t *block = groups - sl_packed_groups_at(rows, exceptions);
    memset(block, 0, (size_t)(groups - block));
    for (int k = 0; k < 7; k++)
        block[k] = (uint8_t)(kind == SALTED && k == 2 ? 255 : kind == ORDINARY ? 120 + rnd() % 10 : rnd() % 255);
    block[3] = kind == SALTED ? 0 : block[3];
    for (int i = 0; i < 4; i++)
        block[8 + i] = (uint8_t)(exceptions >> 8 * i);
    size_t done = 0;
    for (size_t i = 0; i < rows * n; i++) {
        const uint8_t *planes = groups + i / n * row + i % n / 64 * 88 + 64 + i % n % 64 / 8;
        for (int b = 0; i % n == 0 && b < 4; b++)
            block[16 + 4 * (i / n) + (size_t)b] = (uint8_t)(done >> 8 * b);
        if (planes[0] & planes[8] & planes[16] & 1 << i % n % 8)
            block[16 + 4 * rows + done++] = (uint8_t)(kind == ORDINARY ? rnd() % 120 : rnd() % 255);
    }
    return block;
}

/* Against mm_bf16 on the rows that scalar code unpacked. */
static void packed_products(size_t rows, size_t n, size_t tokens, size_t mis, int kind, unsigned seldom)
{
    static uint16_t room[1 << 20];
    const size_t ldx = n + rnd() % 3 * 5, ldy = rows + rnd() % 3, first = rnd() % rows, some = 1 + rnd() % (rows - first);
    const float *x = floats(0, (tokens - 1) * ldx + n, kind);
    const uint8_t *block = packed_block(1, rows, n, mis, kind, seldom);
    ref->unpack_bf16(room, block, 0, rows, rows, n);
    snprintf(what, sizeof what, "rows %zu, n %zu, tokens %zu, ldx %zu, bytes before the page %zu, kind %d, of %u", rows, n,
             tokens, ldx, mis, kind, seldom);
#define RIGHT_OR(call, right) (side ? (void)(call) : (void)(right)), (void)K
    BOTH("mm_packed", NULL, (tokens - 1) * ldy + rows,
         RIGHT_OR(K->mm_packed(Y, ldy, block, 0, rows, rows, x, ldx, n, tokens),
                  K->mm_bf16(Y, ldy, room, x, ldx, rows, n, tokens)));
    BOTH("mm_packed of some rows", NULL, (tokens - 1) * ldy + some,
         RIGHT_OR(K->mm_packed(Y, ldy, block, first, some, rows, x, ldx, n, tokens),
                  K->mm_bf16(Y, ldy, room + first * n, x, ldx, some, n, tokens)));
    prepare(NULL, (some * n + 1) / 2 + 1);
    uint8_t *back = (uint8_t *)(out[1] + CANARY) + mis % 2;
    var->unpack_bf16(back, block, first, some, rows, n);
    CHECK_MSG(!memcmp(back, room + first * n, 2 * some * n), "%s unpack_bf16 %s, seed %" PRIu64, var->name, what, seed);
    for (size_t i = 0; i < 64; i++)
        CHECK(back[-1 - (ptrdiff_t)i] == 0x5a && back[2 * some * n + i] == 0x5a);
}

static void packed(void)
{
    static const size_t real[] = { 127, 128, 129, 511, 512, 513, 1000, 1536, 7168 };
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t n = 1; n <= 67; n++)
            for (size_t tokens = 1; tokens <= 9; tokens += 1 + rnd() % 3)
                packed_products(1 + rnd() % 11, n, tokens, rnd() % 64, kind, n % 3 ? 40 : 1);
        for (size_t mis = 0; mis < 64; mis++)
            packed_products(1 + rnd() % 9, 1 + rnd() % 300, 1, mis, kind, 20);
        for (size_t i = 0; i < sizeof real / sizeof real[0]; i++) {
            packed_products(5 + rnd() % 8, real[i], 1, rnd() % 64, kind, 40);
            packed_products(1 + rnd() % 10, real[i], 2 + rnd() % 9, rnd() % 64, kind, 1000000);
        }
        packed_products(9, 544, 64, 3, kind, 30);
        packed_products(3, 1000, 70, 3, kind, 2);
    }
}

/* CRC-32C by its definition, a bit at a time. */
static uint32_t crc_of(const uint8_t *p, size_t n)
{
    uint32_t crc = ~0u;
    for (size_t i = 0; i < 8 * n; i++)
        crc = crc >> 1 ^ (0x82f63b78u & -((crc ^ p[i / 8] >> i % 8) & 1));
    return ~crc;
}

static void checksums(void)
{
    CHECK_EQ(var->crc32c((const uint8_t *)"123456789", 9), 0xe3069283u);
    for (size_t n = 0; n < 200000; n += n < 300 ? 1 : 1 + rnd() % 20000) {
        uint8_t *p = edge(0, n, 0);
        for (size_t i = 0; i < n; i++)
            p[i] = (uint8_t)(rnd() >> 13);
        CHECK_MSG(var->crc32c(p, n) == crc_of(p, n), "%s crc32c of %zu bytes, seed %" PRIu64, var->name, n, seed);
    }
}

/* All products round to -0, and so do all lanes: a tail that adds zeros to lanes it should leave alone
 * makes some of them +0, and with them the sum. */
static void negative_zeros(size_t n)
{
    enum { MAX_TOKENS = 12 };
    const float x = -0x1p-80f, w = 0x1p-80f;
    float *a = edge(0, MAX_TOKENS * n * 4, 0), *f = edge(1, n * 4, 0);
    uint8_t *b = edge(2, n * 2, 0);
    for (size_t i = 0; i < MAX_TOKENS * n; i++)
        a[i] = x;
    for (size_t i = 0; i < n; i++) {
        f[i] = w;
        b[2 * i] = (uint8_t)(bits(w) >> 16);
        b[2 * i + 1] = (uint8_t)(bits(w) >> 24);
    }
    snprintf(what, sizeof what, "n %zu, products that round to -0", n);
    BOTH("dot", NULL, 1, Y[0] = K->dot(a, f, n));
    for (size_t tokens = 1; tokens <= MAX_TOKENS; tokens++) {
        BOTH("mm_bf16", NULL, tokens, K->mm_bf16(Y, 1, b, a, n, 1, n, tokens));
        BOTH("mm_f32", NULL, tokens, K->mm_f32(Y, 1, f, n, a, n, 1, n, tokens));
    }
    CHECK(n < 16 || signbit(out[0][CANARY]));
}

/* Every code under every scale byte, in every column of a group, against ldexp. */
static void all_weights(const sl_kernels *K)
{
    static const double e2m1[8] = { 0, 0.5, 1, 1.5, 2, 3, 4, 6 };
    for (unsigned scale = 0; scale < 256; scale++)
        for (unsigned code = 0; code < 16; code++) {
            uint8_t packed[32][16] = { { 0 } }, scales[32];
            float x[2][32], y[2][32];
            for (int i = 0; i < 32; i++) {
                packed[i][i / 2] = (uint8_t)(code << i % 2 * 4);
                scales[i] = (uint8_t)scale;
                x[0][i] = x[1][i] = 1;
            }
            double w = ldexp(code & 8 ? -e2m1[code & 7] : e2m1[code & 7], (int)scale - 127);
            for (size_t tokens = 1; tokens <= 2; tokens++) {
                K->mm_mxfp4(y[0], 32, packed[0], scales, x[0], 32, 32, 32, tokens);
                for (int i = 0; i < 32; i++) {
                    float want = scale == 255 ? NAN : (float)w + 0.0f, got = y[tokens - 1][i];
                    CHECK_MSG(same(got, want), "%s: scale %u, code %u, column %d: %a, expected %a",
                              K->name, scale, code, i, (double)got, (double)want);
                }
            }
        }
}

static void run_variant(void)
{
    static const size_t real[] = { 127, 128, 129,  255,  256,  257,  511,
                                   512, 513, 1000, 1536, 3072, 3584, 7168 };
    for (int kind = 0; kind < KINDS; kind++) {
        for (size_t n = 0; n <= 67; n++) {
            vectors(n, kind);
            rows_and_taps(n, kind);
            if (n)
                negative_zeros(n);
        }
        for (size_t i = 0; i < sizeof real / sizeof real[0]; i++) {
            vectors(real[i], kind);
            rows_and_taps(real[i], kind);
        }
        for (size_t dk = 1; dk <= 49; dk += 6)
            recurrence(dk, 1 + rnd() % 9, kind);
        recurrence(128, 128, kind);
        recurrence(144, 5, kind);
        for (size_t n = 1; n <= 67; n++)
            for (size_t tokens = 1; tokens <= 9; tokens += tokens < 2 ? 1 : 1 + rnd() % 3)
                products(1 + rnd() % 19, n, tokens, rnd() % 64, kind);
        for (size_t mis = 0; mis < 64; mis++) {
            products(1 + rnd() % 9, 32 * (1 + rnd() % 9), 1, mis, kind);
            products(1 + rnd() % 9, 32 * (1 + rnd() % 9), 1 + rnd() % 9, mis, kind);
        }
        for (size_t i = 0; i < sizeof real / sizeof real[0]; i++)
            products(5, real[i], 1 + i % 2 * 2, rnd() % 64, kind);
        products(135, 96, 1, 0, kind);
        products(7, 4096 + 160, 1, 1, kind);
        products(6, 4096 + 7, 2, 1, kind);
        products(9, 544, 64, 3, kind);
        products(3, 1000, 70, 3, kind);
    }
    packed();
    checksums();
    all_weights(var);
}

int main(int argc, char **argv)
{
    const unsigned have = sl_cpu_detect();
    state = seed = argc > 1 ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    ref = sl_kernels_for(0);
    CHECK_STR(ref->name, "scalar");
    setup();
    all_weights(ref);
    var = ref;
    packed();
    checksums();
    printf("seed %" PRIu64 ":", seed);
    for (unsigned bit = 1; bit <= have; bit *= 2)
        if (have & bit) {
            var = sl_kernels_for(bit);
            printf(" %s", var->name);
            fflush(stdout);
            run_variant();
        }
    printf("\n");
    CHECK_DONE();
}
