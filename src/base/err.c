#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static sl_log_fn *log_fn;
static void *log_user;
static int log_level = SL_LOG_WARN;

int sl_exit_status(int code)
{
    return code == SL_EINTR ? 130 : code < 0 ? -code : code;
}

static void one_line(char *s)
{
    for (; *s; s++)
        if ((unsigned char)*s < 0x20 || *s == 0x7f)
            *s = '?';
}

int (sl_fail)(sl_err *err, int code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
        one_line(err->text);
        err->code = code;
    }
    return code;
}

int sl_err_prefix(sl_err *err, const char *fmt, ...)
{
    if (!err)
        return SL_EFAIL;
    char prefix[SL_ERR_MAX / 2], joined[2 * SL_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(prefix, sizeof prefix, fmt, ap);
    va_end(ap);
    snprintf(joined, sizeof joined, "%s: %s", prefix, err->text);
    joined[SL_ERR_MAX - 1] = 0;
    memcpy(err->text, joined, SL_ERR_MAX);
    one_line(err->text);
    return err->code;
}

void sl_log_set(sl_log_fn *fn, void *user, int level)
{
    log_fn = fn;
    log_user = user;
    log_level = level;
}

void sl_log(int level, const char *fmt, ...)
{
    if (!log_fn || level > log_level)
        return;
    char line[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(line, sizeof line, fmt, ap);
    va_end(ap);
    one_line(line);
    log_fn(log_user, level, line);
}

void sl_assert_failed(const char *cond, const char *file, int line)
{
    fprintf(stderr, "%s:%d: internal error: %s\n", file, line, cond);
    abort();
}
