#include "gen/stop.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One string and how much of it the text ends with (Knuth, Morris, Pratt). */
typedef struct {
    const char *text;
    uint16_t *border; /* [len]: of the first i + 1 bytes, the longest proper prefix that also ends them */
    size_t len, matched;
} pattern;

struct sl_stop {
    pattern *patterns; /* [n]; the block that their pointers point into */
    size_t n, longest;
    int which;
};

/* The length of the longest prefix of p that ends with c, after one of length `matched`. */
static size_t advance(const pattern *p, size_t matched, char c)
{
    if (matched == p->len)
        matched = p->border[matched - 1];
    while (matched && p->text[matched] != c)
        matched = p->border[matched - 1];
    return matched + (p->text[matched] == c);
}

int sl_stop_open(sl_stop **out, const char *const *strings, size_t n, sl_err *err)
{
    size_t bytes = 0;
    if (n > SL_STOP_STRINGS_MAX)
        return sl_fail(err, SL_EUSAGE, "stop: %zu strings, at most %d expected", n, SL_STOP_STRINGS_MAX);
    for (size_t i = 0; i < n; i++) {
        const size_t len = strlen(strings[i]);
        if (len == 0 || len > SL_STOP_BYTES_MAX)
            return sl_fail(err, SL_EUSAGE, "stop: string %zu has %zu bytes, expected 1 to %d", i + 1, len,
                           SL_STOP_BYTES_MAX);
        bytes += len;
    }
    sl_stop *s = calloc(1, sizeof *s);
    char *block = calloc(1, n * sizeof(pattern) + bytes * (sizeof(uint16_t) + 1) + 1);
    if (!s || !block) {
        free(s);
        free(block);
        return sl_fail(err, SL_EFAIL, "stop: out of memory");
    }
    *s = (sl_stop){ .patterns = (pattern *)block, .n = n, .which = -1 };
    uint16_t *border = (uint16_t *)(block + n * sizeof(pattern));
    char *text = (char *)(border + bytes);
    for (size_t i = 0; i < n; i++) {
        pattern *p = &s->patterns[i];
        *p = (pattern){ .text = text, .border = border, .len = strlen(strings[i]) };
        memcpy(text, strings[i], p->len);
        for (size_t k = 1; k < p->len; k++)
            border[k] = (uint16_t)advance(p, border[k - 1], text[k]);
        text += p->len;
        border += p->len;
        if (p->len > s->longest)
            s->longest = p->len;
    }
    *out = s;
    return 0;
}

void sl_stop_close(sl_stop *s)
{
    if (!s)
        return;
    free(s->patterns);
    free(s);
}

void sl_stop_reset(sl_stop *s)
{
    for (size_t i = 0; i < s->n; i++)
        s->patterns[i].matched = 0;
    s->which = -1;
}

size_t sl_stop_room(const sl_stop *s, size_t len) { return s->longest + len; }
int sl_stop_which(const sl_stop *s) { return s->which; }

/* What is held back is the longest match so far, so the strings themselves remember it. */
static size_t held_back(const sl_stop *s, const char **text)
{
    size_t len = 0;
    for (size_t i = 0; i < s->n; i++)
        if (s->patterns[i].matched > len) {
            len = s->patterns[i].matched;
            *text = s->patterns[i].text;
        }
    return len;
}

/* Writes the first n bytes of what was held back followed by text. */
static size_t release(char *out, const char *held, size_t n_held, const char *text, size_t n)
{
    const size_t k = n < n_held ? n : n_held;
    if (k)
        memcpy(out, held, k);
    if (n > k)
        memcpy(out + k, text, n - k);
    return n;
}

size_t sl_stop_feed(sl_stop *s, const char *text, size_t len, char *out, bool *stopped)
{
    const char *held = NULL, *unused;
    const size_t n_held = held_back(s, &held);
    *stopped = s->which >= 0;
    if (*stopped)
        return 0;
    for (size_t at = 0; at < len; at++) {
        size_t full = 0;
        for (size_t i = 0; i < s->n; i++) {
            pattern *p = &s->patterns[i];
            p->matched = advance(p, p->matched, text[at]);
            if (p->matched == p->len && p->len > full) {
                full = p->len;
                s->which = (int)i;
            }
        }
        if (full) {
            *stopped = true;
            return release(out, held, n_held, text, n_held + at + 1 - full);
        }
    }
    return release(out, held, n_held, text, n_held + len - held_back(s, &unused));
}

size_t sl_stop_flush(sl_stop *s, char *out)
{
    const char *held = NULL;
    const size_t n = s->which >= 0 ? 0 : held_back(s, &held);
    release(out, held, n, "", n);
    for (size_t i = 0; i < s->n; i++)
        s->patterns[i].matched = 0;
    return n;
}
