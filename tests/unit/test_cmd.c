/* Option table, sizes, ids, JSON strings: what is taken and what is refused. */
#include "cmd/cmd.h"

#include <fcntl.h>
#include <unistd.h>

#include "tests/check.h"

static char text[65536]; /* what the last captured call printed */

/* Sends descriptor `fd` into a file while parsing; returns cmd_parse's result. */
static int parse(const cmd_spec *spec, int fd, const char **args, const char *line)
{
    static char copy[1024];
    static char *argv[64];
    int argc = 0;
    snprintf(copy, sizeof copy, "%s", line);
    for (char *p = strtok(copy, " "); p; p = strtok(NULL, " "))
        argv[argc++] = p;
    argv[argc] = NULL;

    FILE *tmp = tmpfile();
    fflush(NULL);
    const int saved = dup(fd);
    if (!tmp || saved < 0 || dup2(fileno(tmp), fd) < 0)
        exit(1);
    const int rc = cmd_parse(spec, argc, argv, args);
    fflush(NULL);
    dup2(saved, fd);
    close(saved);
    rewind(tmp);
    text[fread(text, 1, sizeof text - 1, tmp)] = 0;
    fclose(tmp);
    return rc;
}

static bool json, deep;
static const char *prompt_file;
static cmd_list stop;
static uint32_t max_tokens;
static uint64_t seed, ram;
static float temperature;
static int special;
static const char *const special_names[] = { "allow", "refuse", NULL };
static const cmd_option options[] = {
    { "--max-tokens", "-n", CMD_U32, &max_tokens, "N", "Stop after N tokens", NULL },
    { "--temperature", NULL, CMD_FLOAT, &temperature, "T", "Sampling temperature", NULL },
    { "--seed", NULL, CMD_U64, &seed, "S", "Seed", NULL },
    { "--stop", NULL, CMD_LIST, &stop, "STR", "Stop at this text", NULL },
    { "--ram", NULL, CMD_SIZE, &ram, "SIZE",
      "A text that is long enough to need more than the one line that eighty columns give to it", NULL },
    { "--prompt-file", "-f", CMD_STR, &prompt_file, "FILE", "Prompt", NULL },
    { "--special", NULL, CMD_CHOICE, &special, "allow|refuse", "Special tokens", special_names },
    { "--json", "-j", CMD_FLAG, &json, NULL, "JSON", NULL },
    { "--deep", "-d", CMD_FLAG, &deep, NULL, "Deep", NULL },
    { NULL, NULL, CMD_FLAG, NULL, NULL, NULL, NULL },
};
static const cmd_spec spec = { "run MODEL [PROMPT] [options]", "Runs.", options, 1, 3 };

static void accepts(void)
{
    const char *args[64];
    CHECK_EQ(parse(&spec, 2, args, "run m -n 5 --temperature=0.5 --seed 18446744073709551615 p"), 2);
    CHECK_STR(args[0], "m");
    CHECK_STR(args[1], "p");
    CHECK_EQ(max_tokens, 5);
    CHECK(temperature == 0.5f);
    CHECK(seed == UINT64_MAX);
    CHECK_STR(text, "");
    CHECK_EQ(parse(&spec, 2, args, "run -n7 m -jd --stop a --stop=-b --stop= --ram 1.5G"), 1);
    CHECK_EQ(max_tokens, 7);
    CHECK(json && deep);
    CHECK_EQ(stop.n, 3);
    CHECK_STR(stop.item[1], "-b");
    CHECK_STR(stop.item[2], "");
    CHECK_EQ(ram, 3ull << 29);
    CHECK_EQ(parse(&spec, 2, args, "run m --temperature -1.5e0 --special refuse"), 1);
    CHECK(temperature == -1.5f);
    CHECK_EQ(special, 1);
    /* a lone dash and negative numbers are arguments; -- ends the options */
    CHECK_EQ(parse(&spec, 2, args, "run - -5 -.5"), 3);
    CHECK_STR(args[1], "-5");
    CHECK_EQ(parse(&spec, 2, args, "run m -- --json -n"), 3);
    CHECK_STR(args[1], "--json");
    CHECK_EQ(parse(&spec, 2, args, "run m -f -"), 1);
    CHECK_STR(prompt_file, "-");
    CHECK_EQ(parse(&spec, 2, args, "run m -vq --verbose --quiet"), 1);
}

static void refuses(void)
{
    static const char *const lines[][2] = {
        { "run", "missing argument" },
        { "run a b c d", "unexpected argument 'd'" },
        { "run m --jsonx", "unknown option '--jsonx'" },
        { "run m --jso", "unknown option '--jso'" },
        { "run m -x", "unknown option '-x'" },
        { "run m -jx", "unknown option '-x'" },
        { "run m --json=1", "--json takes no value" },
        { "run m --max-tokens", "--max-tokens needs a value (N)" },
        { "run m --stop --json", "--stop=STR" },
        { "run m -n x", "'x' is not a whole number" },
        { "run m -n 5x", "'5x' is not a whole number" },
        { "run m -n -1", "'-1' is not a whole number" },
        { "run m -n +1", "'+1' is not a whole number" },
        { "run m -n 0x10", "'0x10' is not" },
        { "run m -n=", "'=' is not" },
        { "run m --max-tokens=", "'' is not" },
        { "run m -n 4294967296", "from 0 to 4294967295" },
        { "run m --seed 18446744073709551616", "from 0 to 18446744073709551615" },
        { "run m --temperature nan", "finite" },
        { "run m --temperature=inf", "finite" },
        { "run m --temperature 0x1p3", "finite" },
        { "run m --temperature 1e99", "finite" },
        { "run m --temperature 1,5", "finite" },
        { "run m --temperature=", "finite" },
        { "run m --ram 8X", "is not a size" },
        { "run m --ram 0", "is not a size above 0" },
        { "run m --special maybe", "'maybe' is none of allow, refuse" },
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++) {
        const char *args[64];
        CHECK_EQ(parse(&spec, 2, args, lines[i][0]), -2);
        CHECK_MSG(strstr(text, lines[i][1]), "%s: got: %s", lines[i][0], text);
        const char *newline = strchr(text, '\n');
        CHECK_MSG(newline && !newline[1], "%s: not one line: %s", lines[i][0], text);
        CHECK(strncmp(text, "sluice: run: ", 13) == 0);
    }
    static char bad[] = "--a\nb", name[] = "run";
    char *argv[] = { name, bad, NULL };
    const char *args[2];
    CHECK_EQ(cmd_parse(&spec, 2, argv, args), -2); /* the line break is seen as '?' on stderr */
}

static void help(void)
{
    const char *args[64];
    CHECK_EQ(parse(&spec, 1, args, "run --help"), -1);
    for (const cmd_option *o = options; o->name; o++)
        CHECK_MSG(strstr(text, o->name), "%s is not in the help", o->name);
    CHECK(strstr(text, "Usage: sluice run MODEL [PROMPT] [options]\n"));
    CHECK(strstr(text, "  -n, --max-tokens N"));
    CHECK(strstr(text, "--quiet"));
    for (char *p = text, *end; (end = strchr(p, '\n')); p = end + 1)
        CHECK_MSG(end - p <= 80, "line of %td columns", end - p);
}

static void sizes(void)
{
    static const struct {
        const char *s;
        uint64_t n;
    } good[] = {
        { "0", 0 }, { "1000", 1000 }, { "12B", 12 }, { "8G", 8ull << 30 }, { "8g", 8ull << 30 },
        { "8GB", 8ull << 30 }, { "8GiB", 8ull << 30 }, { "512MiB", 512ull << 20 },
        { "1.5G", 3ull << 29 }, { "0.5k", 512 }, { "1.000000000000001K", 1024 }, { "2T", 2ull << 40 },
        { "1P", 1ull << 50 }, { "18446744073709551615", UINT64_MAX }, { "16383P", 16383ull << 50 },
    };
    static const char *const bad[] = { "", "G", "-1G", "+1", " 1", "1 G", "1.G", ".5G", "1.5", "1.5B",
                                       "1GG", "1Gi", "1iB", "1e3", "0x1", "16384P", "99999999999T",
                                       "18446744073709551616", "8,5G", "8G\n" };
    uint64_t n;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++)
        CHECK_MSG(cmd_parse_size(good[i].s, &n) && n == good[i].n, "%s", good[i].s);
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_MSG(!cmd_parse_size(bad[i], &n), "'%s' was taken", bad[i]);
}

static void ids(void)
{
    static const struct {
        const char *s;
        size_t n;
        int32_t last;
    } good[] = { { "1,2,3", 3, 3 }, { "1 2 3", 3, 3 }, { " 7\n", 1, 7 }, { "1, 2", 2, 2 },
                 { "1 ,2", 2, 2 },  { "0", 1, 0 },     { "2147483647", 1, INT32_MAX } };
    static const char *const bad[] = { "", " ", ",", "1,", "1,,2", ",1", "1;2", "-1", "1.5", "x",
                                       "2147483648", "1 2 3a" };
    int32_t *list;
    size_t n;
    sl_err err;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        if (cmd_parse_ids(good[i].s, &list, &n, &err) < 0) {
            CHECK_MSG(false, "%s: %s", good[i].s, err.text);
            continue;
        }
        CHECK_EQ(n, good[i].n);
        CHECK_EQ(list[n - 1], good[i].last);
        free(list);
    }
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        CHECK_MSG(cmd_parse_ids(bad[i], &list, &n, &err) == SL_EUSAGE, "'%s' was taken", bad[i]);
    CHECK_EQ(cmd_parse_ids("1,2x,3", &list, &n, &err), SL_EUSAGE);
    CHECK_MSG(strstr(err.text, "'2x'"), "%s", err.text);
    char many[4000] = "0";
    for (size_t i = 1; i < 1000; i++)
        strcat(many, ",12");
    CHECK_EQ(cmd_parse_ids(many, &list, &n, &err), 0);
    CHECK_EQ(n, 1000);
    free(list);
}

static void output(void)
{
    char buf[32];
    CHECK_STR(cmd_bytes(buf, 0), "0 B");
    CHECK_STR(cmd_bytes(buf, 999), "999 B");
    CHECK_STR(cmd_bytes(buf, 1000), "1.00 kB");
    CHECK_STR(cmd_bytes(buf, 1530000000), "1.53 GB");
    CHECK_STR(cmd_bytes(buf, 999999999999), "1.00 TB");
    CHECK_STR(cmd_bytes(buf, 136900000000), "137 GB");
    CHECK_STR(cmd_bytes(buf, UINT64_MAX), "18.4 EB");
    char *got = NULL;
    size_t len = 0;
    FILE *f = open_memstream(&got, &len);
    cmd_json_string(f, "a\"\\\n\x01\x7f\xc3\xa9", 8);
    fclose(f);
    CHECK_STR(got, "\"a\\\"\\\\\\n\\u0001\\u007f\xc3\xa9\"");
    free(got);
}

static void files(void)
{
    char path[] = "/tmp/sluice-test-XXXXXX", *got;
    size_t len;
    sl_err err;
    const int fd = mkstemp(path);
    CHECK(fd >= 0 && write(fd, "0123456789", 10) == 10);
    close(fd);
    CHECK_EQ(cmd_read_text(path, &got, &len, 10, &err), 0);
    CHECK_EQ(len, 10);
    CHECK_STR(got, "0123456789");
    free(got);
    CHECK_EQ(cmd_read_text(path, &got, &len, 9, &err), SL_EFORMAT);
    CHECK(strstr(err.text, "larger than 9 bytes"));
    unlink(path);
    CHECK_EQ(cmd_read_text(path, &got, &len, 9, &err), SL_EFORMAT);
    CHECK(strstr(err.text, path));
    CHECK_EQ(cmd_read_text("/", &got, &len, 9, &err), SL_EFAIL);
}

int main(void)
{
    accepts();
    refuses();
    help();
    sizes();
    ids();
    output();
    files();
    CHECK_DONE();
}
