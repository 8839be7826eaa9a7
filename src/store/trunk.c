#include "store/trunk.h"

#include "base/num.h"

enum { FLIGHTS = 256 }; /* chunks being read or held at a time at most */
#define NOWHERE UINT64_MAX
#define NO_SLOT UINT32_MAX

enum { ABSENT, READING, LOADED };

typedef struct {
    uint64_t begin, length; /* what is read of the file */
    uint64_t need;          /* bytes from begin that must exist */
    uint64_t place;         /* of a resident chunk in the resident memory, else NOWHERE */
    uint32_t matrix, first_row, rows;
    uint16_t skip;          /* where the rows begin in what is read */
    uint8_t state;          /* of a resident chunk */
} chunk_info;

/* A chunk on its way to the caller or in its hands. */
typedef struct {
    sl_io_req req;
    uint64_t ring_end; /* where its buffer ends in the ring; NOWHERE when it lies in resident memory */
    uint32_t chunk;
    bool released;
} flight;

struct sl_trunk {
    sl_io *io;
    sl_trunk_matrix *matrices;
    chunk_info *chunks;
    uint32_t n_chunks, n_layers; /* all; those before the head */
    uint8_t *ring, *resident;
    /* The ring is a FIFO of bytes without a wrap inside a buffer: live buffers lie in [head, tail), or
     * in [head, size) and [0, tail) after a wrap. head == tail with live buffers means full. */
    uint64_t ring_size, ring_head, ring_tail;
    uint32_t ring_live;
    /* Flights in chunk order; these count up and index modulo FLIGHTS:
     * [first, given) are with the caller or released, [given, last) are being read ahead. */
    flight *flights;
    uint64_t first, given, last;
    /* This pass: the next chunk to give, the next to read, its end. ahead_next: `ahead` belongs to the
     * pass after this one. */
    uint32_t now, ahead, end;
    bool ahead_next, more;
    sl_trunk_counts counts;
};

/* ---- the list of chunks --------------------------------------------------------------------- */

typedef struct {
    const sl_trunk_matrix *m;
    uint64_t chunk_bytes;
    size_t n, i;
    uint32_t row;
} walk;

/* Rows of a chunk: the matrix in as few chunks as chunk_bytes allows, of nearly equal size. */
static uint32_t chunk_rows(const sl_trunk_matrix *m, uint64_t chunk_bytes)
{
    const uint64_t group = m->row_group;
    const uint64_t most = sl_max_u64(chunk_bytes / m->row_bytes / group, 1) * group;
    const uint64_t n = (m->rows + most - 1) / most, even = (m->rows + n - 1) / n;
    return (uint32_t)sl_min_u64((even + group - 1) / group * group, m->rows);
}

static bool walk_next(walk *w, chunk_info *c)
{
    if (w->i == w->n)
        return false;
    const sl_trunk_matrix *m = &w->m[w->i];
    const uint32_t rows = (uint32_t)sl_min_u64(chunk_rows(m, w->chunk_bytes), m->rows - w->row);
    const uint64_t bytes = rows * m->row_bytes;
    uint64_t skip;
    *c = (chunk_info){ .place = NOWHERE, .matrix = (uint32_t)w->i, .first_row = w->row, .rows = rows };
    sl_io_span(m->file, m->offset + w->row * m->row_bytes, bytes, &c->begin, &c->length, &skip);
    c->skip = (uint16_t)skip; /* < SL_IO_ALIGN */
    c->need = skip + bytes;
    w->row += rows;
    if (w->row == m->rows) {
        w->row = 0;
        w->i++;
    }
    return true;
}

/* Memory a chunk takes in the ring or among the residents. */
static uint64_t room(const chunk_info *c) { return sl_round_up(c->length, SL_IO_ALIGN); }

static uint64_t block_size(uint64_t n) { return n ? sl_mem_size(n) : 0; }

/* The most bytes in whole units that an allocation counted as `memory` can hold. */
static uint64_t block_room(uint64_t memory)
{
    uint64_t low = 0, high = memory / SL_IO_ALIGN; /* in units; low fits */
    while (low < high) {
        const uint64_t mid = high - (high - low) / 2;
        if (block_size(mid * SL_IO_ALIGN) <= memory)
            low = mid;
        else
            high = mid - 1;
    }
    return low * SL_IO_ALIGN;
}

/* Spreads residents evenly by bytes: after each chunk the residents so far hold at most their share. */
typedef struct {
    uint64_t capacity, total, seen, used;
} spread;

static bool stays(spread *s, const chunk_info *c)
{
    s->seen += room(c);
    if (s->used + room(c) > (unsigned __int128)s->capacity * s->seen / s->total)
        return false;
    s->used += room(c);
    return true;
}

static uint64_t index_size(size_t n_matrices, uint64_t n_chunks)
{
    return sl_mem_size(sizeof(sl_trunk)) + sl_mem_size(n_matrices * sizeof(sl_trunk_matrix)) +
           sl_mem_size(n_chunks * sizeof(chunk_info)) + sl_mem_size(FLIGHTS * sizeof(flight));
}

static int check_matrices(const sl_trunk_matrix *m, size_t n, sl_err *err)
{
    for (size_t i = 0; i < n; i++) {
        uint64_t bytes, end;
        if (!m[i].rows || !m[i].row_bytes || !m[i].row_group || (i && m[i - 1].head && !m[i].head))
            return sl_fail(err, SL_EUSAGE, "trunk: matrix %zu is empty, without row group or behind the head", i);
        if (!sl_mul_u64(m[i].rows, m[i].row_bytes, &bytes) || !sl_add_u64(m[i].offset, bytes, &end) ||
            end > m[i].file->size)
            return sl_fail(err, SL_EFORMAT, "%s: file is %llu bytes, a matrix of %u rows of %llu at offset %llu is beyond",
                           m[i].file->path, (unsigned long long)m[i].file->size, m[i].rows,
                           (unsigned long long)m[i].row_bytes, (unsigned long long)m[i].offset);
    }
    return 0;
}

/* Also *total: bytes of memory for all chunks, alignment included. */
static int measure(sl_trunk_sizes *out, uint64_t *total, const sl_trunk_matrix *m, size_t n, uint64_t chunk_bytes,
                   sl_err *err)
{
    const int rc = check_matrices(m, n, err);
    if (rc < 0)
        return rc;
    walk w = { .m = m, .n = n, .chunk_bytes = chunk_bytes };
    uint64_t largest = 0;
    *out = (sl_trunk_sizes){ 0 };
    *total = 0;
    for (chunk_info c; walk_next(&w, &c); out->n_chunks++) {
        *total += room(&c);
        largest = sl_max_u64(largest, room(&c));
        *(m[c.matrix].head ? &out->read_head : &out->read_layers) += c.length;
    }
    if (out->n_chunks == 0 || out->n_chunks >= UINT32_MAX)
        return sl_fail(err, SL_EUSAGE, "trunk: %llu chunks", (unsigned long long)out->n_chunks);
    /* The caller holds one while the next is read, and a wrap wastes less than one. */
    out->ring_min = block_size(3 * largest);
    out->resident_all = block_size(*total);
    out->index = index_size(n, out->n_chunks);
    return 0;
}

int sl_trunk_measure(sl_trunk_sizes *out, const sl_trunk_matrix *m, size_t n, uint64_t chunk_bytes, sl_err *err)
{
    uint64_t total;
    return measure(out, &total, m, n, chunk_bytes, err);
}

int sl_trunk_reads_for(const sl_trunk_matrix *m, size_t n, uint64_t chunk_bytes, uint64_t resident_bytes,
                       uint64_t *layers, uint64_t *head, sl_err *err)
{
    sl_trunk_sizes sizes;
    spread s = { .capacity = block_room(resident_bytes) };
    const int rc = measure(&sizes, &s.total, m, n, chunk_bytes, err);
    if (rc < 0)
        return rc;
    *layers = sizes.read_layers;
    *head = sizes.read_head;
    walk w = { .m = m, .n = n, .chunk_bytes = chunk_bytes };
    for (chunk_info c; walk_next(&w, &c);)
        if (stays(&s, &c))
            *(m[c.matrix].head ? head : layers) -= c.length;
    return 0;
}

static bool is_head(const sl_trunk *t, const chunk_info *c) { return t->matrices[c->matrix].head; }

/* ---- open and close ------------------------------------------------------------------------- */

/* From a page up allocations are aligned for direct reads. */
static uint8_t *open_block(sl_budget *b, sl_mem_class class, uint64_t n)
{
    uint8_t *p = sl_mem_alloc(b, class, n);
    if (p)
        sl_mem_touch(p, n);
    return p;
}

static void list_chunks(sl_trunk *t, const sl_trunk_options *opt, spread *s)
{
    walk w = { .m = t->matrices, .n = opt->n_matrices, .chunk_bytes = opt->chunk_bytes };
    for (chunk_info *c = t->chunks; walk_next(&w, c); c++) {
        const uint64_t place = s->used;
        if (stays(s, c))
            c->place = place;
        t->n_layers += !is_head(t, c);
    }
}

int sl_trunk_open(sl_trunk **out, const sl_trunk_options *opt, sl_err *err)
{
    sl_trunk_sizes sizes;
    spread s = { .capacity = block_room(opt->resident_bytes) };
    const int rc = measure(&sizes, &s.total, opt->matrices, opt->n_matrices, opt->chunk_bytes, err);
    if (rc < 0)
        return rc;
    sl_trunk *t = sl_mem_alloc(opt->budget, SL_MEM_INDEX, sizeof *t);
    if (!t)
        return sl_fail(err, SL_EBUDGET, "trunk: no room for %llu bytes of index", (unsigned long long)sizes.index);
    t->io = opt->io;
    t->n_chunks = (uint32_t)sizes.n_chunks;
    t->matrices = sl_mem_alloc(opt->budget, SL_MEM_INDEX, opt->n_matrices * sizeof *t->matrices);
    t->chunks = sl_mem_alloc(opt->budget, SL_MEM_INDEX, sizes.n_chunks * sizeof *t->chunks);
    t->flights = sl_mem_alloc(opt->budget, SL_MEM_INDEX, FLIGHTS * sizeof *t->flights);
    if (!t->matrices || !t->chunks || !t->flights) {
        sl_trunk_close(t);
        return sl_fail(err, SL_EBUDGET, "trunk: no room for %llu bytes of index", (unsigned long long)sizes.index);
    }
    memcpy(t->matrices, opt->matrices, opt->n_matrices * sizeof *t->matrices);
    list_chunks(t, opt, &s);
    if (s.used && !(t->resident = open_block(opt->budget, SL_MEM_TRUNK, s.used))) {
        sl_trunk_close(t);
        return sl_fail(err, SL_EBUDGET, "trunk: no room for %llu resident bytes", (unsigned long long)block_size(s.used));
    }
    t->ring_size = s.used < s.total ? block_room(opt->ring_bytes) : 0;
    if (s.used < s.total && (opt->ring_bytes < sizes.ring_min ||
                             !(t->ring = open_block(opt->budget, SL_MEM_RING, t->ring_size)))) {
        sl_trunk_close(t);
        return sl_fail(err, SL_EBUDGET, "trunk: no room for a ring of %llu bytes, %llu is the least",
                       (unsigned long long)opt->ring_bytes, (unsigned long long)sizes.ring_min);
    }
    sl_io_remember(t->io, t->ring, t->ring_size);
    *out = t;
    return 0;
}

/* Takes back what was read ahead and what the caller holds. */
static void drop_flights(sl_trunk *t)
{
    for (; t->given < t->last; t->given++) {
        flight *f = &t->flights[t->given % FLIGHTS];
        chunk_info *c = &t->chunks[f->chunk];
        *(is_head(t, c) ? &t->counts.head : &t->counts.layers) -= sl_io_cancel(t->io, &f->req);
        if (c->place != NOWHERE)
            c->state = f->req.status == 0 ? LOADED : ABSENT;
    }
    t->first = t->last;
    t->ring_live = 0;
}

void sl_trunk_close(sl_trunk *t)
{
    if (!t)
        return;
    if (t->flights)
        drop_flights(t);
    sl_io_forget(t->io, t->ring);
    sl_mem_free(t->ring);
    sl_mem_free(t->resident);
    sl_mem_free(t->flights);
    sl_mem_free(t->chunks);
    sl_mem_free(t->matrices);
    sl_mem_free(t);
}

/* ---- a pass --------------------------------------------------------------------------------- */

static bool take_ring(sl_trunk *t, uint64_t n, uint64_t *at)
{
    if (t->ring_live == 0)
        t->ring_head = t->ring_tail = 0;
    if (t->ring_live == 0 || t->ring_tail > t->ring_head) {
        if (t->ring_size - t->ring_tail >= n)
            *at = t->ring_tail;
        else if (t->ring_head >= n)
            *at = 0;
        else
            return false;
    } else if (t->ring_head - t->ring_tail >= n) {
        *at = t->ring_tail;
    } else {
        return false;
    }
    t->ring_tail = *at + n;
    t->ring_live++;
    return true;
}

/* Reads ahead as far as there is room. */
static void pump(sl_trunk *t)
{
    for (;; t->ahead++) {
        if (!t->ahead_next && t->ahead == t->end && t->more) {
            t->ahead_next = true;
            t->ahead = 0;
        }
        if (t->ahead == (t->ahead_next ? t->n_layers : t->end))
            return;
        chunk_info *c = &t->chunks[t->ahead];
        const bool resident = c->place != NOWHERE;
        if (resident && c->state != ABSENT)
            continue;
        uint64_t at = c->place;
        if (t->last - t->first == FLIGHTS || (!resident && !take_ring(t, room(c), &at)))
            return;
        flight *f = &t->flights[t->last++ % FLIGHTS];
        f->chunk = t->ahead;
        f->released = false;
        f->ring_end = resident ? NOWHERE : at + room(c);
        f->req = (sl_io_req){
            .file = t->matrices[c->matrix].file, .offset = c->begin, .length = c->length, .need = c->need,
            .buffer = (resident ? t->resident : t->ring) + at, .class = SL_IO_STREAM,
        };
        c->state = READING;
        *(is_head(t, c) ? &t->counts.head : &t->counts.layers) += c->length;
        sl_io_submit(t->io, &f->req);
    }
}

void sl_trunk_pass(sl_trunk *t, bool head, bool more)
{
    if (t->now != t->end || !t->ahead_next) { /* left early, or nothing of this pass is read yet */
        if (t->now != t->end)
            drop_flights(t);
        t->ahead = 0;
    }
    t->now = 0;
    t->ahead_next = false;
    t->end = head ? t->n_chunks : t->n_layers;
    t->more = more;
    pump(t);
}

/* Forgets the oldest flights that are over. */
static void retire(sl_trunk *t)
{
    for (; t->first < t->given && t->flights[t->first % FLIGHTS].released; t->first++) {
        const flight *f = &t->flights[t->first % FLIGHTS];
        if (f->ring_end == NOWHERE)
            continue;
        t->ring_head = f->ring_end;
        t->ring_live--;
    }
}

int sl_trunk_next(sl_trunk *t, sl_trunk_chunk *chunk, sl_err *err)
{
    sl_assert(t->now < t->end);
    chunk_info *c = &t->chunks[t->now];
    const bool resident = c->place != NOWHERE;
    *chunk = (sl_trunk_chunk){ .matrix = c->matrix, .first_row = c->first_row, .rows = c->rows, .slot = NO_SLOT };
    if (resident && c->state == LOADED) {
        chunk->data = t->resident + c->place + c->skip;
    } else {
        pump(t);
        sl_assert(t->given < t->last); /* else the caller holds more chunks than it may */
        flight *f = &t->flights[t->given % FLIGHTS];
        sl_assert(f->chunk == t->now);
        const int rc = sl_io_wait(t->io, &f->req, err);
        if (rc < 0)
            return rc;
        chunk->data = f->req.buffer + c->skip;
        if (resident)
            c->state = LOADED;
        else
            chunk->slot = (uint32_t)(t->given % FLIGHTS);
        f->released = resident;
        t->given++;
        retire(t);
    }
    t->now++;
    pump(t);
    return 0;
}

void sl_trunk_release(sl_trunk *t, sl_trunk_chunk *chunk)
{
    if (chunk->slot == NO_SLOT)
        return;
    t->flights[chunk->slot].released = true;
    chunk->slot = NO_SLOT;
    chunk->data = NULL;
    retire(t);
    pump(t);
}

sl_trunk_counts sl_trunk_count(const sl_trunk *t) { return t->counts; }
