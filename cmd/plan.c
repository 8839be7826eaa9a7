/* sluice plan: what a budget is spent on and what a token will cost, without running anything. */
#include "cmd.h"

static void row(const char *name, uint64_t bytes, const char *what)
{
    char size[32];
    printf("  %-18s %10s  %s\n", name, cmd_bytes(size, bytes), what);
}

static uint64_t predicted_bytes(const sl_plan *p)
{
    return p->trunk_bytes + p->head_bytes + p->embed_bytes + p->expert_expected;
}

static void print_time(const sl_plan *p, const sl_speed *s)
{
    char a[32], b[32], c[32], d[32];
    const double compute = s->bf16 > 0 && s->mxfp4 > 0
                               ? (double)p->used_bf16 / s->bf16 + (double)p->used_mxfp4 / s->mxfp4 : 0;
    printf("through the kernels per decoded token: %s bf16 at %s/s, %s MXFP4 at %s/s, measured now: %.2f s\n",
           cmd_bytes(a, p->used_bf16), cmd_bytes(b, (uint64_t)s->bf16), cmd_bytes(c, p->used_mxfp4),
           cmd_bytes(d, (uint64_t)s->mxfp4), compute);
    const double seconds = sl_plan_seconds(p, s);
    if (seconds > 0) {
        printf("predicted: %.2f s a token, from a drive that reads the trunk at %s/s, experts at %s/s\n", seconds,
               cmd_bytes(a, (uint64_t)s->stream), cmd_bytes(b, (uint64_t)s->experts));
        return;
    }
    printf("predicted:");
    for (int gb = 1; gb <= 7; gb += gb + 1) { /* 1, 3, 7 */
        const sl_speed at = { .stream = gb * 1e9, .experts = gb * 1e9, .bf16 = s->bf16, .mxfp4 = s->mxfp4 };
        printf("%s %.2f s a token at %d GB/s", gb > 1 ? "," : "", sl_plan_seconds(p, &at), gb);
    }
    puts(" ('sluice bench disk' measures the drive)");
}

static void print_plan(const sl_plan *p, const sl_speed *s)
{
    char a[32], b[32];
    printf("memory, of %s:\n", cmd_bytes(a, p->budget));
    row("reserve", p->reserve, "program, libraries, stacks, page tables");
    row("index", p->index, "where each tensor lies; norms and other small vectors");
    row("state", p->state, "recurrent state, latent cache, of all sequences");
    row("scratch", p->scratch, "activations of one prefill chunk");
    row("ring", p->ring, "trunk chunks being read or used");
    row("experts in flight", p->inflight, "");
    row("trunk resident", p->trunk, "");
    row("expert cache", p->cache, "");
    row("total", p->total, "");
    printf("sequences %u, context %u positions (%s each), prefill chunk %u, threads %u, cached experts %u\n", p->sequences, p->context,
           cmd_bytes(a, p->state_per_position), p->prefill_chunk, p->threads, p->expert_slots);
    printf("smallest budget for this context %s; largest context for this budget %llu\n", cmd_bytes(a, p->minimum),
           (unsigned long long)p->max_context);
    char experts[96] = "";
    if (p->expert_slots)
        snprintf(experts, sizeof experts, "%s less what the cache holds, were all called for equally often",
                 cmd_bytes(a, p->expert_bytes));
    printf("read per decoded token:\n");
    row("trunk", p->trunk_bytes, "");
    row("head", p->head_bytes, "");
    row("embedding row", p->embed_bytes, "");
    row("experts", p->expert_expected, experts);
    row("total", predicted_bytes(p), "");
    print_time(p, s);
    printf("a prompt reads the trunk once per %u tokens, and each distinct expert once (%s for one token)\n",
           p->prefill_chunk, cmd_bytes(b, p->expert_bytes));
}

static void print_json(const sl_plan *p, const sl_speed *s)
{
    const struct { const char *name; uint64_t value; } field[] = {
        { "budget", p->budget }, { "total", p->total }, { "reserve", p->reserve }, { "index", p->index },
        { "state", p->state }, { "scratch", p->scratch }, { "ring", p->ring }, { "inflight", p->inflight },
        { "trunk", p->trunk }, { "cache", p->cache }, { "state_per_position", p->state_per_position },
        { "minimum", p->minimum }, { "max_context", p->max_context }, { "context", p->context },
        { "prefill_chunk", p->prefill_chunk }, { "threads", p->threads }, { "sequences", p->sequences }, { "expert_slots", p->expert_slots },
        { "trunk_bytes", p->trunk_bytes }, { "head_bytes", p->head_bytes }, { "embed_bytes", p->embed_bytes },
        { "expert_bytes", p->expert_bytes },
        { "token_bytes", p->trunk_bytes + p->head_bytes + p->embed_bytes + p->expert_bytes },
        { "expert_expected_bytes", p->expert_expected }, { "predicted_bytes", predicted_bytes(p) },
        { "used_bf16_bytes", p->used_bf16 }, { "used_mxfp4_bytes", p->used_mxfp4 },
        { "stream_bytes_per_second", (uint64_t)s->stream }, { "expert_bytes_per_second", (uint64_t)s->experts },
        { "bf16_bytes_per_second", (uint64_t)s->bf16 }, { "mxfp4_bytes_per_second", (uint64_t)s->mxfp4 },
    };
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        printf("%s\"%s\":%llu", i ? "," : "{", field[i].name, (unsigned long long)field[i].value);
    const double seconds = sl_plan_seconds(p, s);
    if (seconds > 0)
        printf(",\"predicted_seconds\":%.6f", seconds);
    puts("}");
}

int cmd_plan(int argc, char **argv)
{
    sl_options opt = sl_options_default();
    int backend = SL_IO_AUTO;
    bool json = false;
    uint64_t drive = 0;
    const cmd_option options[] = {
        CMD_ENGINE_OPTIONS(opt, backend),
        { "--sequences", NULL, CMD_U32, &opt.sequences, "N", "sequences that advance together (default 1)", NULL },
        { "--drive-bandwidth", NULL, CMD_SIZE, &drive, "SIZE", "bytes a second from the drive (default: as 'bench disk' found)",
          NULL },
        { "--json", NULL, CMD_FLAG, &json, NULL, "one JSON object on one line; all numbers in bytes or counts", NULL },
        { 0 },
    };
    const cmd_spec spec = { "plan MODEL [options]",
                            "Shows how a RAM budget would be spent, and the bytes read and seconds per token.",
                            options, 1, 1 };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n = cmd_parse(&spec, argc, argv, args);
    if (n < 0)
        return n == -1 ? 0 : CMD_USAGE;
    sl_plan plan;
    sl_err err;
    opt.io = (enum sl_io_backend)backend;
    if (sl_engine_plan(args[0], &opt, &plan, &err) < 0)
        return cmd_fail(&err);
    sl_speed speed;
    if (sl_measure_speed(args[0], &opt, &speed, &err) < 0)
        return cmd_fail(&err);
    if (drive)
        speed.stream = speed.experts = (double)drive;
    if (json)
        print_json(&plan, &speed);
    else
        print_plan(&plan, &speed);
    return cmd_flush();
}
