/* sluice logits: the raw output of the model, for comparison bit by bit. */
#include "cmd.h"

#include <stdlib.h>
#include <string.h>

#include "base/file.h"

typedef struct {
    sl_atomic_file file;
    uint32_t vocab;
    sl_err err;
} writer;

/* float32 little-endian, as the machines we run on keep it: both targets are little-endian. */
static int write_row(void *user, uint32_t position, const float *logits)
{
    writer *w = user;
    (void)position;
    const int rc = sl_write_all(w->file.fd, logits, w->vocab * sizeof *logits);
    return rc < 0 ? sl_fail(&w->err, SL_EFAIL, "%s: %s", w->file.path, strerror(-rc)) : 0;
}

static int compute(const char *dir, const sl_options *opt, const int32_t *ids, size_t n, const char *path, sl_err *err)
{
    sl_engine *engine = NULL;
    sl_session *session = NULL;
    writer w = { .file.fd = -1 };
    int rc = sl_engine_open(&engine, dir, opt, err);
    if (rc == 0 && (rc = sl_session_open(&session, engine, err)) == 0 && (rc = sl_atomic_open(&w.file, path, err)) == 0) {
        w.vocab = sl_engine_vocab(engine);
        const sl_feed feed = { .last = true, .on_logits = write_row, .user = &w };
        rc = sl_session_feed(session, ids, n, &feed, err);
        if (rc == 0 && !opt->all_logits)
            rc = write_row(&w, 0, sl_session_logits(session));
        if (rc < 0 && w.err.code)
            *err = w.err;
        if (rc == 0)
            rc = sl_atomic_commit(&w.file, err);
        else
            sl_atomic_abort(&w.file);
    }
    sl_session_close(session);
    sl_engine_close(engine);
    return rc;
}

int cmd_logits(int argc, char **argv)
{
    sl_options opt = sl_options_default();
    int backend = SL_IO_AUTO;
    const char *text = NULL, *path = NULL;
    opt.context = 0; /* as long as the input, unless told otherwise */
    const cmd_option options[] = {
        { "--ids", NULL, CMD_STR, &text, "LIST", "token ids, separated by commas", NULL },
        { "--output", "-o", CMD_STR, &path, "FILE", "where to write float32 little-endian values", NULL },
        { "--all", NULL, CMD_FLAG, &opt.all_logits, NULL, "every position, [positions][vocab]; else the last", NULL },
        CMD_ENGINE_OPTIONS(opt, backend),
        { 0 },
    };
    const cmd_spec spec = { "logits MODEL --ids LIST -o FILE [options]", "Writes the logits that follow the given tokens.",
                            options, 1, 1 };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n_args = cmd_parse(&spec, argc, argv, args);
    if (n_args < 0)
        return n_args == -1 ? 0 : CMD_USAGE;
    if (!text || !path)
        return cmd_error(CMD_USAGE, "logits: --ids and -o are needed");
    int32_t *ids;
    size_t n;
    sl_err err;
    if (cmd_parse_ids(text, &ids, &n, &err) < 0)
        return cmd_fail(&err);
    cmd_catch_signals();
    opt.io = (enum sl_io_backend)backend;
    opt.cancel = cmd_interrupted;
    if (opt.context == 0)
        opt.context = (uint32_t)n;
    const int rc = compute(args[0], &opt, ids, n, path, &err);
    free(ids);
    return rc < 0 ? cmd_fail(&err) : 0;
}
