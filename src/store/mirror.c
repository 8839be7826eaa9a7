#include "store/mirror.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/num.h"

enum { BLOCK = 32768, SAMPLE = 4096 };

/* Bytes [at, at + n) of two files; buffered, because headers are unaligned. */
static int compare(int a, int b, uint64_t at, uint64_t n, const char *path, const char *original, sl_err *err)
{
    uint8_t x[BLOCK], y[BLOCK];
    for (const uint64_t end = at + n; at < end;) {
        const size_t k = (size_t)sl_min_u64(end - at, BLOCK);
        int rc = sl_pread_all(a, x, k, at);
        if (rc < 0)
            return sl_fail(err, SL_EIO, "%s: reading %zu bytes at offset %llu: %s", path, k, (unsigned long long)at,
                           strerror(-rc));
        if ((rc = sl_pread_all(b, y, k, at)) < 0)
            return sl_fail(err, SL_EIO, "%s: reading %zu bytes at offset %llu: %s", original, k,
                           (unsigned long long)at, strerror(-rc));
        if (memcmp(x, y, k) != 0)
            return sl_fail(err, SL_EFORMAT, "%s: differs from %s within %zu bytes at offset %llu: no copy of it, or not "
                           "finished", path, original, k, (unsigned long long)at);
        at += k;
    }
    return 0;
}

static int compare_files(int a, int b, const sl_io_file *f, const char *path, sl_err *err)
{
    unsigned char length[8];
    int rc = sl_pread_all(b, length, 8, 0);
    if (rc < 0)
        return sl_fail(err, SL_EIO, "%s: header: %s", f->path, strerror(-rc));
    const uint64_t header = sl_min_u64(sl_le64(length), f->size - 8) + 8; /* checked when the model was opened */
    rc = compare(a, b, 0, header, path, f->path, err);
    const uint64_t sample = sl_min_u64(SAMPLE, f->size), room = f->size - sample;
    for (uint64_t i = 0; i <= SL_MIRROR_SAMPLES && rc == 0; i++) /* the last one at the very end */
        rc = compare(a, b, i < SL_MIRROR_SAMPLES ? i * (room / SL_MIRROR_SAMPLES) : room, sample, path, f->path, err);
    return rc;
}

static int open_reading(const char *path, struct stat *st)
{
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0 && fstat(fd, st) < 0)
        *st = (struct stat){ 0 };
    if (fd >= 0)
        posix_fadvise(fd, 0, 0, POSIX_FADV_RANDOM);
    return fd;
}

/* Adds one shard's copy; *added: there is one. */
static int add_copy(sl_io_file *f, const char *path, unsigned drive, bool *added, sl_err *err)
{
    struct stat st, own;
    const int fd = open_reading(path, &st);
    if (fd < 0 && errno == ENOENT)
        return 0;
    const int original = fd < 0 ? -1 : open_reading(f->path, &own);
    int rc = 0;
    if (fd < 0 || original < 0)
        rc = sl_fail(err, SL_EFORMAT, "%s: %s", fd < 0 ? path : f->path, strerror(errno));
    else if ((*added = st.st_dev != own.st_dev || st.st_ino != own.st_ino) &&
             (rc = sl_io_file_mirror(f, path, drive, err)) == 0)
        rc = compare_files(fd, original, f, path, err);
    const int both[] = { fd, original };
    for (int i = 0; i < 2; i++)
        if (both[i] >= 0) {
            posix_fadvise(both[i], 0, 0, POSIX_FADV_DONTNEED); /* as with the headers: not to stay in the page cache */
            close(both[i]);
        }
    return rc;
}

int sl_mirror_open(sl_shards *s, const char *dir, unsigned drive, sl_err *err)
{
    unsigned copies = 0;
    for (uint16_t i = 0; i < s->n; i++) {
        char path[4096];
        bool added = false;
        int rc = sl_path_join(path, sizeof path, dir, s->name[i], err);
        if (rc == 0 && s->file[i].path)
            rc = add_copy(&s->file[i], path, drive, &added, err);
        if (rc < 0)
            return sl_err_prefix(err, "mirror");
        copies += added;
    }
    if (!copies)
        return sl_fail(err, SL_EFORMAT, "mirror: %s: found no copy of a shard of the model, expected %s or another",
                       dir, s->n ? s->name[0] : "one");
    sl_log(SL_LOG_INFO, "mirror: %s holds %u of %u shards", dir, copies, s->n);
    return 0;
}
