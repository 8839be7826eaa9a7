/* Headers and indexes, good and hostile: what is accepted is exact, what is refused names the cause. */
#include "tests/check.h"
#include "tests/unit/model_dir.h"

#include "store/safetensors.h"

typedef struct {
    unsigned n;
    uint64_t offset, bytes, dim0;
    char name[SL_ST_NAME_MAX + 1];
    sl_dtype dtype;
    unsigned stop_after; /* the callback fails at this tensor, 0: never */
} seen;

static int note(void *user, const sl_tensor *t, sl_err *err)
{
    seen *s = user;
    CHECK_EQ(t->name_len, strlen(t->name));
    snprintf(s->name, sizeof s->name, "%s", t->name);
    s->offset = t->offset;
    s->bytes = t->bytes;
    s->dim0 = t->n_dims ? t->dim[0] : 0;
    s->dtype = t->dtype;
    return ++s->n == s->stop_after ? sl_fail(err, SL_EFAIL, "stopped") : 0;
}

static int parse(const char *header, uint64_t data, seen *s, sl_err *err)
{
    const size_t n = strlen(header);
    char *text = malloc(n ? n : 1); /* no NUL at its end, so that a read beyond it shows */
    memcpy(text, header, n);
    *err = (sl_err){ 0 };
    const int rc = sl_st_parse(text, n, "FILE", 3, 1000, data, note, s, err);
    free(text);
    return rc;
}

#define T(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

static void test_good(void)
{
    static const struct {
        const char *header;
        uint64_t data;
        unsigned n;
    } good[] = {
        { "{}", 0, 0 },
        { " { } \n", 0, 0 },
        { "{\"__metadata__\":{\"format\":\"pt\",\"x\":\"\"}}", 0, 0 },
        { "{" T("a", "F32", "2,3", 0, 24) "}    ", 24, 1 },
        { "{" T("a", "BF16", "2", 4, 8) "," T("b", "U8", "4", 0, 4) "}", 8, 2 },       /* out of order */
        { "{" T("a", "U8", "0,5", 0, 0) "," T("b", "U8", "", 0, 1) "}", 1, 2 },        /* empty; scalar */
        { "{" T("z", "U8", "0", 2, 2) "," T("b", "U8", "2", 0, 2) "," T("y", "U8", "0", 0, 0) "}", 2, 3 },
        { "{\"a\":{\"data_offsets\":[0,1],\"shape\":[1],\"dtype\":\"BOOL\"}}", 1, 1 }, /* any order of keys */
        { "{" T("a", "F8_E4M3", "1,1,1,1,1,1,1,1", 0, 1) "}", 1, 1 },
        { "{" T("a\\u00e9\\ud83d\\ude00\\n\\\"", "I64", "1", 0, 8) "}", 8, 1 },
    };
    sl_err err;
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        seen s = { 0 };
        const int rc = parse(good[i].header, good[i].data, &s, &err);
        CHECK_MSG(rc == 0, "%s: %s", good[i].header, err.text);
        CHECK_EQ(s.n, good[i].n);
    }
    seen s = { 0 };
    parse(good[3].header, 24, &s, &err);
    CHECK_EQ(s.offset, 1000);
    CHECK_EQ(s.bytes, 24);
    CHECK_EQ(s.dim0, 2);
    CHECK_EQ(s.dtype, SL_DTYPE_F32);
    parse(good[9].header, 8, &s, &err);
    CHECK_STR(s.name, "a\xc3\xa9\xf0\x9f\x98\x80\n\"");
    CHECK_EQ(s.dtype, SL_DTYPE_OTHER);
    s = (seen){ .stop_after = 1 };
    CHECK_EQ(parse(good[4].header, 8, &s, &err), SL_EFAIL);
    CHECK_STR(err.text, "stopped");
}

static void refused(const char *header, uint64_t data, const char *says)
{
    sl_err err;
    seen s = { 0 };
    const int rc = parse(header, data, &s, &err);
    CHECK_MSG(rc == SL_EFORMAT && err.code == rc, "code %d: %.200s", rc, header);
    CHECK_MSG(strncmp(err.text, "FILE: ", 6) == 0 && strstr(err.text, says), "\"%s\" lacks \"%s\": %.200s", err.text, says,
              header);
    CHECK_MSG(!strpbrk(err.text, "\n\r\t\033"), "more than one line: %s", err.text);
}

static void test_hostile(void)
{
    static const struct {
        const char *header;
        uint64_t data;
        const char *says;
    } bad[] = {
        { "", 0, "expected '{'" },
        { "[]", 0, "expected '{'" },
        { "{", 0, "a string" },
        { "{\"a\"", 0, "expected ':'" },
        { "{\"a\":", 0, "expected '{' of a tensor" },
        { "{\"a", 0, "end of the string" },
        { "{\"a\\", 0, "escape" },
        { "{\"a\\u12", 0, "hexadecimal" },
        { "{}x", 0, "end of the header" },
        { "{} {}", 0, "end of the header" },
        { "{" T("a", "U8", "1", 0, 1) ",}", 1, "a string" },
        { "{" T("a", "U8", "1", 0, 1) T("b", "U8", "1", 1, 2) "}", 2, "expected ',' or '}'" },
        { "{" T("a", "U8", "1", 0, 1) "," T("a", "U8", "1", 1, 2) "}", 2, "a: the name occurs twice" },
        { "{" T("a", "U8", "1", 0, 1) "," T("\\u0061", "U8", "1", 1, 2) "}", 2, "a: the name occurs twice" },
        { "{\"__metadata__\":{},\"__metadata__\":{}}", 0, "__metadata__ occurs twice" },
        { "{\"__metadata__\":{\"x\":\"\",\"x\":\"\"}}", 0, "x occurs twice" },
        { "{\"__metadata__\":{\"x\":{}}}", 0, "a string" },
        { "{\"__metadata__\":[[[[[[[[[[]]]]]]]]]]}", 0, "'{' of __metadata__" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[[[[1]]]],\"data_offsets\":[0,1]}}", 1, "unsigned integer" },
        { "{\"a\":{\"a\":{\"a\":{\"a\":{\"a\":{}}}}}}", 0, "found key \"a\"" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "one is missing" },
        { "{\"a\":{}}", 0, "one is missing" },
        { "{\"a\":{\"dtype\":\"U8\",\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "occurs twice" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"extra\":1}}", 1, "found key \"extra\"" },
        { "{\"a\":{\"dtype\":1,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "a string" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "'[' of a shape" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "','" },
        { "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "']' of data_offsets" },
        { "{" T("a", "Q4", "1", 0, 1) "}", 1, "found \"Q4\"" },
        { "{" T("a", "bf16", "1", 0, 2) "}", 2, "found \"bf16\"" },
        { "{" T("a", "U8", "1", 1, 0) "}", 1, "expected begin <= end" },
        { "{" T("a", "U8", "1", 0, 1) "}", 0, "the file holds 0 bytes" },
        { "{" T("a", "U8", "1", 18446744073709551614, 18446744073709551615) "}", 1, "the file holds 1 bytes" },
        { "{" T("a", "U8", "1", 0, 18446744073709551616) "}", 1, "below 2^64" },
        { "{" T("a", "U8", "2", 0, 1) "}", 1, "shape needs 2 bytes" },
        { "{" T("a", "BF16", "1", 0, 1) "}", 1, "shape needs 2 bytes" },
        { "{" T("a", "F32", "4294967296,4294967296", 0, 0) "}", 0, "product overflows" },
        { "{" T("a", "F64", "2305843009213693952", 0, 0) "}", 0, "product overflows" },
        { "{" T("a", "U8", "1,1,1,1,1,1,1,1,1", 0, 1) "}", 1, "at most 8 dimensions" },
        { "{" T("a", "U8", "-1", 0, 1) "}", 1, "unsigned integer" },
        { "{" T("a", "U8", "1.0", 0, 1) "}", 1, "unsigned integer" },
        { "{" T("a", "U8", "1e0", 0, 1) "}", 1, "unsigned integer" },
        { "{" T("a", "U8", "01", 0, 1) "}", 1, "unsigned integer" },
        { "{" T("a", "U8", "1,", 0, 1) "}", 1, "unsigned integer" },
        { "{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 1, 3) "}", 3, "overlap" },
        { "{" T("a", "U8", "2", 0, 2) "," T("b", "U8", "2", 0, 2) "}", 2, "overlap" },
        { "{" T("b", "U8", "1", 2, 3) "," T("a", "U8", "1", 0, 1) "}", 3, "hole" },
        { "{" T("a", "U8", "1", 1, 2) "}", 2, "hole" },
        { "{" T("a", "U8", "1", 0, 1) "}", 2, "tensors end at 1, the data at 2" },
        { "{}", 1, "tensors end at 0, the data at 1" },
        { "{\"a\\x\":{}}", 0, "escape" },
        { "{\"a\\ud800\":{}}", 0, "lone surrogates" },
        { "{\"a\\udc00\":{}}", 0, "lone surrogates" },
        { "{\"a\\ud800\\n\":{}}", 0, "hexadecimal" },
        { "{\"a\\ud800\\u0041\":{}}", 0, "lone surrogates" },
        { "{\"a\\u0000\":{}}", 0, "other than NUL" },
        { "{\"a\nb\":{}}", 0, "no control character" },
        { "{\"a\\n\\u001b[2J\":{\"dtype\":\"Q\"}}", 0, "a??[2J: dtype" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refused(bad[i].header, bad[i].data, bad[i].says);
}

/* A name at the limit and one beyond it, plain and through escapes at the end of the buffer. */
static void test_long_names(void)
{
    char header[3000], name[2000];
    for (unsigned n = SL_ST_NAME_MAX - 4; n <= SL_ST_NAME_MAX + 4; n++)
        for (int escapes = 0; escapes < 3; escapes++) {
            static const char *const last[] = { "x", "\\n", "\\ud83d\\ude00" };
            static const unsigned last_bytes[] = { 1, 1, 4 };
            memset(name, 'n', n);
            name[n - last_bytes[escapes]] = 0;
            strcat(name, last[escapes]);
            snprintf(header, sizeof header, "{\"%s\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", name);
            sl_err err;
            seen s = { 0 };
            CHECK_EQ(parse(header, 1, &s, &err), n <= SL_ST_NAME_MAX ? 0 : SL_EFORMAT);
            if (n <= SL_ST_NAME_MAX)
                CHECK_EQ(strlen(s.name), n);
        }
    char *deep = malloc(200001); /* no recursion: a stack of any depth would be a crash */
    memset(deep, '[', 200000);
    deep[200000] = 0;
    refused(deep, 0, "expected '{'");
    memset(deep, '{', 200000);
    refused(deep, 0, "a string");
    free(deep);
}

/* ---- directories ------------------------------------------------------------------------------ */

static char dir[256];
static const char header_a[] = "{" T("a", "U8", "2", 0, 2) "}", header_b[] = "{" T("b", "U8", "3", 0, 3) "}",
                  header_c[] = "{" T("c", "U8", "2", 0, 2) "}";

static int open_dir(unsigned flags, seen *s, sl_shards *shards, sl_err *err)
{
    *s = (seen){ 0 };
    *err = (sl_err){ 0 };
    return sl_shards_open(shards, dir, flags, note, s, err);
}

static void dir_refused(int code, const char *says)
{
    seen s;
    sl_err err;
    sl_shards shards;
    const int rc = open_dir(0, &s, &shards, &err);
    CHECK_MSG(rc == code && strstr(err.text, says), "code %d, \"%s\" lacks \"%s\"", rc, err.text, says);
    if (rc == 0)
        sl_shards_close(&shards);
}

static void put_index(const char *text) { put_file(dir, "model.safetensors.index.json", text, strlen(text)); }

static void good_shards(void)
{
    put_shard(dir, "model-1.safetensors", header_a, 2);
    put_shard(dir, "model-2.safetensors", header_b, 3);
}

static void test_no_index(void)
{
    seen s;
    sl_err err;
    sl_shards shards;
    dir_refused(SL_EFORMAT, "no *.safetensors file");
    good_shards();
    put_file(dir, "other.txt", "x", 1);
    for (unsigned flags = 0; flags <= SL_SHARDS_DIRECT; flags++) {
        CHECK_EQ(open_dir(flags, &s, &shards, &err), 0);
        CHECK_EQ(shards.n, 2);
        CHECK_EQ(shards.tensors, 2);
        CHECK_EQ(shards.header_bytes, strlen(header_a) + strlen(header_b));
        CHECK_STR(shards.name[1], "model-2.safetensors");
        CHECK_STR(s.name, "b");
        CHECK_EQ(s.offset, 8 + strlen(header_b));
        sl_shards_close(&shards);
    }
    put_shard(dir, "model-3.safetensors", header_a, 2);
    dir_refused(SL_EFORMAT, "model-3.safetensors: a: the name occurs twice, first in another shard");
}

static void test_bad_shards(void)
{
    static const struct {
        const char *header;
        uint64_t length;
        size_t data;
        const char *says;
    } bad[] = {
        { header_c, 0, 2, "header length: found 0" },
        { header_c, 1, 2, "header length: found 1" },
        { header_c, UINT64_MAX, 2, "header length: found 18446744073709551615" },
        { header_c, (uint64_t)1 << 40, 2, "header length: found 1099511627776" },
        { header_c, sizeof header_c - 1 + 3, 2, "header length" },
        { header_c, sizeof header_c - 1 + 1, 3, "end of the header" }, /* a zero byte of the data */
        { header_c, sizeof header_c - 2, 2, "expected ',' or '}'" },
        { header_c, sizeof header_c - 1, 1, "the file holds 1 bytes" }, /* truncated data */
        { header_c, sizeof header_c - 1, 0, "the file holds 0 bytes" },
        { header_c, sizeof header_c - 1, 3, "tensors end at 2, the data at 3" },
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_shard_lying(dir, "model-3.safetensors", bad[i].header, bad[i].length, bad[i].data);
        dir_refused(SL_EFORMAT, bad[i].says);
    }
    for (size_t n = 0; n < 8; n++) {
        put_file(dir, "model-3.safetensors", "\0\0\0\0\0\0\0\0", n);
        dir_refused(SL_EFORMAT, "too short for a header");
    }
    char path[300], fifo[300];
    snprintf(path, sizeof path, "%s/model-3.safetensors", dir);
    unlink(path);
    snprintf(fifo, sizeof fifo, "%s/model-4.safetensors", dir);
    CHECK_EQ(mkdir(fifo, 0777), 0);
    dir_refused(SL_EFORMAT, "model-4.safetensors");
    rmdir(fifo);
    CHECK_EQ(mkfifo(fifo, 0666), 0); /* must not hang */
    dir_refused(SL_EFORMAT, "model-4.safetensors");
    unlink(fifo);
    good_shards();
}

static void test_index(void)
{
    static const struct {
        const char *index, *says;
    } bad[] = {
        { "", "expected '{'" },
        { "{}", "expected a weight_map" },
        { "{\"weight_map\":{}}", "names no shard" },
        { "{\"weight_map\":{},\"weight_map\":{}}", "one weight_map" },
        { "{\"weight_map\":{\"a\":\"model-1.safetensors\"}", "',' or '}'" },
        { "{\"weight_map\":{\"a\":\"model-1.safetensors\"}} x", "end of the file" },
        { "{\"weight_map\":{\"a\":1}}", "a string" },
        { "{\"weight_map\":[\"a\"]}", "'{' of weight_map" },
        { "{\"metadata\":[[[[[1]]]]],\"weight_map\":{}}", "less nesting" },
        { "{\"metadata\":@,\"weight_map\":{}}", "a value" },
        { "{\"weight_map\":{\"a\":\"model-1.safetensors\",\"a\":\"model-1.safetensors\"}}", "a occurs twice" },
        { "{\"weight_map\":{\"a\":\"model-1.safetensors\",\"b\":\"model-9.safetensors\"}}", "model-9.safetensors" },
        { "{\"weight_map\":{\"a\":\"model-1.safetensors\",\"b\":\"model-1.safetensors\"}}",
          "weight_map: b is not in model-1.safetensors" },
        { "{\"weight_map\":{\"a\":\"model-2.safetensors\",\"b\":\"model-2.safetensors\"}}", "a is not in" },
        { "{\"weight_map\":{\"a\":\"model-2.safetensors\",\"b\":\"model-1.safetensors\"}}", "another shard" },
        { "{\"weight_map\":{\"x\":\"model-1.safetensors\",\"b\":\"model-2.safetensors\"}}", "a: not in model" },
        { "{\"weight_map\":{\"a\":\"../model-1.safetensors\"}}", "expected a plain file name" },
        { "{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "expected a plain file name" },
        { "{\"weight_map\":{\"a\":\"..\"}}", "expected a plain file name" },
        { "{\"weight_map\":{\"a\":\"\"}}", "expected a plain file name" },
        { "{\"weight_map\":{\"a\":\"x\\ny\"}}", "expected a plain file name" },
        { "{\"weight_map\":{\"a\":\"\xff\"}}", "expected a plain file name" },
    };
    static const char good[] = "{\"metadata\":{\"total_size\":5,\"x\":[1.5e-3,null,true,{\"y\":\"\\n\"}]},\n\"weight_map\":"
                               "{\"b\":\"model-2.safetensors\",\n\"a\":\"model-1.safetensors\"}}\n";
    seen s;
    sl_err err;
    sl_shards shards;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        put_index(bad[i].index);
        dir_refused(SL_EFORMAT, bad[i].says);
    }
    put_shard(dir, "stray.safetensors", header_a, 2); /* not named by the index: not read */
    put_index(good);
    CHECK_EQ(open_dir(0, &s, &shards, &err), 0);
    CHECK_EQ(shards.n, 2);
    CHECK_STR(s.name, "a");
    sl_shards_close(&shards);

    put_index("{\"weight_map\":{\"b\":\"model-2.safetensors\",\"z\":\"model-9.safetensors\"}}");
    CHECK_EQ(open_dir(SL_SHARDS_PARTIAL, &s, &shards, &err), 0);
    CHECK_EQ(shards.n, 2);
    CHECK_EQ(shards.tensors, 1);
    CHECK(shards.file[0].fd >= 0 && shards.file[1].fd < 0);
    sl_shards_close(&shards);
}

/* The index is read in pieces of 1 MiB: tokens that lie across their edges must come out whole. */
static void test_index_edges(void)
{
    static const char rest[] = ",\"weight_map\":{\"\\u0061\":\"model-1.safetensors\",\"b\":\"model-2.safetensors\"}}";
    const size_t piece = 1 << 20;
    char *text = malloc(piece + sizeof rest + 64);
    seen s;
    sl_err err;
    sl_shards shards;
    for (size_t shift = 0; shift < sizeof rest + 2; shift++) {
        const size_t n = piece - shift;
        memcpy(text, "{\"x\":\"", 6);
        memset(text + 6, 'x', n - 7);
        text[n - 1] = '"';
        strcpy(text + n, rest);
        put_index(text);
        const int rc = open_dir(0, &s, &shards, &err);
        CHECK_MSG(rc == 0, "shift %zu: %s", shift, err.text);
        if (rc == 0)
            sl_shards_close(&shards);
    }
    free(text);
}

int main(void)
{
    test_good();
    test_hostile();
    test_long_names();
    make_dir(dir);
    test_no_index();
    remove_dir(dir);
    make_dir(dir);
    good_shards();
    test_bad_shards();
    test_index();
    test_index_edges();
    remove_dir(dir);
    CHECK_DONE();
}
