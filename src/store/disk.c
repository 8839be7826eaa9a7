#include "store/disk.h"

#include <errno.h>
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/sysmacros.h>
#include <time.h>

#include "base/file.h"
#include "base/num.h"

enum { PROFILE_MAX = 65536, REQUESTS = 64 };
static const char FORMAT[] = "sluice-disk";

/* ---- profile -------------------------------------------------------------------------------- */

int sl_disk_profile_path(char *buf, size_t size, const char *path, sl_err *err)
{
    struct stat st;
    if (stat(path, &st) < 0)
        return sl_fail(err, SL_EFORMAT, "%s: %s", path, strerror(errno));
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const bool xdg = cache && *cache == '/'; /* a relative one is to be ignored, says its specification */
    if (!xdg && !(home && *home))
        return sl_fail(err, SL_EUSAGE, "disk profile: neither XDG_CACHE_HOME nor HOME is set");
    const int n = snprintf(buf, size, "%s%s/sluice/disk-%u-%u.json", xdg ? cache : home, xdg ? "" : "/.cache",
                           major(st.st_dev), minor(st.st_dev));
    return n < 0 || (size_t)n >= size ? sl_fail(err, SL_EUSAGE, "disk profile: path too long") : 0;
}

/* Device numbers may change places between boots: the file system's own number tells. */
static void file_system(char id[17], const char *path)
{
    struct statfs fs = { 0 };
    uint32_t word[2] = { 0 };
    if (statfs(path, &fs) == 0)
        memcpy(word, &fs.f_fsid, sizeof word);
    snprintf(id, 17, "%08x%08x", word[0], word[1]);
}

static bool positive(const json_t *o, const char *key, double *out)
{
    const json_t *v = json_object_get(o, key);
    *out = json_number_value(v);
    return json_is_number(v) && isfinite(*out) && *out >= 1 && *out <= 1e15;
}

/* What is wrong with the profile, or NULL. *other: it is another file system's. */
static const char *parse(sl_disk_profile *p, const json_t *o, const char *fs, bool *other)
{
    const json_t *depth = json_object_get(o, "depth"), *piece = json_object_get(o, "piece_bytes");
    const char *format = json_string_value(json_object_get(o, "format"));
    const char *id = json_string_value(json_object_get(o, "file_system"));
    const json_int_t d = json_integer_value(depth), b = json_integer_value(piece);
    if (!format || strcmp(format, FORMAT) != 0 || json_integer_value(json_object_get(o, "version")) != 1)
        return "format, version: expected \"sluice-disk\", 1";
    if (d < 1 || d > SL_DISK_DEPTH_MAX)
        return "depth: expected 1 to 1024";
    if (b < SL_IO_ALIGN || b > SL_DISK_PIECE_MAX || b % SL_IO_ALIGN)
        return "piece_bytes: expected a multiple of 4096, at most 67108864";
    if (!positive(o, "stream_bytes_per_second", &p->stream) || !positive(o, "expert_bytes_per_second", &p->experts))
        return "stream_bytes_per_second, expert_bytes_per_second: expected 1 to 1e15";
    if (!id)
        return "file_system: expected a string";
    p->depth = (unsigned)d;
    p->piece = (uint64_t)b;
    *other = strcmp(id, fs) != 0;
    return NULL;
}

bool sl_disk_profile_load(sl_disk_profile *out, const char *path)
{
    char file[4096], fs[17];
    struct stat st;
    char *text = NULL;
    size_t len = 0;
    sl_err err = { 0 };
    bool other = false;
    if (sl_disk_profile_path(file, sizeof file, path, NULL) < 0 || (stat(file, &st) < 0 && errno == ENOENT))
        return false;
    const char *why = NULL;
    if (sl_file_read(&text, &len, file, NULL, PROFILE_MAX, &err) < 0) {
        sl_log(SL_LOG_WARN, "disk profile ignored: %s", err.text);
        return false;
    }
    json_error_t at;
    json_t *o = json_loadb(text, len, JSON_REJECT_DUPLICATES, &at);
    free(text);
    file_system(fs, path);
    why = json_is_object(o) ? parse(out, o, fs, &other) : "not a JSON object";
    json_decref(o);
    if (why)
        sl_log(SL_LOG_WARN, "disk profile ignored: %s: %s", file, why);
    return !why && !other;
}

static int make_dirs(const char *file, sl_err *err)
{
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", file);
    for (char *slash = strchr(dir + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(dir, 0777) < 0 && errno != EEXIST)
            return sl_fail(err, SL_EFAIL, "%s: %s", dir, strerror(errno));
        *slash = '/';
    }
    return 0;
}

int sl_disk_profile_save(const sl_disk_profile *p, const char *file, const char *path, sl_err *err)
{
    char text[512], fs[17];
    sl_atomic_file f;
    int rc = make_dirs(file, err);
    if (rc < 0 || (rc = sl_atomic_open(&f, file, err)) < 0)
        return rc;
    file_system(fs, path);
    const int n = snprintf(text, sizeof text,
                           "{\"format\":\"%s\",\"version\":1,\"file_system\":\"%s\",\"depth\":%u,\"piece_bytes\":%llu,"
                           "\"stream_bytes_per_second\":%.0f,\"expert_bytes_per_second\":%.0f}\n",
                           FORMAT, fs, p->depth, (unsigned long long)p->piece, p->stream, p->experts);
    rc = sl_write_all(f.fd, text, (size_t)n);
    if (rc == 0)
        return sl_atomic_commit(&f, err);
    sl_atomic_abort(&f);
    return sl_fail(err, SL_EFAIL, "%s: %s", file, strerror(-rc));
}

/* ---- measurement ---------------------------------------------------------------------------- */

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static uint64_t draw(sl_disk_source *s, uint64_t below) /* splitmix64 */
{
    uint64_t z = s->random += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (z ^ z >> 31) % below;
}

static void next_request(sl_io_req *r, uint8_t *buffer, sl_disk_source *s, const sl_disk_setting *set)
{
    if (set->scattered)
        s->file = (size_t)draw(s, s->n_files);
    const sl_io_file *f = &s->files[s->file];
    const uint64_t units = f->size / SL_IO_ALIGN, want = sl_min_u64(set->request / SL_IO_ALIGN, units);
    uint64_t at = set->scattered ? draw(s, units - want + 1) : s->at, n = want;
    if (!set->scattered) {
        n = sl_min_u64(want, units - at);
        s->at += n;
        if (s->at == units) {
            s->at = 0;
            s->file = (s->file + 1) % s->n_files;
        }
    }
    *r = (sl_io_req){ .file = f, .offset = at * SL_IO_ALIGN, .length = n * SL_IO_ALIGN, .need = n * SL_IO_ALIGN,
                      .buffer = buffer, .class = set->scattered ? SL_IO_DEMAND : SL_IO_STREAM };
}

int sl_disk_measure(double *rate, sl_disk_source *src, const sl_disk_setting *set, sl_err *err)
{
    sl_io *io;
    sl_io_req req[REQUESTS], *list[REQUESTS];
    const size_t n = (size_t)sl_min_u64(src->buffer_size / set->request, REQUESTS);
    sl_assert(n > 0 && set->request % SL_IO_ALIGN == 0);
    const sl_io_options opt = { .backend = set->backend, .depth = set->depth, .piece = set->piece };
    int rc = sl_io_open(&io, &opt, err);
    if (rc < 0)
        return rc;
    sl_io_remember(io, src->buffer, src->buffer_size);
    src->at = 0;
    src->file = (size_t)draw(src, src->n_files);
    for (size_t i = 0; i < n; i++) {
        next_request(list[i] = &req[i], src->buffer + i * set->request, src, set);
        sl_io_submit(io, &req[i]);
    }
    /* From the first completion, when the queue is full, to the end; in pieces, not whole requests. */
    double from = 0, to = 0;
    uint64_t before = 0;
    do {
        const size_t i = sl_io_wait_any(io, list, n);
        if ((rc = sl_io_wait(io, &req[i], err)) < 0)
            break;
        next_request(&req[i], src->buffer + i * set->request, src, set);
        sl_io_submit(io, &req[i]);
        to = now();
        if (from == 0) {
            from = to;
            before = sl_io_count(io).bytes;
        }
    } while (to - from < set->seconds || sl_io_count(io).bytes == before);
    const double read = (double)(sl_io_count(io).bytes - before);
    for (size_t i = 0; i < n; i++)
        sl_io_cancel(io, &req[i]);
    sl_io_close(io);
    *rate = rc < 0 ? 0 : read / (to - from);
    return rc;
}
