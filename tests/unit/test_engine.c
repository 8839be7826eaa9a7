/* What must never become a wrong token: read errors, short reads, weights that are not finite, files that
 * change under the engine, a stop in the middle. Every failure leaves an engine that closes, and a new one
 * gives the bits that an undisturbed run gives. */
#include "tests/check.h"

#include <errno.h>
#include <stdarg.h>
#include <fcntl.h>
#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/num.h"
#include "model/model.h"

enum { TOKENS = 5, VOCAB = 512 };
static const char *const golden = "tests/data/golden/tiny-k3-b";
static const int32_t ids[TOKENS] = { 3, 141, 59, 26, 500 };
static float expected[VOCAB];
static char dir[256];
static bool quick; /* SL_QUICK: a slow build or an emulator: fewer places to fail at */

/* From one place to the next when `all` places are sampled at about n. */
static long stride(long all, long n) { return 1 + all / (quick ? 1 + n / 12 : n); }

static void shell(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void shell(const char *fmt, ...)
{
    char cmd[1024];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(cmd, sizeof cmd, fmt, ap);
    va_end(ap);
    FILE *p = popen(cmd, "r");
    CHECK(p && pclose(p) == 0);
}

static void fresh_copy(void) { shell("rm -rf '%s' && cp -r %s '%s' && chmod -R u+w '%s'", dir, golden, dir, dir); }

static sl_model_options options(void)
{
    return (sl_model_options){ .ram = 80 << 20, .context = 16, .threads = 2, .prefill_chunk = 4 };
}

static int feed(sl_model *m, sl_err *err)
{
    sl_state *s = &m->states[0];
    sl_state_clear(s);
    const sl_segment first = { .state = s, .ids = ids, .tokens = 4 }, second = { .state = s, .ids = ids + 4, .tokens = 1, .logits = 1 };
    int rc = sl_forward(m, &first, 1, true, NULL, NULL, err);
    return rc < 0 ? rc : sl_forward(m, &second, 1, false, NULL, NULL, err);
}

static int run(const sl_model_options *o, sl_err *err, float out[VOCAB])
{
    sl_model *m;
    int rc = sl_model_open(&m, dir, o, err);
    if (rc < 0)
        return rc;
    rc = feed(m, err);
    if (rc == 0)
        memcpy(out, m->logits, VOCAB * sizeof *out);
    sl_model_close(m);
    return rc;
}

/* ---- reads ------------------------------------------------------------------------------------------ */

typedef struct {
    atomic_long count, fail_at;
    long result;
} faults;

static long inject(void *user, const sl_io_file *f, uint64_t offset, uint64_t length)
{
    faults *x = user;
    (void)f;
    (void)offset;
    (void)length;
    const long n = atomic_fetch_add(&x->count, 1);
    if (x->fail_at == -1)
        return x->result; /* every piece */
    return n == x->fail_at ? x->result : 0;
}

static void test_reads(enum sl_io_backend io)
{
    sl_err err;
    float out[VOCAB];
    faults f = { .fail_at = -2 };
    sl_model_options o = options();
    o.io = io;
    o.fault = inject;
    o.fault_user = &f;
    const int opened = run(&o, &err, out);
    if (opened == SL_EFAIL && io == SL_IO_URING && strstr(err.text, "io_uring")) {
        printf("io_uring: not on this machine\n");
        return;
    }
    CHECK_MSG(opened == 0, "%s", err.text);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    const long pieces = f.count;
    CHECK(pieces > 100);
    for (long at = 0; at < pieces; at += stride(pieces, 60)) {
        atomic_store(&f.count, 0);
        f.fail_at = at;
        f.result = -EIO;
        memset(out, 0, sizeof out);
        const int rc = run(&o, &err, out);
        CHECK_MSG(rc == SL_EIO, "piece %ld of %ld: %d", at, pieces, rc);
        CHECK_MSG(strstr(err.text, ".safetensors") && strstr(err.text, "offset"), "%s", err.text);
    }
    f.fail_at = -1;
    f.result = 512; /* rounded to the alignment: every read comes in parts */
    CHECK_EQ(run(&o, &err, out), 0);
    CHECK(memcmp(out, expected, sizeof out) == 0);
}

/* ---- weights that are not finite -------------------------------------------------------------------- */

static void patch(uint16_t shard, const sl_binding *b, uint64_t offset, const void *bytes, size_t n)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", dir, b->shards.name[shard]);
    const int fd = open(path, O_WRONLY);
    CHECK(fd >= 0 && pwrite(fd, bytes, n, (off_t)offset) == (ssize_t)n);
    close(fd);
}

/* One weight of every kind of tensor, NaN or infinite: refused, by the tensor's name. */
static void test_not_finite(void)
{
    static const uint16_t bf16[] = { 0x7fc0, 0x7f80, 0xff80 };
    static const uint32_t f32[] = { 0x7fc00000, 0x7f800000, 0xff800000 };
    sl_binding b;
    sl_err err;
    float out[VOCAB];
    char name[SL_ST_NAME_MAX];
    const sl_model_options o = options();
    CHECK_EQ(sl_binding_open(&b, golden, 0, NULL, &err), 0);
    unsigned tried = 0;
    for (unsigned k = 0; k < SL_KINDS; k++) {
        uint32_t layer = SL_NO_LAYER;
        if (k < SL_LAYER_KINDS)
            for (layer = 0; layer < b.config.layers && !sl_kind_present(&b.config, layer, (sl_kind)k);)
                layer++;
        if (layer == b.config.layers || !sl_kind_present(&b.config, layer, (sl_kind)k))
            continue;
        if (quick && k % 8)
            continue;
        const sl_place *p = sl_binding_place(&b, layer, (sl_kind)k);
        /* The last element; of the embedding, that of a token in use. */
        uint64_t at = sl_kind_elements(&b.config, (sl_kind)k) - 1;
        if (k == SL_EMBED)
            at = (uint64_t)ids[1] * b.config.hidden;
        fresh_copy();
        if (sl_kind_dtype((sl_kind)k) == SL_DTYPE_BF16)
            patch(p->shard, &b, p->offset + 2 * at, &bf16[tried % 3], 2);
        else
            patch(p->shard, &b, p->offset + 4 * at, &f32[tried % 3], 4);
        tried++;
        sl_kind_name(layer, (sl_kind)k, name, sizeof name);
        const int rc = run(&o, &err, out);
        CHECK_MSG(rc == SL_EFORMAT, "%s: %d", name, rc);
        CHECK_MSG(rc == 0 || strstr(err.text, name), "%s: %s", name, err.text);
    }
    CHECK(tried > (quick ? 4 : 30));
    /* Scale byte 255 in every expert of a layer, so that the chosen ones have it. */
    for (int t = SL_W1_SCALE; t < SL_EXPERT_TENSORS; t += 2) {
        const unsigned char nan_scale = 255;
        fresh_copy();
        for (uint32_t e = 0; e < b.config.experts; e++) {
            uint64_t rows, row_bytes;
            sl_expert_shape(&b.config, t, &rows, &row_bytes);
            for (uint64_t i = 0; i < rows * row_bytes; i++)
                patch(b.experts[e].file[t], &b, b.experts[e].offset[t] + i, &nan_scale, 1);
        }
        const int rc = run(&o, &err, out);
        sl_expert_name(b.config.dense_layers, 0, t, name, sizeof name);
        CHECK_MSG(rc == SL_EFORMAT && strstr(err.text, "experts.") && strstr(err.text, strstr(name, ".w")), "%d: %s", rc, err.text);
    }
    sl_binding_close(&b);
}

/* ---- files that change ------------------------------------------------------------------------------ */

static void test_changes(void)
{
    static const struct { const char *what, *command; int expected; } cases[] = {
        { "truncated", "f='%s/model-00001-of-000003.safetensors'; truncate -s 100000 \"$f\"", SL_EIO },
        { "written to", "f='%s/model-00002-of-000003.safetensors'; sleep 0.02; dd if=/dev/zero of=\"$f\" bs=1 count=1 "
                        "seek=200000 conv=notrunc 2>/dev/null", SL_EIO },
        { "grown", "f='%s/model-00002-of-000003.safetensors'; echo >> \"$f\"", SL_EIO },
        { "replaced by rename", "d='%s'; echo no > \"$d/x\"; mv \"$d/x\" \"$d/model-00001-of-000003.safetensors\"", 0 },
        { "removed", "rm '%s/model-00001-of-000003.safetensors'", 0 },
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sl_model *m;
        sl_err err;
        char command[512];
        const sl_model_options o = options();
        fresh_copy();
        CHECK_EQ(sl_model_open(&m, dir, &o, &err), 0);
        CHECK_EQ(feed(m, &err), 0);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(command, sizeof command, cases[i].command, dir);
#pragma GCC diagnostic pop
        shell("%s", command);
        const int rc = feed(m, &err);
        CHECK_MSG(rc == cases[i].expected, "%s: %d %s", cases[i].what, rc, rc ? err.text : "");
        if (rc == 0) /* the open file is still the model that was asked for */
            CHECK(memcmp(m->logits, expected, sizeof expected) == 0);
        sl_model_close(m);
    }
}

/* ---- mirrors ---------------------------------------------------------------------------------------- */

/* Every piece in turn fails once, on whichever copy it is read from: the same bits, and no error. When it fails on
 * both, the error that there is without mirrors. */
static void test_mirrors(enum sl_io_backend io)
{
    char copy[300];
    sl_err err;
    float out[VOCAB];
    faults f = { .fail_at = -2 };
    sl_model_options o = options();
    const char *const mirrors[] = { copy };
    snprintf(copy, sizeof copy, "%s-mirror", dir);
    fresh_copy();
    shell("rm -rf '%s' && cp -r %s '%s' && chmod -R u+w '%s'", copy, golden, copy, copy);
    o.io = io;
    o.fault = inject;
    o.fault_user = &f;
    o.mirrors = mirrors;
    o.n_mirrors = 1;
    const int opened = run(&o, &err, out);
    if (opened == SL_EFAIL && io == SL_IO_URING)
        return; /* not on this machine */
    CHECK_MSG(opened == 0, "%s", err.text);
    CHECK(memcmp(out, expected, sizeof out) == 0);
    const long pieces = f.count;
    for (long at = 0; at < pieces; at += stride(pieces, 60)) {
        atomic_store(&f.count, 0);
        f.fail_at = at;
        f.result = -EIO;
        memset(out, 0, sizeof out);
        CHECK_MSG(run(&o, &err, out) == 0, "piece %ld of %ld: %s", at, pieces, err.text);
        CHECK_MSG(memcmp(out, expected, sizeof out) == 0, "piece %ld of %ld: other bits", at, pieces);
    }
    f.fail_at = -1;
    CHECK_EQ(run(&o, &err, out), SL_EIO);
    f.fail_at = -2;
    /* The original goes bad after it was opened; then a piece has no copy left. */
    sl_model *m;
    CHECK_EQ(sl_model_open(&m, dir, &o, &err), 0);
    shell("truncate -s 50000 '%s'/*.safetensors", dir);
    CHECK_MSG(feed(m, &err) == 0, "%s", err.text);
    CHECK(memcmp(m->logits, expected, sizeof expected) == 0);
    shell("truncate -s 50000 '%s'/*.safetensors", copy);
    CHECK_EQ(feed(m, &err), SL_EIO);
    sl_model_close(m);
    shell("rm -rf '%s'", copy);
    fresh_copy();
}

/* ---- stops ------------------------------------------------------------------------------------------ */

static long polls_left, polls;

static bool countdown(void *user)
{
    (void)user;
    polls++;
    return polls_left-- == 0;
}

static void test_cancel(void)
{
    sl_err err;
    float out[VOCAB];
    sl_model_options o = options();
    o.cancel = countdown;
    fresh_copy();
    polls = 0;
    polls_left = -1;
    CHECK_EQ(run(&o, &err, out), 0);
    const long all = polls;
    CHECK(all > 100);
    for (long at = 0; at < all; at += stride(all, 80)) {
        polls_left = at;
        const int rc = run(&o, &err, out);
        CHECK_MSG(rc == SL_EINTR, "poll %ld of %ld: %d", at, all, rc);
    }
}

/* A pass that failed or was stopped must not disturb the next one on the same engine. */
static void test_recovery(void)
{
    sl_model *m;
    sl_err err;
    faults f = { .fail_at = -2, .result = -EIO };
    sl_model_options o = options();
    o.fault = inject;
    o.fault_user = &f;
    o.cancel = countdown;
    polls_left = -1;
    CHECK_EQ(sl_model_open(&m, dir, &o, &err), 0);
    const long opened = f.count;
    CHECK_EQ(feed(m, &err), 0);
    const long pieces = f.count - opened;
    for (long at = 0; at < pieces; at += stride(pieces, 40)) {
        atomic_store(&f.count, 0);
        f.fail_at = at;
        polls_left = -1;
        const int rc = feed(m, &err);
        CHECK_MSG(rc == SL_EIO || rc == 0, "piece %ld: %d", at, rc); /* resident chunks are read once */
        f.fail_at = -2;
        polls_left = at;
        feed(m, &err);
        polls_left = -1;
        CHECK_EQ(feed(m, &err), 0);
        CHECK_MSG(memcmp(m->logits, expected, sizeof expected) == 0, "after a failure at piece %ld", at);
    }
    sl_model_close(m);
}

static void test_refusals(void)
{
    sl_engine *e;
    sl_session *s, *second;
    sl_err err;
    sl_options o = sl_options_default();
    const int32_t low = -1, high = VOCAB;
    o.ram_bytes = 1 << 20;
    CHECK_EQ(sl_engine_open(&e, dir, &o, &err), SL_EBUDGET);
    CHECK(strstr(err.text, "at least"));
    sl_plan plan;
    CHECK_EQ(sl_engine_plan(dir, &o, &plan, &err), SL_EBUDGET);
    o.ram_bytes = plan.minimum;
    o.context = 0;
    CHECK_EQ(sl_engine_plan(dir, &o, &plan, &err), 0);
    o.ram_bytes = plan.minimum - (1 << 20);
    CHECK_EQ(sl_engine_plan(dir, &o, &plan, &err), SL_EBUDGET);
    o.ram_bytes = 80 << 20;
    o.context = 6;
    CHECK_EQ(sl_engine_open(&e, dir, &o, &err), 0);
    CHECK_EQ(sl_session_open(&s, e, &err), 0);
    CHECK_EQ(sl_session_open(&second, e, &err), SL_EUSAGE);
    CHECK_EQ(sl_session_feed(s, ids, 0, NULL, &err), SL_EUSAGE);
    CHECK_EQ(sl_session_feed(s, &low, 1, NULL, &err), SL_EUSAGE);
    CHECK_EQ(sl_session_feed(s, &high, 1, NULL, &err), SL_EUSAGE);
    CHECK(strstr(err.text, "512"));
    CHECK_EQ(sl_session_feed(s, ids, TOKENS, NULL, &err), 0);
    CHECK_EQ(sl_session_feed(s, ids, 2, NULL, &err), SL_EUSAGE);
    CHECK(memcmp(sl_session_logits(s), expected, sizeof expected) == 0);
    CHECK_EQ(sl_session_feed(s, ids, 1, NULL, &err), 0);
    CHECK_EQ(sl_session_position(s), 6);
    sl_session_close(s);
    sl_engine_close(e);
}

int main(void)
{
    const char *tmp = getenv("TMPDIR"), *slow = getenv("SL_QUICK");
    quick = slow && *slow;
    snprintf(dir, sizeof dir, "%s/sluice-test-engine-%ld", tmp ? tmp : "/tmp", (long)getpid());
    sl_err err;
    sl_model_options o = options();
    fresh_copy();
    sl_log_set(NULL, NULL, 0); /* the warnings are many, and another test's to check */
    const int rc = run(&o, &err, expected);
    CHECK_MSG(rc == 0, "%s", err.text);
    if (rc == 0) {
        test_reads(SL_IO_PREAD);
        test_reads(SL_IO_URING);
        test_mirrors(SL_IO_PREAD);
        test_mirrors(SL_IO_URING);
        test_recovery();
        test_refusals();
        test_cancel();
        test_changes();
        test_not_finite();
    }
    shell("rm -rf '%s'", dir);
    CHECK_DONE();
}
