/* run --trace: which experts the routers chose, and nothing of the text. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "cmd.h"

struct cmd_trace {
    sl_atomic_file file;
    FILE *out;             /* writes to file.fd, which it does not own */
    uint32_t before, next; /* passes before this feed; passes so far */
};

static int failed(const char *path, sl_err *err)
{
    err->code = SL_EFAIL;
    snprintf(err->text, sizeof err->text, "--trace: %.300s: %s", path, strerror(errno));
    return SL_EFAIL;
}

int cmd_trace_open(cmd_trace **out, const char *path, sl_err *err)
{
    cmd_trace *t = calloc(1, sizeof *t);
    if (!t)
        return failed(path, err);
    const int rc = sl_atomic_open(&t->file, path, err);
    if (rc < 0) {
        free(t);
        return rc;
    }
    const int fd = dup(t->file.fd);
    t->out = fd < 0 ? NULL : fdopen(fd, "w");
    if (!t->out) {
        failed(path, err);
        if (fd >= 0)
            close(fd);
        sl_atomic_abort(&t->file);
        free(t);
        return SL_EFAIL;
    }
    fputs("{\"format\":\"sluice-routing-trace\",\"version\":1}\n", t->out);
    *out = t;
    return 0;
}

void cmd_trace_feed(cmd_trace *t)
{
    if (t)
        t->before = t->next;
}

void cmd_trace_routing(cmd_trace *t, uint32_t pass, uint32_t position, uint32_t layer, const uint32_t *experts,
                       const float *weights, uint32_t n)
{
    t->next = t->before + pass + 1;
    fprintf(t->out, "{\"pass\":%u,\"pos\":%u,\"layer\":%u,\"experts\":[", t->before + pass, position, layer);
    for (uint32_t i = 0; i < n; i++)
        fprintf(t->out, "%s%u", i ? "," : "", experts[i]);
    fputs("],\"weights\":[", t->out);
    for (uint32_t i = 0; i < n; i++)
        fprintf(t->out, "%s%.9g", i ? "," : "", (double)weights[i]);
    fputs("]}\n", t->out);
}

int cmd_trace_close(cmd_trace *t, sl_err *err)
{
    if (!t)
        return 0;
    int rc = 0;
    if (ferror(t->out)) {
        errno = EIO; /* of the write that failed, long ago */
        rc = failed(t->file.path, err);
    }
    if (fclose(t->out) != 0 && rc == 0)
        rc = failed(t->file.path, err);
    if (rc == 0)
        rc = sl_atomic_commit(&t->file, err);
    else
        sl_atomic_abort(&t->file);
    free(t);
    return rc;
}
