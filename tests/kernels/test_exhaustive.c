/* tests/kernels/test_exhaustive.c - exp, tanh and sigmoid over the fp32 inputs: every variant returns the
 * bits of scalar, and scalar is within 2 ulp of the correctly rounded result.
 *
 * Usage: test_exhaustive [--all | SEED]. --all takes all 2^32 inputs (minutes); otherwise one input in 128
 * in random runs (SL_QUICK set: in 16384) and all of the regions where something changes: zero and subnormals,
 * thresholds, overflow and underflow, the steps of the exponent, infinities and NaN. The oracle is libm in
 * double precision, whose error of about 1e-16 is nothing beside the 6e-8 of an fp32 ulp. */
#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

#include "kernels/kernels.h"
#include "tests/check.h"

enum { CHUNK = 256, CHUNKS = 1 << 24, BATCH = 4096, FUNCTIONS = 3, MAX_THREADS = 64 };

static const char *const names[FUNCTIONS] = { "exp", "tanh", "sigmoid" };
static const sl_kernels *tables[4]; /* scalar first */
static int n_tables;
static uint8_t wanted[CHUNKS / 8];
static atomic_uint next_batch;

typedef struct {
    uint64_t inputs;
    int64_t max_ulp[FUNCTIONS];  /* distance in floats from the rounded oracle */
    double max_error[FUNCTIONS]; /* |result - oracle| in ulp of the oracle */
    float at[FUNCTIONS];
} result;

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

static void evaluate(const sl_kernels *k, int function, float *y, const float *x)
{
    (function == 0 ? k->exp : function == 1 ? k->tanh : k->sigmoid)(y, x, CHUNK);
}

static double oracle(int function, double x)
{
    return function == 0 ? exp(x) : function == 1 ? tanh(x) : 1 / (1 + exp(-x));
}

/* Floats in order of value, -0 and +0 apart. */
static int64_t ordinal(float f)
{
    int64_t magnitude = bits(f) & 0x7fffffff;
    return bits(f) >> 31 ? -1 - magnitude : magnitude;
}

static void bound(int function, float x, float y, result *r)
{
    const double want = oracle(function, x);
    const float rounded = (float)want;
    if (isnan(x)) {
        CHECK_MSG(isnan(y), "%s(NaN) = %a", names[function], (double)y);
        return;
    }
    const int64_t ulp = llabs(ordinal(y) - ordinal(rounded));
    CHECK_MSG(!isnan(y) && ulp <= 2, "%s(%a) = %a, expected %a", names[function], (double)x,
              (double)y, want);
    if (ulp > r->max_ulp[function])
        r->max_ulp[function] = ulp;
    if (isinf(rounded) || isinf(y))
        return;
    const float magnitude = fabsf(rounded);
    const double error =
        fabs((double)y - want) / ((double)nextafterf(magnitude, INFINITY) - (double)magnitude);
    if (error > r->max_error[function]) {
        r->max_error[function] = error;
        r->at[function] = x;
    }
}

static void check_chunk(uint32_t chunk, result *r)
{
    float x[CHUNK], want[CHUNK], got[CHUNK];
    for (uint32_t i = 0; i < CHUNK; i++)
        x[i] = from_bits(chunk * CHUNK + i);
    for (int f = 0; f < FUNCTIONS; f++) {
        evaluate(tables[0], f, want, x);
        for (int t = 1; t < n_tables; t++) {
            evaluate(tables[t], f, got, x);
            if (!memcmp(want, got, sizeof want))
                continue;
            for (int i = 0; i < CHUNK; i++)
                CHECK_MSG(bits(want[i]) == bits(got[i]) || (isnan(want[i]) && isnan(got[i])),
                          "%s %s(%a) = %a, scalar %a", tables[t]->name, names[f], (double)x[i],
                          (double)got[i], (double)want[i]);
        }
        for (int i = 0; i < CHUNK; i++)
            bound(f, x[i], want[i], r);
    }
    r->inputs += CHUNK;
}

static void *work(void *arg)
{
    uint32_t batch;
    while ((batch = atomic_fetch_add(&next_batch, 1)) < CHUNKS / BATCH)
        for (uint32_t c = batch * BATCH; c < (batch + 1) * BATCH; c++)
            if (wanted[c / 8] >> c % 8 & 1)
                check_chunk(c, arg);
    return NULL;
}

static void want_around(float x, int64_t radius)
{
    const int64_t middle = bits(x) / CHUNK;
    for (int64_t c = middle - radius; c <= middle + radius; c++)
        if (c >= 0 && c < CHUNKS)
            wanted[c / 8] |= (uint8_t)(1 << c % 8);
}

static void choose(bool all, uint64_t seed, bool quick)
{
    static const float hard[] = { 0.0f,   0x1p-126f, 0x1p-12f,         0.55f,    1.0f,  8.3f,
                                  9.01f,  17.3f,     87.33f,           88.7228f, 89.0f, 103.9f,
                                  104.0f, 0x1p100f,  0x1.fffffep+127f, INFINITY };
    const int64_t radius = quick ? 1 : 16;
    uint64_t s = seed;
    for (uint32_t c = 0; c < CHUNKS; c++) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        if (all || (s >> 33) % (quick ? 16384 : 128) == 0)
            wanted[c / 8] |= (uint8_t)(1 << c % 8);
    }
    for (size_t i = 0; i < sizeof hard / sizeof hard[0]; i++) {
        want_around(hard[i], radius);
        want_around(-hard[i], radius);
    }
    want_around(NAN, radius);
    for (int k = -151; k <= 129; k++) {
        want_around((float)((k + 0.5) * 0.69314718055994530942), radius);
        want_around((float)((k + 0.5) * 0.34657359027997265471), radius); /* tanh takes exp(2x) */
    }
}

int main(int argc, char **argv)
{
    static result results[MAX_THREADS];
    pthread_t threads[MAX_THREADS];
    const bool all = argc > 1 && !strcmp(argv[1], "--all");
    const uint64_t seed = argc > 1 && !all ? strtoull(argv[1], NULL, 0) : (uint64_t)time(NULL);
    const unsigned have = sl_cpu_detect();
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    const int n = !all || cpus < 1 ? 1 : cpus > MAX_THREADS ? MAX_THREADS : (int)cpus;

    tables[n_tables++] = sl_kernels_for(0);
    for (unsigned bit = 1; bit <= have; bit *= 2)
        if (have & bit)
            tables[n_tables++] = sl_kernels_for(bit);
    choose(all, seed, getenv("SL_QUICK") != NULL);
    printf("seed %" PRIu64 "\n", seed);
    for (int i = 0; i < n; i++)
        if (pthread_create(&threads[i], NULL, work, &results[i]))
            return 1;
    result total = { 0 };
    for (int i = 0; i < n; i++) {
        pthread_join(threads[i], NULL);
        total.inputs += results[i].inputs;
        for (int f = 0; f < FUNCTIONS; f++) {
            if (results[i].max_ulp[f] > total.max_ulp[f])
                total.max_ulp[f] = results[i].max_ulp[f];
            if (results[i].max_error[f] > total.max_error[f]) {
                total.max_error[f] = results[i].max_error[f];
                total.at[f] = results[i].at[f];
            }
        }
    }
    for (int t = 1; t < n_tables; t++)
        printf("%s = scalar on %" PRIu64 " inputs of each function\n", tables[t]->name,
               total.inputs);
    for (int f = 0; f < FUNCTIONS; f++)
        printf("scalar %s: at most %" PRId64
               " ulp from the rounded result; largest error %.4f ulp, at %a\n",
               names[f], total.max_ulp[f], total.max_error[f], (double)total.at[f]);
    CHECK_DONE();
}
