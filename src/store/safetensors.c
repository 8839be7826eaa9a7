#include "store/safetensors.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "base/num.h"

enum { INDEX_BUFFER = 1 << 20, READ_AHEAD = 1 << 20, FILE_NAME_MAX = 255 };
static const uint64_t INDEX_MAX = 1u << 30; /* bytes of model.safetensors.index.json */

/* ---- a JSON reader for the two files that are too large for a document tree ------------------ */

/* Reads from a buffer that `fd` refills when it is >= 0. The first error sticks. */
typedef struct {
    char *buf;
    size_t pos, len, size;
    int fd;
    uint64_t base; /* offset of buf[0] in the text, for messages */
    const char *file;
    sl_err *err;
    int rc;
} json;

static int bad(json *j, const char *expected)
{
    if (j->rc < 0)
        return j->rc;
    return j->rc = sl_fail(j->err, SL_EFORMAT, "%s: JSON at byte %llu: expected %s", j->file,
                           (unsigned long long)(j->base + j->pos), expected);
}

static bool refill(json *j)
{
    if (j->fd < 0 || j->rc < 0)
        return false;
    ssize_t n;
    do
        n = read(j->fd, j->buf, j->size);
    while (n < 0 && errno == EINTR);
    if (n < 0)
        j->rc = sl_fail(j->err, SL_EIO, "%s: %s", j->file, strerror(errno));
    if (n <= 0)
        return false;
    j->base += j->len;
    j->pos = 0;
    j->len = (size_t)n;
    return true;
}

/* The next byte without taking it, or -1 at the end. */
static inline int peek(json *j)
{
    if (j->pos == j->len && !refill(j))
        return -1;
    return (unsigned char)j->buf[j->pos];
}

static inline int peek_token(json *j)
{
    int c;
    while ((c = peek(j)) == ' ' || c == '\n' || c == '\t' || c == '\r')
        j->pos++;
    return c;
}

static bool take(json *j, char c, const char *expected)
{
    if (peek_token(j) != (unsigned char)c) {
        bad(j, expected);
        return false;
    }
    j->pos++;
    return true;
}

/* Whether the list or object goes on: takes ',' (true) or `close` (false). `first`: nothing read yet. */
static bool more(json *j, char close, bool *first)
{
    const int c = peek_token(j);
    if (j->rc < 0)
        return false;
    if (c == (unsigned char)close) {
        j->pos++;
        return false;
    }
    if (*first) {
        *first = false;
        return true;
    }
    if (c != ',') {
        bad(j, close == '}' ? "',' or '}'" : "',' or ']'");
        return false;
    }
    j->pos++;
    return true;
}

static int hex4(json *j, unsigned *out)
{
    *out = 0;
    for (int i = 0; i < 4; i++) {
        const int c = peek(j);
        const int d = c >= '0' && c <= '9'   ? c - '0'
                      : c >= 'a' && c <= 'f' ? c - 'a' + 10
                      : c >= 'A' && c <= 'F' ? c - 'A' + 10
                                             : -1;
        if (d < 0)
            return bad(j, "four hexadecimal digits");
        *out = *out << 4 | (unsigned)d;
        j->pos++;
    }
    return 0;
}

static size_t put_utf8(char *p, unsigned c)
{
    if (c < 0x80) {
        p[0] = (char)c;
        return 1;
    }
    const unsigned n = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    for (unsigned i = n - 1; i > 0; i--, c >>= 6)
        p[i] = (char)(0x80 | (c & 0x3f));
    p[0] = (char)((0xf00u >> n) | c);
    return n;
}

/* An escape after its backslash; returns the bytes written (0 after an error). */
static size_t escape(json *j, char *p)
{
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    const int c = peek(j);
    j->pos += c >= 0;
    const char *k = c > 0 ? strchr(from, c) : NULL;
    if (k) {
        *p = to[k - from];
        return 1;
    }
    unsigned u, low;
    if (c != 'u') {
        bad(j, "an escape sequence");
        return 0;
    }
    if (hex4(j, &u) < 0)
        return 0;
    if (u >= 0xd800 && u < 0xdc00 && peek(j) == '\\') {
        j->pos++;
        if (peek(j) == 'u')
            j->pos++;
        if (hex4(j, &low) < 0)
            return 0;
        if (low >= 0xdc00 && low < 0xe000)
            u = 0x10000 + ((u - 0xd800) << 10) + (low - 0xdc00);
    }
    if (u == 0 || (u >= 0xd800 && u < 0xe000)) {
        bad(j, "a character other than NUL and lone surrogates");
        return 0;
    }
    return put_utf8(p, u);
}

/* Bytes of buf[pos..len) that stand for themselves in a string. */
static size_t plain_run(const json *j)
{
    size_t k = j->pos;
    for (; k < j->len; k++) {
        const unsigned char c = (unsigned char)j->buf[k];
        if (c < 0x20 || c == '"' || c == '\\')
            break;
    }
    return k - j->pos;
}

/* A string into out (room for max + 5), NUL-terminated; out NULL: skipped, any length. */
static int string(json *j, char *out, size_t max, size_t *len)
{
    char scratch[8] = { 0 };
    size_t n = 0;
    if (!take(j, '"', "a string"))
        return j->rc;
    for (;;) {
        const int c = peek(j);
        if (c < 0x20)
            return bad(j, c < 0 ? "the end of the string" : "no control character in a string");
        size_t k;
        if (c == '"') {
            j->pos++;
            break;
        }
        if (c == '\\') {
            j->pos++;
            if ((k = escape(j, out ? out + n : scratch)) == 0)
                return j->rc;
        } else {
            k = plain_run(j);
            if (out && k <= max - n)
                memcpy(out + n, j->buf + j->pos, k);
            j->pos += k;
        }
        if (out && k > max - n)
            return bad(j, "a shorter string");
        n += k;
    }
    if (out)
        out[n] = 0;
    if (len)
        *len = n;
    return 0;
}

static int number(json *j, uint64_t *out)
{
    int c = peek_token(j);
    uint64_t v = 0;
    if (c < '0' || c > '9')
        return bad(j, "an unsigned integer");
    const bool zero = c == '0';
    unsigned digits = 0;
    for (; (c = peek(j)) >= '0' && c <= '9'; j->pos++, digits++)
        if (!sl_mul_u64(v, 10, &v) || !sl_add_u64(v, (uint64_t)(c - '0'), &v))
            return bad(j, "a number below 2^64");
    if (c == '.' || c == 'e' || c == 'E' || (zero && digits > 1))
        return bad(j, "an unsigned integer");
    *out = v;
    return 0;
}

static int skip_value(json *j, unsigned depth)
{
    const int c = peek_token(j);
    if (c == '"')
        return string(j, NULL, 0, NULL);
    if (c == '{' || c == '[') {
        if (depth == 0)
            return bad(j, "less nesting");
        j->pos++;
        bool first = true;
        while (more(j, c == '{' ? '}' : ']', &first)) {
            if (c == '{' && (string(j, NULL, 0, NULL) < 0 || !take(j, ':', "':'")))
                return j->rc;
            if (skip_value(j, depth - 1) < 0)
                return j->rc;
        }
        return j->rc;
    }
    size_t n = 0; /* a number, true, false or null: nothing here depends on which */
    for (int k; (k = peek(j)) >= 0 && (strchr("+-.", k) || (k >= '0' && k <= '9') ||
                                       (k >= 'a' && k <= 'z') || k == 'E');
         n++)
        j->pos++;
    return n ? 0 : bad(j, "a value");
}

/* ---- the set of names, as 64-bit hashes ------------------------------------------------------- */

/* A collision of two different names would refuse a good model, with a chance of 10^-8 at half a
 * million names; it can never let a bad one pass. The key is chance, so that no file can be made whose
 * names collide and take forever. */
enum { NOT_SEEN = 0x8000 }; /* in `shard`: named by the index, not yet met in a shard */
typedef struct {
    uint64_t hash; /* 0: free */
    uint16_t shard;
} name_slot; /* together: half a million look-ups miss the cache once each, not twice */
typedef struct {
    name_slot *slot;
    size_t size, used; /* size: a power of two */
    uint64_t key;
} name_set;

static uint64_t hash_name(const name_set *set, const char *s, size_t n)
{
    uint64_t h = set->key ^ n;
    while (n) {
        uint64_t w = 0;
        const size_t k = n < 8 ? n : 8;
        memcpy(&w, s, k);
        h = (h ^ w) * 0xff51afd7ed558ccdu;
        h ^= h >> 29;
        s += k;
        n -= k;
    }
    h *= 0xc4ceb9fe1a85ec53u;
    h ^= h >> 32;
    return h ? h : 1;
}

static size_t find_slot(const name_set *s, uint64_t h)
{
    size_t i = (size_t)h & (s->size - 1);
    while (s->slot[i].hash && s->slot[i].hash != h)
        i = (i + 1) & (s->size - 1);
    return i;
}

static void clear_set(name_set *s)
{
    sl_mem_free(s->slot);
    *s = (name_set){ 0 };
}

static int grow_set(name_set *s)
{
    if (!s->size && getrandom(&s->key, sizeof s->key, 0) < 0)
        return SL_EFAIL;
    name_set bigger = { .size = s->size ? 2 * s->size : 1024, .used = s->used };
    bigger.slot = sl_mem_alloc(NULL, SL_MEM_INDEX, bigger.size * sizeof *bigger.slot); /* in large pages */
    if (!bigger.slot)
        return SL_EFAIL;
    for (size_t i = 0; i < s->size; i++)
        if (s->slot[i].hash)
            bigger.slot[find_slot(&bigger, s->slot[i].hash)] = s->slot[i];
    sl_mem_free(s->slot);
    s->slot = bigger.slot; /* one by one: clang's analyzer loses track of a struct copied whole */
    s->size = bigger.size;
    return 0;
}

/* The slot of a name, added with `shard` when new (*added). NULL: out of memory. */
static uint16_t *add_name(name_set *s, const char *name, size_t len, uint16_t shard, bool *added)
{
    if (2 * (s->used + 1) > s->size && grow_set(s) < 0)
        return NULL;
    const uint64_t h = hash_name(s, name, len);
    name_slot *slot = &s->slot[find_slot(s, h)];
    *added = slot->hash == 0;
    if (*added) {
        *slot = (name_slot){ h, shard };
        s->used++;
    }
    return &slot->shard;
}

/* ---- headers ---------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    sl_dtype dtype;
    unsigned bytes;
} dtypes[] = {
    { "BF16", SL_DTYPE_BF16, 2 },    { "F32", SL_DTYPE_F32, 4 },      { "U8", SL_DTYPE_U8, 1 },
    { "F16", SL_DTYPE_OTHER, 2 },    { "F64", SL_DTYPE_OTHER, 8 },    { "I8", SL_DTYPE_OTHER, 1 },
    { "I16", SL_DTYPE_OTHER, 2 },    { "I32", SL_DTYPE_OTHER, 4 },    { "I64", SL_DTYPE_OTHER, 8 },
    { "U16", SL_DTYPE_OTHER, 2 },    { "U32", SL_DTYPE_OTHER, 4 },    { "U64", SL_DTYPE_OTHER, 8 },
    { "BOOL", SL_DTYPE_OTHER, 1 },   { "F8_E4M3", SL_DTYPE_OTHER, 1 }, { "F8_E5M2", SL_DTYPE_OTHER, 1 },
    { "F8_E8M0", SL_DTYPE_OTHER, 1 },
};

const char *sl_dtype_name(sl_dtype d)
{
    return d == SL_DTYPE_BF16 ? "BF16" : d == SL_DTYPE_F32 ? "F32" : d == SL_DTYPE_U8 ? "U8" : "another dtype";
}

typedef struct {
    uint64_t begin, end; /* relative to the data */
} range;

typedef struct {
    json j;
    uint16_t shard;
    uint64_t data_begin, data_size;
    sl_tensor_fn *fn;
    void *user;
    name_set *names;
    bool indexed; /* names were filled from the index */
    range *ranges;
    size_t n, cap;
} header;

static int parse_shape(json *j, sl_tensor *t)
{
    bool first = true;
    if (!take(j, '[', "'[' of a shape"))
        return j->rc;
    while (more(j, ']', &first)) {
        if (t->n_dims == SL_ST_DIMS_MAX)
            return bad(j, "at most 8 dimensions");
        if (number(j, &t->dim[t->n_dims++]) < 0)
            return j->rc;
    }
    return j->rc;
}

/* {"dtype": .., "shape": [..], "data_offsets": [begin, end]} */
static int parse_entry(json *j, sl_tensor *t, unsigned *elem_bytes, range *r)
{
    char word[32];
    bool first = true;
    unsigned seen = 0;
    if (!take(j, '{', "'{' of a tensor"))
        return j->rc;
    while (more(j, '}', &first)) {
        if (string(j, word, 24, NULL) < 0 || !take(j, ':', "':'"))
            return j->rc;
        unsigned bit;
        if (strcmp(word, "dtype") == 0) {
            bit = 1;
            if (string(j, word, 24, NULL) < 0)
                return j->rc;
            size_t k = 0;
            while (k < sizeof dtypes / sizeof *dtypes && strcmp(dtypes[k].name, word) != 0)
                k++;
            if (k == sizeof dtypes / sizeof *dtypes)
                return j->rc = sl_fail(j->err, SL_EFORMAT, "%s: %s: dtype: found \"%s\", expected one of BF16, F32, U8",
                                       j->file, t->name, word);
            t->dtype = dtypes[k].dtype;
            *elem_bytes = dtypes[k].bytes;
        } else if (strcmp(word, "shape") == 0) {
            bit = 2;
            t->n_dims = 0;
            if (parse_shape(j, t) < 0)
                return j->rc;
        } else if (strcmp(word, "data_offsets") == 0) {
            bit = 4;
            if (!take(j, '[', "'[' of data_offsets") || number(j, &r->begin) < 0 || !take(j, ',', "','") ||
                number(j, &r->end) < 0 || !take(j, ']', "']' of data_offsets"))
                return j->rc;
        } else {
            return j->rc = sl_fail(j->err, SL_EFORMAT, "%s: %s: found key \"%s\", expected dtype, shape, data_offsets",
                                   j->file, t->name, word);
        }
        if (seen & bit)
            return j->rc = sl_fail(j->err, SL_EFORMAT, "%s: %s: a key occurs twice", j->file, t->name);
        seen |= bit;
    }
    if (j->rc == 0 && seen != 7)
        j->rc = sl_fail(j->err, SL_EFORMAT, "%s: %s: dtype, shape and data_offsets expected, one is missing",
                        j->file, t->name);
    return j->rc;
}

static int check_entry(const header *h, const sl_tensor *t, unsigned elem_bytes, const range *r)
{
    const char *file = h->j.file;
    if (r->begin > r->end)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: data_offsets: found [%llu, %llu], expected begin <= end",
                       file, t->name, (unsigned long long)r->begin, (unsigned long long)r->end);
    if (r->end > h->data_size)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: data_offsets end at %llu, but the file holds %llu bytes of data",
                       file, t->name, (unsigned long long)r->end, (unsigned long long)h->data_size);
    uint64_t bytes = elem_bytes;
    for (unsigned i = 0; i < t->n_dims; i++)
        if (!sl_mul_u64(bytes, t->dim[i], &bytes))
            return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: shape: the product overflows", file, t->name);
    if (bytes != r->end - r->begin)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: shape needs %llu bytes, data_offsets give %llu", file,
                       t->name, (unsigned long long)bytes, (unsigned long long)(r->end - r->begin));
    return 0;
}

static int note_name(header *h, const sl_tensor *t)
{
    bool added;
    uint16_t *slot = add_name(h->names, t->name, t->name_len, h->shard, &added);
    if (!slot)
        return sl_fail(h->j.err, SL_EFAIL, "%s: no memory for tensor names", h->j.file);
    if (h->indexed && added)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: not in model.safetensors.index.json", h->j.file, t->name);
    if (h->indexed && *slot == (h->shard | NOT_SEEN)) {
        *slot = h->shard;
        return 0;
    }
    if (h->indexed && *slot & NOT_SEEN)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: the index places this tensor in another shard", h->j.file,
                       t->name);
    if (!added)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: %s: the name occurs twice%s", h->j.file, t->name,
                       *slot == h->shard ? "" : ", first in another shard");
    return 0;
}

static int note_range(header *h, range r)
{
    if (h->n == h->cap) {
        const size_t cap = h->cap ? 2 * h->cap : 1024;
        range *p = realloc(h->ranges, cap * sizeof *p);
        if (!p)
            return sl_fail(h->j.err, SL_EFAIL, "%s: no memory for %zu tensors", h->j.file, cap);
        h->ranges = p;
        h->cap = cap;
    }
    h->ranges[h->n++] = r;
    return 0;
}

static int by_begin(const void *a, const void *b)
{
    const range *x = a, *y = b;
    if (x->begin != y->begin)
        return x->begin < y->begin ? -1 : 1;
    return x->end < y->end ? -1 : x->end > y->end;
}

/* The format: the ranges cover the data exactly, without holes or overlaps. */
static int check_ranges(header *h)
{
    bool sorted = true;
    for (size_t i = 1; i < h->n && sorted; i++)
        sorted = h->ranges[i - 1].begin <= h->ranges[i].begin;
    if (!sorted)
        qsort(h->ranges, h->n, sizeof *h->ranges, by_begin);
    uint64_t at = 0;
    for (size_t i = 0; i < h->n; at = h->ranges[i++].end)
        if (h->ranges[i].begin != at)
            return sl_fail(h->j.err, SL_EFORMAT, "%s: data_offsets: a tensor begins at %llu where %llu is expected (%s)",
                           h->j.file, (unsigned long long)h->ranges[i].begin, (unsigned long long)at,
                           h->ranges[i].begin < at ? "overlap" : "hole");
    if (at != h->data_size)
        return sl_fail(h->j.err, SL_EFORMAT, "%s: tensors end at %llu, the data at %llu", h->j.file,
                       (unsigned long long)at, (unsigned long long)h->data_size);
    return 0;
}

static int parse_metadata(header *h)
{
    json *j = &h->j;
    char key[SL_ST_NAME_MAX + 8];
    size_t len;
    bool first = true, added;
    name_set keys = { 0 };
    if (!take(j, '{', "'{' of __metadata__"))
        return j->rc;
    while (more(j, '}', &first)) {
        if (string(j, key, SL_ST_NAME_MAX, &len) < 0 || !take(j, ':', "':'") || string(j, NULL, 0, NULL) < 0)
            break;
        if (!add_name(&keys, key, len, 0, &added) || !added) {
            j->rc = sl_fail(j->err, SL_EFORMAT, "%s: __metadata__: %s occurs twice", j->file, key);
            break;
        }
    }
    clear_set(&keys);
    return j->rc;
}

static int parse_header(header *h)
{
    json *j = &h->j;
    char name[SL_ST_NAME_MAX + 8];
    bool first = true, metadata = false;
    if (!take(j, '{', "'{' of the header"))
        return j->rc;
    while (more(j, '}', &first)) {
        sl_tensor t = { .name = name, .shard = h->shard };
        range r = { 0, 0 };
        unsigned elem_bytes = 0;
        if (string(j, name, SL_ST_NAME_MAX, &t.name_len) < 0 || !take(j, ':', "':'"))
            return j->rc;
        if (strcmp(name, "__metadata__") == 0) {
            if (metadata)
                return sl_fail(j->err, SL_EFORMAT, "%s: __metadata__ occurs twice", j->file);
            metadata = true;
            if (parse_metadata(h) < 0)
                return j->rc;
            continue;
        }
        if (h->n == SL_ST_TENSORS_MAX)
            return bad(j, "fewer tensors");
        int rc = parse_entry(j, &t, &elem_bytes, &r);
        if (rc < 0 || (rc = check_entry(h, &t, elem_bytes, &r)) < 0 || (rc = note_name(h, &t)) < 0 ||
            (rc = note_range(h, r)) < 0)
            return rc;
        t.offset = h->data_begin + r.begin;
        t.bytes = r.end - r.begin;
        if ((rc = h->fn(h->user, &t, j->err)) < 0)
            return rc;
    }
    if (j->rc == 0 && peek_token(j) >= 0)
        bad(j, "the end of the header");
    return j->rc < 0 ? j->rc : check_ranges(h);
}

int sl_st_parse(char *text, size_t len, const char *file, uint16_t shard, uint64_t data_begin,
                uint64_t data_size, sl_tensor_fn *fn, void *user, sl_err *err)
{
    name_set names = { 0 };
    header h = { .j = { .buf = text, .len = len, .fd = -1, .file = file, .err = err },
                 .shard = shard, .data_begin = data_begin, .data_size = data_size,
                 .fn = fn, .user = user, .names = &names };
    const int rc = parse_header(&h);
    free(h.ranges);
    clear_set(&names);
    return rc;
}

/* ---- shards ----------------------------------------------------------------------------------- */

typedef struct {
    sl_shards *s;
    const char *dir;
    size_t cap;
    name_set names;
    bool indexed, partial; /* partial: a shard is absent */
    sl_err *err;
} opener;

static int add_shard(opener *o, const char *name)
{
    sl_shards *s = o->s;
    if (s->n == SL_ST_SHARDS_MAX)
        return sl_fail(o->err, SL_EFORMAT, "%s: more than %d shards", o->dir, SL_ST_SHARDS_MAX);
    if (s->n == o->cap) {
        const size_t cap = o->cap ? 2 * o->cap : 128;
        char **names = realloc(s->name, cap * sizeof *names);
        if (!names)
            return sl_fail(o->err, SL_EFAIL, "%s: no memory", o->dir);
        s->name = names;
        o->cap = cap;
    }
    if (!(s->name[s->n] = strdup(name)))
        return sl_fail(o->err, SL_EFAIL, "%s: no memory", o->dir);
    s->n++;
    return 0;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static int list_shards(opener *o)
{
    static const char suffix[] = ".safetensors";
    DIR *d = opendir(o->dir);
    if (!d)
        return sl_fail(o->err, SL_EFORMAT, "%s: %s", o->dir, strerror(errno));
    int rc = 0;
    struct dirent *e;
    while (rc == 0 && (e = readdir(d))) {
        const size_t n = strlen(e->d_name);
        if (n > sizeof suffix - 1 && strcmp(e->d_name + n - (sizeof suffix - 1), suffix) == 0)
            rc = add_shard(o, e->d_name);
    }
    closedir(d);
    if (rc == 0 && o->s->n == 0)
        rc = sl_fail(o->err, SL_EFORMAT, "%s: no *.safetensors file", o->dir);
    if (rc == 0)
        qsort(o->s->name, o->s->n, sizeof *o->s->name, by_name);
    return rc;
}

/* The shard's number; the index repeats one name thousands of times, so the last one is tried first. */
static int shard_number(opener *o, json *j, const char *name, uint16_t *last)
{
    sl_shards *s = o->s;
    if (*last < s->n && strcmp(s->name[*last], name) == 0)
        return 0;
    for (*last = 0; *last < s->n; ++*last)
        if (strcmp(s->name[*last], name) == 0)
            return 0;
    bool plain = *name && *name != '.'; /* printable, and never a path */
    for (const char *p = name; *p; p++)
        plain &= *p > ' ' && *p <= '~' && *p != '/';
    if (!plain)
        return j->rc = sl_fail(o->err, SL_EFORMAT, "%s: found shard name \"%s\", expected a plain file name", j->file, name);
    return j->rc = add_shard(o, name);
}

typedef int index_fn(opener *o, json *j, const char *name, size_t len, uint16_t shard);

static int walk_weight_map(opener *o, json *j, index_fn *fn)
{
    char name[SL_ST_NAME_MAX + 8] = "", file[FILE_NAME_MAX + 8] = "";
    size_t len = 0;
    uint16_t shard = 0;
    bool first = true;
    if (!take(j, '{', "'{' of weight_map"))
        return j->rc;
    while (more(j, '}', &first))
        if (string(j, name, SL_ST_NAME_MAX, &len) < 0 || !take(j, ':', "':'") ||
            string(j, file, FILE_NAME_MAX, NULL) < 0 || shard_number(o, j, file, &shard) < 0 ||
            (j->rc = fn(o, j, name, len, shard)) < 0)
            break;
    return j->rc;
}

static int walk_index(opener *o, int fd, const char *path, index_fn *fn)
{
    char key[32];
    bool first = true, map = false;
    json j = { .size = INDEX_BUFFER, .fd = fd, .file = path, .err = o->err };
    if (lseek(fd, 0, SEEK_SET) < 0 || !(j.buf = malloc(j.size)))
        return sl_fail(o->err, SL_EFAIL, "%s: %s", path, strerror(errno));
    posix_fadvise(fd, 0, 0, POSIX_FADV_SEQUENTIAL);
    if (take(&j, '{', "'{'"))
        while (more(&j, '}', &first)) {
            if (string(&j, key, 24, NULL) < 0 || !take(&j, ':', "':'"))
                break;
            if (strcmp(key, "weight_map") != 0)
                skip_value(&j, SL_ST_DEPTH_MAX);
            else if (map)
                bad(&j, "one weight_map");
            else
                walk_weight_map(o, &j, fn);
            map |= strcmp(key, "weight_map") == 0;
            if (j.rc < 0)
                break;
        }
    if (j.rc == 0 && peek_token(&j) >= 0)
        bad(&j, "the end of the file");
    if (j.rc == 0 && !map)
        bad(&j, "a weight_map");
    free(j.buf);
    return j.rc;
}

static int note_indexed(opener *o, json *j, const char *name, size_t len, uint16_t shard)
{
    bool added;
    if (!add_name(&o->names, name, len, shard | NOT_SEEN, &added))
        return sl_fail(o->err, SL_EFAIL, "%s: no memory for tensor names", j->file);
    return added ? 0 : sl_fail(o->err, SL_EFORMAT, "%s: weight_map: %s occurs twice", j->file, name);
}

static int find_absent(opener *o, json *j, const char *name, size_t len, uint16_t shard)
{
    if (!(o->names.slot[find_slot(&o->names, hash_name(&o->names, name, len))].shard & NOT_SEEN))
        return 0;
    return sl_fail(o->err, SL_EFORMAT, "%s: weight_map: %s is not in %s", j->file, name, o->s->name[shard]);
}

/* Has the next header read from the drive while this one is parsed. */
static void read_ahead(const opener *o, uint16_t shard)
{
    char path[4096];
    if (shard >= o->s->n || sl_path_join(path, sizeof path, o->dir, o->s->name[shard], NULL) < 0)
        return;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return;
    posix_fadvise(fd, 0, READ_AHEAD, POSIX_FADV_WILLNEED);
    close(fd);
}

static int read_shard(opener *o, uint16_t shard, unsigned flags, sl_tensor_fn *fn, void *user)
{
    char path[4096];
    unsigned char length[8];
    sl_io_file *f = &o->s->file[shard];
    int rc = sl_path_join(path, sizeof path, o->dir, o->s->name[shard], o->err);
    if (rc < 0)
        return rc;
    if (flags & SL_SHARDS_PARTIAL && access(path, F_OK) < 0 && errno == ENOENT) {
        o->partial = true;
        return 0;
    }
    if ((rc = sl_io_file_open(f, path, flags & SL_SHARDS_DIRECT, o->err)) < 0)
        return rc;
    const int fd = open(path, O_RDONLY | O_CLOEXEC); /* buffered: headers are small and unaligned */
    if (fd < 0)
        return sl_fail(o->err, SL_EIO, "%s: %s", path, strerror(errno));
    char *text = NULL;
    uint64_t n = 0;
    if (f->size < 8)
        rc = sl_fail(o->err, SL_EFORMAT, "%s: %llu bytes, too short for a header", path, (unsigned long long)f->size);
    else if ((rc = sl_pread_all(fd, length, 8, 0)) < 0)
        rc = sl_fail(o->err, SL_EIO, "%s: header: %s", path, strerror(-rc));
    else if ((n = sl_le64(length)) < 2 || n > SL_ST_HEADER_MAX || n > f->size - 8)
        rc = sl_fail(o->err, SL_EFORMAT, "%s: header length: found %llu, expected 2 to %llu", path,
                     (unsigned long long)n, (unsigned long long)sl_min_u64(SL_ST_HEADER_MAX, f->size - 8));
    else if (!(text = malloc(n)))
        rc = sl_fail(o->err, SL_EFAIL, "%s: no memory for a header of %llu bytes", path, (unsigned long long)n);
    else if ((rc = sl_pread_all(fd, text, n, 8)) < 0)
        rc = sl_fail(o->err, SL_EIO, "%s: header: %s", path, strerror(-rc));
    if (rc == 0) {
        header h = { .j = { .buf = text, .len = n, .fd = -1, .file = path, .err = o->err },
                     .shard = shard, .data_begin = 8 + n, .data_size = f->size - 8 - n,
                     .fn = fn, .user = user, .names = &o->names, .indexed = o->indexed };
        rc = parse_header(&h);
        free(h.ranges);
        o->s->tensors += h.n;
        o->s->header_bytes += n;
    }
    free(text);
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED); /* weights bypass the page cache; so should headers */
    close(fd);
    return rc;
}

int sl_shards_open(sl_shards *out, const char *dir, unsigned flags, sl_tensor_fn *fn, void *user, sl_err *err)
{
    char path[4096];
    *out = (sl_shards){ 0 };
    opener o = { .s = out, .dir = dir, .err = err };
    int rc = sl_path_join(path, sizeof path, dir, "model.safetensors.index.json", err);
    if (rc < 0)
        return rc;
    const int index = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat st;
    if (index < 0 && errno != ENOENT)
        rc = sl_fail(err, SL_EFORMAT, "%s: %s", path, strerror(errno));
    else if (index >= 0 && (fstat(index, &st) < 0 || !S_ISREG(st.st_mode) || (uint64_t)st.st_size > INDEX_MAX))
        rc = sl_fail(err, SL_EFORMAT, "%s: expected a regular file of at most %llu bytes", path,
                     (unsigned long long)INDEX_MAX);
    else if ((o.indexed = index >= 0))
        rc = walk_index(&o, index, path, note_indexed);
    else
        rc = list_shards(&o);
    if (rc == 0 && out->n == 0)
        rc = sl_fail(err, SL_EFORMAT, "%s: weight_map: names no shard", path);
    if (rc == 0 && !(out->file = calloc(out->n, sizeof *out->file)))
        rc = sl_fail(err, SL_EFAIL, "%s: no memory", dir);
    for (uint16_t i = 0; out->file && i < out->n; i++)
        out->file[i].fd = -1;
    for (uint16_t i = 0; rc == 0 && i < out->n; i++) {
        read_ahead(&o, (uint16_t)(i + 1));
        rc = read_shard(&o, i, flags, fn, user);
    }
    if (rc == 0 && o.indexed && !o.partial && out->tensors != o.names.used)
        rc = walk_index(&o, index, path, find_absent);
    if (index >= 0) {
        posix_fadvise(index, 0, 0, POSIX_FADV_DONTNEED);
        close(index);
    }
    clear_set(&o.names);
    if (rc < 0)
        sl_shards_close(out);
    return rc;
}

void sl_shards_close(sl_shards *s)
{
    for (uint16_t i = 0; i < s->n; i++) {
        if (s->file)
            sl_io_file_close(&s->file[i]);
        free(s->name[i]);
    }
    free(s->file);
    free(s->name);
    *s = (sl_shards){ 0 };
}
