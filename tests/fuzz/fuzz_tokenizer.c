/* First byte: what the rest is. 0: a tiktoken.model. 1: a tokenizer_config.json. Others: text, to be encoded
 * in the mode that the byte selects, spelled by its ids and decoded in pieces. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/err.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static const char CONFIG[] = "{\"added_tokens_decoder\":{\"261\":{\"content\":\"[A]\"},\"262\":{\"content\":\"[A]]\"}}}";
/* Longer tokens, in base64: "ab", "abc", two spaces, e with acute, "hello". */
static const char *const MERGES[] = { "YWI=", "YWJj", "ICA=", "w6k=", "aGVsbG8=" };

static size_t make_vocab(char *out)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    size_t n = 0;
    for (int i = 0; i < 256; i++)
        n += (size_t)sprintf(out + n, "%c%c== %d\n", digit[i >> 2], digit[(i & 3) << 4], i);
    for (int i = 0; i < 5; i++)
        n += (size_t)sprintf(out + n, "%s %d\n", MERGES[i], 256 + i);
    return n;
}

/* The definition of a merge, quadratic. */
static void check_merge(const sl_tokenizer *t, const char *p, size_t n, const int32_t *ids, size_t n_ids)
{
    size_t cut[65], parts = n;
    for (size_t i = 0; i <= n; i++)
        cut[i] = i;
    for (;;) {
        int32_t best = INT32_MAX;
        size_t at = 0;
        for (size_t i = 0; i + 1 < parts; i++) {
            const int32_t r = sl_tokenizer_rank(t, p + cut[i], cut[i + 2] - cut[i]);
            if (r >= 0 && r < best) {
                best = r;
                at = i;
            }
        }
        if (best == INT32_MAX)
            break;
        memmove(cut + at + 1, cut + at + 2, (parts - at - 1) * sizeof *cut);
        parts--;
    }
    sl_assert(parts == n_ids);
    for (size_t i = 0; i < parts; i++)
        sl_assert(ids[i] == sl_tokenizer_rank(t, p + cut[i], cut[i + 1] - cut[i]));
}

static void check_text(const sl_tokenizer *t, enum sl_special special, const char *text, size_t len)
{
    int32_t *ids;
    size_t n, at = 0;
    sl_err err = { 0 };
    const int rc = sl_tokenizer_encode(t, text, len, special, &ids, &n, &err);
    if (rc < 0) {
        sl_assert(rc == SL_EUSAGE && err.code == rc && err.text[0]);
        sl_assert(special == SL_SPECIAL_REFUSE || sl_utf8_valid(text, len) < len);
        return;
    }
    char *out = malloc(SL_DETOK_MAX(len) + 16 * n + 16);
    size_t written = 0;
    sl_detok d = { 0 };
    for (size_t i = 0; i < n; i++) {
        size_t k = 0;
        const char *b = sl_tokenizer_bytes(t, ids[i], &k);
        sl_assert(b && k && k <= len - at && memcmp(b, text + at, k) == 0);
        sl_assert(special == SL_SPECIAL_ALLOW || !sl_tokenizer_is_special(t, ids[i]));
        at += k;
        const size_t w = sl_detok_feed(&d, b, k, out + written);
        sl_assert(w <= SL_DETOK_MAX(k) && sl_utf8_valid(out + written, w) == w);
        written += w;
    }
    sl_assert(at == len && sl_detok_flush(&d, out) == 0);
    sl_assert(written == len && (len == 0 || memcmp(out, text, len) == 0));
    /* Lower-case letters alone are one piece. */
    size_t letters = 0;
    while (letters < len && text[letters] >= 'a' && text[letters] <= 'z')
        letters++;
    if (letters == len && len > 0 && len <= 64 && sl_tokenizer_rank(t, text, len) < 0)
        check_merge(t, text, len, ids, n);
    free(out);
    sl_free(ids);
}

/* Any bytes: what comes out is UTF-8, however they are cut. */
static void check_detok(const char *bytes, size_t len)
{
    char *whole = malloc(SL_DETOK_MAX(len) + 16), *cut = malloc(SL_DETOK_MAX(len) + 32);
    sl_detok d = { 0 };
    size_t n = sl_detok_feed(&d, bytes, len, whole), k = 0;
    sl_assert(n <= SL_DETOK_MAX(len));
    n += sl_detok_flush(&d, whole + n);
    sl_assert(sl_utf8_valid(whole, n) == n);
    for (size_t i = 0; i < len; i++)
        k += sl_detok_feed(&d, bytes + i, 1, cut + k);
    k += sl_detok_flush(&d, cut + k);
    sl_assert(k == n && memcmp(whole, cut, n) == 0);
    free(whole);
    free(cut);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char vocab[8192];
    static size_t vocab_len;
    static sl_tokenizer *fixed;
    if (!fixed) {
        vocab_len = make_vocab(vocab);
        sl_assert(sl_tokenizer_parse(&fixed, vocab, vocab_len, CONFIG, sizeof CONFIG - 1, NULL) == 0);
    }
    if (size == 0)
        return 0;
    const char *text = (const char *)data + 1;
    const size_t len = size - 1;
    if (data[0] > 1) {
        check_text(fixed, (enum sl_special)(data[0] % 3), text, len);
        check_detok(text, len);
        return 0;
    }
    sl_tokenizer *t = NULL;
    sl_err err = { 0 };
    const int rc = data[0] == 0 ? sl_tokenizer_parse(&t, text, len, "{\"added_tokens_decoder\":{}}", 27, &err)
                                : sl_tokenizer_parse(&t, vocab, vocab_len, text, len, &err);
    sl_assert(rc == 0 || (rc == SL_EFORMAT && err.code == rc && err.text[0] && !t));
    if (rc == 0) {
        static const char sample[] = "abcab [A]] hello\xc3\xa9  <|reserved_token_300|>";
        for (int32_t id = 0; id < (int32_t)sl_tokenizer_size(t); id++) {
            size_t k = 0;
            sl_assert(sl_tokenizer_bytes(t, id, &k) && k > 0);
            if (!sl_tokenizer_is_special(t, id))
                sl_assert(sl_tokenizer_rank(t, sl_tokenizer_bytes(t, id, &k), k) == id);
        }
        check_text(t, SL_SPECIAL_ALLOW, sample, sizeof sample - 1);
    }
    sl_tokenizer_close(t);
    return 0;
}
