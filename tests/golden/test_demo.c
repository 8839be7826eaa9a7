/* The trained demo model against the trainer's own forward pass in float64 (tools/train/oracle.py): logits after 20
 * prompts, and 200 greedy tokens after each. */
#include "tests/check.h"

#include <jansson.h>

#include "sluice.h"

#define MODEL "models/demo"
#define EXPECTED "tests/data/demo/"

enum { PROMPTS = 20, STEPS = 200, MAX_PROMPT = 600 };

static uint32_t vocab;
static uint32_t wrong_steps;      /* of continuations that were fed in one call */
static const int32_t *wanted;     /* the ids after the prompt */
static uint32_t prompt_length;

static uint32_t argmax(const float *logits)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < vocab; i++)
        if (logits[i] > logits[best])
            best = i;
    return best;
}

static size_t read_ids(const json_t *from, int32_t *to, size_t room)
{
    const size_t n = json_array_size(from);
    CHECK_MSG(n >= 1 && n <= room, "%zu ids", n);
    for (size_t i = 0; i < n && i < room; i++)
        to[i] = (int32_t)json_integer_value(json_array_get(from, i));
    return n;
}

static void check_logits(const char *prompt, const float *found, const float *expected, double tolerance)
{
    double worst = 0;
    for (uint32_t i = 0; i < vocab; i++) {
        const double difference = found[i] > expected[i] ? found[i] - expected[i] : expected[i] - found[i];
        worst = difference > worst ? difference : worst;
    }
    CHECK_MSG(worst <= tolerance, "\"%s\": a logit differs by %g, at most %g", prompt, worst, tolerance);
}

/* Every position that a greedy token follows must choose that token. */
static int check_choice(void *user, uint32_t position, const float *logits)
{
    (void)user;
    if (position + 1 >= prompt_length && position + 1 < prompt_length + STEPS)
        wrong_steps += argmax(logits) != (uint32_t)wanted[position + 1 - prompt_length];
    return 0;
}

static void test_prompt(sl_engine *engine, const json_t *entry, const float *expected, double tolerance, bool decode)
{
    static int32_t ids[MAX_PROMPT + STEPS];
    const char *prompt = json_string_value(json_object_get(entry, "prompt"));
    const size_t n = read_ids(json_object_get(entry, "ids"), ids, MAX_PROMPT);
    CHECK_EQ(read_ids(json_object_get(entry, "greedy"), ids + n, STEPS), STEPS);
    sl_session *session;
    sl_err err;
    CHECK_EQ(sl_session_open(&session, engine, &err), 0);
    CHECK_MSG(sl_session_feed(session, ids, n, NULL, &err) == 0, "%s", err.text);
    check_logits(prompt, sl_session_logits(session), expected, tolerance);
    for (int i = 0; decode && i < STEPS; i++) {
        const uint32_t id = argmax(sl_session_logits(session));
        CHECK_MSG(id == (uint32_t)ids[n + i], "\"%s\": token %d is %u, expected %d", prompt, i, id, ids[n + i]);
        if (id != (uint32_t)ids[n + i])
            break;
        CHECK_EQ(sl_session_feed(session, ids + n + i, 1, NULL, &err), 0);
    }
    sl_session_close(session);

    /* The same ids in one call: decode and prefill choose alike. */
    wanted = ids + n;
    prompt_length = (uint32_t)n;
    wrong_steps = 0;
    CHECK_EQ(sl_session_open(&session, engine, &err), 0);
    const sl_feed feed = { .on_logits = check_choice, .last = true };
    CHECK_EQ(sl_session_feed(session, ids, n + STEPS - 1, &feed, &err), 0);
    CHECK_MSG(wrong_steps == 0, "\"%s\": %u of %d greedy tokens differ", prompt, wrong_steps, STEPS);
    sl_session_close(session);
}

int main(void)
{
    const int quick = getenv("SL_QUICK") != NULL && *getenv("SL_QUICK"); /* slow build: fewer prompts, no decoding */
    const sl_options options = { .ram_bytes = 256u << 20, .context = MAX_PROMPT + STEPS, .all_logits = true };
    sl_engine *engine;
    sl_err err;
    if (sl_engine_open(&engine, MODEL, &options, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    vocab = sl_engine_vocab(engine);
    json_t *golden = json_load_file(EXPECTED "golden.json", 0, NULL);
    const json_t *prompts = json_object_get(golden, "prompts");
    const double tolerance = json_number_value(json_object_get(golden, "tolerance"));
    CHECK_EQ(json_array_size(prompts), PROMPTS);
    CHECK(tolerance > 0 && tolerance <= 1e-3);
    float *expected = malloc((size_t)PROMPTS * vocab * sizeof *expected);
    FILE *file = fopen(EXPECTED "logits.f32", "rb");
    CHECK(expected != NULL && file != NULL);
    if (expected == NULL || file == NULL)
        return 1;
    CHECK_EQ(fread(expected, sizeof *expected, (size_t)PROMPTS * vocab, file), (size_t)PROMPTS * vocab);
    fclose(file);
    for (size_t i = 0; i < PROMPTS; i += quick ? 7 : 1)
        test_prompt(engine, json_array_get(prompts, i), expected + i * vocab, tolerance, !quick);
    free(expected);
    json_decref(golden);
    sl_engine_close(engine);
    CHECK_DONE();
}
