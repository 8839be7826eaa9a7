/* The streaming decoder of sluice.h. `pending` always holds a proper prefix of a well-formed sequence. */
#include <string.h>

#include "sluice.h"
#include "text/utf8.h"

static size_t put_replacement(char *out)
{
    memcpy(out, "\xef\xbf\xbd", 3);
    return 3;
}

size_t sl_detok_feed(sl_detok *d, const char *bytes, size_t len, char *out)
{
    size_t n = 0;
    for (size_t i = 0; i < len; i++) {
        const uint8_t b = (uint8_t)bytes[i];
        if (d->n_pending && !sl_utf8_follows(d->pending[0], d->n_pending, b)) {
            n += put_replacement(out + n);
            d->n_pending = 0; /* b itself may start a sequence */
        }
        if (!d->n_pending && sl_utf8_size(b) == 0) {
            n += put_replacement(out + n);
            continue;
        }
        d->pending[d->n_pending++] = b;
        if (d->n_pending == sl_utf8_size(d->pending[0])) {
            memcpy(out + n, d->pending, d->n_pending);
            n += d->n_pending;
            d->n_pending = 0;
        }
    }
    return n;
}

size_t sl_detok_flush(sl_detok *d, char *out)
{
    const bool cut = d->n_pending != 0;
    d->n_pending = 0;
    return cut ? put_replacement(out) : 0;
}
