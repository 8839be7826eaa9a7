#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

int sl_path_join(char *buf, size_t size, const char *dir, const char *name, sl_err *err)
{
    const int n = name ? snprintf(buf, size, "%s/%s", dir, name) : snprintf(buf, size, "%s", dir);
    if (n < 0 || (size_t)n >= size)
        return sl_fail(err, SL_EUSAGE, "%.200s: path too long", dir);
    return 0;
}

int sl_write_all(int fd, const void *data, size_t n)
{
    const char *p = data;
    while (n) {
        const ssize_t k = write(fd, p, n);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return -errno;
        p += k;
        n -= (size_t)k;
    }
    return 0;
}

int sl_pread_all(int fd, void *data, size_t n, uint64_t offset)
{
    char *p = data;
    while (n) {
        const ssize_t k = pread(fd, p, n, (off_t)offset);
        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return -errno;
        if (k == 0)
            return -ENODATA;
        p += k;
        n -= (size_t)k;
        offset += (uint64_t)k;
    }
    return 0;
}

int sl_file_read(char **out, size_t *len, const char *dir, const char *name, uint64_t max, sl_err *err)
{
    char path[4096];
    int rc = sl_path_join(path, sizeof path, dir, name, err);
    if (rc < 0)
        return rc;
    const int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* a FIFO must not hang us */
    if (fd < 0)
        return sl_fail(err, SL_EFORMAT, "%s: %s", path, strerror(errno));
    struct stat st;
    char *data = NULL;
    if (fstat(fd, &st) < 0)
        rc = sl_fail(err, SL_EIO, "%s: %s", path, strerror(errno));
    else if (!S_ISREG(st.st_mode))
        rc = sl_fail(err, SL_EFORMAT, "%s: not a regular file", path);
    else if ((uint64_t)st.st_size > max)
        rc = sl_fail(err, SL_EFORMAT, "%s: %llu bytes, at most %llu expected", path,
                     (unsigned long long)st.st_size, (unsigned long long)max);
    else if (!(data = malloc((size_t)st.st_size + 1)))
        rc = sl_fail(err, SL_EFAIL, "%s: no memory for %llu bytes", path, (unsigned long long)st.st_size);
    else if ((rc = sl_pread_all(fd, data, (size_t)st.st_size, 0)) < 0)
        rc = sl_fail(err, SL_EIO, "%s: %s", path, rc == -ENODATA ? "shrank while being read" : strerror(-rc));
    close(fd);
    if (rc < 0 || !data) {
        free(data);
        return rc;
    }
    data[st.st_size] = 0;
    *out = data;
    *len = (size_t)st.st_size;
    return 0;
}

int sl_atomic_open(sl_atomic_file *f, const char *path, sl_err *err)
{
    f->fd = -1;
    const int n = snprintf(f->tmp, sizeof f->tmp, "%s.tmp.%ld", path, (long)getpid());
    if (n < 0 || (size_t)n >= sizeof f->tmp)
        return sl_fail(err, SL_EUSAGE, "%.200s: path too long", path);
    memcpy(f->path, path, strlen(path) + 1);
    struct stat st; /* a rename would put a plain file in the place of a device or a pipe */
    if (stat(path, &st) == 0 && !S_ISREG(st.st_mode))
        return sl_fail(err, SL_EUSAGE, "%s: not a regular file, it cannot be replaced by one", path);
    f->fd = open(f->tmp, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (f->fd < 0)
        return sl_fail(err, SL_EFAIL, "%s: %s", f->tmp, strerror(errno));
    return 0;
}

static int sync_dir(const char *path)
{
    char dir[4096];
    snprintf(dir, sizeof dir, "%s", path);
    char *slash = strrchr(dir, '/');
    if (slash == dir)
        slash[1] = 0;
    else if (slash)
        *slash = 0;
    const int fd = open(slash ? dir : ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    const int rc = fsync(fd) < 0 && errno != EINVAL ? -errno : 0; /* some file systems cannot */
    close(fd);
    return rc;
}

int sl_atomic_commit(sl_atomic_file *f, sl_err *err)
{
    int e = 0;
    if (fsync(f->fd) < 0 && errno != EINVAL)
        e = errno;
    if (close(f->fd) < 0 && !e)
        e = errno;
    f->fd = -1;
    if (!e && rename(f->tmp, f->path) < 0)
        e = errno;
    if (e) {
        unlink(f->tmp);
        return sl_fail(err, SL_EFAIL, "%s: %s", f->path, strerror(e));
    }
    if ((e = sync_dir(f->path)) < 0)
        return sl_fail(err, SL_EFAIL, "%s: directory: %s", f->path, strerror(-e));
    return 0;
}

void sl_atomic_abort(sl_atomic_file *f)
{
    if (f->fd < 0)
        return;
    close(f->fd);
    unlink(f->tmp);
    f->fd = -1;
}
