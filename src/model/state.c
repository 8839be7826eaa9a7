/* The sequences' states: what is carried from one token to the next (spec 2.3). */
#include <string.h>

#include "base/num.h"
#include "model/model.h"

static uint64_t kda_floats(const sl_config *c)
{
    return (uint64_t)(c->layers - sl_config_mla_layers(c)) * c->kda_heads * c->kda_dim * c->kda_dim;
}

static uint64_t conv_floats(const sl_config *c)
{
    return (uint64_t)(c->layers - sl_config_mla_layers(c)) * c->kda_heads * c->kda_dim * 3 * (c->conv_taps - 1);
}

static uint64_t latent_floats(const sl_config *c, uint32_t context)
{
    return (uint64_t)sl_config_mla_layers(c) * context * (c->kv_lora + c->rope);
}

static uint64_t floats(uint64_t n) { return n ? sl_mem_size(n * sizeof(float)) : 0; }

uint64_t sl_state_size(const sl_config *c, uint32_t context)
{
    return floats(kda_floats(c)) + floats(conv_floats(c)) + floats(latent_floats(c, context));
}

int sl_state_open(sl_state *s, const sl_config *c, uint32_t context, sl_budget *budget, sl_err *err)
{
    *s = (sl_state){ .context = context, .kda_floats = kda_floats(c), .conv_floats = conv_floats(c) };
    s->kda = sl_mem_alloc(budget, SL_MEM_STATE, s->kda_floats * sizeof(float));
    s->conv = sl_mem_alloc(budget, SL_MEM_STATE, s->conv_floats * sizeof(float));
    s->latent = sl_mem_alloc(budget, SL_MEM_STATE, latent_floats(c, context) * sizeof(float));
    if ((!s->kda && s->kda_floats) || (!s->conv && s->conv_floats) || (!s->latent && latent_floats(c, context)))
        return sl_fail(err, SL_EBUDGET, "memory: the state of a sequence does not fit as planned, or the system refused it");
    return 0;
}

void sl_state_close(sl_state *s)
{
    sl_mem_free(s->kda);
    sl_mem_free(s->conv);
    sl_mem_free(s->latent);
}

void sl_state_clear(sl_state *s)
{
    s->position = 0;
    if (s->kda_floats) { /* no KDA layer: no state */
        memset(s->kda, 0, s->kda_floats * sizeof(float));
        memset(s->conv, 0, s->conv_floats * sizeof(float));
    }
    /* The latent cache is written at a position before it is read there. */
}

sl_state *sl_state_take(sl_model *m)
{
    for (uint32_t i = 0; i < m->plan.sequences; i++) {
        sl_state *s = &m->states[i];
        if (s->taken)
            continue;
        s->taken = true;
        sl_state_clear(s);
        return s;
    }
    return NULL;
}
