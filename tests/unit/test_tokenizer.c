/* The tokenizer's files, refused one defect at a time; special tokens; cuts; the edges of the interface. */
#include "sluice.h"
#include "tests/check.h"
#include "text/tokenizer.h"

/* A vocabulary in memory: the 256 single bytes, rank = byte, and a few merges. */
typedef struct {
    char text[1 << 14];
    size_t len;
} buffer;

static void put_token(buffer *b, const char *token, size_t n, long rank)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t v = 0;
        for (size_t k = 0; k < 3; k++)
            v = v << 8 | (i + k < n ? (uint8_t)token[i + k] : 0);
        for (size_t k = 0; k < 4; k++)
            b->text[b->len++] = i + k <= n ? digit[v >> (18 - 6 * k) & 63] : '=';
    }
    b->len += (size_t)sprintf(b->text + b->len, " %ld\n", rank);
}

static const char *const MERGES[] = { "ab", "abc", "bc", "  ", "hello" }; /* no merge leads to hello */
enum { N_MERGES = sizeof MERGES / sizeof *MERGES, RANKS = 256 + N_MERGES };

static void put_vocab(buffer *b)
{
    b->len = 0;
    for (int i = 0; i < 256; i++)
        put_token(b, &(char){ (char)i }, 1, i);
    for (int i = 0; i < N_MERGES; i++)
        put_token(b, MERGES[i], strlen(MERGES[i]), 256 + i);
    b->text[b->len] = 0;
}

static const char CONFIG[] = "{\"added_tokens_decoder\":{\"261\":{\"content\":\"[A]\",\"special\":true},"
                             "\"262\":{\"content\":\"[A]]\",\"special\":false},\"263\":{\"content\":\"\xc3\xa9!\"},\"516\":{\"content\":\"[PAD]\"}}}";

static int parse(sl_tokenizer **t, const buffer *b, const char *config, sl_err *err)
{
    return sl_tokenizer_parse(t, b->text, b->len, config, strlen(config), err);
}

static void refused(const buffer *b, const char *config, const char *message)
{
    sl_tokenizer *t = NULL;
    sl_err err = { 0 };
    const int rc = parse(&t, b, config, &err);
    CHECK_MSG(rc == SL_EFORMAT && err.code == rc, "%s: code %d", message, rc);
    CHECK_MSG(strstr(err.text, message) != NULL, "\"%s\", expected \"%s\"", err.text, message);
    sl_tokenizer_close(t);
    CHECK_EQ(parse(&t, b, config, NULL), rc);
}

/* Each row replaces the first `from` in a good vocabulary; an empty `from` appends. */
static const struct {
    const char *from, *to, *message;
} BAD_VOCAB[] = {
    { "YQ== 97\n", "YQ= 97\n", "line 98: token \"YQ=\", expected padded base64" },
    { "YQ== 97\n", "YR== 97\n", "line 98: token \"YR==\"" },
    { "YQ== 97\n", "Y=== 97\n", "line 98: token \"Y===\"" },
    { "YQ== 97\n", "==== 97\n", "line 98: token \"====\"" },
    { "YQ== 97\n", "Y\xff== 97\n", "line 98: token" },
    { "YWI= 256\n", "YW-_ 256\n", "line 257: token \"YW-_\"" },
    { "YWI= 256\n", "YQ==YQ== 256\n", "line 257: token" },
    { "YQ== 97\n", " 97\n", "line 98: token \"\", expected padded base64" },
    { "YQ== 97\n", "\n", "line 98: empty" },
    { "", "\n", "line 262: empty" },
    { "YQ== 97\n", "YQ==97\n", "line 98: no space" },
    { "YQ== 97\n", "YQ==\t97\n", "line 98: no space" },
    { "YQ== 97\n", "YQ==  97\n", "line 98: rank \" 97\"" },
    { "YQ== 97\n", "YQ== 97 \n", "line 98: rank \"97 \"" },
    { "YQ== 97\n", "YQ== \n", "line 98: rank \"\"" },
    { "YQ== 97\n", "YQ== 097\n", "line 98: rank \"097\"" },
    { "YQ== 97\n", "YQ== +97\n", "line 98: rank \"+97\"" },
    { "YQ== 97\n", "YQ== -1\n", "line 98: rank \"-1\", expected 0 to 260, one for each line" },
    { "YQ== 97\n", "YQ== 0x61\n", "line 98: rank \"0x61\"" },
    { "YQ== 97\n", "YQ== 98\n", "line 99: rank 98 a second time" },
    { "YQ== 97\n", "YQ== 261\n", "line 98: rank \"261\", expected 0 to 260" },
    { "YQ== 97\n", "YQ== 4294967393\n", "line 98: rank \"4294967393\"" },
    { "YQ== 97\n", "YQ== 18446744073709551713\n", "line 98: rank \"18446744073709551713\"" },
    { "YQ== 97\n", "Yg== 97\n", "line 99: rank 98 has the bytes of rank 97" },
    { "YQ== 97\n", "YWFh 97\n", "no token for the byte 0x61" },
    { "YQ== 97\n", "", "line 260: rank \"260\", expected 0 to 259" },
    { "YQ== 97\n", "YQ== 97\r\n", "line 98: ends in CR LF" },
    { "AA== 0\n", "\xef\xbb\xbf" "AA== 0\n", "line 1: token" },
};

static const struct {
    const char *config, *message;
} BAD_CONFIG[] = {
    { "", "tokenizer_config.json: line 1: " },
    { "{", "expected JSON" },
    { "{}{}", "end of file expected" },
    { "[]", "tokenizer_config.json: an array, expected an object" },
    { "{}", "added_tokens_decoder: nothing, expected an object" },
    { "{\"added_tokens_decoder\":[]}", "added_tokens_decoder: an array, expected an object" },
    { "{\"added_tokens_decoder\":null}", "added_tokens_decoder: null, expected an object" },
    { "{\"added_tokens_decoder\":{},\"added_tokens_decoder\":{}}", "duplicate" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":\"x\"},\"261\":{\"content\":\"y\"}}}", "duplicate" },
    { "{\"added_tokens_decoder\":{\"260\":{\"content\":\"x\"}}}", "id \"260\", expected 261 to 516" },
    { "{\"added_tokens_decoder\":{\"517\":{\"content\":\"x\"}}}", "id \"517\", expected 261 to 516" },
    { "{\"added_tokens_decoder\":{\"0261\":{\"content\":\"x\"}}}", "id \"0261\"" },
    { "{\"added_tokens_decoder\":{\"-1\":{\"content\":\"x\"}}}", "id \"-1\"" },
    { "{\"added_tokens_decoder\":{\"\":{\"content\":\"x\"}}}", "id \"\"" },
    { "{\"added_tokens_decoder\":{\"4294967557\":{\"content\":\"x\"}}}", "id \"4294967557\"" },
    { "{\"added_tokens_decoder\":{\"261\":\"x\"}}", "added_tokens_decoder.261: a string, expected an object" },
    { "{\"added_tokens_decoder\":{\"261\":{}}}", "added_tokens_decoder.261.content: nothing, expected a string" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":1}}}", "261.content: a number, expected a string" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":\"\"}}}", "261.content: 0 bytes, expected 1 to 128" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":\"x\",\"special\":\"yes\"}}}", "261.special: a string" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":\"x\\u0000y\"}}}", "expected JSON" },
    { "{\"added_tokens_decoder\":{\"261\":{\"content\":\"\xff\"}}}", "expected JSON" },
    { "{\"added_tokens_decoder\":{\"262\":{\"content\":\"x\"},\"300\":{\"content\":\"x\"}}}",
      "ids 262 and 300 are both \"x\"" },
    { "{\"added_tokens_decoder\":{\"300\":{\"content\":\"<|reserved_token_262|>\"}}}", "ids 262 and 300 are both" },
};

static void test_hostile(void)
{
    static buffer good, bad;
    put_vocab(&good);
    for (size_t i = 0; i < sizeof BAD_VOCAB / sizeof *BAD_VOCAB; i++) {
        const char *from = BAD_VOCAB[i].from, *to = BAD_VOCAB[i].to;
        const char *at = *from ? strstr(good.text, from) : good.text + good.len;
        const size_t head = (size_t)(at - good.text), cut = strlen(from), put = strlen(to);
        memcpy(bad.text, good.text, head);
        memcpy(bad.text + head, to, put);
        bad.len = good.len - cut + put;
        memcpy(bad.text + head + put, at + cut, bad.len - head - put);
        refused(&bad, CONFIG, BAD_VOCAB[i].message);
    }
    bad.len = 0;
    refused(&bad, CONFIG, "tiktoken.model: no token for the byte 0x00");
    for (size_t i = 0; i < sizeof BAD_CONFIG / sizeof *BAD_CONFIG; i++)
        refused(&good, BAD_CONFIG[i].config, BAD_CONFIG[i].message);

    /* A token and a name just within and just beyond their limits. */
    for (int over = 0; over < 2; over++) {
        static char big[SL_TOKEN_MAX + 1], config[400];
        sl_tokenizer *t = NULL;
        bad = good;
        memset(big, 'z', sizeof big);
        put_token(&bad, big, SL_TOKEN_MAX + (size_t)over, RANKS);
        snprintf(config, sizeof config, "{\"added_tokens_decoder\":{\"300\":{\"content\":\"%0*d\"}}}",
                 SL_SPECIAL_NAME_MAX + over, 0);
        if (over) {
            refused(&bad, "{\"added_tokens_decoder\":{}}", "token of 4097 bytes, at most 4096 expected");
            refused(&good, config, "300.content: 129 bytes");
        } else {
            CHECK_EQ(parse(&t, &bad, config, NULL), 0);
            CHECK_EQ(sl_tokenizer_rank(t, big, SL_TOKEN_MAX), RANKS);
            sl_tokenizer_close(t);
        }
    }
    /* Lines beyond the limit are refused before anything is allocated for them. */
    const size_t n = (size_t)SL_RANKS_MAX + 1;
    char *many = malloc(n);
    sl_err err;
    sl_tokenizer *t = NULL;
    memset(many, '\n', n);
    CHECK_EQ(sl_tokenizer_parse(&t, many, n, CONFIG, strlen(CONFIG), &err), SL_EFORMAT);
    CHECK_STR(err.text, "tiktoken.model: 1048577 lines, at most 1048576 expected");
    free(many);

    CHECK_EQ(sl_tokenizer_open(&t, "tests/data/absent", &err), SL_EFORMAT);
    CHECK(strstr(err.text, "tests/data/absent/tiktoken.model") != NULL);
    CHECK(t == NULL);
    sl_tokenizer_close(NULL);
}

/* Every prefix of the files is refused: a vocabulary cut between lines by the ids of the other file. */
static void test_truncated(void)
{
    static buffer good;
    put_vocab(&good);
    for (size_t n = 0; n < good.len; n += n < good.len - 200 ? 61 : 1) {
        char *copy = malloc(n ? n : 1);
        sl_tokenizer *t = NULL;
        memcpy(copy, good.text, n);
        const int rc = sl_tokenizer_parse(&t, copy, n, CONFIG, strlen(CONFIG), NULL);
        CHECK_MSG(rc == SL_EFORMAT || n == good.len - 1, "%zu bytes: %d", n, rc);
        sl_tokenizer_close(t);
        free(copy);
    }
    for (size_t n = 0; n < strlen(CONFIG); n++) {
        char *copy = malloc(n ? n : 1);
        sl_tokenizer *t = NULL;
        memcpy(copy, CONFIG, n);
        CHECK_EQ(sl_tokenizer_parse(&t, good.text, good.len, copy, n, NULL), SL_EFORMAT);
        free(copy);
    }
}

static void check_ids(const sl_tokenizer *t, const char *text, size_t len, enum sl_special special,
                      const int32_t *want, size_t n_want)
{
    int32_t *ids = NULL;
    size_t n = 0;
    CHECK_EQ(sl_tokenizer_encode(t, text, len, special, &ids, &n, NULL), 0);
    CHECK_MSG(n == n_want, "%s: %zu ids, expected %zu", text, n, n_want);
    for (size_t i = 0; i < n && i < n_want; i++)
        CHECK_MSG(ids[i] == want[i], "%s: id %zu is %d, expected %d", text, i, ids[i], want[i]);
    CHECK(ids != NULL);
    sl_free(ids);
}
#define IDS(text, special, ...)                                                                      \
    check_ids(t, text, sizeof text - 1, special, (const int32_t[]){ __VA_ARGS__ },                   \
              sizeof(const int32_t[]){ __VA_ARGS__ } / sizeof(int32_t))

static void test_encode(const sl_tokenizer *t)
{
    IDS("abc", SL_SPECIAL_PLAIN, 257);
    IDS("abcabc", SL_SPECIAL_PLAIN, 257, 257);
    IDS("xbcab", SL_SPECIAL_PLAIN, 'x', 258, 256);
    IDS("abbc", SL_SPECIAL_PLAIN, 256, 258);
    IDS("hello", SL_SPECIAL_PLAIN, 260);       /* whole piece */
    IDS("hellox", SL_SPECIAL_PLAIN, 'h', 'e', 'l', 'l', 'o', 'x'); /* not reached by merging */
    IDS("     x", SL_SPECIAL_PLAIN, 259, 259, ' ', 'x'); /* the last space belongs to x */
    IDS("a\0b", SL_SPECIAL_PLAIN, 'a', 0, 'b');
    check_ids(t, "", 0, SL_SPECIAL_REFUSE, NULL, 0);

    /* Leftmost, then longest; a name that is a prefix of another; names that are not ASCII. */
    IDS("[A]", SL_SPECIAL_ALLOW, 261);
    IDS("[A]]", SL_SPECIAL_ALLOW, 262);
    IDS("[A]]]", SL_SPECIAL_ALLOW, 262, ']');
    IDS("[[A]", SL_SPECIAL_ALLOW, '[', 261);
    IDS("[A", SL_SPECIAL_ALLOW, '[', 'A');
    IDS("[A][A]]x", SL_SPECIAL_ALLOW, 261, 262, 'x');
    IDS("\xc3\xa9!", SL_SPECIAL_ALLOW, 263);
    IDS("\xc3\xa9?", SL_SPECIAL_ALLOW, 0xc3, 0xa9, '?');
    IDS("<|reserved_token_264|><|reserved_token_515|>", SL_SPECIAL_ALLOW, 264, 515);
    IDS("<|reserved_token_261|>", SL_SPECIAL_ALLOW, '<', '|', 'r', 'e', 's', 'e', 'r', 'v', 'e', 'd', '_', 't',
        'o', 'k', 'e', 'n', '_', '2', '6', '1', '|', '>');
    IDS("[A]]", SL_SPECIAL_PLAIN, '[', 'A', ']', ']');
    IDS("[A", SL_SPECIAL_REFUSE, '[', 'A');

    int32_t *ids = NULL;
    size_t n;
    sl_err err;
    CHECK_EQ(sl_tokenizer_encode(t, "x [A]]", 6, SL_SPECIAL_REFUSE, &ids, &n, &err), SL_EUSAGE);
    CHECK_STR(err.text, "text: special token [A]] at offset 2, expected plain text");
    static const struct {
        const char *text;
        size_t len, at;
    } bad[] = { { "ab\x80", 3, 2 },        { "\xc3", 1, 0 },           { "\xc0\x80", 2, 0 },
                { "\xe0\x9f\xbf", 3, 0 },  { "x\xed\xa0\x80", 4, 1 },  { "\xf0\x8f\xbf\xbf", 4, 0 },
                { "\xf4\x90\x80\x80", 4, 0 }, { "\xf5\x80\x80\x80", 4, 0 }, { "\xe4\xb8\xad\xe4\xb8", 5, 3 } };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char want[80];
        snprintf(want, sizeof want, "at offset %zu, expected UTF-8", bad[i].at);
        CHECK_EQ(sl_tokenizer_encode(t, bad[i].text, bad[i].len, SL_SPECIAL_ALLOW, &ids, &n, &err), SL_EUSAGE);
        CHECK_MSG(strstr(err.text, want) != NULL, "%s, expected %s", err.text, want);
    }
    CHECK(ids == NULL);

    CHECK_EQ(sl_tokenizer_size(t), RANKS + 256);
    CHECK_EQ(sl_tokenizer_find_special(t, "[A]]"), 262);
    CHECK_EQ(sl_tokenizer_find_special(t, "[A"), -1);
    CHECK_EQ(sl_tokenizer_find_special(t, "[A]x"), -1);
    CHECK_EQ(sl_tokenizer_find_special(t, ""), -1);
    CHECK_EQ(sl_tokenizer_find_special(t, "<|reserved_token_400|>"), 400);
    CHECK(!sl_tokenizer_is_special(t, -1) && !sl_tokenizer_is_special(t, RANKS - 1));
    CHECK(sl_tokenizer_is_special(t, RANKS) && sl_tokenizer_is_special(t, RANKS + 255));
    CHECK(!sl_tokenizer_is_special(t, RANKS + 256));
    CHECK(sl_tokenizer_bytes(t, -1, &n) == NULL && sl_tokenizer_bytes(t, RANKS + 256, &n) == NULL);
    const char *b = sl_tokenizer_bytes(t, 257, &n);
    CHECK(n == 3 && memcmp(b, "abc", 3) == 0);
    b = sl_tokenizer_bytes(t, 262, &n);
    CHECK(n == 4 && memcmp(b, "[A]]", 4) == 0);
}

/* Cuts at 400,000 code points come before special tokens and the pattern: what they split is not found. */
static void test_cuts(const sl_tokenizer *t)
{
    enum { LEN = 400000 };
    char *text = malloc(LEN + 4);
    int32_t *ids;
    size_t n;
    for (size_t i = 0; i < LEN; i++)
        text[i] = i % 2 ? ' ' : 'x';
    memcpy(text + LEN - 2, "[A]abc", 6); /* one code point of the name after the cut */
    CHECK_EQ(sl_tokenizer_encode(t, text, LEN + 1, SL_SPECIAL_ALLOW, &ids, &n, NULL), 0);
    CHECK_EQ(n, LEN + 1);
    CHECK(ids[n - 3] == '[' && ids[n - 2] == 'A' && ids[n - 1] == ']');
    sl_free(ids);
    memcpy(text + LEN - 4, " [A]abc", 7);
    CHECK_EQ(sl_tokenizer_encode(t, text, LEN + 3, SL_SPECIAL_ALLOW, &ids, &n, NULL), 0);
    CHECK_EQ(n, LEN - 2);
    CHECK(ids[n - 3] == 259 && ids[n - 2] == 261 && ids[n - 1] == 257);
    sl_free(ids);
    memcpy(text + LEN - 2, "abc", 3); /* abc is cut into ab and c */
    CHECK_EQ(sl_tokenizer_encode(t, text, LEN + 1, SL_SPECIAL_ALLOW, &ids, &n, NULL), 0);
    CHECK(ids[n - 2] == 256 && ids[n - 1] == 'c');
    sl_free(ids);
    free(text);
}

int main(void)
{
    static buffer vocab;
    sl_tokenizer *t = NULL;
    sl_err err = { 0 };
    put_vocab(&vocab);
    CHECK_MSG(parse(&t, &vocab, CONFIG, &err) == 0, "%s", err.text);
    if (!t)
        return 1;
    test_encode(t);
    test_cuts(t);
    sl_tokenizer_close(t);
    vocab.len--; /* no final newline */
    CHECK_EQ(parse(&t, &vocab, CONFIG, NULL), 0);
    CHECK_EQ(sl_tokenizer_size(t), RANKS + 256);
    sl_tokenizer_close(t);
    test_hostile();
    test_truncated();
    CHECK_DONE();
}
