/* store/safetensors.h - walks the headers of a model's shards.
 *
 * Headers are hostile input: every range is checked here, against the file's size and its neighbours,
 * before a caller sees it. Names are not kept (497,220 of them are 50 MB of text): each tensor is shown
 * once to a callback, which keeps what it needs.
 * Limits (docs/formats.md): SL_ST_*. */
#ifndef SL_STORE_SAFETENSORS_H
#define SL_STORE_SAFETENSORS_H

#include "store/io.h"

enum {
    SL_ST_HEADER_MAX = 64 << 20, /* bytes of one header */
    SL_ST_TENSORS_MAX = 1 << 20, /* in one shard */
    SL_ST_DIMS_MAX = 8,
    SL_ST_NAME_MAX = 256, /* bytes of a name */
    SL_ST_SHARDS_MAX = 4096,
    SL_ST_DEPTH_MAX = 4, /* nesting in a header */
};

typedef enum { SL_DTYPE_BF16, SL_DTYPE_F32, SL_DTYPE_U8, SL_DTYPE_OTHER } sl_dtype;
const char *sl_dtype_name(sl_dtype d);

typedef struct {
    const char *name;   /* NUL-terminated, borrowed for the callback */
    size_t name_len;
    sl_dtype dtype;     /* OTHER: known to the format (F16, I64, ...) but not used by this engine */
    unsigned n_dims;
    uint64_t dim[SL_ST_DIMS_MAX];
    uint16_t shard;
    uint64_t offset;    /* in the file */
    uint64_t bytes;
} sl_tensor;

/* Returns 0 to go on, or a code after writing the message. */
typedef int sl_tensor_fn(void *user, const sl_tensor *t, sl_err *err);

/* Parses one header of `len` bytes (the text after the 8-byte length). `data_begin`:
 * where data starts in the file; `data_size`: bytes of it. `file` is for messages. Pure: the fuzz
 * entry. SL_EFORMAT on anything the format does not allow: duplicate names, overlaps, gaps, reversed
 * or overlong ranges, a shape that needs another size, an unknown dtype, deep nesting, bad JSON. */
int sl_st_parse(char *text, size_t len, const char *file, uint16_t shard, uint64_t data_begin,
                uint64_t data_size, sl_tensor_fn *fn, void *user, sl_err *err);

/* All shards of a model directory, held open for the life of the engine. */
typedef struct {
    sl_io_file *file; /* n of them, in the order in which the index names them, else by name */
    char **name;      /* base names */
    uint16_t n;
    uint64_t tensors;      /* in all shards */
    uint64_t header_bytes; /* lengths of all headers */
} sl_shards;

/* Opens dir's shards: those that model.safetensors.index.json names, if it exists, else all
 * *.safetensors. Calls fn for every tensor. A tensor in two shards, and an index that names an absent
 * shard, an absent tensor, a tensor in another shard or not all tensors, is SL_EFORMAT. */
enum {
    SL_SHARDS_DIRECT = 1,  /* read weights past the page cache where the file system allows it */
    SL_SHARDS_PARTIAL = 2, /* shards that the index names may be absent (fd -1), with their tensors */
};
int sl_shards_open(sl_shards *out, const char *dir, unsigned flags, sl_tensor_fn *fn, void *user, sl_err *err);
void sl_shards_close(sl_shards *s);

#endif
