/* cmd/cmd.h - what the commands share: the option table, messages, sizes, signals.
 * One table drives parsing, --help and the man-page check. */
#ifndef SL_CMD_H
#define SL_CMD_H

#include <stdio.h>

#include "sluice.h"

/* Exit status of a usage error. */
enum { CMD_USAGE = 2 };

enum cmd_kind {
    CMD_FLAG,   /* bool *         set to true */
    CMD_STR,    /* const char **  */
    CMD_LIST,   /* cmd_list *     repeatable string; the list belongs to the parser and lives until exit */
    CMD_U32,    /* uint32_t *     */
    CMD_U64,    /* uint64_t *     */
    CMD_SIZE,   /* uint64_t *     8G, 512MiB, 1000 */
    CMD_FLOAT,  /* float *        finite */
    CMD_CHOICE, /* int *          index into `choices` */
    CMD_MIRROR, /* sl_options *   repeatable; appended to its mirrors, which every command shares */
};

typedef struct {
    const char **item;
    size_t n;
} cmd_list;

typedef struct {
    const char *name;  /* "--max-tokens" */
    const char *brief; /* "-n" or NULL */
    enum cmd_kind kind;
    void *value;
    const char *arg;   /* name of the argument in help, NULL for flags */
    const char *help;
    const char *const *choices; /* CMD_CHOICE: NULL-terminated */
} cmd_option;

typedef struct {
    const char *usage;          /* "run MODEL [PROMPT|-] [options]" */
    const char *about;          /* one or two sentences */
    const cmd_option *options;  /* ends with a NULL name; --help, -v and -q are added */
    int min_args, max_args;     /* positional arguments; max -1: any number */
} cmd_spec;

/* Parses argv[1..]. Positional arguments are collected into args (room for argc). Returns their count,
 * or -1 after --help was printed (exit status 0), or -2 after a usage error was printed (status 2). */
int cmd_parse(const cmd_spec *spec, int argc, char **argv, const char **args);
/* "sluice: text" on stderr, one line; returns the exit status for err->code. */
int cmd_fail(const sl_err *err);
/* The same for a message made here. */
int cmd_error(int status, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
/* Whether anything written to stdout was lost (closed pipe, full disk): flushes, and reports it. Returns
 * 0 or the exit status. */
int cmd_flush(void);
/* "8G", "512MiB", "1.5G", "1000": K, M, G, T, P count by 1024, with or without a following iB or B. */
bool cmd_parse_size(const char *s, uint64_t *out);
/* "1,2,3" or "1 2 3" into ids (malloc'd). SL_EUSAGE names the bad part. */
int cmd_parse_ids(const char *s, int32_t **ids, size_t *n, sl_err *err);
/* Reads a file, or stdin for "-" or NULL, whole; malloc'd, NUL-terminated. At most `max` bytes. */
int cmd_read_text(const char *path, char **text, size_t *len, size_t max, sl_err *err);
/* Prints s as a JSON string with its quotes; bytes must be UTF-8. */
void cmd_json_string(FILE *f, const char *s, size_t len);
/* "1.53 GB" into buf; units of 1000, as drives are sold. */
const char *cmd_bytes(char buf[32], uint64_t n);
/* SIGINT and SIGTERM set a flag that cmd_interrupted reads (it fits sl_options.cancel); SIGPIPE is ignored. */
void cmd_catch_signals(void);
bool cmd_interrupted(void *unused);

/* A record of routing, one JSON object a line (docs/formats.md). It appears under its name when closed, whole. */
typedef struct cmd_trace cmd_trace;
int cmd_trace_open(cmd_trace **out, const char *path, sl_err *err);
void cmd_trace_feed(cmd_trace *t); /* a feed begins: its passes count on from those before; NULL is fine */
void cmd_trace_routing(cmd_trace *t, uint32_t pass, uint32_t position, uint32_t layer, const uint32_t *experts,
                       const float *weights, uint32_t n);
int cmd_trace_close(cmd_trace *t, sl_err *err); /* SL_EFAIL: something could not be written, there is no file; NULL is fine */

/* The log goes to stderr from level warn up. Moves the level: -v is +1, -q is -1. */
void cmd_log_adjust(int delta);
int cmd_log_level(void); /* SL_LOG_*, or -1: silent */
bool cmd_log_named(const char *name); /* "error" to "trace"; false: no such level */

/* The options of every command that opens an engine; o: a sl_options, backend: an int for --io. */
extern const char *const cmd_io_choices[];
#define CMD_ENGINE_OPTIONS(o, backend)                                                                       \
    { "--ram", NULL, CMD_SIZE, &(o).ram_bytes, "SIZE", "limit of resident memory (default 90 % of what is free)", NULL }, \
    { "--ctx", NULL, CMD_U32, &(o).context, "N", "positions the sequence can grow to", NULL },                 \
    { "--threads", NULL, CMD_U32, &(o).threads, "N", "compute threads (default: one per CPU)", NULL },         \
    { "--prefill-chunk", NULL, CMD_U32, &(o).prefill_chunk, "N", "prompt tokens per pass over the weights", NULL }, \
    { "--io", NULL, CMD_CHOICE, &(backend), "WAY", "how weights are read: auto, uring, pread", cmd_io_choices }, \
    { "--mirror", NULL, CMD_MIRROR, &(o), "DIR", "further copies of shards, on another drive; repeatable", NULL }

int cmd_run(int argc, char **argv);
int cmd_plan(int argc, char **argv);
int cmd_inspect(int argc, char **argv);
int cmd_logits(int argc, char **argv);
int cmd_tokenize(int argc, char **argv);
int cmd_detokenize(int argc, char **argv);
int cmd_synth(int argc, char **argv);
int cmd_bench(int argc, char **argv);

#endif
