/* model/config.h - config.json of a Kimi K3 class model: spec section 1.
 * Keys are read from text_config where the file has one (the released, multimodal form), else from the
 * top level. A key that defines the computation is never defaulted, except the few for which the
 * release's own code has a default (spec 1.3). */
#ifndef SL_MODEL_CONFIG_H
#define SL_MODEL_CONFIG_H

#include "base/err.h"

enum {
    SL_LAYERS_MAX = 1024,
    SL_EXPERTS_MAX = 65535,
    SL_ALL_EXPERTS_MAX = 1 << 20, /* layers x experts: a bound on the index */
    SL_DIM_MAX = 1 << 20, /* any width, also of all heads together, or vocabulary: no sum of sizes overflows */
    SL_TAPS_MAX = 8,
};

typedef struct {
    uint32_t vocab, hidden, layers;
    float eps;          /* rms_norm_eps: all norms but the two inside MLA */
    float mla_norm_eps; /* 1e-6 in the released code, which does not read it from the config */
    int32_t eos;        /* -1: none given */

    uint32_t res_block; /* attn_res_block_size; 0: ordinary residuals */
    float situ_beta, situ_linear_beta;

    uint32_t dense_layers;       /* layers below this have a dense MLP */
    uint32_t intermediate;       /* its width */
    uint32_t experts, top_k;
    uint32_t shared_experts;     /* fused into one MLP of width shared_experts * moe_intermediate; may be 0 */
    uint32_t moe_intermediate;
    uint32_t latent;             /* expert input and output width */
    bool latent_projection;      /* routed_expert_hidden_size given: down/up projections exist */
    bool latent_norm;
    bool renormalize;
    float routed_scale;

    uint32_t heads;              /* MLA */
    uint32_t q_lora, kv_lora, nope, rope, v_dim;
    bool mla_gate;

    uint32_t kda_heads, kda_dim; /* d_k = d_v */
    uint32_t conv_taps;
    float gate_lower_bound;
    bool full_rank_gate;         /* g_proj; else g_a_proj, g_b_proj */

    bool is_mla[SL_LAYERS_MAX];  /* by zero-based layer; the others are KDA */
} sl_config;

int sl_config_load(sl_config *out, const char *dir, sl_err *err);
/* The same from a text; `file` is for messages. The fuzz entry. */
int sl_config_parse(sl_config *out, const char *text, size_t len, const char *file, sl_err *err);

static inline bool sl_config_is_moe(const sl_config *c, uint32_t layer) { return layer >= c->dense_layers; }
/* Whether the running sum is saved and restarted at this layer (spec 3.3). */
static inline bool sl_config_is_reset(const sl_config *c, uint32_t layer)
{
    return c->res_block && layer % c->res_block == 0;
}
static inline uint32_t sl_config_snapshots(const sl_config *c) /* in the bank after the last layer */
{
    return c->res_block ? (c->layers + c->res_block - 1) / c->res_block : 0;
}
uint32_t sl_config_mla_layers(const sl_config *c);

#endif
