#include "store/plan.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/num.h"

enum { SLOTS_MIN = 2, CHUNK_AUTO_MAX = 512 };

/* Program, libraries, vocabulary, the stacks' touched pages, and page tables, which a cgroup counts. */
static uint64_t reserve_for(uint64_t budget, uint32_t threads)
{
    return (48ull << 20) + threads * (256ull << 10) + sl_min_u64(budget, 1ull << 46) / 512;
}

static uint64_t slots_size(const sl_plan_input *in, uint64_t n) { return n && in->slot ? sl_mem_size(n * in->slot) : 0; }

/* What must be there for this context, chunk, ring and number of slots. */
static uint64_t required(const sl_plan_input *in, uint32_t context, uint32_t chunk, uint64_t ring, uint64_t slots)
{
    return in->index + in->state(in->user, context) + in->scratch(in->user, context, chunk) + ring +
           slots_size(in, slots);
}

static uint32_t least_chunk(const sl_plan_input *in)
{
    return in->prefill_chunk > in->sequences ? in->prefill_chunk : in->sequences;
}

static uint64_t least(const sl_plan_input *in, uint32_t context)
{
    return required(in, context, least_chunk(in), in->ring_min, SLOTS_MIN);
}

static uint64_t minimum_budget(const sl_plan_input *in, uint32_t context)
{
    uint64_t need = least(in, context), b = need;
    while (b < need + reserve_for(b, in->threads)) /* the reserve grows slowly with the budget: a few steps */
        b = need + reserve_for(b, in->threads);
    return sl_round_up(b, 1 << 20);
}

static uint32_t largest_context(const sl_plan_input *in, uint64_t room)
{
    uint32_t low = 0, high = 1u << 30; /* room for low, none for high */
    while (high - low > 1) {
        const uint32_t mid = low + (high - low) / 2;
        if (least(in, mid) <= room)
            low = mid;
        else
            high = mid;
    }
    return low;
}

/* The largest chunk whose scratch takes at most an eighth of the room: the trunk is read once a chunk,
 * so a prompt of n tokens costs n / chunk passes, but scratch is memory that saves nothing in decode. */
static uint32_t choose_chunk(const sl_plan_input *in, uint64_t room)
{
    const uint64_t most = (uint64_t)in->context * in->sequences;
    uint32_t chunk = most < CHUNK_AUTO_MAX ? (uint32_t)most : CHUNK_AUTO_MAX;
    while (chunk > in->sequences && (in->scratch(in->user, in->context, chunk) > room / 8 ||
                         required(in, in->context, chunk, in->ring_min, SLOTS_MIN) > room))
        chunk = (chunk + 1) / 2;
    return chunk > in->sequences ? chunk : in->sequences;
}

int sl_plan_make(sl_plan *p, uint32_t *inflight_slots, const sl_plan_input *in, sl_err *err)
{
    *p = (sl_plan){ .budget = in->budget, .context = in->context, .threads = in->threads,
                     .sequences = in->sequences };
    p->reserve = reserve_for(in->budget, in->threads);
    p->index = in->index;
    p->state_per_position = (in->state(in->user, 1 << 20) - in->state(in->user, 0) + in->scratch(in->user, 1 << 20, 1) -
                             in->scratch(in->user, 0, 1)) >> 20;
    p->minimum = minimum_budget(in, in->context);
    const uint64_t room = in->budget > p->reserve ? in->budget - p->reserve : 0;
    p->max_context = least(in, 0) <= room ? largest_context(in, room) : 0;
    p->prefill_chunk = in->prefill_chunk ? least_chunk(in) : choose_chunk(in, room);
    p->state = in->state(in->user, in->context);
    p->scratch = in->scratch(in->user, in->context, p->prefill_chunk);
    if (required(in, in->context, p->prefill_chunk, in->ring_min, SLOTS_MIN) > room)
        return sl_fail(err, SL_EBUDGET,
                       "--ram: %llu bytes do not hold a context of %u: at least %llu bytes (%lluM) needed; "
                       "largest context for this budget: %llu",
                       (unsigned long long)in->budget, in->context, (unsigned long long)p->minimum,
                       (unsigned long long)(p->minimum >> 20), (unsigned long long)p->max_context);
    uint64_t left = room - required(in, in->context, p->prefill_chunk, in->ring_min, SLOTS_MIN);

    /* A ring and slots that keep the drive busy come before residency, but take a quarter at most. */
    p->ring = sl_max_u64(in->ring_min, sl_min_u64(in->ring_want, in->ring_min + sl_min_u64(left, room / 16)));
    left -= p->ring - in->ring_min;
    uint32_t slots = SLOTS_MIN;
    const uint64_t slots_room = sl_min_u64(left, room / 8);
    while (in->slot && slots < in->slots_want && slots_size(in, slots + 1) - slots_size(in, SLOTS_MIN) <= slots_room)
        slots++;
    *inflight_slots = slots;
    p->inflight = slots_size(in, slots);
    left -= p->inflight - slots_size(in, SLOTS_MIN);

    /* The trunk first: a byte of it that stays saves one a token. A byte of cache saves the share of calls that it
     * adds to the hits x bytes of a token's experts / bytes of cache: at K3's shape 0.02 with uniform routing, and 0.53
     * for the first 8 GB on the recorded routing (docs/memory.md), less for what comes after. */
    p->trunk = left >= in->trunk_all ? in->trunk_all : sl_round_down(left, 2 << 20);
    left -= p->trunk;
    if (in->slot) {
        uint64_t n = sl_min_u64(left / in->slot, in->experts);
        while (n && slots_size(in, n) > left)
            n--;
        p->expert_slots = (uint32_t)n;
        p->cache = slots_size(in, n);
    }
    p->total = p->reserve + p->index + p->state + p->scratch + p->ring + p->inflight + p->trunk + p->cache;
    return 0;
}

/* ---- what the machine leaves ------------------------------------------------------------------ */

/* The number after `key` in a file such as /proc/meminfo, or of the whole file when key is NULL. */
static bool read_number(const char *path, const char *key, uint64_t *out)
{
    FILE *f = fopen(path, "re");
    if (!f)
        return false;
    char line[256];
    bool found = false;
    while (!found && fgets(line, sizeof line, f)) {
        const char *s = line;
        if (key && strncmp(line, key, strlen(key)) != 0)
            continue;
        s += key ? strlen(key) : 0;
        char *end;
        *out = strtoull(s, &end, 10);
        found = end != s;
    }
    fclose(f);
    return found;
}

/* The memory limit of this process's cgroup less what it uses now; v2, else v1. */
static uint64_t cgroup_left(void)
{
    FILE *f = fopen("/proc/self/cgroup", "re");
    if (!f)
        return UINT64_MAX;
    char line[4096];
    uint64_t left = UINT64_MAX;
    while (fgets(line, sizeof line, f)) {
        line[strcspn(line, "\n")] = 0;
        const bool v2 = strncmp(line, "0::", 3) == 0;
        char *path = v2 ? line + 3 : strstr(line, ":memory:");
        if (!path)
            continue;
        path += v2 ? 0 : strlen(":memory:");
        const char *base = v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        /* Every level up to the root may have a limit; inside a container the path may not exist. */
        for (;;) {
            char file[4400];
            uint64_t limit, used;
            snprintf(file, sizeof file, "%s%s/%s", base, path, v2 ? "memory.max" : "memory.limit_in_bytes");
            const bool limited = read_number(file, NULL, &limit); /* "max" is no number */
            snprintf(file, sizeof file, "%s%s/%s", base, path, v2 ? "memory.current" : "memory.usage_in_bytes");
            if (limited && read_number(file, NULL, &used))
                left = sl_min_u64(left, limit > used ? limit - used : 0);
            char *slash = strrchr(path, '/');
            if (!slash)
                break;
            *slash = 0;
        }
    }
    fclose(f);
    return left;
}

uint64_t sl_plan_default_budget(void)
{
    uint64_t kib, left = cgroup_left();
    if (read_number("/proc/meminfo", "MemAvailable:", &kib))
        left = sl_min_u64(left, kib << 10);
    return left == UINT64_MAX ? 0 : left / 10 * 9;
}
