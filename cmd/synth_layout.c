/* cmd/synth_layout.c - which tensors a shard holds, in which order, and its header. The names, dtypes and
 * shapes of the text model come from the table of model/bind.h. */
#include "synth.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"

/* Not read by this engine, but part of the released census. Blocks of the tower are counted by %u. */
enum { VISION_BLOCKS = 27 };
static const struct {
    const char *name;
    bool projector, block;
    uint8_t n_dims;
    uint64_t dim[4];
} vision[] = {
    { "mm_projector.proj.0.weight", true, false, 2, { 4096, 4096 } },
    { "mm_projector.proj.2.weight", true, false, 2, { 7168, 4096 } },
    { "mm_projector.post_norm.weight", true, false, 1, { 7168 } },
    { "vision_tower.patch_embed.proj.weight", false, false, 4, { 1024, 3, 14, 14 } },
    { "vision_tower.patch_embed.pos_emb.weight", false, false, 3, { 64, 64, 1024 } },
    { "vision_tower.encoder.blocks.%u.norm0.weight", false, true, 1, { 1024 } },
    { "vision_tower.encoder.blocks.%u.norm1.weight", false, true, 1, { 1024 } },
    { "vision_tower.encoder.blocks.%u.wqkv.weight", false, true, 2, { 4608, 1024 } },
    { "vision_tower.encoder.blocks.%u.wo.weight", false, true, 2, { 1024, 1536 } },
    { "vision_tower.encoder.blocks.%u.mlp.fc0.weight", false, true, 2, { 4096, 1024 } },
    { "vision_tower.encoder.blocks.%u.mlp.fc1.weight", false, true, 2, { 1024, 4096 } },
    { "vision_tower.encoder.final_layernorm.weight", false, false, 1, { 1024 } },
};

void synth_shard_name(const synth_model *m, uint32_t shard, char buf[64])
{
    snprintf(buf, 64, "model-%05u-of-%06u.safetensors", shard + 1, m->shards);
}

void synth_tensor_name(const synth_tensor *t, char *buf, size_t size)
{
    if (t->source == SYNTH_EXPERT)
        sl_expert_name(t->layer, t->index, t->what, buf, size);
    else if (t->source == SYNTH_TRUNK)
        sl_kind_name(t->layer, (sl_kind)t->what, buf, size);
    else {
        const char *name = vision[t->what].name, *number = strstr(name, "%u");
        if (number)
            snprintf(buf, size, "%.*s%u%s", (int)(number - name), name, t->index, number + 2);
        else
            snprintf(buf, size, "%s", name);
    }
}

uint64_t synth_expert_bytes(const sl_config *c)
{
    uint64_t sum = 0, rows, row_bytes;
    for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
        sl_expert_shape(c, k, &rows, &row_bytes);
        sum += rows * row_bytes;
    }
    return sum;
}

static bool is_f32(const synth_tensor *t)
{
    return t->fill == SYNTH_F32 || t->fill == SYNTH_CONV || t->fill == SYNTH_A_LOG;
}

static const char *dtype(const synth_tensor *t)
{
    return t->source == SYNTH_EXPERT ? "U8" : is_f32(t) ? "F32" : "BF16";
}

/* Appends t behind the others. False: out of memory. */
static bool add(synth_shard *s, const synth_model *m, synth_tensor t)
{
    if (s->n == s->cap) {
        const size_t cap = s->cap ? 2 * s->cap : 256;
        synth_tensor *p = realloc(s->tensor, cap * sizeof *p);
        if (!p)
            return false;
        s->tensor = p;
        s->cap = cap;
    }
    /* An expert's matrix and its scales are drawn as one. */
    const unsigned what = t.source == SYNTH_EXPERT ? t.what / 2u : t.what;
    t.key = synth_mix(synth_mix(m->seed) ^ ((uint64_t)t.layer << 32 | t.index));
    t.key = synth_mix(t.key ^ ((uint64_t)t.source << 16 | what));
    t.bytes = t.source == SYNTH_EXPERT ? 1 : is_f32(&t) ? 4 : 2;
    for (unsigned i = 0; i < t.n_dims; i++)
        t.bytes *= t.dim[i];
    t.begin = s->data_bytes;
    s->data_bytes += t.bytes;
    s->tensor[s->n++] = t;
    return true;
}

static bool add_expert(synth_shard *s, const synth_model *m, uint32_t layer, uint32_t expert)
{
    for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
        synth_tensor t = { .layer = layer, .index = expert, .what = (uint16_t)k, .n_dims = 2, .source = SYNTH_EXPERT,
                           .fill = k & 1 ? SYNTH_SCALE : SYNTH_PACKED };
        sl_expert_shape(&m->config, k, &t.dim[0], &t.dim[1]);
        if (!add(s, m, t))
            return false;
    }
    return true;
}

/* Matrices keep the length of a normalised vector, so that every sublayer adds about as much to the
 * running sum, at any depth; norms are near 1; decays and gates are spread. */
static void choose_values(synth_tensor *t)
{
    uint64_t fan_in = 1;
    for (unsigned i = 1; i < t->n_dims; i++)
        fan_in *= t->dim[i];
    t->mean = t->n_dims == 1 ? 1 : 0;
    t->std = t->n_dims == 1 ? 0.05f : 1 / sqrtf((float)fan_in);
    if (t->source != SYNTH_TRUNK)
        return;
    switch (t->what) {
    case SL_EMBED:
        t->std = 1;
        break;
    case SL_DT_BIAS: /* most channels keep most of their state */
        t->mean = -2;
        t->std = 1;
        break;
    case SL_ROUTER_BIAS:
        t->mean = 0;
        t->std = 0.02f;
        break;
    case SL_A_LOG:
        t->fill = SYNTH_A_LOG;
        break;
    case SL_Q_CONV:
    case SL_K_CONV:
    case SL_V_CONV:
        t->fill = SYNTH_CONV;
        break;
    default:
        break;
    }
}

/* All but the experts: the fp32 tensors first, so that these begin at multiples of four. */
static bool add_trunk(synth_shard *s, const synth_model *m, uint32_t layer)
{
    for (int f32 = 1; f32 >= 0; f32--)
        for (unsigned k = 0; k < SL_KINDS; k++) {
            if (!sl_kind_present(&m->config, layer, (sl_kind)k) || (sl_kind_dtype((sl_kind)k) == SL_DTYPE_F32) != f32)
                continue;
            synth_tensor t = { .layer = layer, .what = (uint16_t)k, .source = SYNTH_TRUNK,
                               .fill = f32 ? SYNTH_F32 : SYNTH_BF16 };
            t.n_dims = (uint8_t)sl_kind_shape(&m->config, (sl_kind)k, t.dim);
            choose_values(&t);
            if (!add(s, m, t))
                return false;
        }
    return true;
}

static bool add_vision(synth_shard *s, const synth_model *m, bool projector)
{
    for (unsigned k = 0; k < sizeof vision / sizeof *vision; k++) {
        const uint32_t n = vision[k].block ? VISION_BLOCKS : 1;
        for (uint32_t i = 0; i < n && vision[k].projector == projector; i++) {
            synth_tensor t = { .layer = SL_NO_LAYER, .index = i, .what = (uint16_t)k, .n_dims = vision[k].n_dims,
                               .source = SYNTH_VISION, .fill = SYNTH_BF16 };
            memcpy(t.dim, vision[k].dim, sizeof t.dim);
            choose_values(&t);
            if (!add(s, m, t))
                return false;
        }
    }
    return true;
}

int synth_shard_init(synth_shard *s, const synth_model *m, uint32_t shard, sl_err *err)
{
    const sl_config *c = &m->config;
    *s = (synth_shard){ 0 };
    bool ok = true;
    if (shard < c->layers && sl_config_is_moe(c, shard))
        for (uint32_t e = 0; ok && e < c->experts; e++)
            ok = add_expert(s, m, shard, e);
    s->trunk_begin = s->data_bytes;
    if (shard <= c->layers)
        ok = ok && add_trunk(s, m, shard < c->layers ? shard : SL_NO_LAYER);
    else
        ok = add_vision(s, m, shard == c->layers + 1);
    if (ok)
        return 0;
    synth_shard_clear(s);
    return sl_fail(err, SL_EFAIL, "out of memory for the tensors of shard %u", shard + 1);
}

void synth_shard_clear(synth_shard *s)
{
    free(s->tensor);
    free(s->header);
    *s = (synth_shard){ 0 };
}

int synth_shard_header(synth_shard *s, FILE *map, const char *shard_name, bool first, sl_err *err)
{
    size_t size = 0;
    char name[SL_ST_NAME_MAX];
    FILE *f = open_memstream(&s->header, &size);
    if (!f)
        return sl_fail(err, SL_EFAIL, "%s: out of memory for its header", shard_name);
    fprintf(f, "%8s{\"__metadata__\":{\"format\":\"pt\"}", ""); /* eight bytes for the length */
    for (size_t i = 0; i < s->n; i++) {
        const synth_tensor *t = &s->tensor[i];
        synth_tensor_name(t, name, sizeof name);
        fprintf(map, "%s\"%s\": \"%s\"", first && i == 0 ? "" : ",\n", name, shard_name);
        fprintf(f, ",\"%s\":{\"dtype\":\"%s\",\"shape\":[", name, dtype(t));
        for (unsigned d = 0; d < t->n_dims; d++)
            fprintf(f, "%s%" PRIu64, d ? "," : "", t->dim[d]);
        fprintf(f, "],\"data_offsets\":[%" PRIu64 ",%" PRIu64 "]}", t->begin, t->begin + t->bytes);
    }
    putc('}', f);
    const uint64_t end = (uint64_t)ftell(f);
    fprintf(f, "%*s", (int)(sl_round_up(end, SYNTH_ALIGN) - end), "");
    const bool failed = ferror(f);
    if (fclose(f) != 0 || failed)
        return sl_fail(err, SL_EFAIL, "%s: out of memory for its header", shard_name);
    s->header_bytes = size;
    for (unsigned i = 0; i < 8; i++)
        s->header[i] = (char)((size - 8) >> 8 * i);
    return 0;
}
