/* tests/kernels/test_golden_ops.c - every variant against float64 results of an independent reference
 * (tests/data/golden/ops), within the tolerances that the files state, and against a sample of released
 * MXFP4 weights where ../shared/data has it. */
#include "tests/check.h"

#ifndef WITHOUT_LIBRARIES /* a cross compiler without jansson */
#include <jansson.h>
#include <math.h>
#include <stdint.h>

#include "kernels/kernels.h"

static const sl_kernels *K;
static json_t *tolerances;
static const char *op, *case_name;

static void *get(size_t n)
{
    void *p = calloc(n ? n : 1, 1);
    if (!p)
        exit(1);
    return p;
}

static json_t *member(const json_t *o, const char *key)
{
    json_t *v = json_object_get(o, key);
    if (!v) {
        fprintf(stderr, "%s: %s: no \"%s\"\n", op, case_name, key);
        exit(1);
    }
    return v;
}

static double number(const json_t *o, const char *key) { return json_number_value(member(o, key)); }
static json_t *data(const json_t *c, const char *key) { return member(member(c, key), "data"); }
static size_t count(const json_t *c, const char *key) { return json_array_size(data(c, key)); }

static size_t dim(const json_t *c, const char *key, size_t i)
{
    return (size_t)json_integer_value(json_array_get(member(member(c, key), "shape"), i));
}

static double element(const json_t *a, size_t i)
{
    const json_t *v = json_array_get(a, i);
    return json_is_null(v) ? NAN : json_number_value(v);
}

static float *floats(const json_t *c, const char *key) /* to be freed */
{
    const json_t *a = data(c, key);
    float *p = get(json_array_size(a) * sizeof *p);
    for (size_t i = 0; i < json_array_size(a); i++)
        p[i] = (float)element(a, i);
    return p;
}

/* Integers of `size` bytes, little-endian. */
static uint8_t *integers(const json_t *c, const char *key, size_t size)
{
    const json_t *a = data(c, key);
    uint8_t *p = get(json_array_size(a) * size);
    for (size_t i = 0; i < json_array_size(a); i++)
        for (size_t b = 0; b < size; b++)
            p[i * size + b] = (uint8_t)(json_integer_value(json_array_get(a, i)) >> 8 * b);
    return p;
}

static double largest(const json_t *a)
{
    double max = 0;
    for (size_t i = 0; i < json_array_size(a); i++)
        max = fmax(max, fabs(element(a, i)));
    return max;
}

/* got against the tensor `key`; an error may be tolerance `name` times what that name says. */
static void compare(const json_t *c, const char *key, const float *got, const char *name)
{
    const json_t *want = data(c, key), *magnitude = NULL;
    const double tolerance = number(tolerances, name), max = largest(want);
    const double least = json_number_value(json_object_get(tolerances, "abs"));
    if (!strcmp(name, "rel_to_magnitude"))
        magnitude = data(c, "magnitude");
    for (size_t i = 0; i < json_array_size(want); i++) {
        const double w = element(want, i), g = (double)got[i];
        const double of = magnitude                     ? element(magnitude, i)
                          : !strcmp(name, "rel_to_max") ? max
                                                        : fabs(w);
        if (isnan(w) ? !isnan(g) : !(fabs(g - w) <= fmax(tolerance * of, least)))
            CHECK_MSG(false, "%s: %s: %s: %s[%zu] = %.9g, expected %.17g", K->name, op, case_name,
                      key, i, g, w);
    }
}

static void run_bf16_matvec(const json_t *c)
{
    const size_t rows = (size_t)number(c, "rows"), cols = (size_t)number(c, "cols"),
                 tokens = dim(c, "x", 0);
    uint8_t *w = integers(c, "weight_bits", 2);
    float *x = floats(c, "x"), *y = get(tokens * rows * sizeof *y);
    K->mm_bf16(y, rows, w, x, cols, rows, cols, tokens);
    compare(c, "y", y, "rel_to_magnitude");
    free(w);
    free(x);
    free(y);
}

static void run_mxfp4_matvec(const json_t *c)
{
    const size_t rows = (size_t)number(c, "rows"), cols = (size_t)number(c, "cols"),
                 tokens = dim(c, "x", 0);
    uint8_t *packed = integers(c, "packed", 1), *scale = integers(c, "scale", 1);
    float *x = floats(c, "x"), *y = get(tokens * rows * sizeof *y);
    K->mm_mxfp4(y, rows, packed, scale, x, cols, rows, cols, tokens);
    compare(c, "y", y, "rel_to_magnitude");
    free(packed);
    free(scale);
    free(x);
    free(y);
}

static void run_rmsnorm(const json_t *c)
{
    const size_t rows = dim(c, "x", 0), n = dim(c, "x", 1);
    float *x = floats(c, "x"), *w = floats(c, "weight");
    for (size_t r = 0; r < rows; r++)
        K->rms_norm(x + r * n, x + r * n, w, (float)number(c, "eps"), n);
    compare(c, "y", x, "rel");
    free(x);
    free(w);
}

static void run_l2norm(const json_t *c)
{
    const size_t rows = dim(c, "x", 0), n = dim(c, "x", 1);
    float *x = floats(c, "x");
    for (size_t r = 0; r < rows; r++)
        K->l2_norm(x + r * n, x + r * n, (float)number(c, "eps"), 1, n);
    compare(c, "y", x, "rel");
    free(x);
}

static void run_situ_glu(const json_t *c)
{
    float *g = floats(c, "gate"), *u = floats(c, "up");
    K->situ_glu(g, g, u, (float)number(c, "beta"), (float)number(c, "linear_beta"),
                count(c, "gate"));
    compare(c, "y", g, "rel");
    free(g);
    free(u);
}

static void run_short_conv(const json_t *c)
{
    const size_t tokens = dim(c, "x", 0), n = dim(c, "x", 1), taps = dim(c, "weight", 2);
    float *x = floats(c, "x"), *w = floats(c, "weight"), *past = floats(c, "past");
    float *y = get(tokens * n * sizeof *y);
    for (size_t t = 0; t < tokens; t++)
        K->conv_silu(y + t * n, past, x + t * n, w, taps, n);
    compare(c, "y", y, "rel_to_max");
    compare(c, "past_after", past, "rel_to_max");
    free(x);
    free(w);
    free(past);
    free(y);
}

static void run_kda_decay(const json_t *c)
{
    const size_t tokens = dim(c, "z", 0), heads = dim(c, "z", 1), n = dim(c, "z", 2);
    float *z = floats(c, "z"), *a_log = floats(c, "A_log_stored"), *bias = floats(c, "dt_bias");
    for (size_t h = 0; h < heads; h++) {
        float exp_a;
        K->exp(&exp_a, a_log + h, 1);
        for (size_t t = 0; t < tokens; t++) {
            float *p = z + (t * heads + h) * n;
            K->kda_decay(p, p, bias + h * n, exp_a, (float)number(c, "lower_bound"), n);
        }
    }
    compare(c, "decay", z, "decay_rel");
    free(z);
    free(a_log);
    free(bias);
}

/* The file's state is [head][key][value], the kernel's [value][key]. */
static void run_kda_recurrence(const json_t *c)
{
    const size_t steps = dim(c, "q", 0), heads = dim(c, "q", 1), n = dim(c, "q", 2);
    float *q = floats(c, "q"), *k = floats(c, "k"), *v = floats(c, "v"), *beta = floats(c, "beta");
    float *alpha = floats(c, "log_decay"), *before = floats(c, "state_before");
    float *after = get(heads * n * n * sizeof *after), *state = get(n * n * sizeof *state);
    float *out = get(steps * heads * n * sizeof *out);
    K->exp(alpha, alpha, steps * heads * n);
    K->scale(q, q, (float)(1 / sqrt((double)n)), steps * heads * n);
    for (size_t h = 0; h < heads; h++) {
        for (size_t i = 0; i < n * n; i++)
            state[i % n * n + i / n] = before[h * n * n + i];
        for (size_t t = 0; t < steps; t++) {
            const size_t at = (t * heads + h) * n;
            K->kda_step(out + at, state, q + at, k + at, v + at, alpha + at, beta[t * heads + h], n,
                        n);
        }
        for (size_t i = 0; i < n * n; i++)
            after[h * n * n + i] = state[i % n * n + i / n];
    }
    compare(c, "out", out, "rel_to_max");
    compare(c, "state_after", after, "rel_to_max");
    free(q);
    free(k);
    free(v);
    free(beta);
    free(alpha);
    free(before);
    free(after);
    free(state);
    free(out);
}

static json_t *load(const char *path)
{
    json_error_t error;
    json_t *root = json_load_file(path, 0, &error);
    CHECK_MSG(root != NULL, "%s: line %d: %s", path, error.line, error.text);
    return root;
}

static void run_op(const char *name, void (*run)(const json_t *c))
{
    char path[128];
    op = name;
    snprintf(path, sizeof path, "tests/data/golden/ops/%s.json", name);
    json_t *root = load(path), *c;
    size_t i;
    if (!root)
        return;
    tolerances = member(root, "tolerance");
    CHECK(json_array_size(member(root, "cases")) > 0);
    json_array_foreach(member(root, "cases"), i, c)
    {
        case_name = json_string_value(member(c, "name"));
        run(c);
    }
    json_decref(root);
}

/* Weights of the released model: each column by itself must give the expected weight exactly. */
static void released_sample(json_t *root)
{
    op = "released MXFP4 sample";
    case_name = "all";
    const size_t rows = (size_t)number(root, "rows"), n = (size_t)number(root, "logical_width");
    uint8_t *packed = integers(root, "packed", 1), *scale = integers(root, "scales", 1);
    float *want = floats(root, "expected"), *x = get(n * n / 16 * sizeof *x),
          *y = get(rows * n * sizeof *y);
    for (size_t c0 = 0; c0 < n; c0 += n / 16) { /* n/16 tokens, each with a single one */
        memset(x, 0, n * n / 16 * sizeof *x);
        for (size_t t = 0; t < n / 16; t++)
            x[t * n + c0 + t] = 1;
        K->mm_mxfp4(y + c0 * rows, rows, packed, scale, x, n, rows, n, n / 16);
    }
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++)
            CHECK_MSG(y[i * rows + r] == want[r * n + i],
                      "%s: %s: weight [%zu][%zu] = %a, expected %a", K->name, op, r, i,
                      (double)y[i * rows + r], (double)want[r * n + i]);
    free(packed);
    free(scale);
    free(want);
    free(x);
    free(y);
}

int main(void)
{
    const unsigned have = sl_cpu_detect();
    const char *sample_path = "../shared/data/k3-mxfp4-sample.json";
    FILE *f = fopen(sample_path, "rb");
    json_t *sample = f ? load(sample_path) : NULL;
    if (f)
        fclose(f);
    else
        printf("%s: not here, skipped\n", sample_path);
    for (unsigned bit = 0; bit <= have; bit = bit ? 2 * bit : 1) {
        if (bit && !(have & bit))
            continue;
        K = sl_kernels_for(bit);
        run_op("bf16_matvec", run_bf16_matvec);
        run_op("mxfp4_matvec", run_mxfp4_matvec);
        run_op("rmsnorm", run_rmsnorm);
        run_op("l2norm", run_l2norm);
        run_op("situ_glu", run_situ_glu);
        run_op("short_conv", run_short_conv);
        run_op("kda_decay", run_kda_decay);
        run_op("kda_recurrence", run_kda_recurrence);
        if (sample &&
            bit) /* scalar would take a minute; test_kernels holds it equal to the others */
            released_sample(sample);
    }
    json_decref(sample);
    CHECK_DONE();
}
#else
int main(void) { CHECK_SKIP("built without libraries"); }
#endif
