/* tests/check.h - the few macros that all C tests share. Exit status: 0 passed, 1 failed, 77 skipped. */
#ifndef SL_TESTS_CHECK_H
#define SL_TESTS_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int check_failures __attribute__((unused));

/* Reports and goes on, so that one run shows all that is wrong; stops after 20. */
#define CHECK_MSG(cond, ...)                                                   \
    do {                                                                       \
        if (!(cond)) {                                                         \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #cond);         \
            fprintf(stderr, __VA_ARGS__);                                      \
            fputc('\n', stderr);                                               \
            if (++check_failures >= 20)                                        \
                exit(1);                                                       \
        }                                                                      \
    } while (0)
#define CHECK(cond) CHECK_MSG(cond, "failed")
#define CHECK_EQ(a, b)                                                         \
    do {                                                                       \
        const long long check_a = (long long)(a), check_b = (long long)(b);    \
        CHECK_MSG(check_a == check_b, "%lld, expected %lld", check_a, check_b); \
    } while (0)
#define CHECK_STR(a, b)                                                        \
    do {                                                                       \
        const char *check_a = (a), *check_b = (b);                             \
        CHECK_MSG(strcmp(check_a, check_b) == 0, "\"%s\", expected \"%s\"", check_a, check_b); \
    } while (0)
#define CHECK_DONE() return check_failures != 0
#define CHECK_SKIP(reason)                                                     \
    do {                                                                       \
        printf("skipped: %s\n", reason);                                       \
        exit(77);                                                              \
    } while (0)

#endif
