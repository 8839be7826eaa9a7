/* The sampler against a plain reading of its definition, and against probabilities. */
#include <float.h>
#include <math.h>

#include "gen/sampler.h"
#include "kernels/kernels.h"
#include "sluice.h"
#include "tests/check.h"

enum { VOCAB_MAX = 163840 };
static float logits[VOCAB_MAX];
static sl_candidate scratch[VOCAB_MAX], list[VOCAB_MAX];

static uint64_t state = 42;
static double uniform(void) { return (double)((state = state * 6364136223846793005u + 1442695040888963407u) >> 11) / 0x1p53; }

static int descending(const void *a, const void *b)
{
    const sl_candidate *x = a, *y = b;
    return x->logit != y->logit ? (x->logit < y->logit) - (x->logit > y->logit) : x->id - y->id;
}

/* Sorts everything, then cuts the list by each filter in turn. */
static int32_t sample_sorted(uint32_t vocab, const sl_sampling *p, uint64_t position)
{
    float max = -INFINITY;
    for (uint32_t i = 0; i < vocab; i++)
        max = fmaxf(max, logits[i]);
    double by_id = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        float w = (logits[i] - max) / p->temperature;
        sl_kernels_for(0)->exp(&w, &w, 1);
        list[i] = (sl_candidate){ logits[i], w, (int32_t)i };
        if (w >= p->min_p)
            by_id += w;
    }
    qsort(list, vocab, sizeof *list, descending);
    uint32_t n = p->top_k && p->top_k < vocab ? p->top_k : vocab, k = 0;
    for (uint32_t i = 0; i < n; i++)
        if (list[i].prob >= p->min_p)
            list[k++] = list[i];
    double total = by_id, sum = 0;
    if (k == p->top_k)
        for (uint32_t i = (total = 0, 0); i < k; i++)
            total += list[i].prob;
    if (p->top_p < 1) {
        for (n = 0; n < k && (n == 0 || sum < p->top_p * total); n++)
            sum += list[n].prob;
        k = n;
        total = sum;
    }
    const double target = sl_uniform(p->seed, position) * total;
    sum = 0;
    for (uint32_t i = 0; i < k; i++)
        if ((sum += list[i].prob) > target)
            return list[i].id;
    return list[k - 1].id;
}

static void test_greedy(void)
{
    const float x[] = { -1, 3, 3, 2, 3 }, zero[] = { -0.0f, 0.0f }, one[] = { -5 };
    sl_sampling p = { .temperature = 0, .top_p = 0.1f, .top_k = 1, .min_p = 1, .seed = 7 };
    float logprob;
    CHECK_EQ(sl_sample(x, 5, &p, 0, scratch, &logprob), 1);
    CHECK(fabs(logprob - -log(3 + exp(-1) + exp(-4))) < 1e-6);
    CHECK_EQ(sl_sample(zero, 2, &p, 0, scratch, NULL), 0);
    CHECK_EQ(sl_sample(one, 1, &p, 0, scratch, &logprob), 0);
    CHECK(logprob == 0);
    p.temperature = -1;
    CHECK_EQ(sl_sample(x, 5, &p, 0, scratch, NULL), 1);
}

static void test_random_numbers(void)
{
    /* From the formula in sampler.h, computed with Python's integers. */
    static const struct {
        uint64_t seed, position;
        double u;
    } known[] = {
        { 0x0u, 0x0u, 0x1.4e0dba5e9a32fp-1 },
        { 0x0u, 0x1u, 0x1.6705460be8829p-1 },
        { 0x1u, 0x0u, 0x1.7906ac21d0e58p-2 },
        { 0x4d2u, 0xfffffu, 0x1.fbd19a28da3f4p-1 },
        { 0xffffffffffffffffu, 0xffffffffffffffffu, 0x1.1140638c16042p-2 },
        { 0x123456789abcdefu, 0x2au, 0x1.597793b5dae98p-2 },
    };
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        CHECK(sl_uniform(known[i].seed, known[i].position) == known[i].u);
    double sum = 0;
    uint32_t bins[16] = { 0 };
    for (uint64_t i = 0; i < 160000; i++) {
        const double u = sl_uniform(i % 4, i / 4);
        CHECK(u >= 0 && u < 1);
        sum += u;
        bins[(int)(u * 16)]++;
    }
    CHECK(fabs(sum / 160000 - 0.5) < 0.004);
    for (int i = 0; i < 16; i++)
        CHECK_MSG(abs((int)bins[i] - 10000) < 500, "bin %d: %u", i, bins[i]);
}

static void test_ln(void)
{
    for (int i = 0; i < 200000; i++) {
        const double x = i < 1000 ? 1 + i * 0x1p-30 : exp(uniform() * 700), want = log(x);
        CHECK_MSG(fabs(sl_ln(x) - want) <= 2 * (nextafter(want, INFINITY) - want), "ln(%a) = %a, expected %a", x,
                  sl_ln(x), want);
    }
    CHECK(sl_ln(1) == 0);
}

static void test_against_definition(void)
{
    static const float temperatures[] = { 1, 0.7f, 1.5f, 0.05f, 1e-30f, 1e30f };
    static const float top_ps[] = { 1, 0.95f, 0.5f, 1e-9f, 0, -1 };
    static const float min_ps[] = { 0, 0.05f, 0.9f, 1 };
    static const uint32_t top_ks[] = { 0, 1, 2, 40, 1000, 1u << 31 };
    for (int round = 0; round < 6000; round++) {
        const uint32_t vocab = 1 + (uint32_t)(uniform() * (round % 10 ? 300 : 3000));
        const int grid = round % 3; /* coarse values make ties */
        for (uint32_t i = 0; i < vocab; i++) {
            const float x = (float)(uniform() * 20 - 10);
            logits[i] = grid ? roundf(x * (float)grid) / (float)grid : x;
        }
        if (round % 17 == 0)
            logits[vocab / 2] = -INFINITY;
        if (vocab == 1)
            logits[0] = 1;
        const sl_sampling p = { temperatures[round % 6], top_ps[round / 6 % 6], top_ks[round / 36 % 6],
                                min_ps[round / 216 % 4], state };
        memset(scratch, round, vocab * sizeof *scratch); /* its contents do not matter */
        const int32_t id = sl_sample(logits, vocab, &p, (uint64_t)round, scratch, NULL);
        CHECK_MSG(id == sample_sorted(vocab, &p, (uint64_t)round),
                  "round %d: id %d, expected %d (T %g top_p %g top_k %u min_p %g)", round, id,
                  sample_sorted(vocab, &p, (uint64_t)round), p.temperature, p.top_p, p.top_k, p.min_p);
    }
    const sl_sampling odd = { .temperature = 1, .top_p = 1, .min_p = 2 }; /* the largest always stays */
    CHECK(sl_sample(logits, 8, &odd, 0, scratch, NULL) >= 0);
}

/* Frequencies over positions, with which tokens each filter leaves worked out by hand. */
static void test_frequencies(void)
{
    static const float x[6] = { 0, 2, 1, -1, 2, -3 }; /* exp: 1 7.389 2.718 0.368 7.389 0.050 */
    static const struct {
        sl_sampling p;
        bool kept[6];
    } cases[] = {
        { { .temperature = 1, .top_p = 1 }, { 1, 1, 1, 1, 1, 1 } },
        { { .temperature = 0.5f, .top_p = 1, .seed = 1 }, { 1, 1, 1, 1, 1, 1 } },
        { { .temperature = 2, .top_p = 1, .seed = 2 }, { 1, 1, 1, 1, 1, 1 } },
        { { .temperature = 1, .top_p = 1, .top_k = 1, .seed = 3 }, { 0, 1, 0, 0, 0, 0 } },
        { { .temperature = 1, .top_p = 1, .top_k = 3, .seed = 4 }, { 0, 1, 1, 0, 1, 0 } },
        { { .temperature = 1, .top_p = 0.78f, .seed = 5 }, { 0, 1, 0, 0, 1, 0 } },  /* 14.778 of 18.914: 0.781 */
        { { .temperature = 1, .top_p = 0.79f, .seed = 6 }, { 0, 1, 1, 0, 1, 0 } },
        { { .temperature = 1, .top_p = 0.39f, .seed = 7 }, { 0, 1, 0, 0, 0, 0 } },  /* 7.389 of 18.914: 0.3907 */
        { { .temperature = 1, .top_p = 1, .min_p = 0.3f, .seed = 8 }, { 0, 1, 1, 0, 1, 0 } },
        { { .temperature = 1, .top_p = 1, .min_p = 0.4f, .seed = 9 }, { 0, 1, 0, 0, 1, 0 } },
        { { .temperature = 2, .top_p = 1, .min_p = 0.3f, .seed = 10 }, { 1, 1, 1, 0, 1, 0 } }, /* after temperature */
        /* top_p of what top_k left: 7.389 + 7.389 of 17.497 is 0.845 */
        { { .temperature = 1, .top_p = 0.84f, .top_k = 3, .seed = 11 }, { 0, 1, 0, 0, 1, 0 } },
        /* top_p of what min_p left */
        { { .temperature = 1, .top_p = 0.84f, .min_p = 0.3f, .seed = 12 }, { 0, 1, 0, 0, 1, 0 } },
    };
    enum { N = 40000 };
    for (size_t c = 0; c < sizeof cases / sizeof *cases; c++) {
        double w[6], total = 0;
        int count[6] = { 0 };
        for (int i = 0; i < 6; i++)
            total += w[i] = cases[c].kept[i] ? exp(x[i] / cases[c].p.temperature) : 0;
        for (uint64_t i = 0; i < N; i++) {
            float logprob;
            const int32_t id = sl_sample(x, 6, &cases[c].p, i, scratch, &logprob);
            CHECK(fabs(logprob - (x[id] - log(18.9140605))) < 1e-6); /* of the unmodified distribution */
            count[id]++;
        }
        for (int i = 0; i < 6; i++) {
            const double want = N * w[i] / total;
            CHECK_MSG(fabs(count[i] - want) <= 4.5 * sqrt(want), "case %zu: token %d %d times, expected %.0f", c, i,
                      count[i], want);
        }
    }
}

/* At the size of the real vocabulary; pinned, since other machines must draw the same. */
static void test_pinned(void)
{
    static const int32_t want[] = { 87920, 131869, 106968, 10053,  114431, 163209,
                                    91818, 41239,  87956,  16349, 161750, 26244 };
    state = 42;
    for (uint32_t i = 0; i < VOCAB_MAX; i++)
        logits[i] = (float)(uniform() * 8 + uniform() * 8 + uniform() * 8);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++) {
        const sl_sampling p = { .temperature = 1, .top_p = i % 2 ? 0.95f : 1, .min_p = i % 3 ? 0 : 0.01f,
                                .top_k = i % 5 ? 0 : 50, .seed = 1234 };
        const int32_t id = sl_sample(logits, VOCAB_MAX, &p, i, scratch, NULL);
        CHECK_EQ(id, sample_sorted(VOCAB_MAX, &p, i));
        CHECK_MSG(id == want[i], "position %zu: id %d, expected %d", i, id, want[i]);
    }
}

int main(void)
{
    test_greedy();
    test_random_numbers();
    test_ln();
    test_against_definition();
    test_frequencies();
    test_pinned();
    CHECK_DONE();
}
