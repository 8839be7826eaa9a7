#include "store/speed.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/mem.h"
#include "base/num.h"

enum { COLUMNS = 7168, GROUP_COLUMNS = 3584, GRAIN = 64, ROUNDS = 3 };
static const uint64_t WEIGHTS = 256ull << 20;

typedef struct {
    const sl_kernels *k;
    const uint8_t *w, *scale; /* scale NULL: bf16 */
    const float *x;
    float *y;
    size_t rows;
} product;

static void run_rows(void *arg, size_t begin, size_t end, unsigned thread)
{
    const product *p = arg;
    (void)thread;
    if (p->scale)
        p->k->mm_mxfp4(p->y + begin, p->rows, p->w + begin * (GROUP_COLUMNS / 2), p->scale + begin * (GROUP_COLUMNS / 32),
                       p->x, GROUP_COLUMNS, end - begin, GROUP_COLUMNS, 1);
    else
        p->k->mm_bf16(p->y + begin, p->rows, p->w + begin * (2 * COLUMNS), p->x, COLUMNS, end - begin, COLUMNS, 1);
}

/* The best of a few rounds: what disturbs only slows down. */
static double best_rate(sl_pool *pool, product *p, uint64_t bytes)
{
    double best = 0;
    for (int i = 0; i < ROUNDS; i++) {
        struct timespec a, b;
        clock_gettime(CLOCK_MONOTONIC, &a);
        sl_pool_run(pool, p->rows, GRAIN, run_rows, p);
        clock_gettime(CLOCK_MONOTONIC, &b);
        const double seconds = (double)(b.tv_sec - a.tv_sec) + (double)(b.tv_nsec - a.tv_nsec) * 1e-9;
        if (seconds > 0 && (double)bytes / seconds > best)
            best = (double)bytes / seconds;
    }
    return best;
}

void sl_speed_measure(double *bf16, double *mxfp4, sl_pool *pool, const sl_kernels *k, uint64_t room)
{
    enum { BF16_ROW = 2 * COLUMNS, MXFP4_ROW = GROUP_COLUMNS / 2 + GROUP_COLUMNS / 32 };
    const uint64_t size = sl_min_u64(room, WEIGHTS), rows = size / BF16_ROW, group_rows = size / MXFP4_ROW;
    sl_budget *budget = sl_budget_open(UINT64_MAX);
    uint8_t *w = budget && rows ? sl_mem_alloc(budget, SL_MEM_SCRATCH, size) : NULL;
    float *x = malloc(COLUMNS * sizeof *x), *y = malloc((group_rows + 1) * sizeof *y);
    *bf16 = *mxfp4 = 0;
    if (w && x && y) {
        for (int i = 0; i < COLUMNS; i++)
            x[i] = 1;
        memset(w, 0x3f, size); /* 0.75 as bf16; 6 and 1.5 times 2^-64 as MXFP4: ordinary numbers */
        product p = { .k = k, .w = w, .x = x, .y = y, .rows = rows };
        *bf16 = best_rate(pool, &p, rows * BF16_ROW);
        p.rows = group_rows;
        p.scale = w + group_rows * (GROUP_COLUMNS / 2);
        *mxfp4 = best_rate(pool, &p, group_rows * MXFP4_ROW);
    }
    free(x);
    free(y);
    sl_mem_free(w);
    sl_budget_close(budget);
}
