/* Text to ids: cut long runs, find special tokens, split by the pattern, merge bytes (spec 5.3 - 5.5).
 * Every step is linear in the text, the merge n log n in the piece. */
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

/* ---- the pattern ---------------------------------------------------------------------------- */

/* \s as the release has it, Unicode White_Space: PCRE2's \s would add U+180E. */
#define SPACE "\\t-\\r \\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
/* [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]] as one negated class: the general categories that are
 * not in it, and Han. A lookahead inside the repeat would cost a backtracking frame a character. */
#define UPPER "[^\\p{sc:Han}\\p{Ll}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}]"
#define LOWER "[^\\p{sc:Han}\\p{Lu}\\p{Lt}\\p{N}\\p{P}\\p{S}\\p{Z}\\p{C}]"
#define SUFFIX "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"

/* The order matters: the first alternative that matches wins. Each character is in some alternative. */
static const char PATTERN[] =
    "\\p{sc:Han}+"
    "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "*" LOWER "+" SUFFIX
    "|[^\\r\\n\\p{L}\\p{N}]?" UPPER "+" LOWER "*" SUFFIX
    "|\\p{N}{1,3}"
    "| ?[^" SPACE "\\p{L}\\p{N}]+[\\r\\n]*"
    "|[" SPACE "]*[\\r\\n]+"
    "|[" SPACE "]+(?![^" SPACE "])"
    "|[" SPACE "]+";

/* A match sees at most CUT_CHARS characters and backtracks over each at most once an alternative;
 * its repeats are of single characters, so that it needs a handful of frames. */
enum { MATCH_LIMIT = 20000000, DEPTH_LIMIT = 1000, HEAP_LIMIT_KIB = 4096 };

int sl_tokenizer_compile(sl_tokenizer *t, sl_err *err)
{
    int code;
    PCRE2_SIZE at;
    t->pattern = pcre2_compile((PCRE2_SPTR)PATTERN, sizeof PATTERN - 1, PCRE2_UTF | PCRE2_ANCHORED, &code, &at, NULL);
    if (!t->pattern) {
        char text[120] = "";
        pcre2_get_error_message(code, (PCRE2_UCHAR *)text, sizeof text);
        return sl_fail(err, SL_EFAIL, "tokenizer: PCRE2 10.40 or later with Unicode is needed: %s", text);
    }
    pcre2_jit_compile(t->pattern, PCRE2_JIT_COMPLETE); /* where that fails, matches are interpreted */
    t->limits = pcre2_match_context_create(NULL);
    if (!t->limits)
        return sl_fail(err, SL_EFAIL, "tokenizer: out of memory");
    pcre2_set_match_limit(t->limits, MATCH_LIMIT);
    pcre2_set_depth_limit(t->limits, DEPTH_LIMIT);
    pcre2_set_heap_limit(t->limits, HEAP_LIMIT_KIB);
    return 0;
}

/* ---- merging -------------------------------------------------------------------------------- */

/* A part of the piece being merged, at the index of its first byte. */
typedef struct {
    uint32_t next, prev;  /* first bytes of the neighbours; next of the last is the piece's length */
    int32_t id, pair;     /* rank of the part; rank of the part joined with the next, -1: none or merged away */
} part;

typedef struct {
    const sl_tokenizer *t;
    int32_t *ids;
    size_t n, cap;
    part *parts;          /* [n_parts] */
    uint64_t *heap;       /* [3 * n_parts] pair rank << 32 | index, smallest first; may hold stale pairs */
    size_t n_parts, n_heap;
    pcre2_match_data *match;
    sl_err *err;
} encoder;

static int push_id(encoder *e, int32_t id)
{
    if (e->n == e->cap) {
        const size_t cap = e->cap + e->cap / 2 + 64;
        int32_t *ids = cap > SIZE_MAX / sizeof *ids ? NULL : realloc(e->ids, cap * sizeof *ids);
        if (!ids)
            return sl_fail(e->err, SL_EFAIL, "tokenizer: no memory for %zu ids", cap);
        e->ids = ids;
        e->cap = cap;
    }
    e->ids[e->n++] = id;
    return 0;
}

static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    const uint64_t v = heap[i];
    for (size_t k; (k = 2 * i + 1) < n; i = k) {
        if (k + 1 < n && heap[k + 1] < heap[k])
            k++;
        if (v <= heap[k])
            break;
        heap[i] = heap[k];
    }
    heap[i] = v;
}

static void heap_push(encoder *e, uint64_t v)
{
    size_t i = e->n_heap++;
    for (; i > 0 && v < e->heap[(i - 1) / 2]; i = (i - 1) / 2)
        e->heap[i] = e->heap[(i - 1) / 2];
    e->heap[i] = v;
}

static uint64_t heap_pop(encoder *e)
{
    const uint64_t top = e->heap[0];
    e->heap[0] = e->heap[--e->n_heap];
    if (e->n_heap)
        sift_down(e->heap, e->n_heap, 0);
    return top;
}

static int reserve_parts(encoder *e, size_t n)
{
    if (n <= e->n_parts)
        return 0;
    n += n / 2 + 64;
    free(e->parts);
    free(e->heap);
    e->n_parts = 0;
    e->parts = malloc(n * sizeof *e->parts);
    e->heap = malloc(3 * n * sizeof *e->heap); /* n - 1 pairs at first, and two a merge */
    if (!e->parts || !e->heap)
        return sl_fail(e->err, SL_EFAIL, "tokenizer: no memory to merge %zu bytes", n);
    e->n_parts = n;
    return 0;
}

/* Sets the pair of the part at i and queues it. */
static void queue_pair(encoder *e, const char *p, uint32_t n, uint32_t i)
{
    part *parts = e->parts;
    const uint32_t next = parts[i].next;
    parts[i].pair = next < n ? sl_tokenizer_rank(e->t, p + i, parts[next].next - i) : -1;
    if (parts[i].pair >= 0)
        heap_push(e, (uint64_t)parts[i].pair << 32 | i);
}

/* The lowest rank first, the leftmost of equals; a pair is any two parts whose bytes are a rank. */
static int merge(encoder *e, const char *p, uint32_t n)
{
    const int rc = reserve_parts(e, n);
    if (rc < 0)
        return rc;
    part *parts = e->parts;
    for (uint32_t i = 0; i < n; i++)
        parts[i] = (part){ .next = i + 1, .prev = i - 1, .id = e->t->byte_id[(uint8_t)p[i]] };
    e->n_heap = 0;
    for (uint32_t i = 0; i < n; i++)
        queue_pair(e, p, n, i);
    while (e->n_heap) {
        const uint64_t top = heap_pop(e);
        const uint32_t i = (uint32_t)top;
        if (parts[i].pair != (int32_t)(top >> 32))
            continue;
        const uint32_t gone = parts[i].next, next = parts[gone].next;
        parts[i].id = parts[i].pair;
        parts[i].next = next;
        parts[gone].pair = -1;
        if (next < n)
            parts[next].prev = i;
        queue_pair(e, p, n, i);
        if (i > 0)
            queue_pair(e, p, n, parts[i].prev);
    }
    for (uint32_t i = 0; i < n; i = parts[i].next)
        if (push_id(e, parts[i].id) < 0)
            return SL_EFAIL;
    return 0;
}

/* ---- splitting ------------------------------------------------------------------------------ */

static int encode_plain(encoder *e, const char *p, size_t len)
{
    while (len) {
        int rc = pcre2_match(e->t->pattern, (PCRE2_SPTR)p, len, 0, PCRE2_NO_UTF_CHECK, e->match, e->t->limits);
        if (rc == PCRE2_ERROR_JIT_STACKLIMIT)
            rc = pcre2_match(e->t->pattern, (PCRE2_SPTR)p, len, 0, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, e->match,
                             e->t->limits);
        if (rc < 0)
            return sl_fail(e->err, SL_EFAIL, "tokenizer: PCRE2 cannot split the text: error %d", rc);
        const size_t n = pcre2_get_ovector_pointer(e->match)[1];
        sl_assert(n > 0 && n <= len);
        const int32_t id = sl_tokenizer_rank(e->t, p, n);
        rc = id >= 0 ? push_id(e, id) : merge(e, p, (uint32_t)n);
        if (rc < 0)
            return rc;
        p += n;
        len -= n;
    }
    return 0;
}

/* The offset of the first special name at or after `from`; len when there is none. */
static size_t find_special(const sl_tokenizer *t, const char *p, size_t len, size_t from, int32_t *id, size_t *id_len)
{
    for (; from < len; from++)
        if (t->special_first[(uint8_t)p[from]] &&
            (*id = sl_tokenizer_match_special(t, p + from, len - from, id_len)) >= 0)
            break;
    return from;
}

static int encode_special(encoder *e, const char *p, size_t len)
{
    for (size_t at = 0; at < len;) {
        int32_t id;
        size_t id_len = 0;
        const size_t found = find_special(e->t, p, len, at, &id, &id_len);
        int rc = encode_plain(e, p + at, found - at);
        if (rc == 0 && found < len)
            rc = push_id(e, id);
        if (rc < 0)
            return rc;
        at = found + id_len;
    }
    return 0;
}

/* ---- cutting -------------------------------------------------------------------------------- */

/* Python's str.isspace: White_Space and U+001C to U+001F. */
static bool is_space(uint32_t c)
{
    if (c < 0x80)
        return (c >= 9 && c <= 13) || (c >= 28 && c <= 32);
    return c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 ||
           c == 0x202f || c == 0x205f || c == 0x3000;
}

/* The release encodes long text in independent parts: none longer than CUT_CHARS code points, none with
 * a run of white space, or of anything else, above CUT_RUN. */
enum { CUT_CHARS = 400000, CUT_RUN = 25000 };

typedef struct {
    const char *text;
    size_t len, at;
    uint32_t chars, run; /* code points since the last cut at CUT_CHARS, and of one class up to `at` */
    bool space;
} cutter;

/* Moves c->at to the end of the next part. */
static void next_cut(cutter *c)
{
    const size_t begin = c->at;
    for (; c->at < c->len; c->at += sl_utf8_size((uint8_t)c->text[c->at])) {
        if (c->chars == CUT_CHARS) {
            c->chars = c->run = 0;
            if (c->at > begin)
                return;
        }
        const bool space = is_space(sl_utf8_code(c->text + c->at));
        if (space != c->space)
            c->run = 0;
        if (c->run == CUT_RUN) {
            c->run = 0;
            return;
        }
        c->space = space;
        c->run++;
        c->chars++;
    }
}

int sl_tokenizer_encode(const sl_tokenizer *t, const char *text, size_t len, enum sl_special special,
                        int32_t **ids, size_t *n, sl_err *err)
{
    const size_t bad = sl_utf8_valid(text, len);
    if (bad < len)
        return sl_fail(err, SL_EUSAGE, "text: byte 0x%02x at offset %zu, expected UTF-8", (uint8_t)text[bad], bad);
    if (special == SL_SPECIAL_REFUSE) {
        int32_t id;
        size_t id_len;
        const size_t at = find_special(t, text, len, 0, &id, &id_len);
        if (at < len)
            return sl_fail(err, SL_EUSAGE, "text: special token %.*s at offset %zu, expected plain text",
                           (int)id_len, text + at, at);
    }
    encoder e = { .t = t, .err = err, .match = pcre2_match_data_create(1, NULL) };
    int rc = e.match ? 0 : sl_fail(err, SL_EFAIL, "tokenizer: out of memory");
    cutter c = { .text = text, .len = len };
    while (rc == 0 && c.at < len) {
        const size_t begin = c.at;
        next_cut(&c);
        rc = special == SL_SPECIAL_ALLOW ? encode_special(&e, text + begin, c.at - begin)
                                         : encode_plain(&e, text + begin, c.at - begin);
    }
    if (rc == 0 && !e.ids)
        rc = (e.ids = malloc(sizeof *e.ids)) ? 0 : sl_fail(err, SL_EFAIL, "tokenizer: out of memory");
    pcre2_match_data_free(e.match);
    free(e.parts);
    free(e.heap);
    if (rc < 0) {
        free(e.ids);
        return rc;
    }
    *ids = e.ids;
    *n = e.n;
    return 0;
}
