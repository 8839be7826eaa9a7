/* tests/unit/temp.h - temporary files of random bytes, aligned buffers, random numbers. Include after check.h. */
#ifndef SL_TESTS_TEMP_H
#define SL_TESTS_TEMP_H

#include <stdint.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

static uint64_t rng_state;

static inline uint64_t rng(void) /* splitmix64 */
{
    uint64_t z = rng_state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static inline uint64_t rng_below(uint64_t n) { return rng() % n; }

/* Seeds from SL_SEED or the clock and says which. */
static inline void rng_seed(void)
{
    const char *s = getenv("SL_SEED");
    rng_state = s ? strtoull(s, NULL, 0) : (uint64_t)time(NULL) * 1000003u + (uint64_t)getpid();
    printf("seed %llu (repeat with SL_SEED)\n", (unsigned long long)rng_state);
}

static inline void *aligned(size_t n)
{
    void *p = NULL;
    if (posix_memalign(&p, 4096, n ? n : 1) != 0)
        abort();
    return p;
}

/* Writes data to a new file under TMPDIR, else build/; its path in `path`. */
static inline void temp_file(char path[256], const void *data, size_t n)
{
    const char *dir = getenv("TMPDIR");
    if (!dir)
        mkdir(dir = "build", 0777);
    snprintf(path, 256, "%s/sluice-test-XXXXXX", dir);
    const int fd = mkstemp(path);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n || close(fd) != 0) {
        perror(path);
        exit(1);
    }
}

static inline uint8_t *random_bytes(size_t n)
{
    uint8_t *p = malloc(n + 8);
    for (size_t i = 0; i < n; i += 8) {
        const uint64_t r = rng();
        memcpy(p + i, &r, 8);
    }
    return p;
}

#endif
