/* store/trunk.h - the trunk matrices (all weights but routed experts and small vectors), streamed.
 *
 * A pass over the model uses the matrices in one fixed order, so what comes next is always known: the
 * matrices are cut into chunks of whole rows, chunks are read ahead in order through a ring of
 * buffers, and some chunks, spread evenly over the pass, stay resident.
 *
 * Owns: ring and resident memory (SL_MEM_RING, SL_MEM_TRUNK), counters.
 * Threads: engine thread only. Invariant: chunks are delivered in order and each is released before
 * the second next one is asked for, so the ring never stalls on its own reader. */
#ifndef SL_STORE_TRUNK_H
#define SL_STORE_TRUNK_H

#include "base/mem.h"
#include "store/io.h"

typedef struct {
    const sl_io_file *file;
    uint64_t offset;    /* of the first row in the file */
    uint64_t row_bytes;
    uint32_t rows;
    uint32_t row_group; /* chunks hold a multiple of this many rows, >= 1; what `rows` leaves over
                           comes in the last */
    bool head;          /* read only in passes that want logits; such matrices come last */
} sl_trunk_matrix;

typedef struct {
    sl_io *io;
    sl_budget *budget;
    const sl_trunk_matrix *matrices; /* copied */
    size_t n_matrices;
    uint64_t chunk_bytes;    /* data bytes a chunk at most, unless one row group is larger */
    uint64_t ring_bytes;     /* memory for buffers in flight, at least sl_trunk_sizes.ring_min; not
                                allocated when every chunk is resident */
    uint64_t resident_bytes; /* memory for resident chunks, may be 0; no more than they need is used */
} sl_trunk_options;

typedef struct sl_trunk sl_trunk;

typedef struct {
    uint32_t matrix, first_row, rows;
    const uint8_t *data; /* rows of row_bytes; borrowed until released; any alignment */
    uint32_t slot;       /* private */
} sl_trunk_chunk;

/* Sizes without opening anything, for the planner; same arguments as the options. Memory sizes are as
 * counted by the accountant. */
typedef struct {
    uint64_t ring_min;       /* smallest ring that works: three of the largest chunk buffers */
    uint64_t resident_all;   /* memory to keep every chunk resident */
    uint64_t read_layers;    /* bytes read per pass, nothing resident, without the head */
    uint64_t read_head;      /* and for the head */
    uint64_t n_chunks;
    uint64_t index;          /* bookkeeping (SL_MEM_INDEX) */
} sl_trunk_sizes;
/* SL_EFORMAT when a matrix does not lie within its file. */
int sl_trunk_measure(sl_trunk_sizes *out, const sl_trunk_matrix *m, size_t n, uint64_t chunk_bytes, sl_err *err);
/* Bytes a pass reads once the resident chunks are loaded, with `resident_bytes` of memory for them. */
int sl_trunk_reads_for(const sl_trunk_matrix *m, size_t n, uint64_t chunk_bytes, uint64_t resident_bytes,
                       uint64_t *layers, uint64_t *head, sl_err *err);

int sl_trunk_open(sl_trunk **out, const sl_trunk_options *opt, sl_err *err);
void sl_trunk_close(sl_trunk *t);
/* Starts a pass at the first matrix. head: the head matrices are part of it. more: another pass will
 * follow, so that its beginning is read ahead while this one ends (its head is not: whether it has one
 * is not known yet). After an error or a pass that was left early, the next pass starts clean: what was
 * read ahead is dropped, chunks not released are taken back. */
void sl_trunk_pass(sl_trunk *t, bool head, bool more);
/* Waits for the next chunk in order; the pass must have one. SL_EIO names file and offset, and comes
 * again until the next pass. */
int sl_trunk_next(sl_trunk *t, sl_trunk_chunk *chunk, sl_err *err);
void sl_trunk_release(sl_trunk *t, sl_trunk_chunk *chunk);

typedef struct { uint64_t layers, head; } sl_trunk_counts; /* bytes read so far */
sl_trunk_counts sl_trunk_count(const sl_trunk *t);

#endif
