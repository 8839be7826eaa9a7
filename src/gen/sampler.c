#include "gen/sampler.h"

#include <stdbool.h>

#include "base/num.h"
#include "kernels/kernels.h"
#include "sluice.h"

static uint64_t mix(uint64_t z)
{
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

double sl_uniform(uint64_t seed, uint64_t position)
{
    static const uint64_t G = 0x9e3779b97f4a7c15u;
    return (double)(mix(mix(seed + G) + (position + 1) * G) >> 11) * 0x1p-53;
}

double sl_ln(double x)
{
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int e = (int)(bits >> 52) - 1023;
    bits = (bits & 0xfffffffffffffu) | (uint64_t)1023 << 52;
    double m;
    memcpy(&m, &bits, sizeof m); /* x = m * 2^e, 1 <= m < 2 */
    if (m > 1.4142135623730951) {
        m *= 0.5;
        e++;
    }
    /* ln m = 2 artanh s, s = (m - 1) / (m + 1), |s| < 0.172: what the series leaves out is below 2^-61. */
    const double s = (m - 1) / (m + 1), z = s * s;
    double series = 0;
    for (int k = 23; k >= 1; k -= 2)
        series = series * z + 1.0 / k;
    return e * 0.6931471805599453 + 2 * s * series;
}

enum { BLOCK = 256 };

/* w[i] = exp((logits[i] - max) / temperature), i < n <= BLOCK */
static void weigh(float *w, const float *logits, uint32_t n, float max, float temperature)
{
    for (uint32_t i = 0; i < n; i++)
        w[i] = (logits[i] - max) / temperature;
    sl_kernels_for(0)->exp(w, w, n);
}

static float log_probability(const float *logits, uint32_t vocab, float logit, float max)
{
    double sum = 0;
    for (uint32_t at = 0; at < vocab; at += BLOCK) {
        float w[BLOCK];
        const uint32_t n = vocab - at < BLOCK ? vocab - at : BLOCK;
        weigh(w, logits + at, n, max, 1);
        for (uint32_t i = 0; i < n; i++)
            sum += w[i];
    }
    return (float)((double)logit - max - sl_ln(sum));
}

/* ---- candidates in descending order, as many as are asked for ---------------------------------- */

typedef struct {
    sl_candidate *c; /* [0, n - taken) a heap, then those taken, the first at n - 1 */
    uint32_t n, taken;
} ranking;

static bool before(const sl_candidate *a, const sl_candidate *b)
{
    return a->logit > b->logit || (a->logit == b->logit && a->id < b->id);
}

static void sift_down(sl_candidate *c, uint32_t n, uint32_t i)
{
    const sl_candidate v = c[i];
    for (uint32_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && before(&c[k + 1], &c[k]))
            k++;
        if (before(&v, &c[k]))
            break;
        c[i] = c[k];
    }
    c[i] = v;
}

static const sl_candidate *nth(ranking *r, uint32_t i)
{
    for (; r->taken <= i; r->taken++) {
        const uint32_t last = r->n - r->taken - 1;
        const sl_candidate top = r->c[0];
        r->c[0] = r->c[last];
        sift_down(r->c, last ? last : 1, 0);
        r->c[last] = top;
    }
    return &r->c[r->n - 1 - i];
}

static int32_t draw(const float *logits, uint32_t vocab, const sl_sampling *p, double u, sl_candidate *scratch,
                    int32_t best)
{
    ranking r = { .c = scratch };
    const float max = logits[best], min_weight = p->min_p < 1 ? p->min_p : 1;
    double total = 0;
    for (uint32_t at = 0; at < vocab; at += BLOCK) {
        float w[BLOCK];
        const uint32_t n = vocab - at < BLOCK ? vocab - at : BLOCK;
        weigh(w, logits + at, n, max, p->temperature);
        for (uint32_t i = 0; i < n; i++)
            if (w[i] >= min_weight) {
                total += w[i];
                scratch[r.n++] = (sl_candidate){ logits[at + i], w[i], (int32_t)(at + i) };
            }
    }
    for (uint32_t i = r.n / 2; i-- > 0;)
        sift_down(scratch, r.n, i);

    uint32_t kept = r.n;
    if (p->top_k && p->top_k < kept) {
        kept = p->top_k;
        total = 0;
        for (uint32_t i = 0; i < kept; i++)
            total += nth(&r, i)->prob;
    }
    if (p->top_p < 1) {
        const double enough = (double)p->top_p * total;
        double sum = 0;
        uint32_t i = 0;
        do
            sum += i < kept ? nth(&r, i)->prob : 0;
        while (++i < kept && sum < enough);
        kept = i < kept ? i : kept;
        total = sum;
    }
    /* Should rounding leave the target above the last sum, the last candidate with a weight is it. */
    const double target = u * total;
    double sum = 0;
    int32_t id = best;
    for (uint32_t i = 0; i < kept && sum <= target; i++) {
        const sl_candidate *c = nth(&r, i);
        sum += c->prob;
        if (c->prob > 0)
            id = c->id;
    }
    return id;
}

int32_t sl_sample(const float *logits, uint32_t vocab, const sl_sampling *p, uint64_t position,
                  sl_candidate *scratch, float *logprob)
{
    int32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = (int32_t)i;
    const int32_t id = p->temperature > 0
                           ? draw(logits, vocab, p, sl_uniform(p->seed, position), scratch, best)
                           : best;
    if (logprob)
        *logprob = log_probability(logits, vocab, logits[id], logits[best]);
    return id;
}
