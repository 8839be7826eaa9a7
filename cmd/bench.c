/* sluice bench: this machine, measured the way the engine uses it. */
#include "cmd.h"

#include <dirent.h>
#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/num.h"
#include "store/disk.h"

enum {
    FILES = 4096,
    ROUNDS = 3,
    BUFFER = 256 << 20,
    CHUNK = 4 << 20,       /* the trunk stream's requests */
    EXPERT = 17551360,     /* the released model's, alignment included */
    ENOUGH = 256 << 20,    /* less than this may come from a cache in the drive */
};
static const uint64_t pieces[] = { 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20 };
static const unsigned depths[] = { 1, 2, 4, 8, 16, 32, 64 };
enum { PIECES = sizeof pieces / sizeof *pieces, DEPTHS = sizeof depths / sizeof *depths, KINDS = 2 };

typedef struct {
    sl_io_file *files;
    sl_disk_source source;
    enum sl_io_backend backend;
    float seconds;
    uint32_t depth;   /* 0: all */
    uint64_t piece;   /* 0: all */
    bool json, dry;
    uint64_t bytes;   /* in the files */
    bool direct;
    double rate[KINDS][PIECES][DEPTHS]; /* bytes a second: stream, experts */
} bench;

/* ---- files ---------------------------------------------------------------------------------- */

static int add_file(bench *b, const char *path, sl_err *err)
{
    sl_io_file *f = &b->files[b->source.n_files];
    const int rc = sl_io_file_open(f, path, true, err);
    if (rc < 0)
        return rc;
    if (f->size < SL_IO_ALIGN) {
        sl_io_file_close(f);
        return 0;
    }
    b->direct = b->direct && f->direct;
    b->bytes += f->size;
    b->source.n_files++;
    return 0;
}

static int add_dir(bench *b, const char *path, sl_err *err)
{
    char name[4096];
    DIR *d = opendir(path);
    int rc = 0;
    if (!d) {
        snprintf(err->text, sizeof err->text, "%.300s: %s", path, strerror(errno));
        return err->code = SL_EFORMAT;
    }
    for (const struct dirent *e; rc == 0 && b->source.n_files < FILES && (e = readdir(d));) {
        const size_t n = strlen(e->d_name);
        if (n > 12 && strcmp(e->d_name + n - 12, ".safetensors") == 0 &&
            (rc = sl_path_join(name, sizeof name, path, e->d_name, err)) == 0)
            rc = add_file(b, name, err);
    }
    closedir(d);
    return rc;
}

static int add_path(bench *b, const char *path, sl_err *err)
{
    struct stat st;
    b->direct = true;
    const bool dir = stat(path, &st) == 0 && S_ISDIR(st.st_mode);
    const int rc = dir ? add_dir(b, path, err) : add_file(b, path, err);
    if (rc < 0 || b->source.n_files)
        return rc;
    snprintf(err->text, sizeof err->text, "%.300s: %s", path,
             dir ? "holds no *.safetensors of 4096 bytes or more to read; give a model, or any large file on the drive"
                 : "too short to measure with, expected 4096 bytes or more");
    return err->code = SL_EFORMAT;
}

/* ---- measuring ------------------------------------------------------------------------------ */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* One cell after another, then all again: what else the machine does falls on all of them. */
static int measure(bench *b, unsigned first_piece, unsigned n_pieces, unsigned first_depth, unsigned n_depths,
                   sl_err *err)
{
    static double sample[KINDS][PIECES][DEPTHS][ROUNDS];
    const unsigned cells = KINDS * n_pieces * n_depths;
    unsigned done = 0;
    for (unsigned round = 0; round < ROUNDS; round++)
        for (unsigned kind = 0; kind < KINDS; kind++)
            for (unsigned p = first_piece; p < first_piece + n_pieces; p++)
                for (unsigned d = first_depth; d < first_depth + n_depths; d++) {
                    const sl_disk_setting set = {
                        .backend = b->backend, .depth = b->depth ? b->depth : depths[d],
                        .piece = b->piece ? b->piece : pieces[p], .request = kind ? EXPERT : CHUNK, .scattered = kind,
                        .seconds = (double)b->seconds / (cells * ROUNDS),
                    };
                    if (cmd_interrupted(NULL)) {
                        snprintf(err->text, sizeof err->text, "interrupted");
                        return err->code = SL_EINTR;
                    }
                    const int rc = sl_disk_measure(&sample[kind][p][d][round], &b->source, &set, err);
                    if (rc < 0)
                        return rc;
                    if (++done % 12 == 0 && isatty(2) && cmd_log_level() >= SL_LOG_WARN)
                        fprintf(stderr, "\rmeasuring, %u %%\033[K", 100 * done / (cells * ROUNDS));
                }
    for (unsigned kind = 0; kind < KINDS; kind++)
        for (unsigned p = first_piece; p < first_piece + n_pieces; p++)
            for (unsigned d = first_depth; d < first_depth + n_depths; d++) {
                qsort(sample[kind][p][d], ROUNDS, sizeof(double), by_size);
                b->rate[kind][p][d] = sample[kind][p][d][ROUNDS / 2];
            }
    if (isatty(2) && cmd_log_level() >= SL_LOG_WARN)
        fputs("\r\033[K", stderr);
    return 0;
}

/* Both patterns in equal parts. */
static double both(const bench *b, unsigned p, unsigned d)
{
    return 2 / (1 / b->rate[0][p][d] + 1 / b->rate[1][p][d]);
}

static unsigned steps(uint64_t a, uint64_t b) /* between powers of two */
{
    unsigned n = 0;
    for (; a < b; n++)
        a *= 2;
    for (; b < a; n++)
        b *= 2;
    return n;
}

/* Of the settings within 5 % of the best the one nearest to what the engine does unasked: the drive's noise must not
 * choose, and a queue that only just suffices on an idle machine runs dry when the thread that fills it shares its
 * processors with arithmetic. */
static void choose(const bench *b, unsigned *piece, unsigned *depth)
{
    double best = 0;
    for (unsigned p = 0; p < PIECES; p++)
        for (unsigned d = 0; d < DEPTHS; d++)
            best = both(b, p, d) > best ? both(b, p, d) : best;
    unsigned nearest = UINT_MAX;
    for (unsigned p = 0; p < PIECES; p++)
        for (unsigned d = 0; d < DEPTHS; d++) {
            const unsigned far = steps(pieces[p], SL_IO_PIECE) + steps(depths[d], SL_IO_DEPTH);
            if (both(b, p, d) < 0.95 * best || far >= nearest)
                continue;
            nearest = far;
            *piece = p;
            *depth = d;
        }
}

/* ---- output --------------------------------------------------------------------------------- */

static const char *const kind_name[KINDS] = { "stream", "experts" };

static void print_table(const bench *b)
{
    static const char *const title[KINDS] = { "in file order, as the trunk is streamed",
                                              "at random places, as experts are read" };
    for (unsigned kind = 0; kind < KINDS; kind++) {
        printf("GB/s, %s\n   piece  in flight", title[kind]);
        for (unsigned d = 0; d < DEPTHS; d++)
            printf(" %6u", depths[d]);
        for (unsigned p = 0; p < PIECES; p++) {
            printf("\n%4llu KiB           ", (unsigned long long)pieces[p] >> 10);
            for (unsigned d = 0; d < DEPTHS; d++)
                printf(" %6.2f", b->rate[kind][p][d] / 1e9);
        }
        printf("\n\n");
    }
}

static void print_json(const bench *b, const sl_disk_profile *chosen, const char *saved)
{
    printf("{\"settings\":[");
    for (unsigned kind = 0, n = 0; kind < KINDS; kind++)
        for (unsigned p = 0; p < PIECES; p++)
            for (unsigned d = 0; d < DEPTHS; d++)
                printf("%s{\"pattern\":\"%s\",\"piece\":%llu,\"depth\":%u,\"bytes_per_second\":%.0f}", n++ ? "," : "",
                       kind_name[kind], (unsigned long long)pieces[p], depths[d], b->rate[kind][p][d]);
    printf("],\"depth\":%u,\"piece\":%llu,\"stream_bytes_per_second\":%.0f,\"expert_bytes_per_second\":%.0f,"
           "\"direct\":%s,\"profile\":", chosen->depth, (unsigned long long)chosen->piece, chosen->stream,
           chosen->experts, b->direct ? "true" : "false");
    if (saved)
        cmd_json_string(stdout, saved, strlen(saved));
    printf("%s}\n", saved ? "" : "null");
}

/* One setting, for scripts that compare. */
static int print_one(bench *b, sl_err *err)
{
    const int rc = measure(b, 0, 1, 0, 1, err);
    if (rc < 0)
        return rc;
    printf(b->json ? "{\"piece\":%llu,\"depth\":%u,\"stream_bytes_per_second\":%.0f,\"expert_bytes_per_second\":%.0f}\n"
                   : "piece %llu, depth %u: stream %.0f bytes/s, experts %.0f bytes/s\n",
           (unsigned long long)b->piece, b->depth, b->rate[0][0][0], b->rate[1][0][0]);
    return 0;
}

static int print_all(bench *b, const char *path, sl_err *err)
{
    char file[4096];
    unsigned p = 0, d = 0;
    const float seconds = b->seconds;
    b->seconds = 0.75f * seconds;
    int rc = measure(b, 0, PIECES, 0, DEPTHS, err);
    if (rc < 0)
        return rc;
    choose(b, &p, &d);
    b->seconds = 0.25f * seconds; /* again and for longer: others count with these figures */
    if ((rc = measure(b, p, 1, d, 1, err)) < 0)
        return rc;
    const sl_disk_profile chosen = { .depth = depths[d], .piece = pieces[p], .stream = b->rate[0][p][d],
                                     .experts = b->rate[1][p][d] };
    const bool save = !b->dry && b->direct && b->backend != SL_IO_PREAD;
    if (save && ((rc = sl_disk_profile_path(file, sizeof file, path, err)) < 0 ||
                 (rc = sl_disk_profile_save(&chosen, file, path, err)) < 0))
        return rc;
    if (b->json) {
        print_json(b, &chosen, save ? file : NULL);
        return 0;
    }
    print_table(b);
    printf("chosen: %u in flight of %llu KiB; %.2f GB/s in file order, %.2f GB/s of experts\n", chosen.depth,
           (unsigned long long)chosen.piece >> 10, chosen.stream / 1e9, chosen.experts / 1e9);
    if (save)
        printf("kept for this device in %s\n", file);
    else if (!b->dry)
        printf("not kept: %s\n", b->direct ? "it is io_uring's that is" : "these are figures of the page cache");
    if (b->bytes < ENOUGH)
        printf("the files hold less than 256 MiB: a cache in the drive may have answered\n");
    return 0;
}

static int run(bench *b, const char *path, sl_err *err)
{
    b->files = calloc(FILES, sizeof *b->files);
    b->source.buffer = sl_mem_alloc(NULL, SL_MEM_RING, BUFFER);
    b->source.buffer_size = BUFFER;
    b->source.random = (uint64_t)getpid();
    b->source.files = b->files;
    int rc;
    if (!b->files || !b->source.buffer) {
        snprintf(err->text, sizeof err->text, "out of memory");
        rc = err->code = SL_EFAIL;
    } else if ((rc = add_path(b, path, err)) == 0) {
        sl_mem_touch(b->source.buffer, BUFFER);
        rc = b->depth ? print_one(b, err) : print_all(b, path, err);
    }
    for (size_t i = 0; b->files && i < b->source.n_files; i++)
        sl_io_file_close(&b->files[i]);
    free(b->files);
    sl_mem_free(b->source.buffer);
    return rc;
}

int cmd_bench(int argc, char **argv)
{
    static bench b = { .seconds = 20 };
    int backend = SL_IO_AUTO;
    const cmd_option options[] = {
        { "--seconds", NULL, CMD_FLOAT, &b.seconds, "S", "time to measure for, in all (default 20)", NULL },
        { "--depth", NULL, CMD_U32, &b.depth, "N", "measure one setting: N pieces in flight", NULL },
        { "--piece", NULL, CMD_SIZE, &b.piece, "SIZE", "and pieces of SIZE", NULL },
        { "--io", NULL, CMD_CHOICE, &backend, "WAY", "how to read: auto, uring, pread", cmd_io_choices },
        { "--dry-run", NULL, CMD_FLAG, &b.dry, NULL, "do not keep the result for the engine", NULL },
        { "--json", NULL, CMD_FLAG, &b.json, NULL, "one JSON object on one line", NULL },
        { 0 },
    };
    const cmd_spec spec = { "bench disk MODEL|DIR|FILE [options]",
                            "Reads the shards of a model, or any large file, in many sizes and depths, prints GB/s, and "
                            "keeps the best setting for the device, where run finds it. Writes nothing to the drive.",
                            options, 2, 2 };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n = cmd_parse(&spec, argc, argv, args);
    if (n < 0)
        return n == -1 ? 0 : CMD_USAGE;
    if (strcmp(args[0], "disk") != 0)
        return cmd_error(CMD_USAGE, "bench: found '%.200s', expected disk", args[0]);
    if (!(b.seconds > 0 && b.seconds <= 3600))
        return cmd_error(CMD_USAGE, "bench: expected --seconds above 0, at most 3600");
    if (!b.depth != !b.piece || b.depth > SL_DISK_DEPTH_MAX || b.piece > SL_DISK_PIECE_MAX || b.piece % SL_IO_ALIGN)
        return cmd_error(CMD_USAGE, "bench: expected --depth, 1 to 1024, with --piece, a multiple of 4096 up to 64M");
    sl_err err = { 0 };
    b.backend = (enum sl_io_backend)backend;
    cmd_catch_signals();
    const int rc = run(&b, args[1], &err);
    return rc < 0 ? cmd_fail(&err) : cmd_flush();
}
