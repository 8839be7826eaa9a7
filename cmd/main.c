/* cmd/main.c - finds the command: built in, or a program sluice-NAME beside this one or on the PATH,
 * so that what needs more libraries never enters this one. */
#include "cmd.h"

#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const struct command {
    const char *name;
    int (*run)(int argc, char **argv);
    const char *summary;
} commands[] = {
    { "run", cmd_run, "Text in, text out, under a RAM budget" },
    { "plan", cmd_plan, "What a budget is spent on and what a token reads" },
    { "logits", cmd_logits, "The model's raw output, to compare" },
    { "inspect", cmd_inspect, "What a model holds: layers, parameters, bytes, what is missing" },
    { "bench", cmd_bench, "Measures the drive the way the engine reads it" },
    { "synth", cmd_synth, "A synthetic checkpoint in the released layout" },
    { "tokenize", cmd_tokenize, "Text to token ids" },
    { "detokenize", cmd_detokenize, "Token ids to text" },
    { NULL, NULL, NULL },
};

static const struct command *find(const char *name)
{
    for (const struct command *c = commands; c->name; c++)
        if (strcmp(c->name, name) == 0)
            return c;
    return NULL;
}

static int print_help(void)
{
    printf("Usage: sluice COMMAND [ARGUMENTS]\n"
           "       sluice help COMMAND\n\n"
           "Runs sparse Mixture-of-Experts language models that do not fit in memory, bit-exact, from\n"
           "the released checkpoint and within the RAM budget it is given.\n\n"
           "Commands:\n");
    for (const struct command *c = commands; c->name; c++)
        printf("  %-12s %s\n", c->name, c->summary);
    printf("\nOptions:\n"
           "  -v, --verbose  log more, before or after the command; repeatable\n"
           "  -q, --quiet    log errors only; twice: nothing\n"
           "  -h, --help     print this help\n"
           "      --version  print the version\n\n"
           "Any other name is looked for as a program sluice-NAME beside this one, then on the PATH.\n"
           "Environment: SL_LOG (error, warn, info, debug, trace), SL_CPU (scalar, avx2, avx512, neon).\n"
           "Exit status: 0 done, 1 failure, 2 usage, 3 invalid model or file, 4 weights unreadable,\n"
           "5 does not fit the RAM budget, 6 verification failed, 130 interrupted.\n");
    return cmd_flush();
}

/* Edits (insert, delete, replace, exchange) between two short names. */
static unsigned distance(const char *a, const char *b)
{
    enum { MAX = 24 };
    unsigned d[MAX + 1][MAX + 1];
    const size_t na = strlen(a), nb = strlen(b);
    if (na > MAX || nb > MAX)
        return UINT_MAX;
    for (size_t i = 0; i <= na; i++)
        for (size_t j = 0; j <= nb; j++) {
            if (!i || !j) {
                d[i][j] = (unsigned)(i + j);
                continue;
            }
            unsigned best = d[i - 1][j - 1] + (a[i - 1] != b[j - 1]);
            best = d[i - 1][j] + 1 < best ? d[i - 1][j] + 1 : best;
            best = d[i][j - 1] + 1 < best ? d[i][j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
                best = d[i - 2][j - 2] + 1 < best ? d[i - 2][j - 2] + 1 : best;
            d[i][j] = best;
        }
    return d[na][nb];
}

static int unknown(const char *name)
{
    const struct command *near = NULL;
    unsigned least = 3;
    for (const struct command *c = commands; c->name; c++)
        if (distance(name, c->name) < least) {
            least = distance(name, c->name);
            near = c;
        }
    if (near)
        return cmd_error(CMD_USAGE, "unknown command '%.200s'; did you mean '%s'?", name, near->name);
    return cmd_error(CMD_USAGE, "unknown command '%.200s' (see 'sluice --help')", name);
}

/* Replaces this process by sluice-NAME; returns when there is no such program. */
static void exec_external(const char *name, char **argv)
{
    char dir[PATH_MAX], path[PATH_MAX + NAME_MAX];
    static const char *const levels[] = { "error", "warn", "info", "debug", "trace" };
    if (!*name || strchr(name, '/') || strlen(name) > NAME_MAX - sizeof "sluice-")
        return;
    if (cmd_log_level() >= 0)
        setenv("SL_LOG", levels[cmd_log_level()], 1); /* a -v given here holds there too */
    const ssize_t n = readlink("/proc/self/exe", dir, sizeof dir);
    const char *slash = n > 0 ? memrchr(dir, '/', (size_t)n) : NULL;
    if (slash) {
        snprintf(path, sizeof path, "%.*s/sluice-%s", (int)(slash - dir), dir, name);
        argv[0] = path;
        execv(path, argv);
    }
    snprintf(path, sizeof path, "sluice-%s", name);
    argv[0] = path;
    execvp(path, argv);
}

/* A descriptor that arrives closed would be given to the next file opened, and output would go there.
 * What takes its place refuses writes, so that they are reported. */
static void fill_standard_descriptors(void)
{
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDONLY) != fd)
            abort();
}

static int dispatch(int argc, char **argv)
{
    const struct command *c = find(argv[0]);
    if (c)
        return c->run(argc, argv);
    const char *name = argv[0];
    exec_external(name, argv);
    return unknown(name);
}

int main(int argc, char **argv)
{
    fill_standard_descriptors();
    cmd_log_adjust(0);
    const char *level = getenv("SL_LOG");
    if (level && *level && !cmd_log_named(level))
        return cmd_error(CMD_USAGE, "SL_LOG: '%.200s' is none of error, warn, info, debug, trace", level);

    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *a = argv[i];
        if (strcmp(a, "-h") == 0 || strcmp(a, "--help") == 0)
            return print_help();
        if (strcmp(a, "--version") == 0) {
            puts("sluice " SL_VERSION);
            return cmd_flush();
        }
        if (strcmp(a, "--verbose") == 0 || strcmp(a, "-v") == 0 || strcmp(a, "-vv") == 0)
            cmd_log_adjust(a[1] == '-' ? 1 : (int)strlen(a) - 1);
        else if (strcmp(a, "--quiet") == 0 || strcmp(a, "-q") == 0 || strcmp(a, "-qq") == 0)
            cmd_log_adjust(a[1] == '-' ? -1 : 1 - (int)strlen(a));
        else
            return cmd_error(CMD_USAGE, "unknown option '%.200s' (see 'sluice --help')", a);
    }
    if (i == argc)
        return cmd_error(CMD_USAGE, "no command given (see 'sluice --help')");

    int status;
    if (strcmp(argv[i], "help") == 0 && i + 1 == argc) {
        status = print_help();
    } else if (strcmp(argv[i], "help") == 0) {
        static char help[] = "--help";
        char *ask[] = { argv[i + 1], help, NULL };
        status = dispatch(2, ask);
    } else {
        status = dispatch(argc - i, argv + i);
    }
    const int lost = cmd_flush();
    return status ? status : lost;
}
