/* tests/unit/model_dir.h - temporary model directories. Include after check.h. */
#ifndef SL_TESTS_MODEL_DIR_H
#define SL_TESTS_MODEL_DIR_H

#include <dirent.h>
#include <stdint.h>
#include <sys/stat.h>
#include <unistd.h>

static inline void make_dir(char dir[256])
{
    const char *top = getenv("TMPDIR");
    if (!top)
        mkdir(top = "build", 0777);
    snprintf(dir, 256, "%s/sluice-test-XXXXXX", top);
    if (!mkdtemp(dir)) {
        perror(dir);
        exit(1);
    }
}

static inline void remove_dir(const char *dir)
{
    char path[1024];
    DIR *d = opendir(dir);
    for (const struct dirent *e; d && (e = readdir(d));) {
        snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            unlink(path);
    }
    if (d)
        closedir(d);
    rmdir(dir);
}

static inline void put_file(const char *dir, const char *name, const void *data, size_t n)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "wb");
    if (!f || fwrite(data, 1, n, f) != n || fclose(f) != 0) {
        perror(path);
        exit(1);
    }
}

/* All of a file with a NUL after its end; free with free. */
static inline char *get_file(const char *dir, const char *name, size_t *n)
{
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0) {
        perror(path);
        exit(1);
    }
    *n = (size_t)ftell(f);
    rewind(f);
    char *data = malloc(*n + 1);
    if (!data || fread(data, 1, *n, f) != *n)
        exit(1);
    fclose(f);
    data[*n] = 0;
    return data;
}

/* A shard of `header` and `data_bytes` zeros; `length` is what its first eight bytes say. */
static inline void put_shard_lying(const char *dir, const char *name, const char *header, uint64_t length,
                                   size_t data_bytes)
{
    const size_t n = strlen(header);
    uint8_t *file = calloc(1, 8 + n + data_bytes + 1);
    for (unsigned i = 0; i < 8; i++)
        file[i] = (uint8_t)(length >> 8 * i);
    memcpy(file + 8, header, n);
    put_file(dir, name, file, 8 + n + data_bytes);
    free(file);
}

static inline void put_shard(const char *dir, const char *name, const char *header, size_t data_bytes)
{
    put_shard_lying(dir, name, header, strlen(header), data_bytes);
}

#endif
