/* cmd/synth_random.c - random weights that look trained. Every number is a function of the seed, the
 * tensor and the place in it, so any part can be made alone, by any thread.
 * Only integer arithmetic and exactly rounded operations: the same bytes on every machine. */
#include "synth.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"

/* MXFP4 groups are drawn from a pool of real quantised ones: codes and scale then belong together. */
enum { NORMALS = 1 << 16, GROUPS = 1 << 14, GROUP = 32 };

typedef struct {
    uint8_t codes[GROUPS][GROUP / 2];
    uint8_t scale[GROUPS];
} group_pool;

struct synth_random {
    float normal[NORMALS]; /* mean 0, standard deviation 1 */
    group_pool in, out;    /* for matrices that read the latent vector; for those that write it */
    uint32_t taps, heads;
};

/* The output function of splitmix64. */
uint64_t synth_mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static inline uint64_t draw(uint64_t key, uint64_t i)
{
    return synth_mix(key + (i + 1) * 0x9e3779b97f4a7c15u);
}

/* A sum of twelve uniform numbers has variance 1; each comes with its negative, so the mean is 0. */
static void make_normals(float *normal)
{
    for (uint32_t i = 0; i < NORMALS / 2; i++) {
        int64_t sum = 0;
        for (uint32_t k = 0; k < 3; k++)
            for (uint64_t r = draw(0, 3 * i + k), j = 0; j < 4; j++, r >>= 16)
                sum += 2 * (int64_t)(r & 0xffff) - 0xffff;
        normal[i] = (float)sum / 0x20000;
        normal[i + NORMALS / 2] = -normal[i];
    }
}

/* The code of a value already divided by its scale: nearest E2M1, ties to the even code. */
static unsigned e2m1(float v)
{
    const float a = fabsf(v);
    const unsigned code = a <= 0.25f ? 0 : a < 0.75f ? 1 : a <= 1.25f ? 2 : a < 1.75f ? 3
                          : a <= 2.5f ? 4 : a < 3.5f ? 5 : a <= 5 ? 6 : 7;
    return code | (v < 0 ? 8u : 0u);
}

/* Quantises groups of numbers of standard deviation `std` by the rule of the quantiser that
 * quantization_config names: the largest magnitude, rounded to a power of two with threshold 1.75, is
 * four units. */
static void make_groups(group_pool *p, const float *normal, float std, uint64_t key)
{
    for (uint32_t g = 0; g < GROUPS; g++) {
        float w[GROUP], largest = 0;
        for (uint32_t i = 0; i < GROUP; i++) {
            w[i] = std * normal[draw(key, GROUP * g + i) & (NORMALS - 1)];
            largest = fmaxf(largest, fabsf(w[i]));
        }
        int e;
        const float f = 2 * frexpf(largest, &e); /* largest = f * 2^(e-1), 1 <= f < 2 */
        const int scale = largest > 0 ? (f < 1.75f ? e - 1 : e) - 2 : 0;
        p->scale[g] = (uint8_t)(scale + 127);
        for (uint32_t i = 0; i < GROUP; i += 2)
            p->codes[g][i / 2] = (uint8_t)(e2m1(ldexpf(w[i], -scale)) | e2m1(ldexpf(w[i + 1], -scale)) << 4);
    }
}

synth_random *synth_random_open(const synth_model *m)
{
    synth_random *r = malloc(sizeof *r);
    if (!r)
        return NULL;
    r->taps = m->config.conv_taps;
    r->heads = m->config.kda_heads;
    make_normals(r->normal);
    make_groups(&r->in, r->normal, 1 / sqrtf((float)m->config.latent), synth_mix(m->seed + 1));
    make_groups(&r->out, r->normal, 1 / sqrtf((float)m->config.moe_intermediate), synth_mix(m->seed + 2));
    return r;
}

void synth_random_close(synth_random *r) { free(r); }

static inline uint16_t to_bf16(float f)
{
    const uint32_t bits = sl_f32_bits(f);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void put_f32(uint8_t *p, float f)
{
    const uint32_t bits = sl_f32_bits(f);
    for (unsigned i = 0; i < 4; i++)
        p[i] = (uint8_t)(bits >> 8 * i);
}

static float f32_value(const synth_random *r, const synth_tensor *t, uint64_t i, float normal)
{
    if (t->fill == SYNTH_CONV) /* mostly the token itself, a little of those before it */
        return i % r->taps == r->taps - 1 ? 1 + 0.1f * normal : 0.2f * normal;
    if (t->fill == SYNTH_A_LOG) /* spread over the heads; what lies beyond them is padding */
        return i < r->heads ? -0.7f + 1.8f * ((float)i + 0.5f) / (float)r->heads + 0.05f * normal : 0;
    return t->mean + t->std * normal;
}

/* One 64-bit draw makes a unit of four elements, or of four groups. */
static const uint8_t unit_bytes[] = {
    [SYNTH_BF16] = 8, [SYNTH_F32] = 16, [SYNTH_CONV] = 16, [SYNTH_A_LOG] = 16,
    [SYNTH_PACKED] = 2 * GROUP, [SYNTH_SCALE] = 4,
};

static void fill_units(const synth_random *r, const synth_tensor *t, uint64_t unit, uint64_t n, uint8_t *out)
{
    const group_pool *pool = t->what == SL_W2_PACKED || t->what == SL_W2_SCALE ? &r->out : &r->in;
    const float mean = t->mean, std = t->std;
    for (const uint64_t end = unit + n; unit < end; unit++) {
        uint64_t bits = draw(t->key, unit);
        for (unsigned i = 0; i < 4; i++, bits >>= 16)
            switch (t->fill) {
            case SYNTH_BF16: {
                const uint16_t b = to_bf16(mean + std * r->normal[bits & (NORMALS - 1)]);
                *out++ = (uint8_t)b;
                *out++ = (uint8_t)(b >> 8);
                break;
            }
            case SYNTH_PACKED:
                memcpy(out, pool->codes[bits & (GROUPS - 1)], GROUP / 2);
                out += GROUP / 2;
                break;
            case SYNTH_SCALE:
                *out++ = pool->scale[bits & (GROUPS - 1)];
                break;
            default:
                put_f32(out, f32_value(r, t, 4 * unit + i, r->normal[bits & (NORMALS - 1)]));
                out += 4;
            }
    }
}

static void fill_tensor(const synth_random *r, const synth_tensor *t, uint64_t begin, uint64_t n, uint8_t *out)
{
    const uint64_t size = unit_bytes[t->fill];
    while (n) {
        uint8_t part[2 * GROUP];
        const uint64_t unit = begin / size, skip = begin % size;
        uint64_t k = n / size * size;
        if (skip || k == 0) {
            k = sl_min_u64(n, size - skip);
            fill_units(r, t, unit, 1, part);
            memcpy(out, part + skip, k);
        } else {
            fill_units(r, t, unit, k / size, out);
        }
        begin += k;
        out += k;
        n -= k;
    }
}

void synth_fill(const synth_random *r, const synth_shard *s, uint64_t begin, uint64_t n, uint8_t *out)
{
    size_t low = 0, high = s->n; /* the tensor that holds `begin`: the last that starts at or before it */
    while (high - low > 1) {
        const size_t mid = low + (high - low) / 2;
        if (s->tensor[mid].begin <= begin)
            low = mid;
        else
            high = mid;
    }
    for (const synth_tensor *t = &s->tensor[low]; n; t++) {
        const uint64_t at = begin - t->begin, k = sl_min_u64(n, t->bytes - at);
        fill_tensor(r, t, at, k, out);
        begin += k;
        out += k;
        n -= k;
    }
}
