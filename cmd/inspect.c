/* cmd/inspect.c - `sluice inspect`: what a model directory holds, from its configuration and headers. No
 * weight is read. */
#include "cmd.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "model/bind.h"

typedef enum {
    G_EMBED, G_HEAD, G_KDA, G_MLA, G_DENSE, G_SHARED, G_LATENT, G_ROUTER, G_ROUTED, G_NORMS, G_OTHER, GROUPS
} group;

static const char *const group_names[GROUPS] = {
    [G_EMBED] = "embedding", [G_HEAD] = "head", [G_KDA] = "KDA attention", [G_MLA] = "MLA attention",
    [G_DENSE] = "dense MLP", [G_SHARED] = "shared experts", [G_LATENT] = "latent projections", [G_ROUTER] = "router",
    [G_ROUTED] = "routed experts", [G_NORMS] = "norms, residual mixes", [G_OTHER] = "vision and other",
};

typedef struct {
    uint64_t tensors, parameters, bytes;
    uint64_t active; /* parameters that one token is multiplied with */
} amount;

enum { FIRST_MISSING = 5 };
typedef struct {
    amount of[GROUPS], all;  /* all: of the text model; "other" is not part of it */
    uint64_t moe_layers, expert_parameters, expert_bytes, expert_bytes_per_token;
    uint64_t state_fixed, state_per_position;
    uint64_t missing_shards, missing_tensors;
    unsigned n_first;
    char first[FIRST_MISSING][SL_ST_NAME_MAX];
} census;

static group group_of(sl_kind k)
{
    switch (k) {
    case SL_EMBED:
        return G_EMBED;
    case SL_HEAD:
        return G_HEAD;
    case SL_Q_CONV: case SL_K_CONV: case SL_V_CONV: case SL_A_LOG: case SL_DT_BIAS: case SL_O_NORM:
    case SL_KDA_Q: case SL_KDA_K: case SL_KDA_V: case SL_KDA_F_A: case SL_KDA_F_B: case SL_KDA_BETA:
    case SL_KDA_GATE: case SL_KDA_GATE_A: case SL_KDA_GATE_B: case SL_KDA_OUT:
        return G_KDA;
    case SL_Q_A_NORM: case SL_KV_A_NORM: case SL_MLA_Q_A: case SL_MLA_Q_B: case SL_MLA_KV_A: case SL_MLA_KV_B:
    case SL_MLA_GATE: case SL_MLA_OUT:
        return G_MLA;
    case SL_DENSE_GATE: case SL_DENSE_UP: case SL_DENSE_DOWN:
        return G_DENSE;
    case SL_SHARED_GATE: case SL_SHARED_UP: case SL_SHARED_DOWN:
        return G_SHARED;
    case SL_LATENT_DOWN: case SL_LATENT_UP:
        return G_LATENT;
    case SL_ROUTER: case SL_ROUTER_BIAS:
        return G_ROUTER;
    default:
        return G_NORMS;
    }
}

static void count_kinds(census *s, const sl_config *c)
{
    for (uint32_t i = 0; i <= c->layers; i++) {
        const uint32_t layer = i < c->layers ? i : SL_NO_LAYER;
        for (unsigned k = 0; k < SL_KINDS; k++) {
            if (!sl_kind_present(c, layer, (sl_kind)k))
                continue;
            amount *a = &s->of[group_of((sl_kind)k)];
            const uint64_t n = sl_kind_elements(c, (sl_kind)k);
            a->tensors++;
            a->parameters += n;
            a->bytes += n * (sl_kind_dtype((sl_kind)k) == SL_DTYPE_F32 ? 4 : 2);
            a->active += k == SL_EMBED ? 0 : n; /* one row of it is looked up */
        }
    }
}

static void count_experts(census *s, const sl_config *c)
{
    uint64_t rows, row_bytes;
    for (int k = 0; k < SL_EXPERT_TENSORS; k++) {
        sl_expert_shape(c, k, &rows, &row_bytes);
        s->expert_bytes += rows * row_bytes;
        s->expert_parameters += k & 1 ? 0 : 2 * rows * row_bytes; /* two codes a byte; scales are none */
    }
    s->moe_layers = c->layers - c->dense_layers;
    const uint64_t experts = s->moe_layers * c->experts, active = s->moe_layers * c->top_k;
    s->of[G_ROUTED] = (amount){ experts * SL_EXPERT_TENSORS, experts * s->expert_parameters,
                                experts * s->expert_bytes, active * s->expert_parameters };
    s->expert_bytes_per_token = active * s->expert_bytes;
}

static void keep_first(void *user, const char *name)
{
    census *s = user;
    if (s->n_first < FIRST_MISSING)
        snprintf(s->first[s->n_first++], SL_ST_NAME_MAX, "%s", name);
}

static void take_census(census *s, const sl_binding *b)
{
    const sl_config *c = &b->config;
    const uint64_t kda_width = (uint64_t)c->kda_heads * c->kda_dim, mla = sl_config_mla_layers(c);
    count_kinds(s, c);
    count_experts(s, c);
    for (int g = 0; g < G_OTHER; g++) {
        s->all.tensors += s->of[g].tensors;
        s->all.parameters += s->of[g].parameters;
        s->all.bytes += s->of[g].bytes;
        s->all.active += s->of[g].active;
    }
    s->of[G_OTHER] = (amount){ b->other_tensors, b->other_elements, b->other_bytes, 0 };
    s->state_fixed = (c->layers - mla) * 4 * (kda_width * c->kda_dim + 3 * (c->conv_taps - 1) * kda_width);
    s->state_per_position = mla * 4 * (c->kv_lora + c->rope);
    for (uint16_t i = 0; i < b->shards.n; i++)
        s->missing_shards += b->shards.file[i].fd < 0;
    s->missing_tensors = sl_binding_missing(b, keep_first, s);
}

/* ---- in words --------------------------------------------------------------------------------- */

/* "104.19 B" into buf. */
static const char *count(char buf[32], uint64_t n)
{
    static const char units[] = " KMBT";
    double v = (double)n;
    unsigned u = 0;
    while (v >= 1000 && u < sizeof units - 2) {
        v /= 1000;
        u++;
    }
    if (u == 0)
        snprintf(buf, 32, "%u", (unsigned)n);
    else
        snprintf(buf, 32, "%.2f %c", v, units[u]);
    return buf;
}

/* "KKKM x 23, M": the pattern to the first MLA layer, as often as it repeats, then the rest. */
static void print_map(const sl_config *c)
{
    uint32_t period = 0, l = 0;
    while (period < c->layers && !c->is_mla[period])
        period++;
    period = period < c->layers ? period + 1 : c->layers;
    fputs("layers       ", stdout);
    while (l < c->layers) {
        uint32_t times = 0;
        while ((times + 1) * (uint64_t)period <= c->layers - l &&
               memcmp(c->is_mla + l + times * period, c->is_mla, period) == 0)
            times++;
        if (l)
            fputs(", ", stdout);
        const uint32_t n = times ? period : 1; /* what does not fit the pattern stands alone */
        for (uint32_t i = 0; i < n; i++)
            putchar(c->is_mla[l + i] ? 'M' : 'K');
        if (times > 1)
            printf(" x %u", times);
        l += times ? times * period : 1;
    }
    puts("   (K: KDA, M: MLA)");
}

static void print_config(const sl_config *c, const census *s)
{
    const uint32_t mla = sl_config_mla_layers(c);
    printf("model        %u layers, hidden size %u, vocabulary %u\n", c->layers, c->hidden, c->vocab);
    print_map(c);
    printf("KDA          %u layers: %u heads of %u, convolution over %u tokens, log decay above %g, %s gate\n",
           c->layers - mla, c->kda_heads, c->kda_dim, c->conv_taps, (double)c->gate_lower_bound,
           c->full_rank_gate ? "full-rank" : "low-rank");
    printf("MLA          %u layers: %u heads, query rank %u, cache of %u + %u values a position, %s gate\n", mla,
           c->heads, c->q_lora, c->kv_lora, c->rope, c->mla_gate ? "output" : "no");
    printf("MoE          %" PRIu64 " layers: %u of %u experts a token, width %u, %s of %u, %u shared\n", s->moe_layers,
           c->top_k, c->experts, c->moe_intermediate, c->latent_projection ? "latent input" : "input", c->latent,
           c->shared_experts);
    if (c->dense_layers)
        printf("dense MLP    layers up to the number %u, width %u\n", c->dense_layers, c->intermediate);
    if (c->res_block)
        printf("residuals    attention over blocks of %u layers, %u snapshots\n", c->res_block, sl_config_snapshots(c));
    else
        printf("residuals    ordinary\n");
    printf("activation   SiTU, bounds %g and %g; RMSNorm epsilon %g\n", (double)c->situ_beta,
           (double)c->situ_linear_beta, (double)c->eps);
}

static void print_row(const char *name, const amount *a)
{
    char bytes[32];
    printf("%-23s %9" PRIu64 " %17" PRIu64 " %15" PRIu64 " %9s\n", name, a->tensors, a->parameters, a->active,
           cmd_bytes(bytes, a->bytes));
}

static void print_words(const sl_binding *b, const census *s)
{
    char x[32], y[32];
    print_config(&b->config, s);
    printf("\n%-23s %9s %17s %15s %9s\n", "kind", "tensors", "parameters", "used by a token", "bytes");
    for (int g = 0; g < GROUPS; g++)
        if (s->of[g].tensors && g != G_OTHER)
            print_row(group_names[g], &s->of[g]);
    print_row("text model", &s->all);
    if (s->of[G_OTHER].tensors)
        print_row(group_names[G_OTHER], &s->of[G_OTHER]);
    printf("\nactivation   a token uses %s of %s parameters: %.2f %%\n", count(x, s->all.active),
           count(y, s->all.parameters), 100.0 * (double)s->all.active / (double)s->all.parameters);
    printf("expert       %" PRIu64 " parameters, %" PRIu64 " bytes; a token without reuse reads %s of experts\n",
           s->expert_parameters, s->expert_bytes, cmd_bytes(x, s->expert_bytes_per_token));
    printf("state        %s a sequence and %s a position, as fp32\n", cmd_bytes(x, s->state_fixed),
           cmd_bytes(y, s->state_per_position));
    printf("files        %u shards, %" PRIu64 " tensors, headers of %s\n", b->shards.n, b->shards.tensors,
           cmd_bytes(x, b->shards.header_bytes));
    if (!s->missing_shards && !s->missing_tensors) {
        printf("missing      nothing\n");
        return;
    }
    printf("missing      %" PRIu64 " of %u shards", s->missing_shards, b->shards.n);
    uint64_t shown = 0;
    for (uint16_t i = 0; i < b->shards.n && shown < FIRST_MISSING; i++)
        if (b->shards.file[i].fd < 0)
            printf("%s%s", shown++ ? ", " : ": ", b->shards.name[i]);
    printf("%s\n             %" PRIu64 " of %" PRIu64 " tensors", shown < s->missing_shards ? ", ..." : "",
           s->missing_tensors, s->all.tensors);
    for (unsigned i = 0; i < s->n_first; i++)
        printf("%s%s", i ? ", " : ": ", s->first[i]);
    printf("%s\n", s->n_first < s->missing_tensors ? ", ..." : "");
}

/* ---- as JSON ---------------------------------------------------------------------------------- */

static void json_key(const char *key, const char *text)
{
    printf("\"%s\":", key);
    cmd_json_string(stdout, text, strlen(text));
}

static void print_json(const char *dir, const sl_binding *b, const census *s)
{
    const sl_config *c = &b->config;
    char map[SL_LAYERS_MAX + 1];
    for (uint32_t l = 0; l < c->layers; l++)
        map[l] = c->is_mla[l] ? 'M' : 'K';
    map[c->layers] = 0;
    putchar('{');
    json_key("model", dir);
    printf(",\"layers\":%u,\"layer_map\":\"%s\",\"dense_layers\":%u,\"hidden\":%u,\"vocab\":%u,\"res_block\":%u,"
           "\"experts\":%u,\"experts_per_token\":%u,\"shared_experts\":%u,\"latent\":%u,\"expert_width\":%u,",
           c->layers, map, c->dense_layers, c->hidden, c->vocab, c->res_block, c->experts, c->top_k, c->shared_experts,
           c->latent, c->moe_intermediate);
    printf("\"shards\":%u,\"tensors\":%" PRIu64 ",\"header_bytes\":%" PRIu64 ",\"parameters\":%" PRIu64
           ",\"active_parameters\":%" PRIu64 ",\"activation_ratio\":%.9g,\"bytes\":%" PRIu64 ",\"kinds\":[",
           b->shards.n, b->shards.tensors, b->shards.header_bytes, s->all.parameters, s->all.active,
           (double)s->all.active / (double)s->all.parameters, s->all.bytes + s->of[G_OTHER].bytes);
    for (int g = 0; g < GROUPS; g++) {
        const amount *a = &s->of[g];
        printf("%s{\"kind\":\"%s\",\"tensors\":%" PRIu64 ",\"parameters\":%" PRIu64 ",\"active_parameters\":%" PRIu64
               ",\"bytes\":%" PRIu64 "}", g ? "," : "", group_names[g], a->tensors, a->parameters, a->active, a->bytes);
    }
    printf("],\"expert\":{\"parameters\":%" PRIu64 ",\"bytes\":%" PRIu64 ",\"bytes_per_token\":%" PRIu64
           "},\"state\":{\"sequence_bytes\":%" PRIu64 ",\"position_bytes\":%" PRIu64 "},\"missing\":{\"shards\":[",
           s->expert_parameters, s->expert_bytes, s->expert_bytes_per_token, s->state_fixed, s->state_per_position);
    const char *comma = "";
    for (uint16_t i = 0; i < b->shards.n; i++)
        if (b->shards.file[i].fd < 0) {
            fputs(comma, stdout);
            cmd_json_string(stdout, b->shards.name[i], strlen(b->shards.name[i]));
            comma = ",";
        }
    printf("],\"tensors\":%" PRIu64 ",\"first\":[", s->missing_tensors);
    for (unsigned i = 0; i < s->n_first; i++)
        printf("%s\"%s\"", i ? "," : "", s->first[i]);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("]},\"peak_rss_bytes\":%llu}\n", (unsigned long long)usage.ru_maxrss << 10);
}

int cmd_inspect(int argc, char **argv)
{
    bool json = false;
    const cmd_option options[] = {
        { "--json", NULL, CMD_FLAG, &json, NULL, "One JSON object on one line", NULL },
        { 0 },
    };
    const cmd_spec spec = {
        "inspect MODEL [options]",
        "Shows the configuration in words, parameters and bytes by kind, the activation ratio, and what is missing. "
        "Reads config.json and the headers of the shards, no weights. Exit status 3 when something is missing.",
        options, 1, 1,
    };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n = cmd_parse(&spec, argc, argv, args);
    if (n < 0)
        return n == -1 ? 0 : CMD_USAGE;
    const char *dir = args[0];
    sl_err err;
    sl_binding *b = malloc(sizeof *b);
    census *s = calloc(1, sizeof *s);
    int rc = b && s ? sl_binding_open(b, dir, SL_SHARDS_PARTIAL, NULL, &err) : sl_fail(&err, SL_EFAIL, "out of memory");
    int status = 0;
    if (rc < 0) {
        status = cmd_fail(&err);
    } else {
        take_census(s, b);
        if (json)
            print_json(dir, b, s);
        else
            print_words(b, s);
        if (s->missing_shards || s->missing_tensors)
            status = sl_exit_status(SL_EFORMAT);
        sl_binding_close(b);
    }
    free(b);
    free(s);
    return status;
}
