/* tests/fuzz/fuzz_config.c - config.json. An accepted configuration must be one that every later part can
 * compute with: sizes in range, all tensors' shapes and names formed, no product that overflows. */
#include <stdint.h>
#include <string.h>

#include "base/num.h"
#include "model/bind.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void check_kinds(const sl_config *c, uint32_t layer)
{
    char name[SL_ST_NAME_MAX];
    uint64_t dim[3];
    for (unsigned k = 0; k < SL_KINDS; k++) {
        if (!sl_kind_present(c, layer, (sl_kind)k))
            continue;
        uint64_t n = 1;
        const unsigned dims = sl_kind_shape(c, (sl_kind)k, dim);
        for (unsigned i = 0; i < dims; i++)
            sl_assert(dim[i] > 0 && dim[i] <= SL_DIM_MAX && sl_mul_u64(n, dim[i], &n));
        sl_assert(n == sl_kind_elements(c, (sl_kind)k) && n <= UINT64_MAX / 4 / SL_KINDS / (SL_LAYERS_MAX + 1));
        sl_kind_name(layer, (sl_kind)k, name, sizeof name);
        sl_assert(strlen(name) < sizeof name - 1);
    }
}

static void check(const sl_config *c)
{
    sl_assert(c->layers >= 1 && c->layers <= SL_LAYERS_MAX && c->dense_layers <= c->layers);
    sl_assert(c->top_k >= 1 && c->top_k <= c->experts && (uint64_t)c->experts * c->layers <= SL_ALL_EXPERTS_MAX);
    sl_assert(c->latent % 32 == 0 && c->moe_intermediate % 32 == 0 && c->kda_heads <= c->kda_dim);
    sl_assert(c->eos >= -1 && c->eos < (int64_t)c->vocab && c->eps > 0 && c->gate_lower_bound <= 0);
    sl_assert(c->conv_taps >= 2 && c->conv_taps <= SL_TAPS_MAX);
    sl_assert(sl_config_mla_layers(c) <= c->layers && sl_config_snapshots(c) <= c->layers);
    check_kinds(c, 0);
    check_kinds(c, c->layers - 1);
    check_kinds(c, SL_NO_LAYER);
    for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
        uint64_t rows, row_bytes, n;
        sl_expert_shape(c, k, &rows, &row_bytes);
        sl_assert(rows > 0 && row_bytes > 0 && sl_mul_u64(rows, row_bytes, &n) && n <= UINT64_MAX / 8 / SL_ALL_EXPERTS_MAX);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static sl_config c;
    sl_err err = { 0 };
    const int rc = sl_config_parse(&c, (const char *)data, size, "FILE", &err);
    sl_assert(rc == 0 || (rc == SL_EFORMAT && err.code == rc && err.text[0] && !strchr(err.text, '\n')));
    if (rc == 0)
        check(&c);
    return 0;
}
