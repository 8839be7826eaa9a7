/* base/err.h - how errors and log lines are made. Codes and sl_err are in sluice.h. */
#ifndef SL_BASE_ERR_H
#define SL_BASE_ERR_H

#include "sluice.h"

/* Writes the message and returns `code`, so that a
 * failing function ends in `return sl_fail(err, SL_EIO, ...)`. err may be NULL. Control characters
 * in the result are replaced by '?': names come from files, and the message must stay one line. */
int sl_fail(sl_err *err, int code, const char *fmt, ...) __attribute__((format(printf, 3, 4)));
#ifdef __clang_analyzer__ /* it cannot see into a variadic function, and must know what returns */
#define sl_fail(err, code, ...) ((sl_fail)(err, code, __VA_ARGS__), (code))
#endif

/* Puts "prefix: " before the message that err already holds; returns err->code. */
int sl_err_prefix(sl_err *err, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

void sl_log(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

/* A broken internal invariant: prints the place and aborts, in release builds too. */
#define sl_assert(cond) ((cond) ? (void)0 : sl_assert_failed(#cond, __FILE__, __LINE__))
_Noreturn void sl_assert_failed(const char *cond, const char *file, int line);

#endif
