/* Stop strings: every split of a text gives what a search of the whole text gives. */
#include "gen/stop.h"
#include "tests/check.h"

/* The definition: the first place where some string ends; of those that end there, the longest. */
static size_t search(const char *text, const char *const *stops, size_t n, int *which)
{
    const size_t len = strlen(text);
    *which = -1;
    for (size_t end = 1; end <= len; end++) {
        size_t best = 0;
        for (size_t i = 0; i < n; i++) {
            const size_t k = strlen(stops[i]);
            if (k <= end && k > best && memcmp(text + end - k, stops[i], k) == 0) {
                best = k;
                *which = (int)i;
            }
        }
        if (best)
            return end - best;
    }
    return len;
}

static bool utf8_boundary(const char *text, size_t at) { return ((uint8_t)text[at] & 0xc0) != 0x80; }

/* Feeds text in pieces that end where `cut` has a bit, checking after each what is out so far. */
static void check_split(sl_stop *s, const char *text, uint32_t cut, size_t want, int which)
{
    const size_t len = strlen(text);
    char out[256];
    size_t n = 0, from = 0;
    bool stopped = false;
    sl_stop_reset(s);
    for (size_t at = 1; at <= len; at++) {
        if (at < len && !(cut >> at & 1))
            continue;
        char *piece = malloc(at - from); /* exact, so that a sanitizer sees a read beyond it */
        char *room = malloc(sl_stop_room(s, at - from) + 1);
        memcpy(piece, text + from, at - from);
        const size_t k = sl_stop_feed(s, piece, at - from, room, &stopped);
        CHECK(k <= sl_stop_room(s, at - from));
        memcpy(out + n, room, k);
        n += k;
        free(piece);
        free(room);
        CHECK_MSG(n <= want, "\"%s\" cut %x: %zu bytes out at %zu, at most %zu", text, cut, n, at, want);
        CHECK(utf8_boundary(text, n) || !utf8_boundary(text, at));
        from = at;
    }
    CHECK_EQ(stopped, which >= 0);
    CHECK_EQ(sl_stop_which(s), which);
    n += sl_stop_flush(s, out + n);
    CHECK_MSG(n == want && memcmp(out, text, n) == 0, "\"%s\" cut %x: %zu bytes, expected %zu", text, cut, n, want);
    CHECK_EQ(sl_stop_flush(s, out), 0);
}

static const struct {
    const char *text, *stops[4];
} CASES[] = {
    { "", { "x" } },
    { "nothing here", { NULL } },
    { "nothing here", { "xyz" } },
    { "ends in a part", { "partial" } },
    { "stop", { "stop" } },
    { "a stop b", { "stop" } },
    { "sstop", { "stop" } },
    { "ststop!", { "stop" } },
    { "aaaaab", { "aaab" } },
    { "abababac", { "ababac" } },
    { "aabaabaaab", { "aabaaab", "aaa" } },
    { "xabcd", { "abcd", "bc" } },      /* bc is complete first */
    { "xabcd", { "bcd", "abcd" } },     /* both end at d: the longer */
    { "xabc", { "abcx", "c" } },
    { "one\n\nUser: two", { "\nUser:", "\n\nSystem:" } },
    { "\n\n\nUser:", { "\n\nUser:" } },
    { "na\xc3\xafve caf\xc3\xa8s", { "caf\xc3\xa9", "\xc3\xa8" } },
    { "\xf0\x9f\x98\x80\xf0\x9f\x98\x81", { "\xf0\x9f\x98\x81" } },
    { "<|end<|end|>", { "<|end|>", "<|eos|>" } },
};

int main(void)
{
    for (size_t c = 0; c < sizeof CASES / sizeof *CASES; c++) {
        const char *text = CASES[c].text;
        const size_t len = strlen(text);
        size_t n = 0;
        while (n < 4 && CASES[c].stops[n])
            n++;
        int which;
        const size_t want = search(text, CASES[c].stops, n, &which);
        sl_stop *s = NULL;
        CHECK_EQ(sl_stop_open(&s, CASES[c].stops, n, NULL), 0);
        for (uint32_t cut = 0; cut < 1u << (len < 17 ? len : 17); cut++)
            check_split(s, text, cut, want, which);
        check_split(s, text, 0xffffffff, want, which);

        /* What follows a stop string never comes out. */
        char room[256];
        bool stopped;
        sl_stop_reset(s);
        sl_stop_feed(s, text, len, room, &stopped);
        if (which >= 0) {
            CHECK_EQ(sl_stop_feed(s, "more", 4, room, &stopped), 0);
            CHECK(stopped);
        }
        sl_stop_close(s);
    }

    /* Small alphabets have the most borders: random texts and strings, every split of two places. */
    uint32_t seed = 1;
    for (int round = 0; round < 3000; round++) {
        char text[25], word[3][7];
        const char *stops[3] = { word[0], word[1], word[2] };
        for (int i = 0; i < 24; i++)
            text[i] = (char)('a' + ((seed = seed * 1664525u + 1013904223u) >> 24) % 2);
        text[24] = 0;
        for (int k = 0; k < 3; k++) {
            const int w = 3 + k + round % 2;
            for (int i = 0; i < w; i++)
                word[k][i] = (char)('a' + ((seed = seed * 1664525u + 1013904223u) >> 24) % 2);
            word[k][w] = 0;
        }
        int which;
        const size_t n = 1 + (size_t)round % 3, want = search(text, stops, n, &which);
        sl_stop *s = NULL;
        CHECK_EQ(sl_stop_open(&s, stops, n, NULL), 0);
        for (uint32_t cut = 1; cut < 1u << 24; cut <<= 1)
            check_split(s, text, cut | cut << 5, want, which);
        sl_stop_close(s);
    }

    static char big[SL_STOP_BYTES_MAX + 2];
    const char *one[1] = { big }, *many[SL_STOP_STRINGS_MAX + 1];
    sl_stop *s = NULL;
    sl_err err;
    CHECK_EQ(sl_stop_open(&s, one, 1, &err), SL_EUSAGE);
    CHECK_STR(err.text, "stop: string 1 has 0 bytes, expected 1 to 4096");
    memset(big, 'x', SL_STOP_BYTES_MAX + 1);
    CHECK_EQ(sl_stop_open(&s, one, 1, &err), SL_EUSAGE);
    for (size_t i = 0; i <= SL_STOP_STRINGS_MAX; i++)
        many[i] = "x";
    CHECK_EQ(sl_stop_open(&s, many, SL_STOP_STRINGS_MAX + 1, &err), SL_EUSAGE);
    CHECK_EQ(sl_stop_open(&s, many, SL_STOP_STRINGS_MAX, &err), 0);
    sl_stop_close(s);
    sl_stop_close(NULL);
    CHECK_DONE();
}
