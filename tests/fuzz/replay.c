/* tests/fuzz/replay.c - runs a fuzz target over its corpus without libFuzzer, so that every input that
 * once mattered is tried in each build. Arguments: files or directories; without any, the corpus of the
 * target that the program is named after: replay_NAME reads tests/fuzz/corpus/NAME. */
#include <dirent.h>
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static unsigned inputs;

static void fatal(const char *path)
{
    fprintf(stderr, "%s: %s\n", path, strerror(errno));
    exit(1);
}

static void replay_file(const char *path)
{
    FILE *f = fopen(path, "rb");
    if (!f || fseek(f, 0, SEEK_END) != 0)
        fatal(path);
    const long size = ftell(f);
    rewind(f);
    /* Exactly as large as the input, so that a sanitizer sees the first byte read past its end. */
    uint8_t *data = malloc(size > 0 ? (size_t)size : 1);
    if (size < 0 || !data || fread(data, 1, (size_t)size, f) != (size_t)size)
        fatal(path);
    fclose(f);
    fprintf(stderr, "%s\n", path); /* shown when the run fails: the last one is the culprit */
    LLVMFuzzerTestOneInput(data, (size_t)size);
    inputs++;
    free(data);
}

static void replay(const char *path)
{
    DIR *dir = opendir(path);
    if (!dir) {
        if (errno != ENOTDIR)
            fatal(path);
        replay_file(path);
        return;
    }
    for (const struct dirent *e; (e = readdir(dir));) {
        char name[4096];
        if (e->d_name[0] == '.')
            continue;
        snprintf(name, sizeof name, "%s/%s", path, e->d_name);
        replay_file(name);
    }
    closedir(dir);
}

int main(int argc, char **argv)
{
    char corpus[512];
    const char *name = strstr(argv[0], "replay_");
    if (argc == 1 && name) {
        snprintf(corpus, sizeof corpus, "tests/fuzz/corpus/%s", name + strlen("replay_"));
        replay(corpus);
    }
    for (int i = 1; i < argc; i++)
        replay(argv[i]);
    printf("%u inputs\n", inputs);
    return inputs == 0; /* an empty corpus tests nothing */
}
