#include "text/tokenizer.h"

#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "base/file.h"
#include "base/num.h"

#define VOCAB "tiktoken.model"
#define CONFIG "tokenizer_config.json"

/* ---- look-up -------------------------------------------------------------------------------- */

static uint64_t mix(uint64_t a, uint64_t b)
{
    const unsigned __int128 m = (unsigned __int128)a * b;
    return (uint64_t)m ^ (uint64_t)(m >> 64);
}

static uint64_t hash(uint64_t seed, const char *p, size_t len)
{
    uint64_t h = seed ^ len;
    for (; len > 8; p += 8, len -= 8)
        h = mix(h ^ sl_le64(p), 0x9e3779b97f4a7c15u);
    uint64_t tail = 0;
    for (size_t i = 0; i < len; i++)
        tail |= (uint64_t)(uint8_t)p[i] << (8 * i);
    return mix(mix(h ^ tail, 0xbf58476d1ce4e5b9u) ^ seed, 0x94d049bb133111ebu);
}

/* The slot that holds these bytes, or the free one where they belong. */
static uint32_t *find_slot(const sl_tokenizer *t, const char *p, size_t len)
{
    const uint32_t mask = (1u << t->slot_bits) - 1;
    for (uint32_t i = (uint32_t)(hash(t->hash_seed, p, len) >> (64 - t->slot_bits));; i = (i + 1) & mask) {
        if (t->slots[i] == 0)
            return &t->slots[i];
        const sl_token tok = t->tokens[t->slots[i] - 1];
        if (tok.len == len && memcmp(t->bytes + tok.at, p, len) == 0)
            return &t->slots[i];
    }
}

int32_t sl_tokenizer_rank(const sl_tokenizer *t, const char *p, size_t len)
{
    return len <= t->longest ? (int32_t)*find_slot(t, p, len) - 1 : -1;
}

/* The first of sorted[lo .. hi) whose name has a byte >= c at `depth`. */
static int lower_bound(const sl_tokenizer *t, int lo, int hi, size_t depth, int c)
{
    while (lo < hi) {
        const int mid = lo + (hi - lo) / 2;
        if ((uint8_t)t->bytes[t->tokens[t->sorted[mid]].at + depth] < c)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

int32_t sl_tokenizer_match_special(const sl_tokenizer *t, const char *p, size_t avail, size_t *len)
{
    int32_t found = -1;
    int lo = 0, hi = SL_N_SPECIAL; /* names sorted[lo .. hi) begin with the first `depth` bytes of p */
    for (size_t depth = 0; lo < hi; depth++) {
        if (t->tokens[t->sorted[lo]].len == depth) {
            found = t->sorted[lo++];
            *len = depth;
        }
        if (depth == avail)
            break;
        lo = lower_bound(t, lo, hi, depth, (uint8_t)p[depth]);
        hi = lower_bound(t, lo, hi, depth, (uint8_t)p[depth] + 1);
    }
    return found;
}

size_t sl_tokenizer_size(const sl_tokenizer *t) { return (size_t)t->n_ranks + SL_N_SPECIAL; }

int32_t sl_tokenizer_find_special(const sl_tokenizer *t, const char *name)
{
    size_t len;
    const int32_t id = sl_tokenizer_match_special(t, name, strlen(name), &len);
    return id >= 0 && name[len] == 0 ? id : -1;
}

bool sl_tokenizer_is_special(const sl_tokenizer *t, int32_t id)
{
    return id >= (int64_t)t->n_ranks && id < (int64_t)sl_tokenizer_size(t);
}

const char *sl_tokenizer_bytes(const sl_tokenizer *t, int32_t id, size_t *len)
{
    if (id < 0 || (size_t)id >= sl_tokenizer_size(t))
        return NULL;
    *len = t->tokens[id].len;
    return t->bytes + t->tokens[id].at;
}

/* ---- tiktoken.model ------------------------------------------------------------------------- */

static int base64_value(char c)
{
    return c >= 'A' && c <= 'Z' ? c - 'A'
         : c >= 'a' && c <= 'z' ? c - 'a' + 26
         : c >= '0' && c <= '9' ? c - '0' + 52
         : c == '+' ? 62 : c == '/' ? 63 : -1;
}

/* Strict: padded, no stray bits. Writes at most n / 4 * 3 bytes; their number, or -1. */
static int64_t base64_decode(char *out, const char *p, size_t n)
{
    if (n == 0 || n % 4)
        return -1;
    const size_t pad = p[n - 1] != '=' ? 0 : p[n - 2] != '=' ? 1 : 2;
    size_t k = 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        const int v = i < n - pad ? base64_value(p[i]) : 0;
        if (v < 0)
            return -1;
        bits = bits << 6 | (uint32_t)v;
        if (i % 4 == 3) {
            out[k++] = (char)(bits >> 16 & 0xff);
            out[k++] = (char)(bits >> 8 & 0xff);
            out[k++] = (char)(bits & 0xff);
        }
    }
    if ((pad >= 1 && out[k - 1]) || (pad == 2 && out[k - 2]))
        return -1;
    return (int64_t)(k - pad);
}

/* A decimal number without sign, leading zero or other decoration, below 10^9; -1 for anything else. */
static int32_t parse_decimal(const char *p, size_t n)
{
    int32_t v = 0;
    if (n == 0 || n > 9 || (n > 1 && p[0] == '0'))
        return -1;
    for (size_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9')
            return -1;
        v = v * 10 + (p[i] - '0');
    }
    return v;
}

/* Takes one line into the vocabulary; *at is the end of the bytes so far. */
static int take_line(sl_tokenizer *t, const char *p, size_t n, unsigned line, uint32_t *at, sl_err *err)
{
    if (n && p[n - 1] == '\r')
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: ends in CR LF, expected LF alone", line);
    const char *space = memchr(p, ' ', n);
    if (!space)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: %s, expected base64, a space and a rank", line,
                       n ? "no space" : "empty");
    char *bytes = t->bytes + *at;
    const int64_t len = base64_decode(bytes, p, (size_t)(space - p));
    if (len <= 0)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: token \"%.*s\", expected padded base64", line,
                       space - p > 40 ? 40 : (int)(space - p), p);
    if (len > SL_TOKEN_MAX)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: token of %lld bytes, at most %d expected", line,
                       (long long)len, SL_TOKEN_MAX);
    const size_t digits = n - (size_t)(space + 1 - p);
    const int32_t rank = parse_decimal(space + 1, digits);
    if (rank < 0 || (uint32_t)rank >= t->n_ranks)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: rank \"%.*s\", expected 0 to %u, one for each line",
                       line, digits > 40 ? 40 : (int)digits, space + 1, t->n_ranks - 1);
    if (t->tokens[rank].len)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: rank %d a second time, expected each once", line, rank);
    uint32_t *slot = find_slot(t, bytes, (size_t)len);
    if (*slot)
        return sl_fail(err, SL_EFORMAT, VOCAB ": line %u: rank %d has the bytes of rank %u, expected new ones",
                       line, rank, *slot - 1);
    *slot = (uint32_t)rank + 1;
    t->tokens[rank] = (sl_token){ .at = *at, .len = (uint32_t)len };
    if (len == 1)
        t->byte_id[(uint8_t)bytes[0]] = rank;
    if (len > t->longest)
        t->longest = (uint32_t)len;
    *at += (uint32_t)len;
    return 0;
}

/* As many lines as ranks, each rank below that and none twice: no gaps without another check. */
static int parse_vocab(sl_tokenizer *t, const char *text, size_t len, uint32_t *names_at, sl_err *err)
{
    size_t lines = len && text[len - 1] != '\n';
    for (size_t i = 0; i < len; i++)
        lines += text[i] == '\n';
    if (lines > SL_RANKS_MAX)
        return sl_fail(err, SL_EFORMAT, VOCAB ": %zu lines, at most %d expected", lines, SL_RANKS_MAX);
    t->n_ranks = (uint32_t)lines;
    for (t->slot_bits = 10; (1u << t->slot_bits) < lines + lines / 2;)
        t->slot_bits++;
    const size_t tokens = sl_tokenizer_size(t) * sizeof *t->tokens, slots = sizeof *t->slots << t->slot_bits;
    char *block = calloc(1, tokens + slots + len / 4 * 3 + SL_N_SPECIAL * SL_SPECIAL_NAME_MAX);
    if (!block)
        return sl_fail(err, SL_EFAIL, VOCAB ": no memory for %zu tokens", lines);
    t->tokens = (sl_token *)block;
    t->slots = (uint32_t *)(block + tokens);
    t->bytes = block + tokens + slots;
    if (getrandom(&t->hash_seed, sizeof t->hash_seed, GRND_NONBLOCK) < 0)
        t->hash_seed = 0; /* early boot, old kernel */
    memset(t->byte_id, 0xff, sizeof t->byte_id);

    const char *p = text, *end = text + len;
    for (unsigned line = 1; p < end; line++) {
        const char *stop = memchr(p, '\n', (size_t)(end - p));
        if (!stop)
            stop = end;
        const int rc = take_line(t, p, (size_t)(stop - p), line, names_at, err);
        if (rc < 0)
            return rc;
        p = stop + 1;
    }
    for (int b = 0; b < 256; b++)
        if (t->byte_id[b] < 0)
            return sl_fail(err, SL_EFORMAT, VOCAB ": no token for the byte 0x%02x, expected all 256", b);
    return 0;
}

/* ---- tokenizer_config.json ------------------------------------------------------------------ */

static const char *type_name(const json_t *j)
{
    if (!j)
        return "nothing";
    switch (json_typeof(j)) {
    case JSON_OBJECT: return "an object";
    case JSON_ARRAY: return "an array";
    case JSON_STRING: return "a string";
    case JSON_INTEGER:
    case JSON_REAL: return "a number";
    case JSON_NULL: return "null";
    default: return "a boolean";
    }
}

/* Fills names [SL_N_SPECIAL] with the ones that are given, borrowed from `root`. */
static int read_names(const sl_tokenizer *t, json_t *root, const char **names, sl_err *err)
{
    json_t *added = json_object_get(root, "added_tokens_decoder"), *entry;
    if (!json_is_object(added))
        return sl_fail(err, SL_EFORMAT, CONFIG ": %s%s, expected an object",
                       json_is_object(root) ? "added_tokens_decoder: " : "",
                       type_name(json_is_object(root) ? added : root));
    const char *key;
    json_object_foreach(added, key, entry) {
        const int32_t id = parse_decimal(key, strlen(key));
        if (!sl_tokenizer_is_special(t, id))
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder: id \"%.40s\", expected %u to %u",
                           key, t->n_ranks, t->n_ranks + SL_N_SPECIAL - 1);
        const json_t *content = json_object_get(entry, "content"), *flag = json_object_get(entry, "special");
        if (!json_is_object(entry))
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder.%d: %s, expected an object", id,
                           type_name(entry));
        if (!json_is_string(content))
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder.%d.content: %s, expected a string",
                           id, type_name(content));
        if (flag && !json_is_boolean(flag))
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder.%d.special: %s, expected a boolean",
                           id, type_name(flag));
        const size_t len = json_string_length(content);
        if (len == 0 || len > SL_SPECIAL_NAME_MAX)
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder.%d.content: %zu bytes, expected "
                           "1 to %d", id, len, SL_SPECIAL_NAME_MAX);
        names[id - (int32_t)t->n_ranks] = json_string_value(content);
    }
    return 0;
}

/* Places the name of special token `id` at *at and the id into sorted[0 .. count). */
static int add_special(sl_tokenizer *t, int32_t id, const char *name, int count, uint32_t *at, sl_err *err)
{
    char reserved[SL_SPECIAL_NAME_MAX];
    if (!name) {
        snprintf(reserved, sizeof reserved, "<|reserved_token_%d|>", id);
        name = reserved;
    }
    const uint32_t len = (uint32_t)strlen(name);
    int i = count;
    for (; i > 0; i--) {
        const sl_token o = t->tokens[t->sorted[i - 1]];
        int order = memcmp(t->bytes + o.at, name, o.len < len ? o.len : len);
        if (order == 0)
            order = o.len < len ? -1 : o.len > len;
        if (order == 0)
            return sl_fail(err, SL_EFORMAT, CONFIG ": added_tokens_decoder: ids %d and %d are both \"%s\", "
                           "expected different names", t->sorted[i - 1], id, name);
        if (order < 0)
            break;
        t->sorted[i] = t->sorted[i - 1];
    }
    t->sorted[i] = id;
    t->tokens[id] = (sl_token){ .at = *at, .len = len };
    t->special_first[(uint8_t)name[0]] = true;
    memcpy(t->bytes + *at, name, len);
    *at += len;
    return 0;
}

static int parse_config(sl_tokenizer *t, const char *text, size_t len, uint32_t names_at, sl_err *err)
{
    json_error_t bad;
    json_t *root = json_loadb(text, len, JSON_REJECT_DUPLICATES, &bad);
    if (!root)
        return sl_fail(err, SL_EFORMAT, CONFIG ": line %d: %s, expected JSON", bad.line, bad.text);
    const char *names[SL_N_SPECIAL] = { 0 };
    int rc = read_names(t, root, names, err);
    for (int i = 0; i < SL_N_SPECIAL && rc == 0; i++)
        rc = add_special(t, (int32_t)t->n_ranks + i, names[i], i, &names_at, err);
    json_decref(root);
    return rc;
}

/* ---- open ----------------------------------------------------------------------------------- */

int sl_tokenizer_parse(sl_tokenizer **out, const char *vocab, size_t vocab_len, const char *config,
                       size_t config_len, sl_err *err)
{
    sl_tokenizer *t = calloc(1, sizeof *t);
    if (!t)
        return sl_fail(err, SL_EFAIL, "tokenizer: out of memory");
    uint32_t names_at = 0;
    int rc = parse_vocab(t, vocab, vocab_len, &names_at, err);
    if (rc == 0)
        rc = parse_config(t, config, config_len, names_at, err);
    if (rc == 0)
        rc = sl_tokenizer_compile(t, err);
    if (rc < 0) {
        sl_tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

int sl_tokenizer_open(sl_tokenizer **out, const char *dir, sl_err *err)
{
    char *vocab = NULL, *config = NULL;
    size_t vocab_len, config_len;
    int rc = sl_file_read(&vocab, &vocab_len, dir, VOCAB, SL_VOCAB_FILE_MAX, err);
    if (rc == 0)
        rc = sl_file_read(&config, &config_len, dir, CONFIG, SL_TOKCFG_FILE_MAX, err);
    if (rc == 0) {
        rc = sl_tokenizer_parse(out, vocab, vocab_len, config, config_len, err);
        if (rc < 0)
            sl_err_prefix(err, "%.200s", dir);
    }
    free(vocab);
    free(config);
    return rc;
}

void sl_tokenizer_close(sl_tokenizer *t)
{
    if (!t)
        return;
    pcre2_code_free(t->pattern);
    pcre2_match_context_free(t->limits);
    free(t->tokens);
    free(t);
}
