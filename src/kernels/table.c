/* kernels/table.c - the choice of a table of functions, made once at start. */
#include <fenv.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/num.h"
#include "kernels/impl.h"

/* Best first. */
static const struct {
    unsigned cpu;
    const sl_kernels *table;
} variants[] = {
#if defined(__x86_64__)
    { SL_CPU_AVX512, &sl_kernels_avx512 },
    { SL_CPU_AVX2, &sl_kernels_avx2 },
#elif defined(__aarch64__)
    { SL_CPU_NEON, &sl_kernels_neon },
#endif
    { 0, &sl_kernels_scalar },
};
enum { VARIANTS = sizeof variants / sizeof variants[0] };

sl_mxfp4_row sl_mxfp4_lut[256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void fill_tables(void)
{
    static const float e2m1[8] = { 0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f };
    sl_crc32c_fill();
    for (uint32_t s = 0; s < 256; s++) {
        float two_to = sl_f32_from_bits(s == 0 ? 0x00400000u : s == 255 ? 0x7fc00000u : s << 23);
        for (unsigned c = 0; c < 16; c++) {
            const float w = c & 8 ? -(e2m1[c & 7] * two_to) : e2m1[c & 7] * two_to;
            sl_mxfp4_lut[s].f32[c] = w;
            sl_mxfp4_lut[s].low[c] = (uint8_t)(sl_f32_bits(w) >> 16);
            sl_mxfp4_lut[s].high[c] = (uint8_t)(sl_f32_bits(w) >> 24);
        }
    }
}

const sl_kernels *sl_kernels_for(unsigned cpu)
{
    size_t i = 0;
    pthread_once(&tables_once, fill_tables);
    while (variants[i].cpu && !(variants[i].cpu & cpu))
        i++;
    return variants[i].table;
}

/* Kernels are compiled on the assumption of the default environment; a library loaded into the
 * process (one built with -ffast-math, say) may have changed it. */
static const char *check_environment(void)
{
    volatile float least = 0x1p-149f, small = 0x1p-126f, half = 0.5f, big = 0x1p+100f;
    if (fegetround() != FE_TONEAREST)
        return "kernels: the rounding mode is not round-to-nearest";
    if (least * big != 0x1p-49f || small * half != 0x1p-127f)
        return "kernels: subnormal numbers are flushed to zero";
    return NULL;
}

const sl_kernels *sl_kernels_choose(const char **why)
{
    const char *want = getenv("SL_CPU");
    unsigned have = sl_cpu_detect();
    if ((*why = check_environment()))
        return NULL;
    if (!want || !*want)
        return sl_kernels_for(have);
    for (size_t i = 0; i < VARIANTS; i++)
        if (!strcmp(want, variants[i].table->name) && (have & variants[i].cpu) == variants[i].cpu)
            return sl_kernels_for(variants[i].cpu);
    *why = "SL_CPU: not one of scalar, avx2, avx512, neon, or this machine lacks it";
    return NULL;
}
