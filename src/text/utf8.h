/* text/utf8.h - the shape of well-formed UTF-8 (Unicode, table 3-7), one byte at a time. */
#ifndef SL_TEXT_UTF8_H
#define SL_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Bytes of the sequence that starts with `lead`; 0: no sequence starts with it. */
static inline unsigned sl_utf8_size(uint8_t lead)
{
    return lead < 0x80 ? 1 : lead < 0xc2 ? 0 : lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : lead < 0xf5 ? 4 : 0;
}

/* Whether byte b may stand at index i >= 1 of the sequence. The second byte is narrower after some
 * leads: no overlong forms, no surrogates, nothing past U+10FFFF. */
static inline bool sl_utf8_follows(uint8_t lead, unsigned i, uint8_t b)
{
    const uint8_t lo = i != 1 ? 0x80 : lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
    const uint8_t hi = i != 1 ? 0xbf : lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
    return b >= lo && b <= hi;
}

/* The offset of the first byte that is not part of well-formed UTF-8; len when there is none. */
static inline size_t sl_utf8_valid(const char *text, size_t len)
{
    const uint8_t *p = (const uint8_t *)text;
    for (size_t at = 0; at < len;) {
        const unsigned size = sl_utf8_size(p[at]);
        if (size == 0 || size > len - at)
            return at;
        for (unsigned i = 1; i < size; i++)
            if (!sl_utf8_follows(p[at], i, p[at + i]))
                return at;
        at += size;
    }
    return len;
}

/* The code point at p, which is well-formed. */
static inline uint32_t sl_utf8_code(const char *text)
{
    const uint8_t *p = (const uint8_t *)text;
    switch (sl_utf8_size(p[0])) {
    case 1: return p[0];
    case 2: return (p[0] & 0x1fu) << 6 | (p[1] & 0x3fu);
    case 3: return (p[0] & 0x0fu) << 12 | (p[1] & 0x3fu) << 6 | (p[2] & 0x3fu);
    default: return (p[0] & 0x07u) << 18 | (p[1] & 0x3fu) << 12 | (p[2] & 0x3fu) << 6 | (p[3] & 0x3fu);
    }
}

#endif
