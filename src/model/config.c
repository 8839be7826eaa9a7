#include "model/config.h"

#include <jansson.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"

enum { CONFIG_MAX = 4 << 20 }; /* bytes of config.json */

/* Reads keys of one object; the first error sticks, so a list of reads needs one check at its end. */
typedef struct {
    const json_t *obj;
    const char *file, *where; /* "config.json", "linear_attn_config." */
    sl_err *err;
    int rc;
} reader;

static void refuse(reader *r, const char *key, const json_t *found, const char *expected)
{
    if (r->rc < 0)
        return;
    char *text = found ? json_dumps(found, JSON_ENCODE_ANY | JSON_COMPACT) : NULL;
    r->rc = sl_fail(r->err, SL_EFORMAT, "%s: %s%s: found %.80s, expected %s", r->file, r->where, key,
                    text ? text : "nothing", expected);
    free(text);
}

/* null counts as absent, as in the release's own reader. */
static const json_t *find(const reader *r, const char *key)
{
    const json_t *v = json_object_get(r->obj, key);
    return json_is_null(v) ? NULL : v;
}

static void get_u32_range(reader *r, const char *key, uint32_t *out, uint32_t min, uint32_t max)
{
    const json_t *v = find(r, key);
    if (json_is_integer(v) && json_integer_value(v) >= min && json_integer_value(v) <= max) {
        *out = (uint32_t)json_integer_value(v);
        return;
    }
    char expected[64];
    snprintf(expected, sizeof expected, "an integer from %u to %u", min, max);
    refuse(r, key, v, expected);
}

static void get_u32(reader *r, const char *key, uint32_t *out)
{
    get_u32_range(r, key, out, 1, SL_DIM_MAX);
}

static void get_float(reader *r, const char *key, float *out, double min, double max)
{
    const json_t *v = find(r, key);
    if (json_is_number(v) && json_number_value(v) >= min && json_number_value(v) <= max) {
        *out = (float)json_number_value(v);
        return;
    }
    char expected[64];
    snprintf(expected, sizeof expected, "a number from %g to %g", min, max);
    refuse(r, key, v, expected);
}

static void get_bool(reader *r, const char *key, bool *out)
{
    const json_t *v = find(r, key);
    if (json_is_boolean(v))
        *out = json_is_true(v);
    else
        refuse(r, key, v, "true or false");
}

static void get_bool_or(reader *r, const char *key, bool *out, bool fallback)
{
    *out = fallback;
    if (find(r, key))
        get_bool(r, key, out);
}

static void want_string(reader *r, const char *key, const char *value)
{
    const json_t *v = find(r, key);
    if (!json_is_string(v) || strcmp(json_string_value(v), value) != 0)
        refuse(r, key, v, value);
}

/* A key that may be absent, but whose only supported value is `value`. */
static void want_u32_if_given(reader *r, const char *key, uint32_t value)
{
    const json_t *v = find(r, key);
    char expected[16];
    snprintf(expected, sizeof expected, "%u", value);
    if (v && (!json_is_integer(v) || json_integer_value(v) != value))
        refuse(r, key, v, expected);
}

static void want_bool_if_given(reader *r, const char *key, bool value)
{
    const json_t *v = find(r, key);
    if (v && (!json_is_boolean(v) || json_is_true(v) != value))
        refuse(r, key, v, value ? "true" : "false");
}

/* The one-based layer lists must partition 1..layers: falling back to one kind gives fluent nonsense. */
static void read_layer_map(reader *r, sl_config *c)
{
    static const char *const keys[2] = { "kda_layers", "full_attn_layers" };
    unsigned char seen[SL_LAYERS_MAX] = { 0 };
    for (int k = 0; k < 2; k++) {
        const json_t *list = find(r, keys[k]);
        if (!json_is_array(list)) {
            refuse(r, keys[k], list, "a list of one-based layer numbers");
            return;
        }
        for (size_t i = 0; i < json_array_size(list); i++) {
            const json_t *v = json_array_get(list, i);
            const json_int_t l = json_integer_value(v);
            char expected[64];
            snprintf(expected, sizeof expected, "layer numbers from 1 to %u, each once in both lists", c->layers);
            if (!json_is_integer(v) || l < 1 || l > c->layers || seen[l - 1]++) {
                refuse(r, keys[k], v, expected);
                return;
            }
            c->is_mla[l - 1] = k == 1;
        }
    }
    for (uint32_t l = 0; l < c->layers; l++)
        if (!seen[l] && r->rc == 0)
            r->rc = sl_fail(r->err, SL_EFORMAT, "%s: %sfull_attn_layers, kda_layers: layer %u is in neither list",
                            r->file, r->where, l + 1);
}

/* Widths that are products must stay in range as well. `keys` names the factors. */
static void check_width(reader *r, const char *keys, uint64_t width)
{
    if (r->rc == 0 && width > SL_DIM_MAX)
        r->rc = sl_fail(r->err, SL_EFORMAT, "%s: %s%s: found a width of %llu together, expected at most %d", r->file,
                        r->where, keys, (unsigned long long)width, SL_DIM_MAX);
}

static void read_linear_attention(reader *outer, sl_config *c)
{
    const json_t *obj = find(outer, "linear_attn_config");
    if (!json_is_object(obj)) {
        refuse(outer, "linear_attn_config", obj, "an object");
        return;
    }
    reader r = { .obj = obj, .file = outer->file, .where = "linear_attn_config.", .err = outer->err, .rc = outer->rc };
    get_u32(&r, "num_heads", &c->kda_heads);
    get_u32(&r, "head_dim", &c->kda_dim);
    check_width(&r, "num_heads, head_dim", (uint64_t)c->kda_heads * c->kda_dim);
    if (r.rc == 0 && c->kda_heads > c->kda_dim) /* A_log has one value a head in head_dim places */
        r.rc = sl_fail(r.err, SL_EFORMAT, "%s: %snum_heads: found %u, expected at most head_dim, %u", r.file, r.where,
                       c->kda_heads, c->kda_dim);
    get_u32_range(&r, "short_conv_kernel_size", &c->conv_taps, 2, SL_TAPS_MAX);
    if (!find(&r, "gate_lower_bound"))
        refuse(&r, "gate_lower_bound", NULL, "a number: the softplus decay of older models is not supported");
    get_float(&r, "gate_lower_bound", &c->gate_lower_bound, -80, 0);
    get_bool_or(&r, "use_full_rank_gate", &c->full_rank_gate, false);
    if (r.rc == 0)
        read_layer_map(&r, c);
    outer->rc = r.rc;
}

static void read_moe(reader *r, sl_config *c)
{
    get_u32_range(r, "first_k_dense_replace", &c->dense_layers, 0, c->layers);
    get_u32(r, "intermediate_size", &c->intermediate);
    get_u32_range(r, "num_experts", &c->experts, 1, SL_EXPERTS_MAX);
    if (r->rc == 0 && (uint64_t)c->experts * c->layers > SL_ALL_EXPERTS_MAX)
        refuse(r, "num_experts", find(r, "num_experts"), "at most 1048576 in all layers together");
    if (r->rc == 0)
        get_u32_range(r, "num_experts_per_token", &c->top_k, 1, c->experts);
    get_u32_range(r, "num_shared_experts", &c->shared_experts, 0, 1024);
    get_u32(r, "moe_intermediate_size", &c->moe_intermediate);
    check_width(r, "num_shared_experts, moe_intermediate_size", (uint64_t)c->shared_experts * c->moe_intermediate);
    c->latent = c->hidden;
    c->latent_projection = find(r, "routed_expert_hidden_size") != NULL;
    if (c->latent_projection)
        get_u32(r, "routed_expert_hidden_size", &c->latent);
    get_bool_or(r, "latent_moe_use_norm", &c->latent_norm, false);
    get_bool_or(r, "moe_renormalize", &c->renormalize, true);
    get_float(r, "routed_scaling_factor", &c->routed_scale, 1e-6, 1e6);
    want_string(r, "moe_router_activation_func", "sigmoid");
    want_u32_if_given(r, "moe_layer_freq", 1);
    want_u32_if_given(r, "num_expert_group", 1);
    want_u32_if_given(r, "topk_group", 1);
    if (r->rc == 0 && (c->latent % 32 || c->moe_intermediate % 32))
        r->rc = sl_fail(r->err, SL_EFORMAT,
                        "%s: routed_expert_hidden_size, moe_intermediate_size: found %u, %u, expected multiples of 32 "
                        "(the MXFP4 group)", r->file, c->latent, c->moe_intermediate);
}

static void read_mla(reader *r, sl_config *c)
{
    get_u32(r, "num_attention_heads", &c->heads);
    if (r->rc == 0)
        want_u32_if_given(r, "num_key_value_heads", c->heads);
    get_u32(r, "q_lora_rank", &c->q_lora);
    get_u32(r, "kv_lora_rank", &c->kv_lora);
    get_u32(r, "qk_nope_head_dim", &c->nope);
    get_u32(r, "qk_rope_head_dim", &c->rope);
    get_u32(r, "v_head_dim", &c->v_dim);
    if (r->rc == 0) {
        check_width(r, "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim", (uint64_t)c->heads * (c->nope + c->rope));
        check_width(r, "num_attention_heads, qk_nope_head_dim, v_head_dim", (uint64_t)c->heads * (c->nope + c->v_dim));
        check_width(r, "kv_lora_rank, qk_rope_head_dim", (uint64_t)c->kv_lora + c->rope);
    }
    get_bool_or(r, "mla_use_output_gate", &c->mla_gate, false);
    bool nope = true;
    get_bool(r, "mla_use_nope", &nope);
    if (r->rc == 0 && !nope)
        refuse(r, "mla_use_nope", find(r, "mla_use_nope"), "true: rotary positions are not supported");
}

static void read_text(reader *r, sl_config *c)
{
    get_u32(r, "vocab_size", &c->vocab);
    get_u32(r, "hidden_size", &c->hidden);
    get_u32_range(r, "num_hidden_layers", &c->layers, 1, SL_LAYERS_MAX);
    get_float(r, "rms_norm_eps", &c->eps, 1e-12, 1);
    c->mla_norm_eps = 1e-6f;
    want_string(r, "hidden_act", "situ");
    get_float(r, "activation_situ_beta", &c->situ_beta, 1e-3, 1e6);
    get_float(r, "activation_situ_linear_beta", &c->situ_linear_beta, 1e-3, 1e6);
    c->res_block = 0;
    if (find(r, "attn_res_block_size"))
        get_u32_range(r, "attn_res_block_size", &c->res_block, 1, SL_LAYERS_MAX);
    want_bool_if_given(r, "tie_word_embeddings", false);
    want_u32_if_given(r, "num_nextn_predict_layers", 0);
    if (r->rc == 0) {
        read_moe(r, c);
        read_mla(r, c);
        read_linear_attention(r, c);
    }
}

/* The experts' storage is known from their tensors; a config that says otherwise is a contradiction. */
static void check_quantization(reader *outer)
{
    const json_t *q = find(outer, "quantization_config");
    if (!q)
        return;
    if (!json_is_object(q)) {
        refuse(outer, "quantization_config", q, "an object");
        return;
    }
    reader r = { .obj = q, .file = outer->file, .where = "quantization_config.", .err = outer->err, .rc = outer->rc };
    want_string(&r, "format", "mxfp4-pack-quantized");
    const json_t *weights = json_object_get(json_object_get(json_object_get(q, "config_groups"), "group_0"), "weights");
    if (weights) {
        reader w = { .obj = weights, .file = r.file, .where = "quantization_config.config_groups.group_0.weights.",
                     .err = r.err, .rc = r.rc };
        want_u32_if_given(&w, "num_bits", 4);
        want_u32_if_given(&w, "group_size", 32);
        r.rc = w.rc;
    }
    outer->rc = r.rc;
}

static void read_eos(reader *text, reader *top, sl_config *c)
{
    reader *r = find(top, "eos_token_id") ? top : text;
    c->eos = -1;
    uint32_t id;
    if (!find(r, "eos_token_id"))
        return;
    get_u32_range(r, "eos_token_id", &id, 0, c->vocab - 1);
    if (r->rc == 0)
        c->eos = (int32_t)id;
    const json_t *inner = find(text, "eos_token_id");
    if (r->rc == 0 && inner && (!json_is_integer(inner) || json_integer_value(inner) != c->eos))
        refuse(text, "eos_token_id", inner, "the same id at both levels");
}

int sl_config_parse(sl_config *out, const char *text, size_t len, const char *file, sl_err *err)
{
    json_error_t je;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &je);
    if (!root)
        return sl_fail(err, SL_EFORMAT, "%s: line %d: %s", file, je.line, je.text);
    memset(out, 0, sizeof *out);
    reader top = { .obj = root, .file = file, .where = "", .err = err };
    reader body = top;
    const json_t *nested = json_object_get(root, "text_config");
    if (!json_is_object(root))
        top.rc = sl_fail(err, SL_EFORMAT, "%s: expected a JSON object", file);
    else if (nested && !json_is_object(nested))
        refuse(&top, "text_config", nested, "an object");
    else {
        if (nested)
            body = (reader){ .obj = nested, .file = file, .where = "text_config.", .err = err };
        read_text(&body, out);
        if (body.rc == 0)
            check_quantization(&body);
        if (body.rc == 0 && nested)
            want_bool_if_given(&top, "tie_word_embeddings", false);
        if (body.rc == 0 && top.rc == 0)
            read_eos(&body, &top, out);
    }
    json_decref(root);
    return body.rc < 0 ? body.rc : top.rc;
}

int sl_config_load(sl_config *out, const char *dir, sl_err *err)
{
    char path[4096], *text;
    size_t len;
    int rc = sl_path_join(path, sizeof path, dir, "config.json", err);
    if (rc < 0 || (rc = sl_file_read(&text, &len, path, NULL, CONFIG_MAX, err)) < 0)
        return rc;
    rc = sl_config_parse(out, text, len, path, err);
    free(text);
    return rc;
}

uint32_t sl_config_mla_layers(const sl_config *c)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < c->layers; l++)
        n += c->is_mla[l];
    return n;
}
