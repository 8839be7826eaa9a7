/* The whole model against float64 values of an independent implementation: logits, greedy ids, router
 * choices, what passes between the layers, and the state after a prompt. */
#include "tests/check.h"

#include <jansson.h>
#include <math.h>

#include "model/model.h"

enum { CONTEXT = 256, MAX_LAYERS = 32, MAX_TOKENS = 256 };

static sl_model *model;
static sl_err err;
static const json_t *tolerance;
static const char *where;

static double number(const json_t *o, const char *key)
{
    const json_t *v = json_object_get(o, key);
    CHECK_MSG(json_is_number(v), "%s: no number %s", where, key);
    return json_number_value(v);
}

static size_t get_ids(const json_t *list, int32_t *ids, size_t max)
{
    const size_t n = json_array_size(list);
    CHECK(n > 0 && n <= max);
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)json_integer_value(json_array_get(list, i));
    return n;
}

static void close_to(const char *what, double found, double expected, double bound)
{
    CHECK_MSG(fabs(found - expected) <= bound, "%s: %s: %.9g, expected %.9g within %.3g", where, what, found, expected, bound);
}

static void compare_logits(const char *what, const float *logits, const json_t *expected)
{
    CHECK_EQ(json_array_size(expected), model->bind.config.vocab);
    double worst = 0;
    for (size_t i = 0; i < json_array_size(expected); i++) {
        const double d = fabs(logits[i] - json_number_value(json_array_get(expected, i)));
        worst = d > worst || isnan(d) ? d : worst;
    }
    CHECK_MSG(worst <= number(tolerance, "logits_abs"), "%s: %s: off by %.3g", where, what, worst);
    printf("%s: %s: largest error %.2g\n", where, what, worst);
}

static void feed(const int32_t *ids, size_t n)
{
    for (size_t at = 0; at < n;) {
        const size_t chunk = n - at < model->plan.prefill_chunk ? n - at : model->plan.prefill_chunk;
        const sl_segment segment = { .state = &model->states[0], .ids = ids + at, .tokens = (uint32_t)chunk,
                                     .logits = (uint32_t)chunk };
        const int rc = sl_forward(model, &segment, 1, false, NULL, NULL, &err);
        CHECK_MSG(rc == 0, "%s: %s", where, err.text);
        if (rc < 0)
            exit(1);
        at += chunk;
    }
}

static int32_t best(const float *logits)
{
    int32_t id = 0;
    for (uint32_t i = 1; i < model->bind.config.vocab; i++)
        if (logits[i] > logits[id])
            id = (int32_t)i;
    return id;
}

/* ---- what the layers hand on ---------------------------------------------------------------------- */

static double norms[6][MAX_LAYERS][MAX_TOKENS]; /* L2 norms by enum sl_probe */
static uint32_t chosen[MAX_LAYERS][MAX_TOKENS][16];
static float weights[MAX_LAYERS][MAX_TOKENS][16];
static float last_vector[6][MAX_LAYERS][512];
static uint32_t probe_base;

static void probe(void *user, int what, uint32_t layer, uint32_t token, const void *data, size_t n)
{
    (void)user;
    const uint32_t t = probe_base + token;
    if (layer == SL_NO_LAYER)
        layer = 0;
    if (what == SL_PROBE_CHOSEN) {
        memcpy(chosen[layer][t], data, n * sizeof(uint32_t));
        return;
    }
    if (what == SL_PROBE_WEIGHTS) {
        memcpy(weights[layer][t], data, n * sizeof(float));
        return;
    }
    double sum = 0;
    for (size_t i = 0; i < n; i++)
        sum += (double)((const float *)data)[i] * ((const float *)data)[i];
    norms[what][layer][t] = sqrt(sum);
    memcpy(last_vector[what][layer], data, n * sizeof(float));
}

static const char *const probe_names[] = {
    [SL_PROBE_ATTN_INPUT] = "attention_input", [SL_PROBE_ATTN_OUTPUT] = "attention_output",
    [SL_PROBE_MLP_INPUT] = "mlp_input", [SL_PROBE_MLP_OUTPUT] = "mlp_output", [SL_PROBE_SUM] = "running_sum",
};

static void compare_norms(const json_t *layers, size_t tokens)
{
    const double rel = number(tolerance, "hidden_rel");
    for (int what = SL_PROBE_ATTN_INPUT; what <= SL_PROBE_SUM; what++)
        for (uint32_t l = 0; l < model->bind.config.layers; l++) {
            char key[64];
            snprintf(key, sizeof key, "%s_norm", probe_names[what]);
            const json_t *row = json_object_get(json_array_get(layers, l), key);
            CHECK_EQ(json_array_size(row), tokens);
            for (size_t t = 0; t < json_array_size(row); t++) {
                const double expected = json_number_value(json_array_get(row, t));
                close_to(probe_names[what], norms[what][l][t], expected, rel * expected);
            }
        }
}

static void compare_router(const json_t *router, size_t tokens)
{
    const sl_config *c = &model->bind.config;
    const double bound = number(tolerance, "router_weight_abs");
    CHECK_EQ(json_array_size(router), c->layers - c->dense_layers);
    for (size_t i = 0; i < json_array_size(router); i++) {
        const json_t *entry = json_array_get(router, i);
        const json_t *layer = json_object_get(entry, "layer");
        const uint32_t l = layer ? (uint32_t)json_integer_value(layer) : c->dense_layers + (uint32_t)i;
        for (size_t t = 0; t < tokens; t++) {
            const json_t *ids = json_array_get(json_object_get(entry, "experts"), t);
            const json_t *w = json_array_get(json_object_get(entry, "weights_f64"), t);
            CHECK_EQ(json_array_size(ids), c->top_k);
            for (uint32_t k = 0; k < c->top_k; k++) {
                uint32_t at = 0;
                while (at < c->top_k && chosen[l][t][at] != json_integer_value(json_array_get(ids, k)))
                    at++;
                CHECK_MSG(at < c->top_k, "%s: layer %u, token %zu: expert %lld was not chosen", where, l, t,
                          (long long)json_integer_value(json_array_get(ids, k)));
                if (at < c->top_k)
                    close_to("router weight", weights[l][t][at], json_number_value(json_array_get(w, k)), bound);
            }
        }
    }
}

static void compare_vectors(const json_t *layers)
{
    const double rel = number(tolerance, "hidden_rel");
    for (int what = SL_PROBE_ATTN_INPUT; what <= SL_PROBE_SUM; what++) {
        if (what == SL_PROBE_MLP_INPUT)
            continue;
        for (uint32_t l = 0; l < model->bind.config.layers; l++) {
            char key[64];
            snprintf(key, sizeof key, "%s_f64", probe_names[what]);
            const json_t *v = json_object_get(json_array_get(layers, l), key);
            double largest = 0;
            CHECK_EQ(json_array_size(v), model->bind.config.hidden);
            for (size_t i = 0; i < json_array_size(v); i++)
                largest = fmax(largest, fabs(json_number_value(json_array_get(v, i))));
            for (size_t i = 0; i < json_array_size(v); i++)
                close_to(probe_names[what], last_vector[what][l][i], json_number_value(json_array_get(v, i)), 2 * rel * largest);
        }
    }
}

/* ---- state ------------------------------------------------------------------------------------------ */

static void compare_kda_state(const json_t *list, double bound)
{
    const sl_config *c = &model->bind.config;
    const size_t dim = c->kda_dim, n = c->kda_heads * dim * dim;
    CHECK_EQ(json_array_size(list), c->layers - sl_config_mla_layers(c));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const uint32_t layer = (uint32_t)number(entry, "layer");
        const float *state = model->states[0].kda + model->layer_index[layer] * n;
        double sum = 0, abs_sum = 0, squares = 0;
        for (size_t k = 0; k < n; k++) {
            sum += state[k];
            abs_sum += fabs(state[k]);
            squares += (double)state[k] * state[k];
        }
        close_to("state sum", sum, number(entry, "sum_f64"), bound * sqrt((double)n));
        close_to("state sum of absolute values", abs_sum, number(entry, "sum_abs_f64"), bound * sqrt((double)n));
        close_to("state norm", sqrt(squares), number(entry, "norm_f64"), bound);
        const json_t *elements = json_object_get(entry, "elements");
        CHECK(json_array_size(elements) > 0);
        for (size_t k = 0; k < json_array_size(elements); k++) {
            const json_t *e = json_array_get(elements, k);
            const size_t h = (size_t)number(e, "head"), key = (size_t)number(e, "key"), value = (size_t)number(e, "value");
            close_to("state element", state[(h * dim + value) * dim + key], number(e, "f64"), bound);
        }
        const json_t *conv = json_object_get(entry, "conv");
        const size_t taps = c->conv_taps - 1;
        CHECK(json_array_size(conv) > 0);
        for (size_t k = 0; k < json_array_size(conv); k++) {
            const json_t *e = json_array_get(conv, k);
            const size_t channel = (size_t)number(e, "channel"), ago = (size_t)number(e, "steps_ago");
            const size_t stream = (size_t)(strchr("qkv", *json_string_value(json_object_get(e, "stream"))) - "qkv");
            const float *past = model->states[0].conv + ((model->layer_index[layer] * c->kda_heads + channel / dim) * 3 + stream) * taps * dim;
            close_to("convolution input", past[(taps - ago) * dim + channel % dim], number(e, "f64"), bound);
        }
    }
}

static void compare_row(const char *what, const float *found, const json_t *expected, size_t n, double bound)
{
    CHECK(json_array_size(expected) > 0 && json_array_size(expected) <= n);
    for (size_t i = 0; i < json_array_size(expected); i++)
        close_to(what, found[i], json_number_value(json_array_get(expected, i)), bound);
}

static void compare_latent_cache(const json_t *list, double bound)
{
    const sl_config *c = &model->bind.config;
    const size_t row = (size_t)c->kv_lora + c->rope;
    CHECK_EQ(json_array_size(list), sl_config_mla_layers(c));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *entry = json_array_get(list, i);
        const size_t positions = (size_t)number(entry, "positions");
        const uint32_t layer = (uint32_t)number(entry, "layer");
        const float *cache = model->states[0].latent + (size_t)model->layer_index[layer] * CONTEXT * row;
        const float *last = cache + (positions - 1) * row;
        double squares = 0;
        for (size_t k = 0; k < positions * row; k++)
            squares += (double)cache[k] * cache[k];
        close_to("latent cache norm", sqrt(squares), number(entry, "norm_f64"), 5 * bound);
        compare_row("last latent", last, json_object_get(entry, "last_latent_f64"), c->kv_lora, bound);
        compare_row("first latent", cache, json_object_get(entry, "first_latent_f64"), c->kv_lora, bound);
        compare_row("last rope slice", last + c->kv_lora, json_object_get(entry, "last_rope_slice_f64"), c->rope, bound);
    }
}

static void test_model(const char *dir)
{
    char path[256];
    json_error_t je;
    snprintf(path, sizeof path, "%s/golden.json", dir);
    json_t *golden = json_load_file(path, 0, &je);
    CHECK_MSG(golden, "%s: %s", path, je.text);
    tolerance = json_object_get(golden, "tolerance");
    const sl_model_options opt = { .ram = 256 << 20, .context = CONTEXT, .threads = 2, .prefill_chunk = MAX_TOKENS,
                                   .all_logits = true };
    const int rc = sl_model_open(&model, dir, &opt, &err);
    CHECK_MSG(rc == 0, "%s: %s", dir, err.text);
    if (rc < 0)
        return;
    const uint32_t vocab = model->bind.config.vocab;
    json_t *prompts = json_object_get(golden, "prompts"), *prompt;
    size_t i;
    json_array_foreach(prompts, i, prompt) {
        int32_t ids[MAX_TOKENS], expected[64];
        char name[128];
        const size_t n = get_ids(json_object_get(prompt, "ids"), ids, MAX_TOKENS);
        snprintf(name, sizeof name, "%s %s", dir + strlen("tests/data/golden/"), json_string_value(json_object_get(prompt, "name")));
        where = name;
        sl_state_clear(&model->states[0]);
        model->probe = probe;
        feed(ids, n);
        model->probe = NULL;
        compare_logits("last logits", model->logits + (n - 1) * vocab, json_object_get(prompt, "last_logits_f64"));
        const json_t *all = json_object_get(prompt, "all_logits_f64"), *layers;
        for (size_t t = 0; t < json_array_size(all); t++)
            compare_logits("logits", model->logits + t * vocab, json_array_get(all, t));
        if ((layers = json_object_get(prompt, "layers")))
            compare_norms(layers, n);
        if ((layers = json_object_get(prompt, "router")))
            compare_router(layers, n);
        if ((layers = json_object_get(prompt, "last_position_layers")))
            compare_vectors(layers);
        if ((layers = json_object_get(prompt, "state_after_prompt"))) {
            compare_kda_state(json_object_get(layers, "kda"), number(tolerance, "state_abs"));
            compare_latent_cache(json_object_get(layers, "mla"), number(tolerance, "state_abs"));
        }
        const json_t *mix = json_object_get(prompt, "final_mix_norm");
        for (size_t t = 0; t < json_array_size(mix); t++) {
            const double expected_norm = json_number_value(json_array_get(mix, t));
            close_to("final mixture", norms[SL_PROBE_FINAL][0][t], expected_norm, number(tolerance, "hidden_rel") * expected_norm);
        }

        const size_t steps = get_ids(json_object_get(json_object_get(prompt, "greedy"), "ids"), expected, 64);
        const float *logits = model->logits + (n - 1) * vocab;
        for (size_t k = 0; k < steps; k++) {
            const int32_t id = best(logits);
            CHECK_MSG(id == expected[k], "%s: greedy step %zu: %d, expected %d", where, k, id, expected[k]);
            if (k + 1 < steps)
                feed(&id, 1);
            logits = model->logits;
        }
    }

    const json_t *perplexity = json_object_get(golden, "perplexity");
    int32_t ids[MAX_TOKENS];
    const size_t n = get_ids(json_object_get(perplexity, "ids"), ids, MAX_TOKENS);
    where = "perplexity";
    sl_state_clear(&model->states[0]);
    feed(ids, n);
    const json_t *nll = json_object_get(perplexity, "nll_f64");
    CHECK_EQ(json_array_size(nll), n - 1);
    for (size_t t = 0; t + 1 < n; t++) {
        double sum = 0;
        for (uint32_t v = 0; v < vocab; v++)
            sum += exp((double)model->logits[t * vocab + v] - model->logits[t * vocab + ids[t + 1]]);
        close_to("nll", log(sum), json_number_value(json_array_get(nll, t)), number(tolerance, "nll_abs"));
    }
    sl_model_close(model);
    model = NULL;
    json_decref(golden);
}

int main(void)
{
    test_model("tests/data/golden/tiny-k3-a");
    test_model("tests/data/golden/tiny-k3-b");
    CHECK_DONE();
}
