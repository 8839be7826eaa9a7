/* sluice plan: what a budget is spent on and what a token will cost, without running anything. */
#include "cmd.h"

static void row(const char *name, uint64_t bytes, const char *what)
{
    char size[32];
    printf("  %-18s %10s  %s\n", name, cmd_bytes(size, bytes), what);
}

static void print_plan(const sl_plan *p)
{
    char a[32], b[32];
    printf("memory, of %s:\n", cmd_bytes(a, p->budget));
    row("reserve", p->reserve, "program, libraries, stacks, page tables");
    row("index", p->index, "where each tensor lies; norms and other small vectors");
    row("state", p->state, "recurrent state, latent cache");
    row("scratch", p->scratch, "activations of one prefill chunk");
    row("ring", p->ring, "trunk chunks being read or used");
    row("experts in flight", p->inflight, "");
    row("trunk resident", p->trunk, "");
    row("expert cache", p->cache, "");
    row("total", p->total, "");
    printf("context %u positions (%s each), prefill chunk %u, threads %u, cached experts %u\n", p->context,
           cmd_bytes(a, p->state_per_position), p->prefill_chunk, p->threads, p->expert_slots);
    printf("smallest budget for this context %s; largest context for this budget %llu\n", cmd_bytes(a, p->minimum),
           (unsigned long long)p->max_context);
    const uint64_t token = p->trunk_bytes + p->head_bytes + p->embed_bytes + p->expert_bytes;
    printf("read per decoded token, no cached expert used:\n");
    row("trunk", p->trunk_bytes, "");
    row("head", p->head_bytes, "");
    row("embedding row", p->embed_bytes, "");
    row("experts", p->expert_bytes, "");
    row("total", token, "");
    printf("time to read that, computed: %.2f s at 1 GB/s, %.2f s at 3 GB/s, %.2f s at 7 GB/s\n", (double)token / 1e9,
           (double)token / 3e9, (double)token / 7e9);
    printf("a prompt reads the trunk once per %u tokens, and each distinct expert once (%s for one token)\n",
           p->prefill_chunk, cmd_bytes(b, p->expert_bytes));
}

static void print_json(const sl_plan *p)
{
    const struct { const char *name; uint64_t value; } field[] = {
        { "budget", p->budget }, { "total", p->total }, { "reserve", p->reserve }, { "index", p->index },
        { "state", p->state }, { "scratch", p->scratch }, { "ring", p->ring }, { "inflight", p->inflight },
        { "trunk", p->trunk }, { "cache", p->cache }, { "state_per_position", p->state_per_position },
        { "minimum", p->minimum }, { "max_context", p->max_context }, { "context", p->context },
        { "prefill_chunk", p->prefill_chunk }, { "threads", p->threads }, { "expert_slots", p->expert_slots },
        { "trunk_bytes", p->trunk_bytes }, { "head_bytes", p->head_bytes }, { "embed_bytes", p->embed_bytes },
        { "expert_bytes", p->expert_bytes },
        { "token_bytes", p->trunk_bytes + p->head_bytes + p->embed_bytes + p->expert_bytes },
    };
    for (size_t i = 0; i < sizeof field / sizeof *field; i++)
        printf("%s\"%s\":%llu", i ? "," : "{", field[i].name, (unsigned long long)field[i].value);
    puts("}");
}

int cmd_plan(int argc, char **argv)
{
    sl_options opt = sl_options_default();
    int backend = SL_IO_AUTO;
    bool json = false;
    const cmd_option options[] = {
        CMD_ENGINE_OPTIONS(opt, backend),
        { "--json", NULL, CMD_FLAG, &json, NULL, "one JSON object on one line; all numbers in bytes or counts", NULL },
        { 0 },
    };
    const cmd_spec spec = { "plan MODEL [options]", "Shows how a RAM budget would be spent, and the bytes read per token.",
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
    if (json)
        print_json(&plan);
    else
        print_plan(&plan);
    return cmd_flush();
}
