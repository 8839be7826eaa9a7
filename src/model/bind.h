/* model/bind.h - which tensor of the checkpoint is which weight of the model.
 * One table (bind.c) lists every tensor: name, dtype, shape, and the layers that have it. The reader
 * binds by it, and `synth` and `inspect` enumerate it. Its order is the order of use in a forward
 * pass, so it is also the order in which the trunk streams. */
#ifndef SL_MODEL_BIND_H
#define SL_MODEL_BIND_H

#include "base/mem.h"
#include "model/config.h"
#include "store/expert.h"
#include "store/safetensors.h"

/* Tensors of a layer. Vectors first: small, kept in RAM as fp32; then the matrices: streamed. */
typedef enum {
    SL_ATTN_RES_NORM, SL_ATTN_RES_PROJ, SL_INPUT_NORM, SL_MLP_RES_NORM, SL_MLP_RES_PROJ, SL_POST_NORM,
    SL_Q_CONV, SL_K_CONV, SL_V_CONV, SL_A_LOG, SL_DT_BIAS, SL_O_NORM, /* KDA */
    SL_Q_A_NORM, SL_KV_A_NORM,                                        /* MLA */
    SL_ROUTER_BIAS, SL_LATENT_NORM,                                   /* MoE */
    SL_VECTORS,

    SL_KDA_Q = SL_VECTORS, SL_KDA_K, SL_KDA_V, SL_KDA_F_A, SL_KDA_F_B, SL_KDA_BETA, SL_KDA_GATE,
    SL_KDA_GATE_A, SL_KDA_GATE_B, SL_KDA_OUT,
    SL_MLA_Q_A, SL_MLA_Q_B, SL_MLA_KV_A, SL_MLA_KV_B, SL_MLA_GATE, SL_MLA_OUT,
    SL_ROUTER, SL_LATENT_DOWN, SL_SHARED_GATE, SL_SHARED_UP, SL_SHARED_DOWN, SL_LATENT_UP,
    SL_DENSE_GATE, SL_DENSE_UP, SL_DENSE_DOWN,
    SL_LAYER_KINDS,

    /* of the model, not of a layer */
    SL_EMBED = SL_LAYER_KINDS, SL_OUT_RES_NORM, SL_OUT_RES_PROJ, SL_FINAL_NORM, SL_HEAD,
    SL_KINDS
} sl_kind;

enum { SL_NO_LAYER = UINT32_MAX }; /* the layer of the model's own tensors */

bool sl_kind_present(const sl_config *c, uint32_t layer, sl_kind k);
sl_dtype sl_kind_dtype(sl_kind k);
/* Fills dim[3]; returns the number of dimensions. */
unsigned sl_kind_shape(const sl_config *c, sl_kind k, uint64_t dim[3]);
uint64_t sl_kind_elements(const sl_config *c, sl_kind k);
/* "language_model.model.layers.3.self_attn.q_a_proj.weight" */
void sl_kind_name(uint32_t layer, sl_kind k, char *buf, size_t size);
/* The same for a tensor of an expert; rows, row_bytes: its U8 shape. */
void sl_expert_name(uint32_t layer, uint32_t expert, int tensor, char *buf, size_t size);
void sl_expert_shape(const sl_config *c, int tensor, uint64_t *rows, uint64_t *row_bytes);

typedef struct {
    uint64_t offset; /* in the file; 0: absent (a header comes first, so no tensor begins there) */
    uint16_t shard;
} sl_place;

/* A model directory with every tensor found. */
typedef struct {
    sl_config config;
    sl_shards shards;
    sl_place *place;          /* [layers + 1][SL_KINDS]; the model's own tensors in the last row */
    sl_expert_place *experts; /* [layers - dense_layers][experts] */
    uint64_t other_tensors, other_elements, other_bytes; /* not part of the text model (vision), passed over */
} sl_binding;

static inline const sl_place *sl_binding_place(const sl_binding *b, uint32_t layer, sl_kind k)
{
    return &b->place[(size_t)(layer == SL_NO_LAYER ? b->config.layers : layer) * SL_KINDS + k];
}

/* Reads config.json and all headers of dir. flags: SL_SHARDS_*. A tensor with another dtype or shape
 * than the table and config say is SL_EFORMAT by name; so is a missing one, except with
 * SL_SHARDS_PARTIAL. Memory is counted as SL_MEM_INDEX of `budget`, which may be NULL. */
int sl_binding_open(sl_binding *out, const char *dir, unsigned flags, sl_budget *budget, sl_err *err);
void sl_binding_close(sl_binding *b);
/* Calls fn with the name of every missing tensor; returns how many there are. fn may be NULL. */
uint64_t sl_binding_missing(const sl_binding *b, void (*fn)(void *user, const char *name), void *user);

#endif
