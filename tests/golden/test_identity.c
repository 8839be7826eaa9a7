/* The same bits whatever the machine offers: kernels, threads, prefill chunk, budget, way of reading. The
 * odd-shaped and the deep checkpoint, every position's logits, against one plain run. */
#include "tests/check.h"

#include "sluice.h"

enum { TOKENS = 70, VOCAB = 512 };

static int32_t ids[TOKENS];
static float expected[TOKENS][VOCAB], found[TOKENS][VOCAB];

static int keep(void *user, uint32_t position, const float *logits)
{
    memcpy(((float(*)[VOCAB])user)[position], logits, VOCAB * sizeof(float));
    return 0;
}

/* Feeds in two calls, so that decode after prefill is part of it. Returns cache hits; -1: not run. */
static long long run(const char *dir, const sl_options *o, const char *cpu, float out[TOKENS][VOCAB])
{
    sl_engine *engine;
    sl_session *session;
    sl_err err;
    setenv("SL_CPU", cpu, 1);
    int rc = sl_engine_open(&engine, dir, o, &err);
    if (rc == SL_EUSAGE && strstr(err.text, "SL_CPU"))
        return -1;
    if (rc == SL_EFAIL && o->io == SL_IO_URING && strstr(err.text, "io_uring"))
        return -1; /* no kernel support: under an emulator, in some containers */
    CHECK_MSG(rc == 0, "%s", err.text);
    if (rc < 0)
        exit(1);
    CHECK_STR(sl_engine_cpu(engine), cpu);
    const sl_feed feed = { .on_logits = keep, .user = out };
    CHECK_EQ(sl_session_open(&session, engine, &err), 0);
    rc = sl_session_feed(session, ids, TOKENS - 3, &feed, &err);
    for (int t = TOKENS - 3; rc == 0 && t < TOKENS; t++)
        rc = sl_session_feed(session, ids + t, 1, &feed, &err);
    CHECK_MSG(rc == 0, "%s", err.text);
    CHECK(rc < 0 || memcmp(sl_session_logits(session), out[TOKENS - 1], VOCAB * sizeof(float)) == 0);
    sl_stats stats;
    sl_engine_stats(engine, &stats);
    CHECK_EQ(sl_session_position(session), TOKENS);
    sl_session_close(session);
    sl_engine_close(engine);
    return (long long)stats.cache_hits;
}

static void compare(const char *dir, const sl_options *o, const char *cpu)
{
    memset(found, 0xff, sizeof found);
    const long long hits = run(dir, o, cpu, found);
    if (hits < 0) {
        printf("%s, io %d: not on this machine\n", cpu, (int)o->io);
        return;
    }
    for (int t = 0; t < TOKENS; t++)
        if (memcmp(found[t], expected[t], sizeof found[t]) != 0) {
            int v = 0;
            while (memcmp(&found[t][v], &expected[t][v], 4) == 0)
                v++;
            CHECK_MSG(0, "%s %s threads %u chunk %u ram %llu io %d: position %d, logit %d: %a, expected %a", dir, cpu,
                      o->threads, o->prefill_chunk, (unsigned long long)o->ram_bytes, (int)o->io, t, v,
                      (double)found[t][v], (double)expected[t][v]);
            break;
        }
}

/* Of the logits' bits, by FNV-1a. The same on every machine that runs this test: x86-64 and aarch64. */
static uint64_t digest(void)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (int t = 0; t < TOKENS; t++)
        for (int v = 0; v < VOCAB; v++) {
            uint32_t bits;
            memcpy(&bits, &expected[t][v], 4);
            for (int i = 0; i < 4; i++, bits >>= 8)
                h = (h ^ (bits & 0xff)) * 0x100000001b3u;
        }
    return h;
}

/* expected_digest belongs to version 1 of the arithmetic contract (docs/contract.md): another value means
 * that the contract has changed, which needs a new version, since receipts carry it. */
static void test_model(const char *dir, uint64_t expected_digest)
{
    static const char *const cpus[] = { "scalar", "avx2", "avx512", "neon" };
    static const uint32_t threads[] = { 2, 3, 8 }, chunks[] = { 1, 7, 64 };
    const int quick = getenv("SL_QUICK") != NULL && *getenv("SL_QUICK"); /* slow build: one of each kind */
    sl_plan plan;
    sl_err err;
    const sl_options plain = { .ram_bytes = 1ull << 30, .context = TOKENS, .threads = 1, .prefill_chunk = 1,
                               .all_logits = true };
    CHECK(run(dir, &plain, "scalar", expected) >= 0);
    CHECK_MSG(digest() == expected_digest, "%s: digest 0x%llx", dir, (unsigned long long)digest());
    const char *best = "scalar";
    for (int i = 0; i < 4; i++) {
        setenv("SL_CPU", cpus[i], 1);
        sl_engine *e;
        if (sl_engine_open(&e, dir, &plain, &err) < 0)
            continue;
        best = cpus[i];
        sl_engine_close(e);
        for (int c = quick; c < 3 - quick; c++) {
            sl_options o = plain;
            o.prefill_chunk = chunks[c];
            compare(dir, &o, cpus[i]);
        }
    }
    for (int t = quick; t < 3 - quick; t++)
        for (int c = 2 * quick; c < 3; c++) {
            sl_options o = plain;
            o.threads = threads[t];
            o.prefill_chunk = chunks[c];
            compare(dir, &o, best);
        }
    /* From the smallest budget, where all streams, to one that holds the model. */
    sl_options small = plain;
    small.threads = 2;
    small.prefill_chunk = 64;
    CHECK_EQ(sl_engine_plan(dir, &small, &plan, &err), 0);
    for (int step = 0; step <= 3 - 3 * quick; step++)
        for (int io = SL_IO_URING; io <= SL_IO_PREAD; io++) {
            sl_options o = small;
            o.ram_bytes = plan.minimum + (uint64_t)step * (3 << 20);
            o.io = (enum sl_io_backend)io;
            o.prefill_chunk = step % 2 ? 64 : 7;
            o.context = TOKENS;
            compare(dir, &o, best);
        }
}

int main(void)
{
    uint32_t x = 1;
    for (int i = 0; i < TOKENS; i++)
        ids[i] = (int32_t)((x = x * 1664525u + 1013904223u) >> 16) % VOCAB;
    test_model("tests/data/golden/tiny-k3-b", 0x48e51daaaf2208fa);
    test_model("tests/data/golden/tiny-k3-a", 0x6408fe7e14fa1a6b);
    CHECK_DONE();
}
