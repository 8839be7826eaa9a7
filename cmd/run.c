/* sluice run: text in, text out. */
#include "cmd.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "gen/stop.h"

enum { PROMPT_MAX = 256 << 20, TOKENS_DEFAULT = 256 };

typedef struct {
    sl_engine *engine;
    sl_session *session;
    sl_tokenizer *tokenizer;
    sl_stop *stop;
    sl_detok detok;
    sl_candidate *candidates;
    char *raw, *text; /* one token's bytes, and what of them may be shown */
    int32_t *prompt;
    size_t n_prompt;
    sl_sampling sampling;
    uint32_t max_tokens;
    bool json, ignore_eos;
    cmd_trace *trace;          /* NULL: none */
    /* results */
    uint32_t tokens;
    const char *finish;
    double prefill_seconds, decode_seconds;
    double decode_from;        /* when the prompt's pass ended; 0: it did not */
    sl_stats decode_stats;     /* and the counts then */
    /* progress on stderr */
    double started, shown;
    bool terminal, line_open;
    uint64_t bytes_before;
} run;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t bytes_read(const run *r)
{
    sl_stats s;
    sl_engine_stats(r->engine, &s);
    return s.trunk + s.experts + s.head + s.embed;
}

/* ---- progress ------------------------------------------------------------------------------- */

static void end_line(run *r)
{
    if (r->line_open)
        fputs("\r\033[K", stderr);
    r->line_open = false;
}

/* Shows where a feed is: on a terminal in place, four times a second; else a line every ten seconds. */
static void show_progress(void *user, uint64_t done, uint64_t total)
{
    run *r = user;
    const double t = now(), elapsed = t - r->started;
    if (cmd_log_level() < SL_LOG_WARN || elapsed < 2 || t - r->shown < (r->terminal ? 0.25 : 10))
        return;
    char rate[32];
    r->shown = t;
    fprintf(stderr, "%s%s %.0f %%, %s/s, %.0f s left%s", r->terminal ? "\r" : "", r->tokens ? "token" : "prompt",
            100.0 * (double)done / (double)total, cmd_bytes(rate, (uint64_t)((double)(bytes_read(r) - r->bytes_before) / elapsed)),
            elapsed * (double)(total - done) / (double)done, r->terminal ? "\033[K" : "\n");
    r->line_open = r->terminal;
}

static void trace_routing(void *user, uint32_t pass, uint32_t position, uint32_t layer, const uint32_t *experts,
                          const float *weights, uint32_t n)
{
    cmd_trace_routing(((run *)user)->trace, pass, position, layer, experts, weights, n);
}

static int feed(run *r, const int32_t *ids, size_t n, bool last, double *seconds, sl_err *err)
{
    const sl_feed f = { .last = last, .on_progress = show_progress, .on_routing = r->trace ? trace_routing : NULL, .user = r };
    cmd_trace_feed(r->trace);
    r->started = r->shown = now();
    r->bytes_before = bytes_read(r);
    const int rc = sl_session_feed(r->session, ids, n, &f, err);
    *seconds += now() - r->started;
    end_line(r);
    return rc;
}

/* ---- output --------------------------------------------------------------------------------- */

static void print_token(const run *r, uint64_t position, int32_t id, float logprob, const char *text, size_t len)
{
    if (r->json) {
        printf("{\"event\":\"token\",\"pos\":%llu,\"id\":%d,\"text\":", (unsigned long long)position, id);
        cmd_json_string(stdout, text, len);
        printf(",\"logprob\":%.6f}\n", (double)logprob);
    } else {
        fwrite(text, 1, len, stdout);
    }
}

/* The drive between the end of the prompt's pass and now: wall time, time with a read in flight, mean depth. */
static void print_drive(const run *r, const sl_stats *s)
{
    const double busy = (double)(s->drive_busy_ns - r->decode_stats.drive_busy_ns) * 1e-9;
    const double depth = (double)(s->drive_depth_ns - r->decode_stats.drive_depth_ns) * 1e-9;
    printf("\"drive\":{\"reads\":%llu,\"decode_wall_seconds\":%.3f,\"decode_busy_seconds\":%.3f,\"decode_depth\":%.2f,"
           "\"mirror_bytes\":%llu,\"mirrors_dropped\":%u},", (unsigned long long)s->drive_reads, r->decode_from > 0 ? now() - r->decode_from : 0.0,
           r->decode_from > 0 ? busy : 0.0, r->decode_from > 0 && busy > 0 ? depth / busy : 0.0,
           (unsigned long long)s->mirror_bytes, s->mirrors_dropped);
}

static void print_done(const run *r)
{
    sl_stats s;
    char bytes[32], rss[32], budget[32];
    const sl_plan *plan = sl_engine_get_plan(r->engine);
    sl_engine_stats(r->engine, &s);
    if (r->json) {
        printf("{\"event\":\"done\",\"prompt_tokens\":%zu,\"tokens\":%u,\"finish_reason\":\"%s\",\"seconds_prefill\":%.3f,"
               "\"seconds_decode\":%.3f,\"bytes\":{\"trunk\":%llu,\"experts\":%llu,\"head\":%llu,\"embed\":%llu},"
               "\"cache\":{\"requests\":%llu,\"hits\":%llu},",
               r->n_prompt, r->tokens, r->finish, r->prefill_seconds, r->decode_seconds, (unsigned long long)s.trunk,
               (unsigned long long)s.experts, (unsigned long long)s.head, (unsigned long long)s.embed,
               (unsigned long long)s.cache_requests, (unsigned long long)s.cache_hits);
        print_drive(r, &s);
        printf("\"peak_rss_bytes\":%llu,\"ram_budget_bytes\":%llu}\n", (unsigned long long)s.peak_rss,
               (unsigned long long)plan->budget);
        return;
    }
    putchar('\n');
    fflush(stdout);
    if (cmd_log_level() < SL_LOG_WARN)
        return;
    /* The first token comes out of the prompt's pass, so one pass fewer belongs to decode. */
    fprintf(stderr, "sluice: %zu prompt tokens in %.2f s, %u tokens in %.2f s (%.2f s/token), %s read, peak %s of %s, %s\n",
            r->n_prompt, r->prefill_seconds, r->tokens, r->decode_seconds,
            r->tokens > 1 ? r->decode_seconds / (r->tokens - 1) : 0.0,
            cmd_bytes(bytes, s.trunk + s.experts + s.head + s.embed), cmd_bytes(rss, s.peak_rss),
            cmd_bytes(budget, plan->budget), r->finish);
}

/* ---- generation ----------------------------------------------------------------------------- */

/* Decodes and prints one token. final: no other follows, so what was held back comes out with it.
 * *stopped: a stop string is complete; the text ends before it. */
static int emit(run *r, uint64_t position, int32_t id, float logprob, bool end, bool final, bool *stopped)
{
    size_t len = 0, n = 0;
    const char *bytes = end ? "" : sl_tokenizer_bytes(r->tokenizer, id, &len); /* NULL: not in its vocabulary */
    if (bytes)
        n = sl_detok_feed(&r->detok, bytes, len, r->raw);
    if (final || end)
        n += sl_detok_flush(&r->detok, r->raw + n);
    size_t shown = sl_stop_feed(r->stop, r->raw, n, r->text, stopped);
    if ((final || end) && !*stopped)
        shown += sl_stop_flush(r->stop, r->text + shown);
    print_token(r, position, id, logprob, r->text, shown);
    return cmd_flush();
}

/* Returns 0, an SL_* code with err filled, or a positive exit status that was reported already. */
static int generate(run *r, uint32_t context, sl_err *err)
{
    int rc = feed(r, r->prompt, r->n_prompt, r->max_tokens <= 1, &r->prefill_seconds, err);
    r->finish = "length";
    if (rc == 0) {
        sl_engine_stats(r->engine, &r->decode_stats);
        r->decode_from = now();
    }
    while (rc == 0 && r->tokens < r->max_tokens) {
        const uint32_t position = sl_session_position(r->session);
        float logprob;
        const int32_t id = sl_sample(sl_session_logits(r->session), sl_engine_vocab(r->engine), &r->sampling, position,
                                     r->candidates, &logprob);
        const bool end = id == sl_engine_eos(r->engine) && !r->ignore_eos;
        const bool final = ++r->tokens == r->max_tokens || position == context;
        bool stopped = false;
        if ((rc = emit(r, position, id, logprob, end, final, &stopped)) != 0)
            return rc;
        if (end || stopped)
            r->finish = "stop";
        if (end || stopped || final)
            break;
        rc = feed(r, &id, 1, r->tokens + 1 == r->max_tokens, &r->decode_seconds, err);
    }
    if (rc == SL_EINTR)
        r->finish = "interrupted";
    return rc;
}

/* ---- set-up --------------------------------------------------------------------------------- */

typedef struct {
    const char *dir, *text, *file, *ids, *trace;
    int special;
    cmd_list stops;
    sl_options engine;
} request;

/* The prompt as ids, from exactly one of its sources. */
static int read_prompt(run *r, const request *q, sl_err *err)
{
    char *text = NULL;
    size_t len = 0;
    int rc;
    if (q->ids)
        return cmd_parse_ids(q->ids, &r->prompt, &r->n_prompt, err);
    if (q->text && strcmp(q->text, "-") != 0)
        len = strlen(q->text);
    else if ((rc = cmd_read_text(q->file ? q->file : "-", &text, &len, PROMPT_MAX, err)) < 0)
        return rc;
    rc = sl_tokenizer_encode(r->tokenizer, text ? text : q->text, len, (enum sl_special)q->special, &r->prompt,
                             &r->n_prompt, err);
    free(text);
    if (rc == 0 && r->n_prompt == 0) {
        err->code = rc = SL_EUSAGE;
        snprintf(err->text, sizeof err->text, "prompt: it is empty");
    }
    return rc;
}

static size_t longest_token(const sl_tokenizer *t)
{
    size_t longest = 0, len;
    for (size_t id = 0; id < sl_tokenizer_size(t); id++)
        if (sl_tokenizer_bytes(t, (int32_t)id, &len) && len > longest)
            longest = len;
    return longest;
}

static int open_all(run *r, request *q, sl_err *err)
{
    int rc = sl_tokenizer_open(&r->tokenizer, q->dir, err);
    if (rc < 0 || (rc = read_prompt(r, q, err)) < 0)
        return rc;
    const uint64_t want = (uint64_t)r->n_prompt + (r->max_tokens ? r->max_tokens - 1 : 0);
    if (q->engine.context == 0)
        q->engine.context = want < UINT32_MAX ? (uint32_t)want : UINT32_MAX;
    if (r->n_prompt > q->engine.context) {
        err->code = SL_EUSAGE;
        snprintf(err->text, sizeof err->text, "prompt: %zu tokens do not fit a context of %u", r->n_prompt,
                 q->engine.context);
        return SL_EUSAGE;
    }
    if ((rc = sl_stop_open(&r->stop, q->stops.item, q->stops.n, err)) < 0 ||
        (rc = sl_engine_open(&r->engine, q->dir, &q->engine, err)) < 0 ||
        (rc = sl_session_open(&r->session, r->engine, err)) < 0)
        return rc;
    const size_t raw = SL_DETOK_MAX(longest_token(r->tokenizer)) + 16;
    r->raw = malloc(raw);
    r->text = malloc(sl_stop_room(r->stop, raw) + sl_stop_room(r->stop, 0) + 1);
    r->candidates = malloc(sl_engine_vocab(r->engine) * sizeof *r->candidates);
    if (r->raw && r->text && r->candidates)
        return 0;
    err->code = SL_EFAIL;
    snprintf(err->text, sizeof err->text, "out of memory");
    return SL_EFAIL;
}

static void close_all(run *r)
{
    sl_session_close(r->session);
    sl_engine_close(r->engine);
    sl_stop_close(r->stop);
    sl_tokenizer_close(r->tokenizer);
    free(r->raw);
    free(r->text);
    free(r->candidates);
    sl_free(r->prompt);
}

static int run_request(request *q, run *r)
{
    sl_err err = { 0 };
    int rc = open_all(r, q, &err);
    if (rc == 0 && q->trace)
        rc = cmd_trace_open(&r->trace, q->trace, &err);
    if (rc == 0) {
        rc = generate(r, q->engine.context, &err);
        if (rc == 0 || rc == SL_EINTR)
            print_done(r);
        if (rc <= 0 && cmd_flush() != 0)
            rc = 1;
    }
    end_line(r);
    sl_err lost; /* what was recorded is kept after a failure too, which then is what is reported */
    if (cmd_trace_close(r->trace, &lost) < 0 && rc == 0) {
        err = lost;
        rc = err.code;
    }
    close_all(r);
    return rc < 0 ? cmd_fail(&err) : rc;
}

int cmd_run(int argc, char **argv)
{
    static const char *const specials[] = { "allow", "plain", "refuse", NULL };
    request q = { .engine = sl_options_default() };
    run r = { .max_tokens = TOKENS_DEFAULT, .sampling = { .top_p = 1 }, .terminal = isatty(2) };
    int backend = SL_IO_AUTO;
    q.engine.context = 0; /* prompt and answer, unless told otherwise */
    const cmd_option options[] = {
        { "--ids", NULL, CMD_STR, &q.ids, "LIST", "the prompt as token ids, separated by commas", NULL },
        { "--prompt-file", NULL, CMD_STR, &q.file, "FILE", "read the prompt from FILE", NULL },
        { "--special", NULL, CMD_CHOICE, &q.special, "HOW", "names of special tokens in the prompt: allow, plain, refuse", specials },
        { "--max-tokens", "-n", CMD_U32, &r.max_tokens, "N", "stop after N tokens (default 256)", NULL },
        { "--temperature", NULL, CMD_FLOAT, &r.sampling.temperature, "T", "sample at temperature T; 0, the default, is greedy", NULL },
        { "--top-p", NULL, CMD_FLOAT, &r.sampling.top_p, "P", "keep the likeliest tokens that reach probability P", NULL },
        { "--top-k", NULL, CMD_U32, &r.sampling.top_k, "K", "keep the K likeliest tokens", NULL },
        { "--min-p", NULL, CMD_FLOAT, &r.sampling.min_p, "P", "keep tokens with P times the largest probability or more", NULL },
        { "--seed", NULL, CMD_U64, &r.sampling.seed, "S", "seed of the random numbers (default 0)", NULL },
        { "--stop", NULL, CMD_LIST, &q.stops, "TEXT", "end before TEXT appears; repeatable", NULL },
        { "--ignore-eos", NULL, CMD_FLAG, &r.ignore_eos, NULL, "go on past the end-of-sequence token", NULL },
        { "--trace", NULL, CMD_STR, &q.trace, "FILE", "record which experts each token's router chose", NULL },
        CMD_ENGINE_OPTIONS(q.engine, backend),
        { "--json", NULL, CMD_FLAG, &r.json, NULL, "one JSON object a line: each token, then a summary", NULL },
        { 0 },
    };
    const cmd_spec spec = { "run MODEL [PROMPT|-] [options]",
                            "Continues PROMPT, standard input (-), a file or a list of ids, greedily unless a "
                            "temperature is given.", options, 1, 2 };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n = cmd_parse(&spec, argc, argv, args);
    if (n < 0)
        return n == -1 ? 0 : CMD_USAGE;
    q.dir = args[0];
    q.text = n > 1 ? args[1] : NULL;
    if (!!q.text + !!q.file + !!q.ids > 1)
        return cmd_error(CMD_USAGE, "run: give one of PROMPT, --prompt-file and --ids");
    if (!q.text && !q.file && !q.ids)
        return cmd_error(CMD_USAGE, "run: a prompt is needed: PROMPT, - for standard input, --prompt-file or --ids");
    if (r.sampling.temperature < 0 || r.sampling.top_p <= 0 || r.sampling.top_p > 1 || r.sampling.min_p < 0 ||
        r.sampling.min_p > 1)
        return cmd_error(CMD_USAGE, "run: expected --temperature >= 0, 0 < --top-p <= 1, 0 <= --min-p <= 1");
    cmd_catch_signals();
    q.engine.io = (enum sl_io_backend)backend;
    q.engine.cancel = cmd_interrupted;
    return run_request(&q, &r);
}
