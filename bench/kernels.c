/* bench/kernels.c - how fast each variant of the kernels is on this machine, as CSV on stdout.
 *
 * Usage: bench/kernels [GIB [REPETITIONS]]. Matrices span GIB (default 1) GiB, well past the caches.
 * Kernels, variants and thread counts take turns within each repetition; the median is printed, with
 * its share of the measured ceiling (read bandwidth or fp32 FMA peak) of the same number of threads.
 * Weight bytes are counted, scales included; kda_step counts its state once read and once written. */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/mem.h"
#include "kernels/kernels.h"

enum {
    N = 7168,
    LATENT = 3584,
    TOKENS = 64,
    TOKEN_ROWS = 2048,
    SMALL = 4096,
    DIM = 128,
    MAX_REPS = 99
};

typedef struct {
    const sl_kernels *k;
    unsigned threads;
    double amount; /* what one run of all threads does, in the kernel's unit */
} job;
/* Does part `t` of the job's `threads` and returns how much that was. */
typedef double part_fn(const job *j, unsigned t);

static uint8_t *weights, *scales;
static float *x, *y, *states, *alpha;
static size_t bytes;
static volatile uint64_t sink;

/* Of this thread's processor time: kernels never wait, so other work on the machine counts only for what
 * it takes of the caches and of memory bandwidth. */
static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Rows of thread t, and where they begin. Scalar code gets a sixteenth: it would take minutes. */
static size_t share(const job *j, size_t rows, unsigned t, size_t *begin)
{
    if (!strcmp(j->k->name, "scalar"))
        rows /= 16;
    *begin = rows * t / j->threads;
    return rows * (t + 1) / j->threads - *begin;
}

/* Four streams, prefetched, as no kernel could do better. */
static double read_part(const job *j, unsigned t)
{
    typedef uint64_t v4 __attribute__((vector_size(32)));
    enum { STREAMS = 4 };
    const size_t lines = bytes / 64 / j->threads / STREAMS;
    const uint8_t *p = weights + lines * STREAMS * 64 * t;
    v4 sum[STREAMS] = { { 0 } };
    for (size_t i = 0; i < lines; i++)
        for (int s = 0; s < STREAMS; s++) {
            const v4 *line = (const v4 *)(const void *)(p + (lines * (size_t)s + i) * 64);
            __builtin_prefetch((const uint8_t *)line + 4096);
            sum[s] += line[0] ^ line[1];
        }
    for (int s = 0; s < STREAMS; s++)
        sink += sum[s][0] + sum[s][1] + sum[s][2] + sum[s][3];
    return (double)(lines * STREAMS * 64) * 1e-9;
}

/* Independent chains of fused multiply-adds in registers. */
enum { CHAINS = 12, PEAK_STEPS = 4000000 };
#if defined(__x86_64__)
#define PEAK(name, isa, reg)                                                                       \
    __attribute__((target(isa))) static double name(void)                                          \
    {                                                                                              \
        for (int i = 0; i < PEAK_STEPS; i++)                                                       \
            __asm__ volatile(FMA(reg, 0) FMA(reg, 1) FMA(reg, 2) FMA(reg, 3) FMA(reg, 4)           \
                                 FMA(reg, 5) FMA(reg, 6) FMA(reg, 7) FMA(reg, 8) FMA(reg, 9)       \
                                     FMA(reg, 10) FMA(reg, 11)::                                   \
                                         : "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", \
                                           "xmm7", "xmm8", "xmm9", "xmm10", "xmm11", "xmm12");     \
        return 2e-9 * CHAINS * PEAK_STEPS;                                                         \
    }
#define FMA(reg, i) "vfmadd231ps %%" #reg "12, %%" #reg "12, %%" #reg #i "\n\t"
PEAK(peak_avx512, "avx512f", zmm)
PEAK(peak_avx2, "avx2,fma", ymm)
#elif defined(__aarch64__)
#define FMA(i) "fmla v" #i ".4s, v16.4s, v16.4s\n\t"
static double peak_neon(void)
{
    for (int i = 0; i < PEAK_STEPS; i++)
        __asm__ volatile(
            FMA(0) FMA(1) FMA(2) FMA(3) FMA(4) FMA(5) FMA(6) FMA(7) FMA(8) FMA(9) FMA(10) FMA(11)::
                : "v0", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8", "v9", "v10", "v11", "v16");
    return 2e-9 * CHAINS * PEAK_STEPS;
}
#endif

static double peak_part(const job *j, unsigned t)
{
    (void)t;
#if defined(__x86_64__)
    if (!strcmp(j->k->name, "avx512"))
        return 16 * peak_avx512();
    if (!strcmp(j->k->name, "avx2"))
        return 8 * peak_avx2();
#elif defined(__aarch64__)
    if (!strcmp(j->k->name, "neon"))
        return 4 * peak_neon();
#endif
    (void)j;
    return 0;
}

static double mv_bf16_part(const job *j, unsigned t)
{
    size_t begin, rows = share(j, bytes / (2 * N), t, &begin);
    j->k->mm_bf16(y + begin, 0, weights + begin * 2 * N, x, 0, rows, N, 1);
    return (double)(rows * 2 * N) * 1e-9;
}

static double mv_mxfp4_part(const job *j, unsigned t)
{
    size_t begin, rows = share(j, bytes / (LATENT / 2), t, &begin);
    j->k->mm_mxfp4(y + begin, 0, weights + begin * LATENT / 2, scales + begin * LATENT / 32, x, 0,
                   rows, LATENT, 1);
    return (double)(rows * (LATENT / 2 + LATENT / 32)) * 1e-9;
}

static double mm_bf16_part(const job *j, unsigned t)
{
    size_t begin, rows = share(j, TOKEN_ROWS, t, &begin);
    j->k->mm_bf16(y + begin, TOKEN_ROWS, weights + begin * 2 * N, x, N, rows, N, TOKENS);
    return 2e-9 * (double)rows * N * TOKENS;
}

static double mm_mxfp4_part(const job *j, unsigned t)
{
    size_t begin, rows = share(j, TOKEN_ROWS, t, &begin);
    j->k->mm_mxfp4(y + begin, TOKEN_ROWS, weights + begin * N / 2, scales + begin * N / 32, x, N,
                   rows, N, TOKENS);
    return 2e-9 * (double)rows * N * TOKENS;
}

static double kda_part(const job *j, unsigned t)
{
    const size_t state = DIM * DIM * sizeof(float);
    size_t begin, heads = share(j, bytes / state / 2, t, &begin);
    for (size_t h = begin; h < begin + heads; h++)
        j->k->kda_step(y + DIM * t, states + DIM * DIM * h, x, x + DIM, x + 2 * DIM, alpha, 0.01f,
                       DIM, DIM);
    return (double)(2 * heads * state) * 1e-9;
}

/* One-input and gate functions on vectors in the L1 cache; the unit is 10^9 elements. */
#define SMALL_PART(fn, call)                                                                       \
    static double fn(const job *j, unsigned t)                                                     \
    {                                                                                              \
        const int times = strcmp(j->k->name, "scalar") ? 2000 : 100;                               \
        float *out = y + SMALL * t;                                                                \
        for (int i = 0; i < times; i++)                                                            \
            call;                                                                                  \
        return 1e-9 * SMALL * times;                                                               \
    }
SMALL_PART(exp_part, j->k->exp(out, x, SMALL))
SMALL_PART(tanh_part, j->k->tanh(out, x, SMALL))
SMALL_PART(sigmoid_part, j->k->sigmoid(out, x, SMALL))
SMALL_PART(situ_part, j->k->situ_glu(out, x, x + SMALL, 4.0f, 25.0f, SMALL))
SMALL_PART(rms_part, j->k->rms_norm(out, x, x + SMALL, 1e-5f, SMALL))
SMALL_PART(conv_part, j->k->conv_silu(out, states + 4 * SMALL * t, x, x + SMALL, 4, SMALL))

static const struct {
    const char *name, *unit;
    part_fn *part;
    int ceiling; /* index of the row whose value bounds this one, or -1 */
} rows[] = {
    { "read bandwidth", "GB/s", read_part, -1 },
    { "fp32 fma peak", "GFLOP/s", peak_part, -1 },
    { "mm_bf16 1 token n=7168", "GB/s", mv_bf16_part, 0 },
    { "mm_mxfp4 1 token n=3584", "GB/s", mv_mxfp4_part, 0 },
    { "mm_bf16 64 tokens n=7168", "GFLOP/s", mm_bf16_part, 1 },
    { "mm_mxfp4 64 tokens n=7168", "GFLOP/s", mm_mxfp4_part, 1 },
    { "kda_step 128x128", "GB/s", kda_part, 0 },
    { "exp", "Gelem/s", exp_part, -1 },
    { "tanh", "Gelem/s", tanh_part, -1 },
    { "sigmoid", "Gelem/s", sigmoid_part, -1 },
    { "situ_glu", "Gelem/s", situ_part, -1 },
    { "rms_norm n=4096", "Gelem/s", rms_part, -1 },
    { "conv_silu 4 taps", "Gelem/s", conv_part, -1 },
};
enum { ROWS = sizeof rows / sizeof rows[0] };

typedef struct {
    const job *j;
    part_fn *part;
    pthread_barrier_t *start;
    unsigned t;
    double done, seconds;
} worker;

static void *work(void *arg)
{
    worker *w = arg;
    pthread_barrier_wait(w->start);
    const double begin = now();
    w->done = w->part(w->j, w->t);
    w->seconds = now() - begin;
    return NULL;
}

/* Amount of all threads per second of the slowest. */
static double run(const sl_kernels *k, unsigned threads, part_fn *part)
{
    const job j = { .k = k, .threads = threads };
    pthread_barrier_t start;
    pthread_t id[64];
    worker w[64];
    double done = 0, seconds = 0;
    pthread_barrier_init(&start, NULL, threads);
    for (unsigned t = 0; t < threads; t++) {
        w[t] = (worker){ .j = &j, .part = part, .start = &start, .t = t };
        if (pthread_create(&id[t], NULL, work, &w[t]))
            exit(1);
    }
    for (unsigned t = 0; t < threads; t++) {
        pthread_join(id[t], NULL);
        done += w[t].done;
        seconds = w[t].seconds > seconds ? w[t].seconds : seconds;
    }
    pthread_barrier_destroy(&start);
    return done / seconds;
}

static int by_value(const void *a, const void *b)
{
    const double d = *(const double *)a - *(const double *)b;
    return (d > 0) - (d < 0);
}

static void *get(size_t n)
{
    void *p = sl_mem_alloc(NULL, SL_MEM_SCRATCH, n);
    if (!p) {
        fprintf(stderr, "kernels: no memory for %zu bytes\n", n);
        exit(1);
    }
    return p;
}

/* Words that are small finite bf16 numbers, and as pairs small fp32 numbers. */
static void fill(void)
{
    uint64_t s = 1;
    for (size_t i = 0; i < bytes; i += 2) {
        s = s * 6364136223846793005u + 1442695040888963407u;
        uint16_t word = (uint16_t)((s >> 48 & 0x83ff) | 0x3c00);
        memcpy(weights + i, &word, 2);
    }
    for (size_t i = 0; i < bytes / 16; i++)
        scales[i] = (uint8_t)(116 + weights[2 * i] % 12);
    for (size_t i = 0; i < DIM; i++)
        alpha[i] = 0.9f;
    for (size_t i = 0; i < (size_t)TOKENS * N; i++)
        x[i] = (float)((double)weights[2 * i] / 64.0 - 2.0);
}

int main(int argc, char **argv)
{
    static double sample[3][2][ROWS][MAX_REPS];
    const sl_kernels *table[3];
    const unsigned have = sl_cpu_detect();
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    const unsigned counts[2] = { 1, cpus > 64 ? 64 : (unsigned)cpus };
    const unsigned settings = counts[1] > 1 ? 2 : 1;
    const double gib = argc > 1 ? atof(argv[1]) : 1.0;
    int reps = argc > 2 ? atoi(argv[2]) : 7, variants = 0;
    reps = reps < 1 ? 1 : reps > MAX_REPS ? MAX_REPS : reps;

    for (unsigned bit = 4; bit; bit /= 2)
        if (have & bit)
            table[variants++] = sl_kernels_for(bit);
    table[variants++] = sl_kernels_for(0);
    bytes = (size_t)(gib * 0x1p30) & ~(size_t)4095;
    if (bytes < (size_t)TOKEN_ROWS * 2 * N) /* the 64-token products read this much */
        bytes = (size_t)TOKEN_ROWS * 2 * N;
    weights = get(bytes);
    scales = get(bytes / 16);
    x = get((size_t)TOKENS * N * sizeof(float));
    states = get(bytes / 2);
    alpha = get(DIM * sizeof *alpha);
    y = get((bytes / (LATENT / 2) + (size_t)TOKENS * TOKEN_ROWS + SMALL * 64) * sizeof(float));
    fill();

    for (int rep = 0; rep < reps; rep++) {
        for (int v = 0; v < variants; v++)
            for (unsigned c = 0; c < settings; c++)
                for (int r = 0; r < ROWS; r++)
                    sample[v][c][r][rep] = run(table[v], counts[c], rows[r].part);
        fprintf(stderr, "\rrepetition %d of %d", rep + 1, reps);
    }
    fprintf(stderr, "\n");
    printf("variant,threads,kernel,median,unit,share of ceiling\n");
    for (int v = 0; v < variants; v++)
        for (unsigned c = 0; c < settings; c++)
            for (int r = 0; r < ROWS; r++) {
                double *s = sample[v][c][r];
                qsort(s, (size_t)reps, sizeof *s, by_value);
                const double median = s[reps / 2];
                const double top =
                    rows[r].ceiling < 0 ? 0 : sample[v][c][rows[r].ceiling][reps / 2];
                printf("%s,%u,%s,%.2f,%s,", table[v]->name, counts[c], rows[r].name, median,
                       rows[r].unit);
                if (top > 0)
                    printf("%.2f", median / top);
                printf("\n");
            }
    sl_mem_free(weights);
    sl_mem_free(scales);
    sl_mem_free(x);
    sl_mem_free(y);
    sl_mem_free(states);
    sl_mem_free(alpha);
    return 0;
}
