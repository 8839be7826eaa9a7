/* cmd/synth.c - `sluice synth`: a checkpoint of random weights in the released layout.
 * Invariant: config.json comes last, so a directory that opens as a model is complete. */
#include "cmd.h"
#include "synth.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"

static const char marker[] = ".sluice-synth"; /* says that what lies here may be replaced */

/* A small file, whole or not at all. */
static int write_text(const char *dir, const char *name, synth_text_fn *fn, const synth_model *m, sl_err *err)
{
    char path[4096];
    sl_atomic_file file;
    int rc = sl_path_join(path, sizeof path, dir, name, err);
    if (rc < 0 || (rc = sl_atomic_open(&file, path, err)) < 0)
        return rc;
    const int fd = dup(file.fd);
    FILE *f = fd < 0 ? NULL : fdopen(fd, "w");
    if (f)
        fn(f, m);
    const bool failed = !f || ferror(f);
    if ((f && fclose(f) != 0) || failed) {
        rc = sl_fail(err, SL_EFAIL, "%s: %s", path, strerror(errno));
        sl_atomic_abort(&file);
        return rc;
    }
    return sl_atomic_commit(&file, err);
}

/* ---- the directory ---------------------------------------------------------------------------- */

/* Whether s[0..n) is `pattern`, in which each # stands for a digit. */
static bool matches(const char *s, size_t n, const char *pattern)
{
    if (strlen(pattern) != n)
        return false;
    for (size_t i = 0; i < n; i++)
        if (pattern[i] == '#' ? s[i] < '0' || s[i] > '9' : s[i] != pattern[i])
            return false;
    return true;
}

/* Names that an earlier run of this command gave, finished or not. */
static bool is_ours(const char *name)
{
    static const char *const patterns[] = {
        "config.json", "generation_config.json", "tokenizer_config.json", "tiktoken.model",
        "model.safetensors.index.json", ".probe", "model-#####-of-######.safetensors",
    };
    const char *tmp = strstr(name, ".tmp");
    const size_t n = tmp ? (size_t)(tmp - name) : strlen(name);
    for (size_t i = 0; i < sizeof patterns / sizeof *patterns; i++)
        if (matches(name, n, patterns[i]))
            return true;
    return false;
}

/* Creates the directory, or empties one that an earlier run filled. */
static int prepare_dir(const char *dir, sl_err *err)
{
    char path[4096];
    int rc = sl_path_join(path, sizeof path, dir, marker, err);
    if (rc < 0)
        return rc;
    if (mkdir(dir, 0777) < 0 && errno != EEXIST)
        return sl_fail(err, SL_EFAIL, "%s: %s", dir, strerror(errno));
    const bool earlier = access(path, F_OK) == 0;
    DIR *d = opendir(dir);
    if (!d)
        return sl_fail(err, SL_EUSAGE, "%s: %s", dir, strerror(errno));
    for (const struct dirent *e; rc == 0 && (e = readdir(d));) {
        if (strcmp(e->d_name, ".") == 0 || strcmp(e->d_name, "..") == 0 || strcmp(e->d_name, marker) == 0)
            continue;
        if (!earlier && strcmp(e->d_name, "lost+found") != 0)
            rc = sl_fail(err, SL_EUSAGE, "%s: not empty, and not written by sluice synth", dir);
        else if (is_ours(e->d_name) && unlinkat(dirfd(d), e->d_name, 0) < 0)
            rc = sl_fail(err, SL_EFAIL, "%s/%s: %s", dir, e->d_name, strerror(errno));
    }
    closedir(d);
    if (rc < 0 || earlier)
        return rc;
    const int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
    if (fd < 0)
        return sl_fail(err, SL_EFAIL, "%s: %s", path, strerror(errno));
    close(fd);
    return 0;
}

static int write_model(const synth_job *job, const synth_model *m, synth_totals *totals, sl_err *err)
{
    static const struct {
        const char *name;
        synth_text_fn *fn;
    } files[] = {
        { "tiktoken.model", synth_ranks },
        { "tokenizer_config.json", synth_tokenizer_json },
        { "generation_config.json", synth_generation_json },
        { "config.json", synth_config_json },
    };
    int rc = prepare_dir(job->dir, err);
    if (rc == 0)
        rc = synth_write(job, m, totals, err);
    for (size_t i = 0; rc == 0 && i < sizeof files / sizeof *files; i++)
        rc = write_text(job->dir, files[i].name, files[i].fn, m, err);
    return rc;
}

int cmd_synth(int argc, char **argv)
{
    static const char *const presets[] = { "tiny", "k3", NULL };
    int preset = -1;
    const char *full_attn = NULL;
    synth_job job = { 0 };
    synth_model model;
    synth_totals totals = { 0 };
    synth_options opt = { .layers = UINT32_MAX, .experts = UINT32_MAX, .vocab = UINT32_MAX, .res_block = UINT32_MAX };
    const cmd_option options[] = {
        { "--preset", NULL, CMD_CHOICE, &preset, "NAME", "Widths: tiny, or k3 (the released model's)", presets },
        { "--layers", NULL, CMD_U32, &opt.layers, "N", "Layers (k3: 93)", NULL },
        { "--experts", NULL, CMD_U32, &opt.experts, "N", "Routed experts of a layer (k3: 896)", NULL },
        { "--vocab", NULL, CMD_U32, &opt.vocab, "N", "Size of the vocabulary (k3: 163840)", NULL },
        { "--full-attn", NULL, CMD_STR, &full_attn, "LIST", "Layers with full attention, counted from 1 (every 4th and "
          "the last)", NULL },
        { "--res-block", NULL, CMD_U32, &opt.res_block, "N", "Layers in a block of the attention residuals, 0: ordinary "
          "residuals (k3: 12)", NULL },
        { "--seed", NULL, CMD_U64, &opt.seed, "S", "Seed of the weights (0)", NULL },
        { "--headers-only", NULL, CMD_FLAG, &job.headers_only, NULL, "Write sparse files of the full size: headers, and "
          "holes for data", NULL },
        { "--reflink-pool", NULL, CMD_U32, &job.pool, "N", "Share the bytes of experts and layers among N distinct ones "
          "of each kind (XFS, Btrfs)", NULL },
        { 0 },
    };
    const cmd_spec spec = {
        "synth DIR --preset tiny|k3 [options]",
        "Writes a checkpoint of random weights in the released layout into DIR, which must be empty, absent, or "
        "written by this command before. The same options give the same bytes.",
        options, 1, 1,
    };
    const char **args = (const char **)argv + 1; /* parsed in place: never more than there are */
    const int n = cmd_parse(&spec, argc, argv, args);
    if (n < 0)
        return n == -1 ? 0 : CMD_USAGE;
    job.dir = args[0];
    if (preset < 0)
        return cmd_error(CMD_USAGE, "synth: --preset tiny or --preset k3 is needed (see 'sluice synth --help')");
    if (job.headers_only && job.pool)
        return cmd_error(CMD_USAGE, "synth: --headers-only writes no data that --reflink-pool could share");
    sl_err err;
    int32_t *list = NULL;
    if (full_attn && cmd_parse_ids(full_attn, &list, &opt.n_full_attn, &err) < 0)
        return cmd_error(CMD_USAGE, "synth: --full-attn: '%.200s' is not a list of layer numbers", full_attn);
    opt.full_attn = list;
    opt.k3 = preset == 1;
    cmd_catch_signals();
    signal(SIGXFSZ, SIG_IGN); /* a limit on file sizes shows as a failed write */
    int rc = synth_model_init(&model, &opt, &err);
    free(list);
    const uint64_t expert = rc == 0 ? synth_expert_bytes(&model.config) : 0;
    if (job.pool && expert % SYNTH_ALIGN)
        rc = sl_fail(&err, SL_EUSAGE, "--reflink-pool: an expert has %" PRIu64 " bytes, expected a multiple of %d", expert,
                     SYNTH_ALIGN);
    if (rc == 0)
        rc = write_model(&job, &model, &totals, &err);
    if (rc < 0)
        return cmd_fail(&err);
    char size[32];
    printf("%s: %" PRIu64 " tensors in %u shards, %s\n", job.dir, totals.tensors, model.shards,
           cmd_bytes(size, totals.bytes));
    return 0;
}
