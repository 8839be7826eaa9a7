/* kernels/cpu.c - which instruction sets this CPU has and the operating system saves. */
#include "kernels/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t saved_state(void)
{
    uint32_t lo, hi;
    __asm__ volatile("xgetbv" : "=a"(lo), "=d"(hi) : "c"(0));
    return (uint64_t)hi << 32 | lo;
}

unsigned sl_cpu_detect(void)
{
    const unsigned need1 = bit_FMA | bit_AVX | bit_F16C | bit_OSXSAVE;
    const unsigned need512 = bit_AVX512F | bit_AVX512BW | bit_AVX512VL | bit_AVX512DQ;
    unsigned a, b, c, d, found = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d) || (c & need1) != need1)
        return 0;
    uint64_t state = saved_state();
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (state & 0x06) != 0x06) /* xmm, ymm */
        return 0;
    if (b & bit_AVX2)
        found |= SL_CPU_AVX2;
    if ((b & need512) == need512 && (state & 0xe6) == 0xe6) /* and opmask, zmm */
        found |= SL_CPU_AVX512;
    return found;
}

#else

unsigned sl_cpu_detect(void)
{
#if defined(__aarch64__) && defined(__ARM_NEON)
    return SL_CPU_NEON;
#else
    return 0;
#endif
}

#endif
