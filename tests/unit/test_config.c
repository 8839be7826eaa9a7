/* config.json: every key that defines the computation, absent, of a wrong type, out of range or in
 * contradiction, is refused by its name. The good ones are the golden models' own. */
#include "tests/check.h"
#include "tests/unit/model_dir.h"

#include <jansson.h>

#include "model/config.h"

static json_t *load(const char *dir)
{
    size_t n;
    char *text = get_file(dir, "config.json", &n);
    json_t *root = json_loadb(text, n, 0, NULL);
    CHECK(root != NULL);
    free(text);
    return root;
}

static int parse(const json_t *root, sl_config *c, sl_err *err)
{
    char *text = json_dumps(root, 0);
    *err = (sl_err){ 0 };
    const int rc = sl_config_parse(c, text, strlen(text), "FILE", err);
    free(text);
    return rc;
}

/* The object and the last part of a dotted path below text_config; "^key": at the top level. */
static json_t *find(json_t *root, const char *path, const char **key)
{
    json_t *text = json_object_get(root, "text_config"), *o = *path == '^' || !text ? root : text;
    path += *path == '^';
    for (const char *dot; (dot = strchr(path, '.')); path = dot + 1) {
        char part[64];
        snprintf(part, sizeof part, "%.*s", (int)(dot - path), path);
        o = json_object_get(o, part);
    }
    *key = path;
    return o;
}

static void refused(const json_t *root, const char *key, const char *what)
{
    sl_config c;
    sl_err err;
    const int rc = parse(root, &c, &err);
    CHECK_MSG(rc == SL_EFORMAT && err.code == rc, "%s %s: code %d", key, what, rc);
    CHECK_MSG(strncmp(err.text, "FILE: ", 6) == 0 && strstr(err.text, key), "%s %s: \"%s\" does not name it", key, what,
              err.text);
}

/* A copy of root with the value (JSON text; NULL: none) put at path. */
static json_t *edited(const json_t *root, const char *path, const char *value)
{
    const char *key;
    json_t *copy = json_deep_copy(root), *o = find(copy, path, &key);
    CHECK_MSG(json_is_object(o), "%s", path);
    if (value)
        json_object_set_new(o, key, json_loads(value, JSON_DECODE_ANY, NULL));
    else
        json_object_del(o, key);
    return copy;
}

static void refuse_edit(const json_t *root, const char *path, const char *value, const char *names)
{
    json_t *copy = edited(root, path, value);
    const char *dot = strrchr(path, '.');
    refused(copy, names ? names : dot ? dot + 1 : path + (*path == '^'), value ? value : "(absent)");
    json_decref(copy);
}

enum need { REQUIRED, OPTIONAL };
static const struct {
    const char *path;
    enum need need;
    const char *wrong[4]; /* further values that are refused */
} keys[] = {
    { "vocab_size", REQUIRED, { "0", "1048577" } },
    { "hidden_size", REQUIRED, { "0", "-152", "152.0" } },
    { "num_hidden_layers", REQUIRED, { "0", "1025", "24" } },
    { "rms_norm_eps", REQUIRED, { "0", "-1e-5", "2" } },
    { "hidden_act", REQUIRED, { "\"silu\"" } },
    { "activation_situ_beta", REQUIRED, { "0", "-4" } },
    { "activation_situ_linear_beta", REQUIRED, { "0", "1e300" } },
    { "attn_res_block_size", OPTIONAL, { "0", "1025" } },
    { "intermediate_size", REQUIRED, { "0" } },
    { "first_k_dense_replace", REQUIRED, { "26", "-1" } },
    { "moe_layer_freq", OPTIONAL, { "2" } },
    { "num_experts", REQUIRED, { "0", "65536", "60000" } },
    { "num_experts_per_token", REQUIRED, { "0", "33" } },
    { "num_shared_experts", REQUIRED, { "-1", "1025" } },
    { "moe_intermediate_size", REQUIRED, { "0", "48" } },
    { "routed_expert_hidden_size", REQUIRED, { "0", "40" } }, /* here: hidden_size is no multiple of 32 */
    { "latent_moe_use_norm", OPTIONAL, { "1" } },
    { "moe_router_activation_func", REQUIRED, { "\"softmax\"" } },
    { "moe_renormalize", OPTIONAL, { "0" } },
    { "routed_scaling_factor", REQUIRED, { "0", "-1" } },
    { "num_expert_group", OPTIONAL, { "2" } },
    { "topk_group", OPTIONAL, { "0" } },
    { "num_attention_heads", REQUIRED, { "0" } },
    { "num_key_value_heads", OPTIONAL, { "1" } },
    { "q_lora_rank", REQUIRED, { "0" } },
    { "kv_lora_rank", REQUIRED, { "0" } },
    { "qk_nope_head_dim", REQUIRED, { "0", "1048576" } },
    { "qk_rope_head_dim", REQUIRED, { "0", "1048576" } },
    { "v_head_dim", REQUIRED, { "0", "1048576" } },
    { "mla_use_nope", REQUIRED, { "false" } },
    { "mla_use_output_gate", OPTIONAL, { "0" } },
    { "num_nextn_predict_layers", OPTIONAL, { "1" } },
    { "tie_word_embeddings", OPTIONAL, { "true" } },
    { "eos_token_id", OPTIONAL, { "-1", "512" } },
    { "linear_attn_config", REQUIRED, { "{}" } },
    { "linear_attn_config.num_heads", REQUIRED, { "0", "25" } }, /* A_log has head_dim places */
    { "linear_attn_config.head_dim", REQUIRED, { "0", "2", "1048576" } },
    { "linear_attn_config.short_conv_kernel_size", REQUIRED, { "1", "9" } },
    { "linear_attn_config.gate_lower_bound", REQUIRED, { "1", "-100" } },
    { "linear_attn_config.use_full_rank_gate", OPTIONAL, { "\"yes\"" } },
    { "linear_attn_config.full_attn_layers", REQUIRED, { "[]" } },
    { "linear_attn_config.kda_layers", REQUIRED, { "[]" } },
    { "quantization_config", OPTIONAL, { "\"mxfp4\"", "[]" } },
    { "quantization_config.format", REQUIRED, { "\"int4\"" } },
    { "quantization_config.config_groups.group_0.weights.num_bits", OPTIONAL, { "8" } },
    { "quantization_config.config_groups.group_0.weights.group_size", OPTIONAL, { "16" } },
    { "^eos_token_id", OPTIONAL, { "-1", "512", "true" } },
    { "^tie_word_embeddings", OPTIONAL, { "true" } },
};

static void test_keys(const json_t *root)
{
    sl_config c;
    sl_err err;
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++) {
        const char *path = keys[i].path, *names = strcmp(path, "linear_attn_config") ? NULL : "linear_attn_config.num_heads";
        if (*path == '^' && !json_object_get(root, "text_config"))
            continue; /* there is one level only */
        for (int null = 0; null < 2; null++) { /* null counts as absent */
            const char *value = null ? "null" : NULL;
            if (keys[i].need == REQUIRED) {
                refuse_edit(root, path, value, NULL);
                continue;
            }
            json_t *copy = edited(root, path, value);
            const int rc = parse(copy, &c, &err);
            CHECK_MSG(rc == 0, "%s %s: %s", path, value ? value : "(absent)", err.text);
            json_decref(copy);
        }
        refuse_edit(root, path, "\"x\\n\\u001b[2J\"", NULL);
        refuse_edit(root, path, "[7,[7]]", NULL);
        if (names)
            refuse_edit(root, path, "{}", names);
        for (unsigned k = 0; k < 4 && keys[i].wrong[k]; k++) {
            const bool layers = strcmp(path, "num_hidden_layers") == 0 && strcmp(keys[i].wrong[k], "24") == 0;
            const bool empty = strcmp(keys[i].wrong[k], "[]") == 0 && strstr(path, "_layers");
            refuse_edit(root, path, keys[i].wrong[k], layers ? "full_attn_layers" : empty ? "full_attn_layers, kda_layers"
                        : names ? names : NULL);
        }
    }
}

static void test_layer_map(const json_t *root)
{
    static const struct {
        const char *full, *kda, *names;
    } bad[] = {
        { "[0,2]", "[1,3]", "full_attn_layers" },
        { "[2,4]", "[0,1,3]", "kda_layers" },
        { "[2,94]", "[1,3,4]", "full_attn_layers" },
        { "[2,5]", "[1,3,4]", "full_attn_layers" },
        { "[4]", "[1,2,3,5]", "kda_layers" },
        { "[4,4]", "[1,2,3]", "full_attn_layers" },
        { "[3,4]", "[1,2,3]", "full_attn_layers" },
        { "[4]", "[1,2]", "layer 3 is in neither" },
        { "[4.0]", "[1,2,3]", "full_attn_layers" },
        { "[\"4\"]", "[1,2,3]", "full_attn_layers" },
        { "[-1]", "[1,2,3]", "full_attn_layers" },
        { "[4294967300]", "[1,2,3]", "full_attn_layers" },
        { "[4]", "{\"1\":1}", "kda_layers" },
    };
    sl_config c;
    sl_err err;
    json_t *four = edited(root, "num_hidden_layers", "4");
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        json_t *a = edited(four, "linear_attn_config.full_attn_layers", bad[i].full),
               *b = edited(a, "linear_attn_config.kda_layers", bad[i].kda);
        refused(b, bad[i].names, bad[i].full);
        json_decref(a);
        json_decref(b);
    }
    json_t *a = edited(four, "linear_attn_config.full_attn_layers", "[4,1]"),
           *b = edited(a, "linear_attn_config.kda_layers", "[3,2]");
    CHECK_EQ(parse(b, &c, &err), 0);
    CHECK(c.is_mla[0] && !c.is_mla[1] && !c.is_mla[2] && c.is_mla[3]);
    CHECK_EQ(sl_config_mla_layers(&c), 2);
    json_decref(four);
    json_decref(a);
    json_decref(b);
}

static void test_values(const json_t *root)
{
    sl_config c;
    sl_err err;
    CHECK_EQ(parse(root, &c, &err), 0);
    CHECK_EQ(c.vocab, 512);
    CHECK_EQ(c.hidden, 152);
    CHECK_EQ(c.layers, 25);
    CHECK(c.eps == 1e-5f && c.mla_norm_eps == 1e-6f && c.gate_lower_bound == -5);
    CHECK_EQ(c.eos, 258);
    CHECK_EQ(c.res_block, 12);
    CHECK_EQ(sl_config_snapshots(&c), 3);
    CHECK(sl_config_is_reset(&c, 0) && sl_config_is_reset(&c, 24) && !sl_config_is_reset(&c, 25));
    CHECK(!sl_config_is_moe(&c, 0) && sl_config_is_moe(&c, 1));
    CHECK_EQ(c.latent, 96);
    CHECK(c.latent_projection && c.latent_norm && c.renormalize && c.mla_gate && c.full_rank_gate);
    CHECK_EQ(sl_config_mla_layers(&c), 7);
    CHECK(c.is_mla[23] && c.is_mla[24] && !c.is_mla[22]);

    static const char *const optional[] = { "latent_moe_use_norm", "moe_renormalize", "mla_use_output_gate",
                                            "linear_attn_config.use_full_rank_gate", "attn_res_block_size" };
    json_t *bare = json_deep_copy(root);
    for (size_t i = 0; i < sizeof optional / sizeof *optional; i++) {
        json_t *next = edited(bare, optional[i], NULL);
        json_decref(bare);
        bare = next;
    }
    CHECK_EQ(parse(bare, &c, &err), 0); /* the defaults of the release's own code */
    CHECK(!c.latent_norm && c.renormalize && !c.mla_gate && !c.full_rank_gate && c.res_block == 0);
    CHECK(sl_config_snapshots(&c) == 0 && !sl_config_is_reset(&c, 0));
    json_decref(bare);

    bare = edited(root, "routed_expert_hidden_size", NULL);
    json_t *wide = edited(bare, "hidden_size", "160");
    CHECK_EQ(parse(wide, &c, &err), 0);
    CHECK(c.latent == 160 && !c.latent_projection);
    json_decref(bare);
    json_decref(wide);
}

static void test_text(void)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        { "", "line 1" }, { "{", "line 1" }, { "[]", "expected a JSON object" }, { "7", "line 1" },
        { "{}", "vocab_size" }, { "{\"text_config\":[]}", "text_config" }, { "{\"text_config\":{}}", "text_config.vocab_size" },
        { "{\"a\":1,\"a\":2}", "duplicate" }, { "{\"vocab_size\":\"\xff\"}", "line 1" },
        { "{\"vocab_size\":99999999999999999999}", "line 1" }, { "{\"vocab_size\":NaN}", "line 1" },
    };
    sl_config c;
    sl_err err;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const int rc = sl_config_parse(&c, bad[i].text, strlen(bad[i].text), "FILE", &err);
        CHECK_MSG(rc == SL_EFORMAT && strstr(err.text, bad[i].says), "%s: %d %s", bad[i].text, rc, err.text);
    }
    char *deep = malloc(1 << 20);
    memset(deep, '[', 1 << 20);
    CHECK_EQ(sl_config_parse(&c, deep, 1 << 20, "FILE", &err), SL_EFORMAT);
    free(deep);
    CHECK_EQ(sl_config_load(&c, "tests/data/no-such-directory", &err), SL_EFORMAT);
    CHECK(strstr(err.text, "no-such-directory/config.json"));
}

int main(void)
{
    json_t *nested = load("tests/data/golden/tiny-k3-a");
    json_t *flat = json_deep_copy(json_object_get(nested, "text_config"));
    test_values(nested);
    test_values(flat);
    test_keys(nested);
    test_keys(flat);
    test_layer_map(nested);
    test_layer_map(flat);
    test_text();
    refuse_edit(nested, "eos_token_id", "259", NULL); /* the other level says 258 */
    sl_config c;
    sl_err err;
    json_t *b = load("tests/data/golden/tiny-k3-b");
    CHECK_EQ(parse(b, &c, &err), 0);
    CHECK(!c.latent_norm && !c.renormalize && c.routed_scale == 2.5f && c.dense_layers == 2);
    json_decref(b);
    json_decref(nested);
    json_decref(flat);
    CHECK_DONE();
}
