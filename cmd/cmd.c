/* cmd/cmd.c - what the commands share. Owns: the log level, the signal flag, whether stdout is lost.
 * Threads: everything belongs to the main thread, except the log callback and cmd_interrupted. */
#include "cmd.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- messages ------------------------------------------------------------------------------- */

int cmd_error(int status, const char *fmt, ...)
{
    char text[2 * SL_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    for (char *p = text; *p; p++) /* arguments and file names must not break the line */
        if ((unsigned char)*p < 0x20 || *p == 0x7f)
            *p = '?';
    fprintf(stderr, "sluice: %s\n", text);
    return status;
}

int cmd_fail(const sl_err *err)
{
    return cmd_error(sl_exit_status(err->code), "%s", err->text);
}

static int fail(sl_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
static int fail(sl_err *err, int code, const char *fmt, ...)
{
    if (err) {
        va_list ap;
        va_start(ap, fmt);
        vsnprintf(err->text, sizeof err->text, fmt, ap);
        va_end(ap);
        err->code = code;
    }
    return code;
}

static int log_level = SL_LOG_WARN;

static void log_line(void *user, int level, const char *line)
{
    (void)user;
    (void)level;
    fprintf(stderr, "sluice: %s\n", line);
}

void cmd_log_adjust(int delta)
{
    log_level += delta;
    if (log_level < -1) /* below SL_LOG_ERROR: nothing at all */
        log_level = -1;
    if (log_level > SL_LOG_TRACE)
        log_level = SL_LOG_TRACE;
    sl_log_set(log_line, NULL, log_level);
}

int cmd_log_level(void) { return log_level; }

bool cmd_log_named(const char *name)
{
    static const char *const names[] = { "error", "warn", "info", "debug", "trace" };
    for (int i = 0; i < (int)(sizeof names / sizeof *names); i++)
        if (strcmp(name, names[i]) == 0) {
            cmd_log_adjust(i - log_level);
            return true;
        }
    return false;
}

/* A write error stays in the stream's state, but its errno is gone by the time of a later call. */
int cmd_flush(void)
{
    static bool reported;
    if (reported)
        return 1;
    const bool earlier = ferror(stdout);
    errno = 0;
    if (fflush(stdout) == 0 && !earlier)
        return 0;
    reported = true;
    return cmd_error(1, "cannot write to standard output: %s",
                     errno ? strerror(errno) : "an earlier write failed");
}

/* ---- signals -------------------------------------------------------------------------------- */

static volatile sig_atomic_t interrupted;

static void on_signal(int sig)
{
    (void)sig;
    interrupted = 1;
}

void cmd_catch_signals(void)
{
    /* SA_RESETHAND: a second Ctrl-C ends the process at once. No SA_RESTART: a blocked read of
     * standard input returns. */
    struct sigaction sa = { .sa_handler = on_signal, .sa_flags = (int)SA_RESETHAND };
    sigemptyset(&sa.sa_mask);
    sigaction(SIGINT, &sa, NULL);
    sigaction(SIGTERM, &sa, NULL);
    signal(SIGPIPE, SIG_IGN);
}

bool cmd_interrupted(void *unused)
{
    (void)unused;
    return interrupted != 0;
}

/* ---- values --------------------------------------------------------------------------------- */

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

/* Digits only: no sign, no space, no other base. *end is the first character that is none. */
static bool parse_digits(const char *s, uint64_t max, uint64_t *out, const char **end)
{
    uint64_t v = 0;
    if (!is_digit(*s))
        return false;
    for (; is_digit(*s); s++) {
        const uint64_t d = (uint64_t)(*s - '0');
        if (v > (max - d) / 10)
            return false;
        v = v * 10 + d;
    }
    *out = v;
    *end = s;
    return true;
}

static bool parse_whole(const char *s, uint64_t max, uint64_t *out)
{
    const char *end;
    return parse_digits(s, max, out, &end) && *end == 0;
}

static bool parse_float(const char *s, float *out)
{
    char *end;
    if (!*s || s[strspn(s, "0123456789.eE+-")]) /* strtof also takes spaces, hex, inf and nan */
        return false;
    const float v = strtof(s, &end);
    if (*end || end == s || !isfinite(v))
        return false;
    *out = v;
    return true;
}

/* Shift of a unit: K, KB and KiB are all 1024. -1: none. */
static int unit_shift(const char *s)
{
    static const char letters[] = "KMGTP";
    if (*s == 0 || ((*s == 'B' || *s == 'b') && s[1] == 0))
        return 0;
    const char *l = strchr(letters, *s >= 'a' && *s <= 'z' ? *s - 'a' + 'A' : *s);
    if (!l)
        return -1;
    s++;
    if ((*s == 'i' || *s == 'I') && s[1])
        s++;
    if (*s == 'B' || *s == 'b')
        s++;
    return *s ? -1 : 10 * (int)(l - letters + 1);
}

bool cmd_parse_size(const char *s, uint64_t *out)
{
    uint64_t whole, frac = 0, scale = 1;
    if (!parse_digits(s, UINT64_MAX, &whole, &s))
        return false;
    const bool fraction = *s == '.';
    if (fraction) {
        if (!is_digit(*++s))
            return false;
        for (; is_digit(*s); s++)
            if (scale < 1000000000) { /* below a byte of any unit that can be meant */
                frac = frac * 10 + (uint64_t)(*s - '0');
                scale *= 10;
            }
    }
    const int shift = unit_shift(s);
    if (shift < 0 || (fraction && shift == 0) || whole > UINT64_MAX >> shift)
        return false;
    uint64_t part = (uint64_t)(((unsigned __int128)frac << shift) / scale);
    return !__builtin_add_overflow(whole << shift, part, out);
}

int cmd_parse_ids(const char *s, int32_t **ids, size_t *n, sl_err *err)
{
    int32_t *list = NULL;
    size_t count = 0, cap = 0;
    while (*s == ' ' || *s == '\n' || *s == '\t' || *s == '\r')
        s++;
    while (*s) {
        uint64_t v;
        const char *end;
        if (!parse_digits(s, INT32_MAX, &v, &end) || (*end && !strchr(", \n\t\r", *end))) {
            free(list);
            return fail(err, SL_EUSAGE, "'%.*s' is not a token id (a whole number from 0 to %d)",
                        (int)strcspn(s, " \n\t\r,") > 40 ? 40 : (int)strcspn(s, " \n\t\r,"), s,
                        INT32_MAX);
        }
        if (count == cap) {
            cap = cap ? 2 * cap : 64;
            int32_t *more = realloc(list, cap * sizeof *list);
            if (!more) {
                free(list);
                return fail(err, SL_EFAIL, "out of memory for %zu token ids", cap);
            }
            list = more;
        }
        list[count++] = (int32_t)v;
        bool comma = false;
        for (s = end; *s && strchr(", \n\t\r", *s); s++) {
            if (*s == ',' && comma)
                break; /* an empty entry: refused above as '' */
            comma |= *s == ',';
        }
        if (comma && !*s) {
            free(list);
            return fail(err, SL_EUSAGE, "the list of token ids ends in a comma");
        }
    }
    if (!count)
        return fail(err, SL_EUSAGE, "the list of token ids is empty");
    *ids = list;
    *n = count;
    return 0;
}

int cmd_read_text(const char *path, char **text, size_t *len, size_t max, sl_err *err)
{
    const bool from_stdin = !path || strcmp(path, "-") == 0;
    const char *name = from_stdin ? "standard input" : path;
    const int fd = from_stdin ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return fail(err, SL_EFORMAT, "%s: %s", name, strerror(errno));
    char *buf = NULL;
    size_t n = 0, cap = 0;
    int rc = 0;
    for (;;) {
        if (n == cap) {
            cap = cap ? 2 * cap : 65536;
            if (cap > max)
                cap = max + 1; /* the one byte more tells too much from just enough */
            char *more = realloc(buf, cap + 1);
            if (!more) {
                rc = fail(err, SL_EFAIL, "%s: out of memory for %zu bytes", name, cap);
                break;
            }
            buf = more;
        }
        const ssize_t got = read(fd, buf + n, cap - n);
        if (got < 0 && errno == EINTR && !interrupted)
            continue;
        if (got < 0) {
            rc = interrupted ? fail(err, SL_EINTR, "interrupted while reading %s", name)
                             : fail(err, SL_EFAIL, "%s: %s", name, strerror(errno));
            break;
        }
        if (got == 0)
            break;
        n += (size_t)got;
        if (n > max) {
            rc = fail(err, SL_EFORMAT, "%s: larger than %zu bytes", name, max);
            break;
        }
    }
    if (!from_stdin)
        close(fd);
    if (rc < 0 || !buf) {
        free(buf);
        return rc;
    }
    buf[n] = 0;
    *text = buf;
    *len = n;
    return 0;
}

/* ---- output --------------------------------------------------------------------------------- */

void cmd_json_string(FILE *f, const char *s, size_t len)
{
    putc('"', f);
    for (size_t i = 0; i < len; i++) {
        const unsigned char c = (unsigned char)s[i];
        if (c == '"' || c == '\\')
            fprintf(f, "\\%c", c);
        else if (c == '\n')
            fputs("\\n", f);
        else if (c < 0x20 || c == 0x7f)
            fprintf(f, "\\u%04x", c);
        else
            putc(c, f);
    }
    putc('"', f);
}

const char *cmd_bytes(char buf[32], uint64_t n)
{
    static const char *const units[] = { "kB", "MB", "GB", "TB", "PB", "EB" };
    if (n < 1000) {
        snprintf(buf, 32, "%u B", (unsigned)n);
        return buf;
    }
    double v = (double)n / 1000;
    int u = 0;
    while (v >= 999.5 && u < 5) { /* what would print as 1000 belongs to the next unit */
        v /= 1000;
        u++;
    }
    snprintf(buf, 32, "%.*f %s", v < 9.995 ? 2 : v < 99.95 ? 1 : 0, v, units[u]);
    return buf;
}

const char *const cmd_io_choices[] = { "auto", "uring", "pread", NULL }; /* as enum sl_io_backend */

/* ---- options -------------------------------------------------------------------------------- */

static int verbose, quiet; /* only their addresses are used */
static const cmd_option shared[] = {
    { "--verbose", "-v", CMD_FLAG, &verbose, NULL, "log more; repeatable", NULL },
    { "--quiet", "-q", CMD_FLAG, &quiet, NULL, "log errors only; twice: nothing", NULL },
    { "--help", "-h", CMD_FLAG, NULL, NULL, "print this help", NULL },
    { NULL, NULL, CMD_FLAG, NULL, NULL, NULL, NULL },
};

enum { HELP_COLUMN = 28, HELP_WIDTH = 80 };

/* Words of text from column HELP_COLUMN (or 0) on, wrapped. */
static void print_wrapped(const char *text, int column, int indent)
{
    while (*text) {
        const int word = (int)strcspn(text, " ");
        if (column > indent && column + 1 + word > HELP_WIDTH) {
            printf("\n%*s", indent, "");
            column = indent;
        } else if (column > indent) {
            putchar(' ');
            column++;
        }
        printf("%.*s", word, text);
        column += word;
        text += word;
        text += strspn(text, " ");
    }
    putchar('\n');
}

static void print_options(const cmd_option *o)
{
    for (; o->name; o++) {
        char left[128];
        snprintf(left, sizeof left, "  %s%s%s%s%s", o->brief ? o->brief : "  ",
                 o->brief ? ", " : "  ", o->name, o->arg ? " " : "", o->arg ? o->arg : "");
        if ((int)strlen(left) > HELP_COLUMN - 2)
            printf("%s\n%*s", left, HELP_COLUMN, "");
        else
            printf("%-*s", HELP_COLUMN, left);
        print_wrapped(o->help, HELP_COLUMN, HELP_COLUMN);
    }
}

static void print_help(const cmd_spec *spec)
{
    printf("Usage: sluice %s\n\n", spec->usage);
    print_wrapped(spec->about, 0, 0);
    printf("\nOptions:\n");
    print_options(spec->options);
    print_options(shared);
}

static int command_length(const cmd_spec *spec) { return (int)strcspn(spec->usage, " "); }

static int usage(const cmd_spec *spec, const char *fmt, ...) __attribute__((format(printf, 2, 3)));
static int usage(const cmd_spec *spec, const char *fmt, ...)
{
    char text[SL_ERR_MAX];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(text, sizeof text, fmt, ap);
    va_end(ap);
    const int n = command_length(spec);
    cmd_error(CMD_USAGE, "%.*s: %s (see 'sluice %.*s --help')", n, spec->usage, text, n, spec->usage);
    return -2;
}

/* Length 0 looks for the one-letter form `name`; otherwise the long form, `len` characters. */
static const cmd_option *find_option(const cmd_spec *spec, const char *name, size_t len)
{
    const cmd_option *const tables[] = { spec->options, shared };
    for (int t = 0; t < 2; t++)
        for (const cmd_option *o = tables[t]; o->name; o++)
            if (len ? strncmp(o->name, name, len) == 0 && !o->name[len]
                    : o->brief && o->brief[1] == *name)
                return o;
    return NULL;
}

/* Lists live until exit: a chain from here keeps them reachable for leak checkers. */
typedef struct kept_list {
    struct kept_list *next;
    const char *item[];
} kept_list;
static kept_list *kept;

static int append(const cmd_spec *spec, cmd_list *list, const char *value, size_t room)
{
    if (!list->item) {
        kept_list *k = calloc(1, sizeof *k + room * sizeof *k->item);
        if (!k)
            return usage(spec, "out of memory");
        k->next = kept;
        kept = k;
        list->item = k->item;
    }
    list->item[list->n++] = value;
    return 0;
}

static int add_mirror(const cmd_spec *spec, const cmd_option *o, const char *value)
{
    static const char *mirrors[15]; /* one set of engine options in a program's run */
    sl_options *engine = o->value;
    if (engine->n_mirrors == sizeof mirrors / sizeof *mirrors)
        return usage(spec, "%s: given more than %zu times", o->name, engine->n_mirrors);
    mirrors[engine->n_mirrors++] = value;
    engine->mirrors = mirrors;
    return 0;
}

static int set_choice(const cmd_spec *spec, const cmd_option *o, const char *value)
{
    char all[256] = "";
    for (int i = 0; o->choices[i]; i++) {
        if (strcmp(o->choices[i], value) == 0) {
            *(int *)o->value = i;
            return 0;
        }
        const size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s%s", i ? ", " : "", o->choices[i]);
    }
    return usage(spec, "%s: '%s' is none of %s", o->name, value, all);
}

static int set_value(const cmd_spec *spec, const cmd_option *o, const char *value, size_t room)
{
    uint64_t v;
    switch (o->kind) {
    case CMD_FLAG: /* handled by set_flag */
        break;
    case CMD_STR:
        *(const char **)o->value = value;
        return 0;
    case CMD_LIST:
        return append(spec, o->value, value, room);
    case CMD_MIRROR:
        return add_mirror(spec, o, value);
    case CMD_U32:
        if (!parse_whole(value, UINT32_MAX, &v))
            return usage(spec, "%s: '%s' is not a whole number from 0 to %u", o->name, value,
                         UINT32_MAX);
        *(uint32_t *)o->value = (uint32_t)v;
        return 0;
    case CMD_U64:
        if (!parse_whole(value, UINT64_MAX, &v))
            return usage(spec, "%s: '%s' is not a whole number from 0 to %llu", o->name, value,
                         (unsigned long long)UINT64_MAX);
        *(uint64_t *)o->value = v;
        return 0;
    case CMD_SIZE:
        if (!cmd_parse_size(value, o->value) || *(uint64_t *)o->value == 0)
            return usage(spec, "%s: '%s' is not a size above 0 (such as 8G, 512MiB, 1.5G or 1000)", o->name,
                         value);
        return 0;
    case CMD_FLOAT:
        if (!parse_float(value, o->value))
            return usage(spec, "%s: '%s' is not a finite number", o->name, value);
        return 0;
    case CMD_CHOICE:
        return set_choice(spec, o, value);
    }
    return usage(spec, "%s takes no value", o->name);
}

/* 0, or -1 when it was --help. */
static int set_flag(const cmd_spec *spec, const cmd_option *o)
{
    if (o->value == &verbose || o->value == &quiet) {
        cmd_log_adjust(o->value == &verbose ? 1 : -1);
    } else if (!o->value) {
        print_help(spec);
        return -1;
    } else {
        *(bool *)o->value = true;
    }
    return 0;
}

/* An argument that begins like an option is no value by accident: `--stop --json` misses one. */
static bool looks_like_option(const char *a)
{
    return a[0] == '-' && a[1] && !is_digit(a[1]) && a[1] != '.';
}

/* Handles argv[*i], which begins an option, and its value. */
static int parse_option(const cmd_spec *spec, int argc, char **argv, int *i)
{
    const char *a = argv[*i], *attached = NULL;
    const cmd_option *o;
    if (a[1] == '-') {
        const size_t len = strcspn(a, "=");
        o = find_option(spec, a, len);
        if (!o)
            return usage(spec, "unknown option '%.*s'", (int)(len > 200 ? 200 : len), a);
        attached = a[len] ? a + len + 1 : NULL;
    } else {
        const char *c = a + 1;
        int rc;
        while ((o = find_option(spec, c, 0)) && o->kind == CMD_FLAG && c[1]) {
            if ((rc = set_flag(spec, o)) < 0)
                return rc;
            c++;
        }
        if (!o)
            return usage(spec, "unknown option '-%.1s'", c);
        attached = c[1] ? c + 1 : NULL;
    }
    if (o->kind == CMD_FLAG)
        return attached ? usage(spec, "%s takes no value", o->name) : set_flag(spec, o);
    if (!attached) {
        if (*i + 1 >= argc)
            return usage(spec, "%s needs a value (%s)", o->name, o->arg);
        if (looks_like_option(argv[*i + 1]))
            return usage(spec, "%s needs a value; one that begins with '-' is given as %s=%s",
                         o->name, o->name, o->arg);
        attached = argv[++*i];
    }
    return set_value(spec, o, attached, (size_t)argc);
}

int cmd_parse(const cmd_spec *spec, int argc, char **argv, const char **args)
{
    int n = 0;
    bool options = true;
    for (int i = 1; i < argc; i++) {
        if (options && strcmp(argv[i], "--") == 0) {
            options = false;
        } else if (options && looks_like_option(argv[i])) {
            const int rc = parse_option(spec, argc, argv, &i);
            if (rc < 0)
                return rc;
        } else {
            args[n++] = argv[i];
        }
    }
    if (spec->max_args >= 0 && n > spec->max_args)
        return usage(spec, "unexpected argument '%s'", args[spec->max_args]);
    if (n < spec->min_args)
        return usage(spec, "missing argument; usage: sluice %s", spec->usage);
    return n;
}
