/* gen/stop.h - stop strings in streamed text.
 *
 * Text goes in as it is decoded; what comes out is safe to show: the beginning of a possible stop string is
 * held back until it is complete or refuted. The string that is complete first stops the text; of several
 * that end at the same byte, the longest. How the text is split does not matter.
 * Owns: copies of the strings. Threads: one at a time. Allocates in open only. */
#ifndef SL_GEN_STOP_H
#define SL_GEN_STOP_H

#include <stdbool.h>

#include "base/err.h"

enum { SL_STOP_STRINGS_MAX = 64, SL_STOP_BYTES_MAX = 4096 }; /* number of strings, bytes of each */

typedef struct sl_stop sl_stop;

/* SL_EUSAGE: too many strings, one that is empty or too long. n may be 0. */
int sl_stop_open(sl_stop **out, const char *const *strings, size_t n, sl_err *err);
void sl_stop_close(sl_stop *s); /* NULL is fine */
/* Forgets the text, not the strings. */
void sl_stop_reset(sl_stop *s);

/* Room that `out` needs for a feed of len bytes: what is held back may come out with it. */
size_t sl_stop_room(const sl_stop *s, size_t len);
/* Writes what has become safe to show and returns its length. Once *stopped is true, the text before the
 * stop string has been written, all of it, and every later call writes nothing. Whole UTF-8 sequences in
 * (and in the strings), whole sequences out. */
size_t sl_stop_feed(sl_stop *s, const char *text, size_t len, char *out, bool *stopped);
/* The text ends without a stop string: writes what was held back. */
size_t sl_stop_flush(sl_stop *s, char *out);
/* The index of the string that stopped the text, or -1. */
int sl_stop_which(const sl_stop *s);

#endif
