/* 5 MB of text that makes a backtracking splitter or a quadratic merge slow: a test that hangs has failed.
 * The ids must spell the text; their numbers are those of another implementation. */
#include "sluice.h"
#include "tests/check.h"

enum { BYTES = 5000000 };

static const struct {
    const char *name, *unit;
    size_t ids;
} CASES[] = {
    { "one letter", "a", 5000000 },
    { "two letters", "ab", 2500000 },
    { "spaces", " ", 1250000 },
    { "newlines", "\n", 1250000 },
    { "CR LF", "\r\n", 5000000 },
    { "punctuation", "!", 5000000 },
    { "upper case", "A", 5000000 },
    { "alternating case", "aA", 5000000 },
    { "marks", "\xcc\x81", 5000000 },
    { "marks and upper case", "A\xcc\x81", 4999998 },
    { "uncased and upper case", "\xd7\x90" "A", 3333332 },
    { "long lines of spaces", "                                                                \n", 1307645 },
    { "space-like control characters", "!\x1c", 5000000 },
    { "spaces and such controls", " \x1c", 5000000 },
    { "two spaces and a letter", "  x", 3333332 },
    { "digits", "1", 5000000 },
    { "Han", "\xe4\xb8\xad", 3333332 },
    { "emoji", "\xf0\x9f\x98\x80", 3750000 },
    { "beginnings of special names", "<|reserved_token_40", 2894771 },
};

int main(void)
{
    sl_tokenizer *t = NULL;
    sl_err err = { 0 };
    if (sl_tokenizer_open(&t, "tests/data/golden/tokenizer", &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    char *text = malloc(BYTES);
    for (size_t c = 0; c < sizeof CASES / sizeof *CASES; c++) {
        const size_t unit = strlen(CASES[c].unit);
        size_t len = 0, n = 0, at = 0;
        for (; len + unit <= BYTES; len += unit)
            memcpy(text + len, CASES[c].unit, unit);
        int32_t *ids = NULL;
        CHECK_EQ(sl_tokenizer_encode(t, text, len, SL_SPECIAL_ALLOW, &ids, &n, &err), 0);
        CHECK_MSG(n == CASES[c].ids, "%s: %zu ids, expected %zu", CASES[c].name, n, CASES[c].ids);
        for (size_t i = 0; i < n; i++) {
            size_t k = 0;
            const char *b = sl_tokenizer_bytes(t, ids[i], &k);
            if (!b || k > len - at || memcmp(b, text + at, k))
                break;
            at += k;
        }
        CHECK_MSG(at == len, "%s: the ids do not spell the text at byte %zu", CASES[c].name, at);
        sl_free(ids);
    }
    free(text);
    sl_tokenizer_close(t);
    CHECK_DONE();
}
