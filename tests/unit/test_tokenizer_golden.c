/* Encodings and decodings of a small trained vocabulary, from an independent implementation, against the
 * tokenizer; streamed decoding at every split. */
#include <jansson.h>
#include <openssl/sha.h>

#include "base/num.h"
#include "sluice.h"
#include "tests/check.h"

#define DIR "tests/data/golden/tokenizer"

static sl_tokenizer *tok;

static json_t *load(const char *name)
{
    char path[200];
    json_error_t e;
    snprintf(path, sizeof path, DIR "/%s", name);
    json_t *j = json_load_file(path, JSON_ALLOW_NUL, &e);
    if (!j) {
        fprintf(stderr, "%s: %s\n", path, e.text);
        exit(1);
    }
    return j;
}

static void check_encode(const char *name, const json_t *text, const json_t *want, enum sl_special special)
{
    int32_t *ids;
    size_t n;
    sl_err err;
    if (!want)
        return;
    if (sl_tokenizer_encode(tok, json_string_value(text), json_string_length(text), special, &ids, &n, &err) < 0) {
        CHECK_MSG(0, "%s: %s", name, err.text);
        return;
    }
    CHECK_MSG(n == json_array_size(want), "%s: %zu ids, expected %zu", name, n, json_array_size(want));
    for (size_t i = 0; i < n && i < json_array_size(want); i++)
        if (ids[i] != json_integer_value(json_array_get(want, i))) {
            CHECK_MSG(0, "%s: id %zu is %d, expected %lld", name, i, ids[i],
                      (long long)json_integer_value(json_array_get(want, i)));
            break;
        }
    sl_free(ids);
}

static void test_encode(void)
{
    json_t *file = load("encode.json"), *c;
    size_t i, n = 0;
    json_array_foreach(json_object_get(file, "cases"), i, c) {
        const char *name = json_string_value(json_object_get(c, "name"));
        const json_t *text = json_object_get(c, "text");
        check_encode(name, text, json_object_get(c, "ids"), SL_SPECIAL_ALLOW);
        check_encode(name, text, json_object_get(c, "ids"), SL_SPECIAL_PLAIN);
        check_encode(name, text, json_object_get(c, "ids"), SL_SPECIAL_REFUSE);
        check_encode(name, text, json_object_get(c, "ids_special"), SL_SPECIAL_ALLOW);
        check_encode(name, text, json_object_get(c, "ids_plain"), SL_SPECIAL_PLAIN);
        if (json_object_get(c, "ids_special")) {
            int32_t *ids;
            size_t k;
            CHECK_EQ(sl_tokenizer_encode(tok, json_string_value(text), json_string_length(text), SL_SPECIAL_REFUSE,
                                         &ids, &k, NULL), SL_EUSAGE);
        }
        n++;
    }
    CHECK_EQ(n, 780);
    json_decref(file);
}

static void test_long_runs(void)
{
    json_t *file = load("long-runs.json"), *c, *part;
    size_t i, k;
    json_array_foreach(json_object_get(file, "cases"), i, c) {
        const char *name = json_string_value(json_object_get(c, "name"));
        char *text = malloc(1 << 20), hex[65];
        size_t len = 0, n;
        json_array_foreach(json_object_get(c, "parts"), k, part) {
            const json_t *s = json_array_get(part, 0);
            for (json_int_t r = json_integer_value(json_array_get(part, 1)); r > 0; r--) {
                memcpy(text + len, json_string_value(s), json_string_length(s));
                len += json_string_length(s);
            }
        }
        int32_t *ids;
        CHECK_EQ(sl_tokenizer_encode(tok, text, len, SL_SPECIAL_PLAIN, &ids, &n, NULL), 0);
        CHECK_MSG((json_int_t)n == json_integer_value(json_object_get(c, "count")), "%s: %zu ids", name, n);
        uint8_t *le = malloc(4 * n), digest[32];
        for (k = 0; k < n; k++)
            for (int b = 0; b < 4; b++)
                le[4 * k + (size_t)b] = (uint8_t)((uint32_t)ids[k] >> (8 * b));
        SHA256(le, 4 * n, digest);
        for (k = 0; k < 32; k++)
            snprintf(hex + 2 * k, 3, "%02x", digest[k]);
        CHECK_MSG(!strcmp(hex, json_string_value(json_object_get(c, "sha256_u32le"))), "%s: other ids", name);
        free(le);
        free(text);
        sl_free(ids);
    }
    CHECK_EQ(i, 9);
    json_decref(file);
}

/* Feeds bytes cut at `a` and `b`, checking the room that the header promises; returns bytes written. */
static size_t stream(const char *bytes, size_t n, size_t a, size_t b, char *out)
{
    const size_t cut[4] = { 0, a, b, n };
    sl_detok d = { 0 };
    size_t len = 0, k;
    for (int i = 0; i < 3; i++) {
        k = sl_detok_feed(&d, bytes + cut[i], cut[i + 1] - cut[i], out + len);
        CHECK(k <= SL_DETOK_MAX(cut[i + 1] - cut[i]));
        len += k;
    }
    k = sl_detok_flush(&d, out + len);
    CHECK(k <= 16);
    CHECK_EQ(sl_detok_flush(&d, out + len + k), 0);
    return len + k;
}

static void test_decode(void)
{
    json_t *file = load("decode.json"), *c;
    size_t i;
    json_array_foreach(json_object_get(file, "cases"), i, c) {
        const char *name = json_string_value(json_object_get(c, "name"));
        const char *hex = json_string_value(json_object_get(c, "bytes_hex"));
        const json_t *ids = json_object_get(c, "ids"), *text = json_object_get(c, "text");
        const size_t want = json_string_length(text), room = SL_DETOK_MAX(strlen(hex) / 2) + 3 * 16;
        char *bytes = malloc(strlen(hex) / 2 + 1), *out = malloc(room);
        size_t n = 0, len = 0;
        sl_detok d = { 0 };
        for (size_t k = 0; k < json_array_size(ids); k++) {
            size_t l = 0;
            const char *b = sl_tokenizer_bytes(tok, (int32_t)json_integer_value(json_array_get(ids, k)), &l);
            CHECK(b != NULL && n + l <= strlen(hex) / 2);
            memcpy(bytes + n, b, l);
            n += l;
            len += sl_detok_feed(&d, b, l, out + len);
        }
        len += sl_detok_flush(&d, out + len);
        CHECK_EQ(n, strlen(hex) / 2);
        for (size_t k = 0; k < n; k++) {
            unsigned v;
            CHECK(sscanf(hex + 2 * k, "%2x", &v) == 1 && v == (uint8_t)bytes[k]);
        }
        CHECK_MSG(len == want && !memcmp(out, json_string_value(text), want), "%s: other text", name);
        /* Every pair of splits where that is affordable, else every split. */
        for (size_t a = 0; a <= n; a++)
            for (size_t b = n <= 80 ? a : n; b <= n; b++) {
                len = stream(bytes, n, a, b, out);
                CHECK_MSG(len == want && !memcmp(out, json_string_value(text), want), "%s: split %zu %zu", name,
                          a, b);
            }
        free(bytes);
        free(out);
    }
    CHECK_EQ(i, 116);
    json_decref(file);
}

int main(void)
{
    sl_err err;
    if (sl_tokenizer_open(&tok, DIR, &err) < 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    CHECK_EQ(sl_tokenizer_size(tok), 4256);
    test_encode();
    test_long_runs();
    test_decode();
    sl_tokenizer_close(tok);
    CHECK_DONE();
}
