/* sluice.h - run a sparse Mixture-of-Experts model that does not fit in memory.
 *
 * The only header a program needs: open an engine on a model directory under a RAM budget, open a
 * session, feed token ids, read logits, sample the next token. Results are the same bits for every
 * budget, thread count, prefill chunk and instruction set (docs/contract.md).
 *
 * Errors: functions that can fail return 0 or a negative SL_E* code and write one line into the
 * caller's sl_err (which may be NULL). Nothing here prints, exits or changes signal handling.
 * Threads: an engine and all its sessions belong to one calling thread at a time; a tokenizer is
 * immutable once open and may be shared. */
#ifndef SLUICE_H
#define SLUICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SL_VERSION "0.1.0"

#if defined(__GNUC__)
#define SL_API __attribute__((visibility("default")))
#else
#define SL_API
#endif

/* The negated code is the exit status of a program that stops for this reason; SL_EINTR exits 130. */
enum {
    SL_OK = 0,
    SL_EFAIL = -1,   /* run-time failure: out of memory, a refused system call, a closed pipe */
    SL_EUSAGE = -2,  /* the caller asked for something that makes no sense */
    SL_EFORMAT = -3, /* the model or a file is invalid or incomplete */
    SL_EIO = -4,     /* a weight could not be read; no token was computed from it */
    SL_EBUDGET = -5, /* does not fit the RAM budget */
    SL_EVERIFY = -6, /* a digest, receipt or replay does not match */
    SL_EINTR = -7,   /* the cancel callback said stop */
};

#define SL_ERR_MAX 512
typedef struct {
    int code;               /* one of SL_E*, 0 while nothing failed */
    char text[SL_ERR_MAX];  /* one line, no newline at its end */
} sl_err;

SL_API int sl_exit_status(int code); /* the process exit status for an SL_* code */

/* ---- log ------------------------------------------------------------------------------------ */
enum { SL_LOG_ERROR, SL_LOG_WARN, SL_LOG_INFO, SL_LOG_DEBUG, SL_LOG_TRACE };
typedef void sl_log_fn(void *user, int level, const char *line);
/* Process-wide; call before anything else. Lines above `level` are not formatted. NULL silences. */
SL_API void sl_log_set(sl_log_fn *fn, void *user, int level);

/* ---- tokenizer ------------------------------------------------------------------------------ */
typedef struct sl_tokenizer sl_tokenizer;

/* Reads tiktoken.model and tokenizer_config.json from `dir`; nothing else is needed there. */
SL_API int sl_tokenizer_open(sl_tokenizer **out, const char *dir, sl_err *err);
SL_API void sl_tokenizer_close(sl_tokenizer *t); /* NULL is fine */
SL_API size_t sl_tokenizer_size(const sl_tokenizer *t); /* ranks plus special ids */
SL_API int32_t sl_tokenizer_find_special(const sl_tokenizer *t, const char *name); /* id or -1 */
SL_API bool sl_tokenizer_is_special(const sl_tokenizer *t, int32_t id); /* any id after the ranks */

enum sl_special {
    SL_SPECIAL_ALLOW,  /* the names of special tokens in the text become their ids */
    SL_SPECIAL_PLAIN,  /* they are ordinary text */
    SL_SPECIAL_REFUSE, /* text that holds one is an error (SL_EUSAGE) */
};
/* Encodes `len` bytes of UTF-8. *ids is allocated; free with sl_free. Invalid UTF-8 is SL_EUSAGE. */
SL_API int sl_tokenizer_encode(const sl_tokenizer *t, const char *text, size_t len,
                               enum sl_special special, int32_t **ids, size_t *n, sl_err *err);
/* The bytes of one token, borrowed from the tokenizer; NULL for an id outside the vocabulary. */
SL_API const char *sl_tokenizer_bytes(const sl_tokenizer *t, int32_t id, size_t *len);

/* Streaming decoder: holds back an incomplete UTF-8 sequence until it completes or is refuted;
 * invalid bytes come out as U+FFFD, one for each maximal invalid part. */
typedef struct {
    unsigned char pending[4];
    unsigned n_pending;
} sl_detok; /* zero-initialised by the caller */
/* A token's `len` bytes expand to at most this many bytes of output. */
#define SL_DETOK_MAX(len) (3 * (size_t)(len) + 16)
/* Feeds a token's bytes; writes complete UTF-8 to out (room for SL_DETOK_MAX(len)); returns bytes written. */
SL_API size_t sl_detok_feed(sl_detok *d, const char *bytes, size_t len, char *out);
/* Ends the stream: what is still incomplete becomes U+FFFD. Room for 16 bytes; returns bytes written. */
SL_API size_t sl_detok_flush(sl_detok *d, char *out);

SL_API void sl_free(void *p); /* frees what this library allocated for the caller */

/* ---- engine --------------------------------------------------------------------------------- */
typedef struct sl_engine sl_engine;
typedef struct sl_session sl_session;

enum sl_io_backend { SL_IO_AUTO, SL_IO_URING, SL_IO_PREAD };

typedef struct {
    uint64_t ram_bytes;          /* budget for the process's peak resident memory; 0: 90 % of what is free */
    uint32_t context;            /* positions a session can hold; 0: 4096 */
    uint32_t threads;            /* 0: one per available CPU */
    uint32_t prefill_chunk;      /* tokens per pass over the weights; 0: chosen by the plan; at least `sequences` */
    uint32_t sequences;          /* sessions that may be open at a time, each with its state; 0: 1; at most 4096 */
    enum sl_io_backend io;       /* SL_IO_AUTO: io_uring where the kernel allows it */
    const char *const *mirrors;  /* directories with further copies of shards, all or some, on other drives */
    size_t n_mirrors;            /* at most 15 */
    bool all_logits;             /* sessions also deliver the logits of every fed position */
    bool (*cancel)(void *user);  /* polled often; true stops with SL_EINTR; may be NULL */
    void *user;
} sl_options;
SL_API sl_options sl_options_default(void);

/* What the budget is spent on and what a token costs, in bytes. */
typedef struct {
    uint64_t budget;             /* the limit the plan was made for */
    uint64_t total;              /* what the plan uses of it; the sum of the parts below */
    uint64_t reserve;            /* program, libraries, stacks, page tables */
    uint64_t index;              /* where every tensor lies, small vectors kept as fp32 */
    uint64_t state;              /* recurrent state, latent cache of `context` positions, of all sequences */
    uint64_t scratch;            /* activations of one prefill chunk */
    uint64_t ring;               /* streamed trunk chunks being read or used */
    uint64_t inflight;           /* expert slots being read or used */
    uint64_t trunk;              /* trunk kept resident */
    uint64_t cache;              /* experts kept resident */
    uint64_t state_per_position; /* growth of state + scratch for one more position of context in all sequences */
    uint64_t minimum;            /* smallest budget that would work with this context */
    uint64_t max_context;        /* largest context that would fit this budget */
    uint32_t context, prefill_chunk, threads, sequences;
    uint32_t expert_slots;       /* cached experts */
    uint64_t trunk_bytes, head_bytes, embed_bytes, expert_bytes; /* read per decoded token, no cache hit */
    uint64_t expert_expected;    /* the same for experts with the cache full, were all called for equally often: text
                                    that repeats itself, and routing that has favourites, read less */
    uint64_t used_bf16, used_mxfp4; /* weights (and state) a decoded token goes through in memory */
} sl_plan;

/* How fast this machine is at what a token consists of, in bytes a second; 0: not known. */
typedef struct {
    double stream, experts; /* from the drive, as `sluice bench disk` last found for it */
    double bf16, mxfp4;     /* weights in memory through the matrix kernels, one token */
} sl_speed;

/* Opens the model in `dir` and allocates all of the plan. SL_EBUDGET names the smallest budget. */
SL_API int sl_engine_open(sl_engine **out, const char *dir, const sl_options *opt, sl_err *err);
/* Makes the plan alone: reads headers, allocates nothing of it. *plan is filled on SL_EBUDGET too. */
SL_API int sl_engine_plan(const char *dir, const sl_options *opt, sl_plan *plan, sl_err *err);
/* Looks up the drive that holds `dir`, and measures the kernels, in under a second and 256 MiB. */
SL_API int sl_measure_speed(const char *dir, const sl_options *opt, sl_speed *out, sl_err *err);
/* Seconds for a decoded token with such a plan; 0 when a speed that it takes is not known. */
SL_API double sl_plan_seconds(const sl_plan *plan, const sl_speed *speed);
SL_API void sl_engine_close(sl_engine *e); /* closes after its sessions; NULL is fine */
SL_API const sl_plan *sl_engine_get_plan(const sl_engine *e);
SL_API uint32_t sl_engine_vocab(const sl_engine *e);
SL_API int32_t sl_engine_eos(const sl_engine *e);       /* eos_token_id of config.json */
SL_API const char *sl_engine_cpu(const sl_engine *e);   /* kernels in use: scalar, avx2, avx512, neon */

typedef struct {
    uint64_t trunk, experts, head, embed; /* bytes read from files so far, alignment included */
    uint64_t cache_requests, cache_hits;  /* experts asked for, and found resident */
    uint64_t peak_rss;                    /* of this process, from the kernel */
    uint64_t drive_busy_ns;               /* time in which a read was in flight, since open */
    uint64_t drive_depth_ns;              /* reads in flight, integrated over time: / busy is the mean depth */
    uint64_t drive_reads;                 /* pieces read */
    uint64_t mirror_bytes;                /* of all that was read: from mirrors */
    uint32_t mirrors_dropped;             /* mirrors given up after a failure; each was logged */
} sl_stats;
SL_API void sl_engine_stats(const sl_engine *e, sl_stats *out);

/* One sequence. As many can be open as the engine was planned for (sl_options.sequences). */
SL_API int sl_session_open(sl_session **out, sl_engine *e, sl_err *err);
SL_API void sl_session_close(sl_session *s);
SL_API uint32_t sl_session_position(const sl_session *s); /* tokens fed so far */

typedef struct {
    bool last;   /* no further call is expected: do not read ahead into the next pass */
    /* Called with the logits [vocab] of each fed position in order when the engine was opened with
     * all_logits; borrowed for the call. A non-zero return stops with that code. May be NULL. */
    int (*on_logits)(void *user, uint32_t position, const float *logits);
    /* Called after each layer of each pass with the work done so far of this feed, in layers x passes. */
    void (*on_progress)(void *user, uint64_t done, uint64_t total);
    /* Called once for each position and MoE layer, layer by layer within a pass, with the n experts that the router
     * chose, ascending, and their weights; borrowed for the call. `pass` counts the feed's passes from 0. */
    void (*on_routing)(void *user, uint32_t pass, uint32_t position, uint32_t layer, const uint32_t *experts,
                       const float *weights, uint32_t n);
    void *user;
} sl_feed;
/* Feeds n >= 1 ids at the next positions. After an error the session must be closed: its state is
 * between tokens. `feed` may be NULL. */
SL_API int sl_session_feed(sl_session *s, const int32_t *ids, size_t n, const sl_feed *feed, sl_err *err);
/* Logits [vocab] of the last fed position, borrowed until the engine's next pass; NULL when another session was fed
 * since, or nothing was. */
SL_API const float *sl_session_logits(const sl_session *s);

typedef struct {
    sl_session *session; /* of no other step */
    const int32_t *ids;
    size_t n;            /* >= 1 */
    const sl_feed *feed; /* as for sl_session_feed, `last` aside; may be NULL */
} sl_step;
/* Feeds several sessions in one pass over the weights, which reads each distinct expert once: the same bits as feeding
 * them one after the other, and then each has its logits. At most plan.prefill_chunk ids in all. `last`: no further
 * pass is expected. An error that names a step beforehand (SL_EUSAGE) changes nothing; after any other all sessions of
 * the call must be closed, whichever of them it came from. */
SL_API int sl_engine_step(sl_engine *e, const sl_step *steps, size_t n, bool last, sl_err *err);

/* ---- sampling ------------------------------------------------------------------------------- */
typedef struct {
    float temperature; /* 0: greedy, the rest is ignored */
    float top_p;       /* 1: off */
    uint32_t top_k;    /* 0: off */
    float min_p;       /* 0: off */
    uint64_t seed;
} sl_sampling;
/* The next id: a function of logits, parameters and position alone (the random number is keyed by
 * seed and position). *logprob: natural log-probability under the unmodified distribution, may be
 * NULL. `scratch` has room for `vocab` entries of sl_candidate. */
typedef struct { float logit, prob; int32_t id; } sl_candidate;
SL_API int32_t sl_sample(const float *logits, uint32_t vocab, const sl_sampling *p, uint64_t position,
                         sl_candidate *scratch, float *logprob);

#ifdef __cplusplus
}
#endif
#endif
