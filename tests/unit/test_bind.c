/* Binding: both golden models with and without their index, without the name prefix, and with each kind
 * of damage that a header can have. */
#include "tests/check.h"
#include "tests/unit/model_dir.h"

#include "model/bind.h"

static char dir[256];
static const char *const shards[] = { "model-00001-of-000003.safetensors", "model-00002-of-000003.safetensors",
                                      "model-00003-of-000003.safetensors" };
static const char index_name[] = "model.safetensors.index.json";

/* Copies a golden model into dir. With `from`, its first occurrence in each shard's header becomes `to`,
 * all of them with `all`; the padding at the header's end takes up the difference (two spaces at least). */
static unsigned copy(const char *model, bool index, const char *from, const char *to, bool all)
{
    char source[128];
    unsigned changed = 0;
    size_t n;
    snprintf(source, sizeof source, "tests/data/golden/%s", model);
    char *data = get_file(source, "config.json", &n);
    put_file(dir, "config.json", data, n);
    free(data);
    if (index) {
        data = get_file(source, index_name, &n);
        put_file(dir, index_name, data, n);
        free(data);
    }
    for (int i = 0; i < 3; i++) {
        data = get_file(source, shards[i], &n);
        uint64_t header;
        memcpy(&header, data, 8); /* tests run on little-endian machines */
        char *end = data + 8 + header, *p = data + 8;
        while (from && (p = memmem(p, (size_t)(end - p), from, strlen(from)))) {
            const size_t k = strlen(from), l = strlen(to);
            memmove(p + l, p + k, (size_t)(end - p) - (k > l ? k : l));
            if (k > l)
                memset(end - (k - l), ' ', k - l);
            memcpy(p, to, l);
            changed++;
            if (!all)
                break;
        }
        put_file(dir, shards[i], data, n);
        free(data);
    }
    return changed;
}

static int open_model(sl_binding *b, unsigned flags, sl_err *err)
{
    *err = (sl_err){ 0 };
    return sl_binding_open(b, dir, flags, NULL, err);
}

static void refused(const char *says)
{
    static sl_binding b;
    sl_err err;
    const int rc = open_model(&b, 0, &err);
    CHECK_MSG(rc == SL_EFORMAT && err.code == rc && strstr(err.text, says), "code %d, \"%s\" lacks \"%s\"", rc, err.text, says);
    if (rc == 0)
        sl_binding_close(&b);
}

static void good(const char *model, uint64_t tensors)
{
    static sl_binding b;
    sl_err err;
    const int rc = open_model(&b, SL_SHARDS_DIRECT, &err);
    CHECK_MSG(rc == 0, "%s: %s", model, err.text);
    if (rc < 0)
        return;
    const sl_config *c = &b.config;
    CHECK_EQ(b.shards.tensors, tensors);
    CHECK_EQ(b.other_tensors, 12);
    CHECK_EQ(sl_binding_missing(&b, NULL, NULL), 0);
    /* Every place lies in its file and is where the name in the header says. */
    char name[SL_ST_NAME_MAX];
    for (uint32_t i = 0; i <= c->layers; i++)
        for (unsigned k = 0; k < SL_KINDS; k++) {
            const uint32_t layer = i < c->layers ? i : SL_NO_LAYER;
            const sl_place *p = sl_binding_place(&b, layer, (sl_kind)k);
            CHECK_EQ(p->offset != 0, sl_kind_present(c, layer, (sl_kind)k));
            if (!p->offset)
                continue;
            sl_kind_name(layer, (sl_kind)k, name, sizeof name);
            const uint64_t bytes = sl_kind_elements(c, (sl_kind)k) * (sl_kind_dtype((sl_kind)k) == SL_DTYPE_F32 ? 4 : 2);
            CHECK(p->offset + bytes <= b.shards.file[p->shard].size);
        }
    for (size_t i = 0; i < (size_t)(c->layers - c->dense_layers) * c->experts; i++)
        for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
            uint64_t rows, row_bytes;
            sl_expert_shape(c, k, &rows, &row_bytes);
            CHECK(b.experts[i].offset[k] + rows * row_bytes <= b.shards.file[b.experts[i].file[k]].size);
        }
    sl_binding_close(&b);
}

/* Where a tensor's data begins, by a plain search of the header. */
static uint64_t offset_in(const char *shard, const char *name)
{
    size_t n;
    char *data = get_file(dir, shard, &n), quoted[300];
    uint64_t header, at = 0;
    memcpy(&header, data, 8);
    data[8 + header - 1] = 0;
    snprintf(quoted, sizeof quoted, "\"%s\"", name);
    const char *p = strstr(data + 8, quoted);
    if (p && (p = strstr(p, "data_offsets\":")))
        at = 8 + header + strtoull(strchr(p, '[') + 1, NULL, 10);
    free(data);
    return at;
}

static void test_places(void)
{
    static sl_binding b;
    sl_err err;
    unsigned found = 0;
    char name[SL_ST_NAME_MAX];
    copy("tiny-k3-b", true, NULL, NULL, false);
    CHECK_EQ(open_model(&b, 0, &err), 0);
    for (uint16_t s = 0; s < b.shards.n; s++) {
        for (uint32_t layer = 0; layer < b.config.layers; layer++) {
            for (unsigned k = 0; k < SL_LAYER_KINDS; k += 3) {
                sl_kind_name(layer, (sl_kind)k, name, sizeof name);
                const sl_place *p = sl_binding_place(&b, layer, (sl_kind)k);
                const uint64_t at = p->offset && p->shard == s ? offset_in(b.shards.name[s], name) : 0;
                if (at) {
                    CHECK_EQ(p->offset, at);
                    found++;
                }
            }
            if (layer < b.config.dense_layers)
                continue;
            for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
                const uint32_t e = layer % b.config.experts;
                const sl_expert_place *p = &b.experts[(layer - b.config.dense_layers) * b.config.experts + e];
                sl_expert_name(layer, e, k, name, sizeof name);
                if (p->file[k] == s) {
                    CHECK_EQ(p->offset[k], offset_in(b.shards.name[s], name));
                    found++;
                }
            }
        }
    }
    CHECK(found > 80);
    sl_binding_close(&b);
}

typedef struct { unsigned n; char first[SL_ST_NAME_MAX]; } names;

static void keep(void *user, const char *name)
{
    names *m = user;
    if (m->n++ == 0)
        snprintf(m->first, sizeof m->first, "%s", name);
}

/* A download that is not finished: an absent shard, absent tensors. */
static void test_partial(void)
{
    static sl_binding b;
    sl_err err;
    char path[600];
    names m = { 0 };
    copy("tiny-k3-a", true, NULL, NULL, false);
    snprintf(path, sizeof path, "%s/%s", dir, shards[1]);
    unlink(path);
    refused(shards[1]);
    CHECK_EQ(open_model(&b, SL_SHARDS_PARTIAL, &err), 0);
    CHECK(b.shards.file[0].fd < 0 || b.shards.file[1].fd < 0 || b.shards.file[2].fd < 0);
    const uint64_t missing = sl_binding_missing(&b, keep, &m);
    CHECK_EQ(m.n, missing);
    CHECK_EQ(missing, 5278 - b.shards.tensors);
    CHECK(strncmp(m.first, "language_model.model.layers.12.", 31) == 0);
    sl_binding_close(&b);
}

int main(void)
{
    make_dir(dir);
    for (int index = 1; index >= 0; index--) {
        copy("tiny-k3-a", index, NULL, NULL, false);
        good("tiny-k3-a", 5278);
        remove_dir(dir);
        mkdir(dir, 0777);
        copy("tiny-k3-b", index, NULL, NULL, false);
        good("tiny-k3-b", 570);
        remove_dir(dir);
        mkdir(dir, 0777);
    }
    CHECK(copy("tiny-k3-b", false, "\"language_model.", "\"", true) > 500);
    good("tiny-k3-b without prefix", 570);

    static const struct {
        const char *from, *to, *says;
    } bad[] = {
        { "layers.3.self_attn.q_a_proj.weight", "layers.3.self_attn.q_x_proj.weight",
          "1 tensors are missing, first language_model.model.layers.3.self_attn.q_a_proj.weight" },
        { "layers.4.block_sparse_moe.experts.7.w2.weight_scale", "layers.4.block_sparse_moe.experts.8.w2.weight_scale",
          "missing, first language_model.model.layers.4.block_sparse_moe.experts.7.w2.weight_scale" },
        { "layers.4.block_sparse_moe.experts.7.w2", "layers.4.block_sparse_moe.experts.07.w2", "experts.7.w2" },
        { "language_model.lm_head.weight", "language_model.lm_heap.weight", "first language_model.lm_head.weight" },
        { "layers.0.self_attn.A_log\":{\"dtype\":\"F32\",\"shape\":[16]", "layers.0.self_attn.A_log\":{\"dtype\":\"F32\","
          "\"shape\":[4,4]", "A_log: found F32 [4,4], expected F32 [16]" },
        { "layers.0.input_layernorm.weight\":{\"dtype\":\"BF16\"", "layers.0.input_layernorm.weight\":{\"dtype\":\"F16\"",
          "input_layernorm.weight: found another dtype [96], expected BF16 [96]" },
        { "layers.0.self_attn.dt_bias\":{\"dtype\":\"F32\",\"shape\":[80]", "layers.0.self_attn.dt_bias\":{\"dtype\":\"BF16\","
          "\"shape\":[160]", "dt_bias: found BF16 [160], expected F32 [80]" },
        { "language_model.model.norm.weight", "model.embed_tokens.weight", "embed_tokens.weight" },
        { "language_model.model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj", "gate_proj.weight" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const unsigned changed = copy("tiny-k3-b", false, bad[i].from, bad[i].to, false);
        CHECK_MSG(changed == 1, "\"%s\" changed %u times", bad[i].from, changed);
        refused(bad[i].says);
    }
    remove_dir(dir);
    make_dir(dir);
    refused("config.json");
    test_places();
    remove_dir(dir);
    make_dir(dir);
    test_partial();

    /* The index is charged to the budget that is given. */
    static sl_binding b;
    sl_err err;
    copy("tiny-k3-a", true, NULL, NULL, false);
    sl_budget *budget = sl_budget_open(1000);
    CHECK_EQ(sl_binding_open(&b, dir, 0, budget, &err), SL_EBUDGET);
    sl_budget_close(budget);
    budget = sl_budget_open(64 << 20);
    CHECK_EQ(sl_binding_open(&b, dir, 0, budget, &err), 0);
    CHECK(sl_budget_used(budget, SL_MEM_INDEX) > 0);
    sl_binding_close(&b);
    CHECK_EQ(sl_budget_used(budget, SL_MEM_INDEX), 0);
    sl_budget_close(budget);
    remove_dir(dir);
    CHECK_DONE();
}
