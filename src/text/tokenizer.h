/* text/tokenizer.h - the loaded vocabulary, shared by tokenizer.c (files, look-up) and encode.c.
 *
 * Ids: ranks 0 .. n_ranks-1 are byte strings in order of merging, then SL_N_SPECIAL special ids. A
 * piece of text is first looked up whole, then merged byte pair by byte pair (spec 5.4).
 * Owns: everything it points to. Threads: immutable once parsed.
 * Unicode version: letters, marks and numbers are what the PCRE2 in use knows (10.42: Unicode 14,
 * 10.45: Unicode 16). A code point that is younger than the tables splits as punctuation does. */
#ifndef SL_TEXT_TOKENIZER_H
#define SL_TEXT_TOKENIZER_H

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include "base/err.h"

enum {
    SL_N_SPECIAL = 256,
    SL_VOCAB_FILE_MAX = 64 << 20,  /* bytes of tiktoken.model */
    SL_TOKCFG_FILE_MAX = 4 << 20,  /* bytes of tokenizer_config.json */
    SL_RANKS_MAX = 1 << 20,
    SL_TOKEN_MAX = 4096,           /* bytes of one token */
    SL_SPECIAL_NAME_MAX = 128,     /* bytes of a special token's name */
};

typedef struct {
    uint32_t at, len; /* in sl_tokenizer.bytes */
} sl_token;

struct sl_tokenizer {
    uint32_t n_ranks;
    uint32_t longest;           /* bytes of the longest rank */
    sl_token *tokens;           /* [n_ranks + SL_N_SPECIAL]; the block that the pointers below point into */
    uint32_t *slots;            /* [1 << slot_bits] open addressing: id + 1, 0 free */
    char *bytes;                /* all tokens, then the special names */
    unsigned slot_bits;
    uint64_t hash_seed;         /* random: no file can choose its collisions. No result depends on it */
    int32_t byte_id[256];       /* the rank of each single byte */
    int32_t sorted[SL_N_SPECIAL]; /* special ids by name, bytewise */
    bool special_first[256];    /* bytes that start a special name */
    pcre2_code *pattern;
    pcre2_match_context *limits;
};

/* The same as sl_tokenizer_open on the contents of the two files. */
int sl_tokenizer_parse(sl_tokenizer **out, const char *vocab, size_t vocab_len, const char *config,
                       size_t config_len, sl_err *err);

/* The rank of a byte string, or -1. */
int32_t sl_tokenizer_rank(const sl_tokenizer *t, const char *p, size_t len);

/* The longest special name that p starts with: its id and *len, or -1. */
int32_t sl_tokenizer_match_special(const sl_tokenizer *t, const char *p, size_t avail, size_t *len);

/* Compiles the pre-tokenisation pattern (spec 5.3) and its limits into t. */
int sl_tokenizer_compile(sl_tokenizer *t, sl_err *err);

#endif
