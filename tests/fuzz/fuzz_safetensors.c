/* tests/fuzz/fuzz_safetensors.c - a shard's header. The input is the header; the size of the data is taken
 * from the last data_offsets in it, so that the fuzzer need not guess. What is accepted must be what the
 * format promises: ranges inside the data that cover it once, of the size that dtype and shape say. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "store/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { DATA_BEGIN = 4096 };

typedef struct {
    uint64_t end, covered;
} check;

static int note(void *user, const sl_tensor *t, sl_err *err)
{
    check *c = user;
    (void)err;
    sl_assert(strlen(t->name) == t->name_len && t->name_len <= SL_ST_NAME_MAX);
    sl_assert(t->n_dims <= SL_ST_DIMS_MAX && t->shard == 7);
    sl_assert(t->offset >= DATA_BEGIN && t->bytes <= c->end && t->offset - DATA_BEGIN <= c->end - t->bytes);
    c->covered += t->bytes;
    return 0;
}

/* The largest number before a ']' is the best guess at where the data ends. */
static uint64_t guess_end(const uint8_t *data, size_t size)
{
    uint64_t v = 0, largest = 0;
    for (size_t i = 0; i < size; i++) {
        if (data[i] >= '0' && data[i] <= '9') {
            v = v * 10 + data[i] - '0';
            continue;
        }
        if (data[i] == ']' && v > largest)
            largest = v;
        v = 0;
    }
    return largest;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    sl_err err = { 0 };
    check c = { .end = guess_end(data, size) };
    char *text = malloc(size ? size : 1);
    if (!text)
        return 0;
    memcpy(text, data, size);
    const int rc = sl_st_parse(text, size, "FILE", 7, DATA_BEGIN, c.end, note, &c, &err);
    sl_assert(rc == 0 || (rc == SL_EFORMAT && err.code == rc && err.text[0] && !strchr(err.text, '\n')));
    sl_assert(rc < 0 || c.covered == c.end);
    free(text);
    return 0;
}
