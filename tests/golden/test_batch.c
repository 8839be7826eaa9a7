/* Several sequences in one pass give the bits that each gives alone, whatever its companions, the chunk, the threads,
 * the budget; and a call that is refused changes nothing. */
#include "tests/check.h"

#include "sluice.h"

enum { SEQUENCES = 5, TOKENS = 24, VOCAB = 512, CHUNK = 24 };

static uint32_t seed = 7;
static int32_t ids[SEQUENCES][TOKENS];
static float expected[SEQUENCES][TOKENS][VOCAB];
static sl_err err;

static uint32_t below(uint32_t n)
{
    seed = seed * 1664525u + 1013904223u;
    return (seed >> 16) % n;
}

static sl_engine *open_engine(const char *dir, const sl_options *o)
{
    sl_engine *e;
    const int rc = sl_engine_open(&e, dir, o, &err);
    CHECK_MSG(rc == 0, "%s", err.text);
    if (rc < 0)
        exit(1);
    return e;
}

static sl_session *open_session(sl_engine *e)
{
    sl_session *s = NULL;
    CHECK_MSG(sl_session_open(&s, e, &err) == 0, "%s", err.text);
    return s;
}

static int keep(void *user, uint32_t position, const float *logits)
{
    memcpy(((float(*)[VOCAB])user)[position], logits, VOCAB * sizeof(float));
    return 0;
}

static void alone(const char *dir)
{
    const sl_options o = { .ram_bytes = 1ull << 30, .context = TOKENS, .threads = 1, .prefill_chunk = 1, .all_logits = true };
    sl_engine *e = open_engine(dir, &o);
    for (int i = 0; i < SEQUENCES; i++) {
        sl_session *s = open_session(e);
        const sl_feed feed = { .on_logits = keep, .user = expected[i] };
        CHECK_EQ(sl_session_feed(s, ids[i], TOKENS, &feed, &err), 0);
        sl_session_close(s);
    }
    sl_engine_close(e);
}

typedef struct {
    uint32_t sequence, done, end, calls; /* of this step: positions before and after it, and what was delivered */
} routed;

static void count(void *user, uint32_t pass, uint32_t position, uint32_t layer, const uint32_t *experts, const float *weights,
                  uint32_t n)
{
    routed *r = user;
    (void)layer;
    (void)experts;
    (void)weights;
    CHECK(n > 0 && pass == 0 && position >= r->done && position < r->end);
    r->calls++;
}

/* Random mixes of sequences and of numbers of tokens until all are at their end. Each begins over once, on the state
 * that another may have had. */
static void together(const char *dir, const sl_options *o)
{
    sl_engine *e = open_engine(dir, o);
    sl_session *s[SEQUENCES] = { NULL };
    uint32_t done[SEQUENCES] = { 0 }, rounds[SEQUENCES] = { 0 }, passes = 0, rows = 0;
    for (int left = 2 * SEQUENCES; left > 0;) {
        sl_step steps[SEQUENCES];
        sl_feed feed[SEQUENCES];
        routed r[SEQUENCES];
        uint32_t n = 0, room = sl_engine_get_plan(e)->prefill_chunk, open = 0;
        for (uint32_t i = 0; i < SEQUENCES; i++)
            open += s[i] != NULL;
        for (uint32_t k = 0, i = below(SEQUENCES); k < SEQUENCES && room; k++, i = (i + 1) % SEQUENCES) {
            if (rounds[i] == 2 || below(3) == 0)
                continue;
            if (!s[i]) {
                if (open == o->sequences)
                    continue;
                s[i] = open_session(e);
                open++;
                done[i] = 0;
            }
            uint32_t take = below(2) ? 1 : 1 + below(12);
            take = take < TOKENS - done[i] ? take : TOKENS - done[i];
            take = take < room ? take : room;
            room -= take;
            r[n] = (routed){ .sequence = i, .done = done[i], .end = done[i] + take };
            feed[n] = (sl_feed){ .on_routing = count, .user = &r[n] };
            steps[n] = (sl_step){ .session = s[i], .ids = ids[i] + done[i], .n = take, .feed = below(2) ? &feed[n] : NULL };
            n++;
        }
        if (n == 0)
            continue;
        passes++;
        CHECK_MSG(sl_engine_step(e, steps, n, false, &err) == 0, "%s", err.text);
        for (uint32_t k = 0; k < n; k++) {
            const uint32_t i = r[k].sequence, end = done[i] += (uint32_t)steps[k].n;
            rows += (uint32_t)steps[k].n;
            CHECK_EQ(sl_session_position(s[i]), end);
            CHECK(!steps[k].feed || (r[k].calls > 0 && r[k].calls % steps[k].n == 0));
            CHECK_MSG(memcmp(sl_session_logits(s[i]), expected[i][end - 1], sizeof expected[i][0]) == 0,
                      "%s threads %u chunk %u ram %llu: sequence %u of %u in the pass, position %u", dir, o->threads,
                      o->prefill_chunk, (unsigned long long)o->ram_bytes, i, n, end);
            if (end == TOKENS) {
                sl_session_close(s[i]);
                s[i] = NULL;
                rounds[i]++;
                left--;
            }
        }
    }
    CHECK_EQ(rows, 2 * SEQUENCES * TOKENS);
    CHECK(rows > passes * 2); /* they did go together */
    sl_engine_close(e);
}

static void refusals(const char *dir)
{
    const sl_options o = { .ram_bytes = 1ull << 30, .context = 8, .threads = 2, .prefill_chunk = 1, .sequences = 2 };
    sl_engine *e = open_engine(dir, &o);
    const sl_plan *plan = sl_engine_get_plan(e);
    CHECK_EQ(plan->sequences, 2);
    CHECK_EQ(plan->prefill_chunk, 2); /* a token of each */
    sl_session *a = open_session(e), *b = open_session(e), *c = NULL;
    CHECK_EQ(sl_session_open(&c, e, &err), SL_EUSAGE);
    CHECK(sl_session_logits(a) == NULL);
    const int32_t bad = VOCAB;
    sl_step steps[3] = { { .session = a, .ids = ids[0], .n = 1 }, { .session = a, .ids = ids[1], .n = 1 },
                         { .session = b, .ids = ids[1], .n = 1 } };
    CHECK_EQ(sl_engine_step(e, steps, 0, false, &err), SL_EUSAGE);
    CHECK_EQ(sl_engine_step(e, steps, 3, false, &err), SL_EUSAGE);
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), SL_EUSAGE);
    CHECK(strstr(err.text, "session"));
    steps[1] = (sl_step){ .session = b, .ids = &bad, .n = 1 };
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), SL_EUSAGE);
    steps[1] = (sl_step){ .session = b, .ids = ids[1], .n = 2 };
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), SL_EUSAGE); /* more than a pass */
    steps[1].n = 0;
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), SL_EUSAGE);
    steps[1].n = 1;
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), 0);
    CHECK(memcmp(sl_session_logits(a), expected[0][0], sizeof expected[0][0]) == 0);
    CHECK(memcmp(sl_session_logits(b), expected[1][0], sizeof expected[0][0]) == 0);
    CHECK_EQ(sl_session_feed(a, ids[0] + 1, 7, NULL, &err), 0); /* longer than a chunk */
    CHECK(memcmp(sl_session_logits(a), expected[0][7], sizeof expected[0][0]) == 0);
    CHECK(sl_session_logits(b) == NULL); /* they were those of the pass before */
    CHECK_EQ(sl_engine_step(e, steps, 2, false, &err), SL_EUSAGE); /* no context left for a */
    CHECK_EQ(sl_session_feed(b, ids[1] + 1, 1, NULL, &err), 0);
    CHECK(memcmp(sl_session_logits(b), expected[1][1], sizeof expected[0][0]) == 0);
    sl_session_close(a);
    sl_session_close(b);
    sl_engine_close(e);

    sl_options many = o;
    sl_plan one, two, p;
    many.prefill_chunk = 0;
    many.sequences = 1 << 20;
    CHECK_EQ(sl_engine_plan(dir, &many, &p, &err), SL_EUSAGE);
    many.context = 4096;
    many.sequences = 1;
    CHECK_EQ(sl_engine_plan(dir, &many, &one, &err), 0);
    many.sequences = 64;
    CHECK_EQ(sl_engine_plan(dir, &many, &two, &err), 0);
    CHECK_EQ(two.state, 64 * one.state);
    CHECK_EQ(two.state_per_position, 64 * one.state_per_position);
    CHECK(two.minimum > one.minimum + 60 * one.state);
    many.ram_bytes = two.minimum;
    CHECK_EQ(sl_engine_plan(dir, &many, &p, &err), 0);
    CHECK(p.prefill_chunk >= 64);
    many.ram_bytes = two.minimum - (1 << 20);
    CHECK_EQ(sl_engine_plan(dir, &many, &p, &err), SL_EBUDGET);
}

static void test_model(const char *dir)
{
    static const uint32_t threads[] = { 2, 1, 3 }, chunks[] = { CHUNK, 5, 64 }, sequences[] = { SEQUENCES, 3, SEQUENCES };
    const int runs = getenv("SL_QUICK") && *getenv("SL_QUICK") ? 1 : 3;
    sl_plan plan;
    alone(dir);
    for (int i = 0; i < runs; i++) {
        sl_options o = { .ram_bytes = 1ull << 30, .context = TOKENS, .threads = threads[i], .prefill_chunk = chunks[i],
                         .sequences = sequences[i], .all_logits = i == 2 };
        together(dir, &o);
        CHECK_EQ(sl_engine_plan(dir, &o, &plan, &err), 0);
        o.ram_bytes = plan.minimum;
        together(dir, &o);
    }
    refusals(dir);
}

int main(void)
{
    for (int i = 0; i < SEQUENCES; i++)
        for (int t = 0; t < TOKENS; t++)
            ids[i][t] = (int32_t)below(VOCAB);
    test_model("tests/data/golden/tiny-k3-b");
    test_model("tests/data/golden/tiny-k3-a");
    CHECK_DONE();
}
