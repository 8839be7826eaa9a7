#include "model/bind.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"

/* Sizes that shapes are made of. */
typedef enum {
    D_NONE, D_ONE, D_HIDDEN, D_VOCAB, D_KDA, D_KDA_DIM, D_KDA_HEADS, D_TAPS, D_Q_LORA, D_Q, D_KV_A,
    D_KV_LORA, D_KV_B, D_V, D_EXPERTS, D_LATENT, D_SHARED, D_DENSE,
} dim_code;

/* Layers that have a tensor: all that apply must hold. */
enum {
    IN_KDA = 1, IN_MLA = 2, IN_MOE = 4, IN_DENSE = 8, IN_MODEL = 16,
    IF_RES = 32, IF_FULL_GATE = 64, IF_LOW_RANK_GATE = 128, IF_MLA_GATE = 256,
    IF_LATENT = 512, IF_LATENT_NORM = 1024, IF_SHARED = 2048,
};

static const struct {
    const char *name; /* after "model.layers.N.", or whole for the model's own */
    sl_dtype dtype;
    unsigned where;
    dim_code dim[3];
} table[SL_KINDS] = {
    [SL_ATTN_RES_NORM] = { "self_attention_res_norm.weight", SL_DTYPE_BF16, IF_RES, { D_HIDDEN } },
    [SL_ATTN_RES_PROJ] = { "self_attention_res_proj.weight", SL_DTYPE_BF16, IF_RES, { D_ONE, D_HIDDEN } },
    [SL_INPUT_NORM] = { "input_layernorm.weight", SL_DTYPE_BF16, 0, { D_HIDDEN } },
    [SL_MLP_RES_NORM] = { "mlp_res_norm.weight", SL_DTYPE_BF16, IF_RES, { D_HIDDEN } },
    [SL_MLP_RES_PROJ] = { "mlp_res_proj.weight", SL_DTYPE_BF16, IF_RES, { D_ONE, D_HIDDEN } },
    [SL_POST_NORM] = { "post_attention_layernorm.weight", SL_DTYPE_BF16, 0, { D_HIDDEN } },

    [SL_Q_CONV] = { "self_attn.q_conv1d.weight", SL_DTYPE_F32, IN_KDA, { D_KDA, D_ONE, D_TAPS } },
    [SL_K_CONV] = { "self_attn.k_conv1d.weight", SL_DTYPE_F32, IN_KDA, { D_KDA, D_ONE, D_TAPS } },
    [SL_V_CONV] = { "self_attn.v_conv1d.weight", SL_DTYPE_F32, IN_KDA, { D_KDA, D_ONE, D_TAPS } },
    [SL_A_LOG] = { "self_attn.A_log", SL_DTYPE_F32, IN_KDA, { D_KDA_DIM } },
    [SL_DT_BIAS] = { "self_attn.dt_bias", SL_DTYPE_F32, IN_KDA, { D_KDA } },
    [SL_O_NORM] = { "self_attn.o_norm.weight", SL_DTYPE_F32, IN_KDA, { D_KDA_DIM } },
    [SL_Q_A_NORM] = { "self_attn.q_a_layernorm.weight", SL_DTYPE_BF16, IN_MLA, { D_Q_LORA } },
    [SL_KV_A_NORM] = { "self_attn.kv_a_layernorm.weight", SL_DTYPE_BF16, IN_MLA, { D_KV_LORA } },
    [SL_ROUTER_BIAS] = { "block_sparse_moe.gate.e_score_correction_bias", SL_DTYPE_F32, IN_MOE, { D_EXPERTS } },
    [SL_LATENT_NORM] = { "block_sparse_moe.routed_expert_norm.weight", SL_DTYPE_BF16, IN_MOE | IF_LATENT_NORM,
                         { D_LATENT } },

    [SL_KDA_Q] = { "self_attn.q_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA, D_HIDDEN } },
    [SL_KDA_K] = { "self_attn.k_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA, D_HIDDEN } },
    [SL_KDA_V] = { "self_attn.v_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA, D_HIDDEN } },
    [SL_KDA_F_A] = { "self_attn.f_a_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA_DIM, D_HIDDEN } },
    [SL_KDA_F_B] = { "self_attn.f_b_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA, D_KDA_DIM } },
    [SL_KDA_BETA] = { "self_attn.b_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_KDA_HEADS, D_HIDDEN } },
    [SL_KDA_GATE] = { "self_attn.g_proj.weight", SL_DTYPE_BF16, IN_KDA | IF_FULL_GATE, { D_KDA, D_HIDDEN } },
    [SL_KDA_GATE_A] = { "self_attn.g_a_proj.weight", SL_DTYPE_BF16, IN_KDA | IF_LOW_RANK_GATE,
                        { D_KDA_DIM, D_HIDDEN } },
    [SL_KDA_GATE_B] = { "self_attn.g_b_proj.weight", SL_DTYPE_BF16, IN_KDA | IF_LOW_RANK_GATE,
                        { D_KDA, D_KDA_DIM } },
    [SL_KDA_OUT] = { "self_attn.o_proj.weight", SL_DTYPE_BF16, IN_KDA, { D_HIDDEN, D_KDA } },
    [SL_MLA_Q_A] = { "self_attn.q_a_proj.weight", SL_DTYPE_BF16, IN_MLA, { D_Q_LORA, D_HIDDEN } },
    [SL_MLA_Q_B] = { "self_attn.q_b_proj.weight", SL_DTYPE_BF16, IN_MLA, { D_Q, D_Q_LORA } },
    [SL_MLA_KV_A] = { "self_attn.kv_a_proj_with_mqa.weight", SL_DTYPE_BF16, IN_MLA, { D_KV_A, D_HIDDEN } },
    [SL_MLA_KV_B] = { "self_attn.kv_b_proj.weight", SL_DTYPE_BF16, IN_MLA, { D_KV_B, D_KV_LORA } },
    [SL_MLA_GATE] = { "self_attn.g_proj.weight", SL_DTYPE_BF16, IN_MLA | IF_MLA_GATE, { D_V, D_HIDDEN } },
    [SL_MLA_OUT] = { "self_attn.o_proj.weight", SL_DTYPE_BF16, IN_MLA, { D_HIDDEN, D_V } },
    [SL_ROUTER] = { "block_sparse_moe.gate.weight", SL_DTYPE_BF16, IN_MOE, { D_EXPERTS, D_HIDDEN } },
    [SL_LATENT_DOWN] = { "block_sparse_moe.routed_expert_down_proj.weight", SL_DTYPE_BF16, IN_MOE | IF_LATENT,
                         { D_LATENT, D_HIDDEN } },
    [SL_SHARED_GATE] = { "block_sparse_moe.shared_experts.gate_proj.weight", SL_DTYPE_BF16, IN_MOE | IF_SHARED,
                         { D_SHARED, D_HIDDEN } },
    [SL_SHARED_UP] = { "block_sparse_moe.shared_experts.up_proj.weight", SL_DTYPE_BF16, IN_MOE | IF_SHARED,
                       { D_SHARED, D_HIDDEN } },
    [SL_SHARED_DOWN] = { "block_sparse_moe.shared_experts.down_proj.weight", SL_DTYPE_BF16, IN_MOE | IF_SHARED,
                         { D_HIDDEN, D_SHARED } },
    [SL_LATENT_UP] = { "block_sparse_moe.routed_expert_up_proj.weight", SL_DTYPE_BF16, IN_MOE | IF_LATENT,
                       { D_HIDDEN, D_LATENT } },
    [SL_DENSE_GATE] = { "mlp.gate_proj.weight", SL_DTYPE_BF16, IN_DENSE, { D_DENSE, D_HIDDEN } },
    [SL_DENSE_UP] = { "mlp.up_proj.weight", SL_DTYPE_BF16, IN_DENSE, { D_DENSE, D_HIDDEN } },
    [SL_DENSE_DOWN] = { "mlp.down_proj.weight", SL_DTYPE_BF16, IN_DENSE, { D_HIDDEN, D_DENSE } },

    [SL_EMBED] = { "model.embed_tokens.weight", SL_DTYPE_BF16, IN_MODEL, { D_VOCAB, D_HIDDEN } },
    [SL_OUT_RES_NORM] = { "model.output_attn_res_norm.weight", SL_DTYPE_BF16, IN_MODEL | IF_RES, { D_HIDDEN } },
    [SL_OUT_RES_PROJ] = { "model.output_attn_res_proj.weight", SL_DTYPE_BF16, IN_MODEL | IF_RES,
                          { D_ONE, D_HIDDEN } },
    [SL_FINAL_NORM] = { "model.norm.weight", SL_DTYPE_BF16, IN_MODEL, { D_HIDDEN } },
    [SL_HEAD] = { "lm_head.weight", SL_DTYPE_BF16, IN_MODEL, { D_VOCAB, D_HIDDEN } },
};

static const char *const expert_suffix[SL_EXPERT_TENSORS] = {
    "w1.weight_packed", "w1.weight_scale", "w2.weight_packed", "w2.weight_scale", "w3.weight_packed", "w3.weight_scale",
};
static const char prefix[] = "language_model.", layers_prefix[] = "model.layers.",
                  experts_prefix[] = "block_sparse_moe.experts.";

static uint64_t dim_value(const sl_config *c, dim_code d)
{
    switch (d) {
    case D_NONE: break;
    case D_ONE: return 1;
    case D_HIDDEN: return c->hidden;
    case D_VOCAB: return c->vocab;
    case D_KDA: return (uint64_t)c->kda_heads * c->kda_dim;
    case D_KDA_DIM: return c->kda_dim;
    case D_KDA_HEADS: return c->kda_heads;
    case D_TAPS: return c->conv_taps;
    case D_Q_LORA: return c->q_lora;
    case D_Q: return (uint64_t)c->heads * (c->nope + c->rope);
    case D_KV_A: return (uint64_t)c->kv_lora + c->rope;
    case D_KV_LORA: return c->kv_lora;
    case D_KV_B: return (uint64_t)c->heads * (c->nope + c->v_dim);
    case D_V: return (uint64_t)c->heads * c->v_dim;
    case D_EXPERTS: return c->experts;
    case D_LATENT: return c->latent;
    case D_SHARED: return (uint64_t)c->shared_experts * c->moe_intermediate;
    case D_DENSE: return c->intermediate;
    }
    return 0;
}

bool sl_kind_present(const sl_config *c, uint32_t layer, sl_kind k)
{
    unsigned have = (c->res_block ? IF_RES : 0u) | (c->full_rank_gate ? IF_FULL_GATE : IF_LOW_RANK_GATE) |
                    (c->mla_gate ? IF_MLA_GATE : 0u) | (c->latent_projection ? IF_LATENT : 0u) |
                    (c->latent_norm ? IF_LATENT_NORM : 0u) | (c->shared_experts ? IF_SHARED : 0u);
    if (layer == SL_NO_LAYER)
        have |= IN_MODEL;
    else
        have |= (c->is_mla[layer] ? IN_MLA : IN_KDA) | (sl_config_is_moe(c, layer) ? IN_MOE : IN_DENSE);
    return (k >= SL_LAYER_KINDS) == (layer == SL_NO_LAYER) && (table[k].where & ~have) == 0;
}

sl_dtype sl_kind_dtype(sl_kind k) { return table[k].dtype; }

unsigned sl_kind_shape(const sl_config *c, sl_kind k, uint64_t dim[3])
{
    unsigned n = 0;
    for (; n < 3 && table[k].dim[n] != D_NONE; n++)
        dim[n] = dim_value(c, table[k].dim[n]);
    return n;
}

uint64_t sl_kind_elements(const sl_config *c, sl_kind k)
{
    uint64_t dim[3], n = 1; /* values up to SL_DIM_MAX, one of any three tiny: no overflow */
    const unsigned dims = sl_kind_shape(c, k, dim);
    for (unsigned i = 0; i < dims; i++)
        n *= dim[i];
    return n;
}

void sl_kind_name(uint32_t layer, sl_kind k, char *buf, size_t size)
{
    if (layer == SL_NO_LAYER)
        snprintf(buf, size, "%s%s", prefix, table[k].name);
    else
        snprintf(buf, size, "%s%s%u.%s", prefix, layers_prefix, layer, table[k].name);
}

void sl_expert_name(uint32_t layer, uint32_t expert, int tensor, char *buf, size_t size)
{
    snprintf(buf, size, "%s%s%u.%s%u.%s", prefix, layers_prefix, layer, experts_prefix, expert, expert_suffix[tensor]);
}

void sl_expert_shape(const sl_config *c, int tensor, uint64_t *rows, uint64_t *row_bytes)
{
    const bool down = tensor == SL_W2_PACKED || tensor == SL_W2_SCALE, scale = tensor & 1;
    *rows = down ? c->latent : c->moe_intermediate;
    *row_bytes = (down ? c->moe_intermediate : c->latent) / (scale ? 32 : 2);
}

/* ---- binding ---------------------------------------------------------------------------------- */

static const char *after(const char *s, const char *start)
{
    const size_t n = strlen(start);
    return strncmp(s, start, n) == 0 ? s + n : NULL;
}

/* A canonical number below `limit` followed by a dot; returns what follows, or NULL. */
static const char *parse_number(const char *s, uint32_t limit, uint32_t *out)
{
    uint32_t n = 0;
    const char *p = s;
    for (; *p >= '0' && *p <= '9' && p - s < 7; p++)
        n = n * 10 + (uint32_t)(*p - '0');
    if (p == s || *p != '.' || (*s == '0' && p - s > 1) || n >= limit)
        return NULL;
    *out = n;
    return p + 1;
}

static int wrong(const sl_binding *b, const sl_tensor *t, sl_dtype dtype, const uint64_t *dim, unsigned n_dims,
                 sl_err *err)
{
    char found[128] = "", expected[128] = "";
    for (unsigned i = 0, at = 0; i < t->n_dims && at < sizeof found - 24; i++)
        at += (unsigned)snprintf(found + at, sizeof found - at, "%s%llu", i ? "," : "", (unsigned long long)t->dim[i]);
    for (unsigned i = 0, at = 0; i < n_dims; i++)
        at += (unsigned)snprintf(expected + at, sizeof expected - at, "%s%llu", i ? "," : "", (unsigned long long)dim[i]);
    return sl_fail(err, SL_EFORMAT, "%s: %s: found %s [%s], expected %s [%s]", b->shards.name[t->shard], t->name,
                   sl_dtype_name(t->dtype), found, sl_dtype_name(dtype), expected);
}

static bool same_shape(const sl_tensor *t, sl_dtype dtype, const uint64_t *dim, unsigned n_dims)
{
    return t->dtype == dtype && t->n_dims == n_dims && memcmp(t->dim, dim, n_dims * sizeof *dim) == 0;
}

static int bind_twice(const sl_binding *b, const sl_tensor *t, sl_err *err)
{
    return sl_fail(err, SL_EFORMAT, "%s: %s: the same weight was given before, with or without \"%s\"",
                   b->shards.name[t->shard], t->name, prefix);
}

/* 1: bound; 0: not an expert tensor of this model. */
static int bind_expert(sl_binding *b, const sl_tensor *t, uint32_t layer, const char *rest, sl_err *err)
{
    uint32_t e;
    const char *leaf = parse_number(rest, b->config.experts, &e);
    if (!leaf || !sl_config_is_moe(&b->config, layer))
        return 0;
    int k = 0;
    while (k < SL_EXPERT_TENSORS && strcmp(leaf, expert_suffix[k]) != 0)
        k++;
    if (k == SL_EXPERT_TENSORS)
        return 0;
    uint64_t dim[2];
    sl_expert_shape(&b->config, k, &dim[0], &dim[1]);
    if (!same_shape(t, SL_DTYPE_U8, dim, 2))
        return wrong(b, t, SL_DTYPE_U8, dim, 2, err);
    sl_expert_place *p = &b->experts[(size_t)(layer - b->config.dense_layers) * b->config.experts + e];
    if (p->offset[k])
        return bind_twice(b, t, err);
    p->offset[k] = t->offset;
    p->file[k] = t->shard;
    return 1;
}

static int bind_kind(sl_binding *b, const sl_tensor *t, uint32_t layer, const char *name, sl_err *err)
{
    for (unsigned k = 0; k < SL_KINDS; k++) {
        if (strcmp(table[k].name, name) != 0 || !sl_kind_present(&b->config, layer, (sl_kind)k))
            continue;
        uint64_t dim[3];
        const unsigned n = sl_kind_shape(&b->config, (sl_kind)k, dim);
        if (!same_shape(t, table[k].dtype, dim, n))
            return wrong(b, t, table[k].dtype, dim, n, err);
        sl_place *p = (sl_place *)sl_binding_place(b, layer, (sl_kind)k);
        if (p->offset)
            return bind_twice(b, t, err);
        *p = (sl_place){ .offset = t->offset, .shard = t->shard };
        return 1;
    }
    return 0;
}

static int bind_tensor(void *user, const sl_tensor *t, sl_err *err)
{
    sl_binding *b = user;
    const char *name = after(t->name, prefix), *rest, *leaf;
    uint32_t layer = SL_NO_LAYER;
    if (!name)
        name = t->name;
    int rc;
    if ((rest = after(name, layers_prefix)) && (rest = parse_number(rest, b->config.layers, &layer)))
        rc = (leaf = after(rest, experts_prefix)) ? bind_expert(b, t, layer, leaf, err)
                                                  : bind_kind(b, t, layer, rest, err);
    else
        rc = bind_kind(b, t, SL_NO_LAYER, name, err);
    if (rc == 0) {
        uint64_t elements = 1; /* no more than the tensor's bytes, which the walk has checked */
        for (unsigned i = 0; i < t->n_dims; i++)
            elements *= t->dim[i];
        b->other_tensors++;
        b->other_elements += elements;
        b->other_bytes += t->bytes;
    }
    return rc < 0 ? rc : 0;
}

uint64_t sl_binding_missing(const sl_binding *b, void (*fn)(void *user, const char *name), void *user)
{
    const sl_config *c = &b->config;
    char name[SL_ST_NAME_MAX];
    uint64_t n = 0;
    for (uint32_t i = 0; i <= c->layers; i++) {
        const uint32_t layer = i < c->layers ? i : SL_NO_LAYER;
        for (unsigned k = 0; k < SL_KINDS; k++)
            if (sl_kind_present(c, layer, (sl_kind)k) && !sl_binding_place(b, layer, (sl_kind)k)->offset) {
                n++;
                sl_kind_name(layer, (sl_kind)k, name, sizeof name);
                if (fn)
                    fn(user, name);
            }
        if (i < c->dense_layers || i == c->layers)
            continue;
        for (uint32_t e = 0; e < c->experts; e++)
            for (int k = 0; k < SL_EXPERT_TENSORS; k++)
                if (!b->experts[(size_t)(i - c->dense_layers) * c->experts + e].offset[k]) {
                    n++;
                    sl_expert_name(i, e, k, name, sizeof name);
                    if (fn)
                        fn(user, name);
                }
    }
    return n;
}

static void keep_first(void *user, const char *name)
{
    char *first = user;
    if (!*first)
        snprintf(first, SL_ST_NAME_MAX, "%s", name);
}

int sl_binding_open(sl_binding *out, const char *dir, unsigned flags, sl_budget *budget, sl_err *err)
{
    *out = (sl_binding){ 0 };
    int rc = sl_config_load(&out->config, dir, err);
    if (rc < 0)
        return rc;
    const sl_config *c = &out->config;
    const uint64_t experts = (uint64_t)(c->layers - c->dense_layers) * c->experts;
    out->place = sl_mem_alloc(budget, SL_MEM_INDEX, (c->layers + 1ull) * SL_KINDS * sizeof *out->place);
    if (experts)
        out->experts = sl_mem_alloc(budget, SL_MEM_INDEX, experts * sizeof *out->experts);
    if (!out->place || (experts && !out->experts))
        rc = sl_fail(err, SL_EBUDGET, "%s: no room for an index of %llu experts", dir, (unsigned long long)experts);
    else
        rc = sl_shards_open(&out->shards, dir, flags, bind_tensor, out, err);
    char first[SL_ST_NAME_MAX] = "";
    uint64_t missing = 0;
    if (rc == 0 && !(flags & SL_SHARDS_PARTIAL) && (missing = sl_binding_missing(out, keep_first, first)))
        rc = sl_fail(err, SL_EFORMAT, "%s: %llu tensors are missing, first %s", dir, (unsigned long long)missing, first);
    if (rc < 0)
        sl_binding_close(out);
    return rc;
}

void sl_binding_close(sl_binding *b)
{
    sl_shards_close(&b->shards);
    sl_mem_free(b->place);
    sl_mem_free(b->experts);
    b->place = NULL;
    b->experts = NULL;
}
