/* Router, residual mixture, MLA and MoE each alone, against float64 values. The last two run as they run in
 * the engine, streamed from a checkpoint of one layer that this test writes around the given weights. */
#include "tests/check.h"

#include <jansson.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/num.h"
#include "model/model.h"

static char dir[256];
static const char *name; /* of the case */

static json_t *cases_of(const char *file, json_t **root)
{
    char path[256];
    json_error_t e;
    snprintf(path, sizeof path, "tests/data/golden/ops/%s", file);
    *root = json_load_file(path, 0, &e);
    CHECK_MSG(*root, "%s: %s", path, e.text);
    if (!*root)
        exit(1);
    return json_object_get(*root, "cases");
}

/* A tensor's values, malloc'd; integers (packed codes) come as floats too. */
static float *values(const json_t *tensor, size_t *n)
{
    const json_t *data = json_object_get(tensor, "data");
    *n = json_array_size(data);
    CHECK_MSG(*n > 0, "%s: no values", name);
    float *v = calloc(*n + 1, sizeof *v);
    for (size_t i = 0; i < *n; i++)
        v[i] = (float)json_number_value(json_array_get(data, i));
    return v;
}

static float *field(const json_t *c, const char *key)
{
    size_t n;
    return values(json_object_get(c, key), &n);
}

static size_t rows(const json_t *c, const char *key)
{
    return (size_t)json_integer_value(json_array_get(json_object_get(json_object_get(c, key), "shape"), 0));
}

static uint32_t size(const json_t *c, const char *key) { return (uint32_t)json_integer_value(json_object_get(c, key)); }

static void compare(const char *what, const float *found, const json_t *expected, double rel_to_max)
{
    const json_t *data = json_object_get(expected, "data");
    double most = 0;
    for (size_t i = 0; i < json_array_size(data); i++)
        most = fmax(most, fabs(json_number_value(json_array_get(data, i))));
    CHECK(json_array_size(data) > 0);
    for (size_t i = 0; i < json_array_size(data); i++) {
        const double e = json_number_value(json_array_get(data, i));
        CHECK_MSG(fabs(found[i] - e) <= rel_to_max * most, "%s: %s[%zu]: %.9g, expected %.9g", name, what, i, (double)found[i], e);
    }
}

/* ---- router and mixture ------------------------------------------------------------------------------ */

static void test_router(const sl_kernels *k)
{
    json_t *root, *c, *cases = cases_of("router.json", &root);
    size_t i;
    json_array_foreach(cases, i, c) {
        name = json_string_value(json_object_get(c, "name"));
        const size_t tokens = rows(c, "x"), experts = rows(c, "gate");
        size_t n;
        float *x = values(json_object_get(c, "x"), &n), *gate = field(c, "gate"), *bias = field(c, "bias");
        float *ids = field(c, "ids"), *expected = field(c, "weights"), *scores = field(c, "scores");
        const size_t width = n / tokens;
        sl_config cfg = { .experts = (uint32_t)experts, .top_k = size(c, "top_k"),
                          .renormalize = json_is_true(json_object_get(c, "renormalize")),
                          .routed_scale = (float)json_number_value(json_object_get(c, "scale")) };
        for (size_t t = 0; t < tokens; t++) {
            float score[64], w[64];
            uint32_t chosen[64];
            k->mm_f32(score, experts, gate, width, x + t * width, width, experts, width, 1);
            k->sigmoid(score, score, experts);
            for (size_t e = 0; e < experts; e++)
                CHECK_MSG(fabs(score[e] - scores[t * experts + e]) < 1e-6, "%s: score", name);
            sl_route(&cfg, score, bias, chosen, w);
            for (uint32_t a = 0; a < cfg.top_k; a++) {
                uint32_t at = 0;
                CHECK(a == 0 || chosen[a - 1] < chosen[a]);
                while (at < cfg.top_k && (uint32_t)ids[t * cfg.top_k + at] != chosen[a])
                    at++;
                CHECK_MSG(at < cfg.top_k, "%s: token %zu: expert %u should not be chosen", name, t, chosen[a]);
                if (at < cfg.top_k)
                    CHECK_MSG(fabs(w[a] - expected[t * cfg.top_k + at]) < 2e-6, "%s: weight %.9g, expected %.9g", name,
                              (double)w[a], (double)expected[t * cfg.top_k + at]);
            }
        }
        free(x), free(gate), free(bias), free(ids), free(expected), free(scores);
    }
    json_decref(root);
}

static void test_mixture(const sl_kernels *k)
{
    json_t *root, *c, *cases = cases_of("attn_res.json", &root);
    size_t i;
    json_array_foreach(cases, i, c) {
        name = json_string_value(json_object_get(c, "name"));
        const json_t *shape = json_object_get(json_object_get(c, "sources"), "shape");
        const size_t tokens = rows(c, "sources"), n = (size_t)json_integer_value(json_array_get(shape, 1)),
                     hidden = (size_t)json_integer_value(json_array_get(shape, 2));
        float *sources = field(c, "sources"), *norm = field(c, "norm_weight"), *proj = field(c, "proj_weight");
        float *out = calloc(tokens * hidden, sizeof *out);
        k->mul(norm, norm, proj, hidden);
        for (size_t t = 0; t < tokens; t++) {
            const float *s = sources + t * n * hidden;
            sl_mix(k, s, (uint32_t)n - 1, s + (n - 1) * hidden, norm, (float)json_number_value(json_object_get(c, "eps")),
                   hidden, out + t * hidden);
        }
        compare("mixture", out, json_object_get(c, "y"), 3e-6);
        free(sources), free(norm), free(proj), free(out);
    }
    json_decref(root);
}

/* ---- a checkpoint of one layer ----------------------------------------------------------------------- */

typedef struct {
    FILE *data, *header;
    uint64_t at;
} shard;

static void put_tensor(shard *s, const char *tensor, const char *dtype, const uint64_t *dim, unsigned dims,
                       const void *bytes, uint64_t n)
{
    fprintf(s->header, "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", s->at ? "," : "{", tensor, dtype);
    for (unsigned i = 0; i < dims; i++)
        fprintf(s->header, "%s%llu", i ? "," : "", (unsigned long long)dim[i]);
    fprintf(s->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)s->at, (unsigned long long)(s->at + n));
    CHECK(fwrite(bytes, 1, n, s->data) == n);
    s->at += n;
}

static const json_t *given(const json_t *c, const char *tensor)
{
    const json_t *weights = json_object_get(c, "weights");
    const char *leaf = strstr(tensor, "self_attn.");
    leaf = leaf ? leaf + strlen("self_attn.") : strstr(tensor, "block_sparse_moe.");
    if (leaf && strncmp(leaf, "block_sparse_moe.", 17) == 0)
        leaf += 17;
    return leaf ? json_object_get(weights, leaf) : NULL;
}

static void put_kind(shard *s, const sl_config *cfg, const json_t *c, uint32_t layer, sl_kind k)
{
    char tensor[SL_ST_NAME_MAX];
    uint64_t dim[3];
    const unsigned dims = sl_kind_shape(cfg, k, dim);
    const uint64_t n = sl_kind_elements(cfg, k), unit = sl_kind_dtype(k) == SL_DTYPE_BF16 ? 2 : 4;
    unsigned char *bytes = calloc(n, unit); /* what the case does not give is zero */
    sl_kind_name(layer, k, tensor, sizeof tensor);
    const json_t *w = given(c, tensor);
    if (w) {
        size_t count;
        float *v = values(w, &count);
        CHECK_MSG(count == n, "%s: %s: %zu values, expected %llu", name, tensor, count, (unsigned long long)n);
        for (size_t i = 0; i < count; i++) {
            const uint32_t bits = sl_f32_bits(v[i]);
            const uint16_t high = (uint16_t)(bits >> 16);
            CHECK(unit == 4 || (bits & 0xffff) == 0);
            memcpy(bytes + i * unit, unit == 2 ? (const void *)&high : (const void *)&bits, unit);
        }
        free(v);
    }
    put_tensor(s, tensor, unit == 2 ? "BF16" : "F32", dim, dims, bytes, n * unit);
    free(bytes);
}

static void put_expert(shard *s, const sl_config *cfg, const json_t *c, uint32_t expert)
{
    for (int t = 0; t < SL_EXPERT_TENSORS; t++) {
        char tensor[SL_ST_NAME_MAX], key[64];
        uint64_t dim[2];
        size_t n = 0;
        sl_expert_name(0, expert, t, tensor, sizeof tensor);
        snprintf(key, sizeof key, "experts.%u.w%d", expert, t / 2 + 1);
        const json_t *w = json_object_get(json_object_get(c, "expert_weights"), key);
        sl_expert_shape(cfg, t, &dim[0], &dim[1]);
        unsigned char *bytes = calloc(dim[0], dim[1]);
        float *v = w ? values(json_object_get(w, t % 2 ? "scale" : "packed"), &n) : NULL;
        CHECK_MSG(!w || n == dim[0] * dim[1], "%s: %s", name, key);
        for (size_t i = 0; i < n; i++)
            bytes[i] = (unsigned char)v[i];
        put_tensor(s, tensor, "U8", dim, 2, bytes, dim[0] * dim[1]);
        free(bytes);
        free(v);
    }
}

static void write_checkpoint(const char *config, const json_t *c)
{
    char path[320], *header;
    size_t header_len;
    sl_config cfg;
    sl_err err;
    CHECK_MSG(sl_config_parse(&cfg, config, strlen(config), "config", &err) == 0, "%s", err.text);
    mkdir(dir, 0700);
    snprintf(path, sizeof path, "%s/config.json", dir);
    FILE *f = fopen(path, "w");
    CHECK(f && fputs(config, f) >= 0 && fclose(f) == 0);
    shard s = { .data = tmpfile(), .header = open_memstream(&header, &header_len) };
    for (uint32_t layer = 0; layer != SL_NO_LAYER - 1;) {
        for (unsigned k = 0; k < SL_KINDS; k++)
            if (sl_kind_present(&cfg, layer, (sl_kind)k))
                put_kind(&s, &cfg, c, layer, (sl_kind)k);
        layer = layer == 0 ? SL_NO_LAYER : SL_NO_LAYER - 1;
    }
    for (uint32_t e = 0; e < (cfg.dense_layers ? 0 : cfg.experts); e++)
        put_expert(&s, &cfg, c, e);
    fputc('}', s.header);
    fclose(s.header);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    f = fopen(path, "w");
    const uint64_t n = header_len;
    fwrite(&n, 8, 1, f);
    fwrite(header, 1, header_len, f);
    rewind(s.data);
    for (int ch; (ch = fgetc(s.data)) != EOF;)
        fputc(ch, f);
    CHECK(fclose(f) == 0);
    fclose(s.data);
    free(header);
}

static sl_model *open_checkpoint(const char *config, const json_t *c, uint32_t chunk)
{
    sl_model *m = NULL;
    sl_err err;
    const sl_model_options o = { .ram = 128 << 20, .context = 32, .threads = 2, .prefill_chunk = chunk };
    write_checkpoint(config, c);
    const int rc = sl_model_open(&m, dir, &o, &err);
    CHECK_MSG(rc == 0, "%s: %s", name, err.text);
    if (rc < 0)
        exit(1);
    sl_state_clear(&m->states[0]);
    return m;
}

static const char config_format[] =
    "{\"vocab_size\":16,\"hidden_size\":%u,\"num_hidden_layers\":1,\"rms_norm_eps\":1e-5,\"hidden_act\":\"situ\","
    "\"activation_situ_beta\":4.0,\"activation_situ_linear_beta\":25.0,\"intermediate_size\":8,"
    "\"first_k_dense_replace\":%u,\"num_experts\":%u,\"num_experts_per_token\":%u,\"num_shared_experts\":%u,"
    "\"moe_intermediate_size\":%u,\"routed_expert_hidden_size\":%u,\"latent_moe_use_norm\":%s,"
    "\"moe_renormalize\":%s,\"routed_scaling_factor\":%g,\"moe_router_activation_func\":\"sigmoid\","
    "\"num_attention_heads\":%u,\"q_lora_rank\":%u,\"kv_lora_rank\":%u,\"qk_nope_head_dim\":%u,"
    "\"qk_rope_head_dim\":%u,\"v_head_dim\":%u,\"mla_use_nope\":true,\"mla_use_output_gate\":true,"
    "\"linear_attn_config\":{\"num_heads\":1,\"head_dim\":8,\"short_conv_kernel_size\":4,\"gate_lower_bound\":-5.0,"
    "\"use_full_rank_gate\":true,\"full_attn_layers\":[1],\"kda_layers\":[]}}";

/* What sl_forward does before the first layer; segment and ids must outlive the pass. */
static void begin_pass(sl_model *m, size_t tokens)
{
    static const int32_t none[8];
    static sl_segment segment;
    CHECK(tokens <= 8);
    segment = (sl_segment){ .state = &m->states[0], .ids = none, .tokens = (uint32_t)tokens };
    sl_forward_rows(m, &segment, 1);
    sl_trunk_pass(m->trunk, false, false);
    m->scratch.top = 0;
}

/* Six tokens in one chunk or one by one, then three more. */
static void mla_case(const json_t *c, uint32_t chunk)
{
    char config[2048];
    const uint32_t hidden = size(c, "hidden");
    snprintf(config, sizeof config, config_format, hidden, 1, 2, 1, 0, 32, 32, "false", "true", 1.0, size(c, "heads"),
             size(c, "q_lora_rank"), size(c, "kv_lora_rank"), size(c, "qk_nope_head_dim"), size(c, "qk_rope_head_dim"),
             size(c, "v_head_dim"));
    sl_model *m = open_checkpoint(config, c, chunk);
    sl_err err;
    const char *const inputs[2] = { "x", "x_next" }, *const outputs[2] = { "y", "y_next" };
    for (int part = 0; part < 2; part++) {
        const size_t tokens = rows(c, inputs[part]);
        float *x = field(c, inputs[part]), *y = calloc(tokens * hidden, sizeof *y);
        for (size_t t = 0; t < tokens;) {
            const size_t n = tokens - t < chunk ? tokens - t : chunk;
            begin_pass(m, n);
            const int rc = sl_mla(m, 0, x + t * hidden, y + t * hidden, n, &err);
            CHECK_MSG(rc == 0, "%s: %s", name, err.text);
            m->states[0].position += (uint32_t)n;
            t += n;
        }
        compare(outputs[part], y, json_object_get(c, outputs[part]), 5e-6);
        free(x);
        free(y);
    }
    sl_model_close(m);
}

static void moe_case(const json_t *c, uint32_t chunk)
{
    char config[2048];
    const uint32_t hidden = size(c, "hidden");
    snprintf(config, sizeof config, config_format, hidden, 0, size(c, "experts"), size(c, "top_k"), size(c, "shared"),
             size(c, "width"), size(c, "latent"), json_is_true(json_object_get(c, "latent_norm")) ? "true" : "false",
             json_is_true(json_object_get(c, "renormalize")) ? "true" : "false",
             json_number_value(json_object_get(c, "scale")), 1, 4, 4, 4, 4, 4);
    sl_model *m = open_checkpoint(config, c, chunk);
    sl_err err;
    const size_t tokens = rows(c, "x");
    float *x = field(c, "x"), *y = calloc(tokens * hidden, sizeof *y), *zero = calloc(tokens * hidden, sizeof *zero);
    for (size_t t = 0; t < tokens;) {
        const size_t n = tokens - t < chunk ? tokens - t : chunk;
        begin_pass(m, n);
        int rc = sl_mla(m, 0, zero, y + t * hidden, n, &err); /* its matrices come first in the stream */
        m->scratch.top = 0;
        if (rc == 0)
            rc = sl_moe(m, 0, x + t * hidden, y + t * hidden, n, &err);
        CHECK_MSG(rc == 0, "%s: %s", name, err.text);
        t += n;
    }
    compare("y", y, json_object_get(c, "y"), 5e-6);
    free(x), free(y), free(zero);
    sl_model_close(m);
}

int main(void)
{
    const char *tmp = getenv("TMPDIR"), *why;
    const sl_kernels *k = sl_kernels_choose(&why);
    snprintf(dir, sizeof dir, "%s/sluice-test-sublayers-%ld", tmp ? tmp : "/tmp", (long)getpid());
    test_router(k);
    test_mixture(k);
    json_t *root, *c, *cases = cases_of("mla.json", &root);
    size_t i;
    json_array_foreach(cases, i, c) {
        name = json_string_value(json_object_get(c, "name"));
        mla_case(c, 6);
        mla_case(c, 1);
    }
    json_decref(root);
    cases = cases_of("moe.json", &root);
    json_array_foreach(cases, i, c) {
        name = json_string_value(json_object_get(c, "name"));
        moe_case(c, 4);
        moe_case(c, 1);
    }
    json_decref(root);
    char path[320];
    snprintf(path, sizeof path, "%s/config.json", dir);
    unlink(path);
    snprintf(path, sizeof path, "%s/model.safetensors", dir);
    unlink(path);
    rmdir(dir);
    CHECK_DONE();
}
