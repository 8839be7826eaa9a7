/* cmd/synth.h - what the parts of `sluice synth` share: which tensors a shard holds, what is in them, and
 * the small files around them.
 * The same model (configuration and seed) gives the same bytes, whatever order they are written in. */
#ifndef SL_CMD_SYNTH_H
#define SL_CMD_SYNTH_H

#include <stdio.h>

#include "model/bind.h"

enum {
    SYNTH_SPECIALS = 256, /* ids after the ranks */
    SYNTH_ALIGN = 4096,   /* where the data of a shard begins, so that runs can be cloned and read directly */
};

typedef struct {
    sl_config config;
    bool released; /* the released shape: the vision tensors are written too */
    uint64_t seed;
    uint32_t shards;
} synth_model;

/* ---- synth_files.c ---- */
typedef struct {
    uint32_t layers, experts, vocab, res_block; /* UINT32_MAX: the preset's */
    const int32_t *full_attn;                   /* one-based; NULL: every fourth layer and the last */
    size_t n_full_attn;
    uint64_t seed;
    bool k3; /* the released widths */
} synth_options;
/* Makes the configuration and checks it as a reader would. SL_EUSAGE names the key that is wrong. */
int synth_model_init(synth_model *m, const synth_options *opt, sl_err *err);

typedef void synth_text_fn(FILE *f, const synth_model *m);
void synth_config_json(FILE *f, const synth_model *m);
void synth_generation_json(FILE *f, const synth_model *m);
void synth_tokenizer_json(FILE *f, const synth_model *m);
void synth_ranks(FILE *f, const synth_model *m);

/* ---- synth_layout.c ---- */
typedef enum { SYNTH_BF16, SYNTH_F32, SYNTH_CONV, SYNTH_A_LOG, SYNTH_PACKED, SYNTH_SCALE } synth_fill_kind;

typedef struct {
    uint64_t begin, bytes; /* from the start of the data */
    uint64_t key;          /* of its random numbers; an expert matrix shares it with its scales */
    uint64_t dim[4];
    uint32_t layer, index; /* index: expert, or block of the vision tower */
    uint16_t what;         /* sl_kind, tensor of an expert, or line of the vision table */
    uint8_t n_dims, fill;  /* fill: synth_fill_kind */
    enum { SYNTH_TRUNK, SYNTH_EXPERT, SYNTH_VISION } source;
    float mean, std;
} synth_tensor;

typedef struct {
    synth_tensor *tensor;  /* in file order: experts, then one run of all others */
    size_t n, cap;
    uint64_t data_bytes;
    uint64_t trunk_begin;  /* of that run, from the start of the data */
    char *header;          /* its 8-byte length and text; NULL before synth_shard_header */
    uint64_t header_bytes; /* of it: a multiple of SYNTH_ALIGN */
} synth_shard;

/* Shard 0 is layer 0 and so on; after the layers the model's own tensors, then the vision part. */
int synth_shard_init(synth_shard *s, const synth_model *m, uint32_t shard, sl_err *err);
/* Makes the header, padded with spaces so that the data begins at a multiple of SYNTH_ALIGN, and writes
 * the tensors' entries to `map`, the index; first: they are its first ones. */
int synth_shard_header(synth_shard *s, FILE *map, const char *shard_name, bool first, sl_err *err);
void synth_shard_clear(synth_shard *s);
void synth_shard_name(const synth_model *m, uint32_t shard, char buf[64]);
void synth_tensor_name(const synth_tensor *t, char *buf, size_t size);
uint64_t synth_expert_bytes(const sl_config *c);

/* ---- synth_write.c ---- */
typedef struct {
    const char *dir;
    bool headers_only; /* holes for data */
    uint32_t pool;     /* distinct experts and layers of a kind, the others are clones; 0: all distinct */
} synth_job;
typedef struct { uint64_t tensors, bytes; } synth_totals;
/* Writes all shards and their index into job->dir, with progress on stderr. */
int synth_write(const synth_job *job, const synth_model *m, synth_totals *out, sl_err *err);

/* ---- synth_random.c ---- */
typedef struct synth_random synth_random;
synth_random *synth_random_open(const synth_model *m); /* NULL: out of memory */
void synth_random_close(synth_random *r);
/* Bytes [begin, begin + n) of a shard's data. Any thread. */
void synth_fill(const synth_random *r, const synth_shard *s, uint64_t begin, uint64_t n, uint8_t *out);
uint64_t synth_mix(uint64_t x);

#endif
