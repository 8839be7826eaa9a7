/* store/mirror.h - further copies of a model's shards, whole or in part, on other drives. */
#ifndef SL_STORE_MIRROR_H
#define SL_STORE_MIRROR_H

#include "store/safetensors.h"

/* Makes the shards of `dir` that bear the names of s's, drive number `drive` >= 1, further sources of their bytes.
 * Absent ones, and links to the very file, are passed over. The others must have the same size, the same header
 * and the same bytes at SL_MIRROR_SAMPLES places, so that a copy that is not finished is seen: SL_EFORMAT names
 * file and offset. SL_EFORMAT too when none is there. */
enum { SL_MIRROR_SAMPLES = 64 };
int sl_mirror_open(sl_shards *s, const char *dir, unsigned drive, sl_err *err);

#endif
