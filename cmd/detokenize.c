/* sluice detokenize: token ids to text. */
#include "cmd.h"

#include <stdlib.h>
#include <string.h>

enum { IDS_TEXT_MAX = 1 << 30 };

/* The arguments, or standard input, as one list separated by spaces; malloc'd. */
static int gather(const char *const *args, int n, char **list, sl_err *err)
{
    size_t len = 0;
    if (n == 0 || (n == 1 && strcmp(args[0], "-") == 0))
        return cmd_read_text(NULL, list, &len, IDS_TEXT_MAX, err);
    for (int i = 0; i < n; i++)
        len += strlen(args[i]) + 1;
    char *p = *list = malloc(len + 1);
    if (!p) {
        snprintf(err->text, sizeof err->text, "out of memory for %zu bytes", len);
        return err->code = SL_EFAIL;
    }
    for (int i = 0; i < n; i++) {
        len = strlen(args[i]);
        memcpy(p, args[i], len);
        p += len;
        *p++ = i + 1 < n ? ' ' : 0;
    }
    return 0;
}

/* Prints nothing when any of the ids has no token. */
static int print_ids(const sl_tokenizer *t, const int32_t *ids, size_t n, sl_err *err)
{
    size_t len, longest = 0;
    for (size_t i = 0; i < n; i++) {
        if (!sl_tokenizer_bytes(t, ids[i], &len)) {
            snprintf(err->text, sizeof err->text, "id %d, expected 0 to %zu", ids[i], sl_tokenizer_size(t) - 1);
            return err->code = SL_EUSAGE;
        }
        longest = len > longest ? len : longest;
    }
    char *out = malloc(SL_DETOK_MAX(longest));
    if (!out) {
        snprintf(err->text, sizeof err->text, "out of memory");
        return err->code = SL_EFAIL;
    }
    sl_detok d = { 0 };
    for (size_t i = 0; i < n; i++) {
        const char *bytes = sl_tokenizer_bytes(t, ids[i], &len);
        fwrite(out, 1, sl_detok_feed(&d, bytes, len, out), stdout);
    }
    fwrite(out, 1, sl_detok_flush(&d, out), stdout);
    putchar('\n');
    free(out);
    return 0;
}

int cmd_detokenize(int argc, char **argv)
{
    static const cmd_option options[] = { { 0 } };
    const cmd_spec spec = {
        .usage = "detokenize MODEL [ID ...|-] [options]",
        .about = "Prints the text of the token ids: the arguments, or standard input.",
        .options = options,
        .min_args = 1,
        .max_args = -1,
    };
    const char **args = calloc((size_t)argc + 1, sizeof *args);
    if (!args)
        return cmd_error(1, "out of memory");
    const int n_args = cmd_parse(&spec, argc, argv, args);
    if (n_args < 0) {
        free(args);
        return n_args == -1 ? 0 : CMD_USAGE;
    }
    sl_err err;
    sl_tokenizer *t = NULL;
    char *list = NULL;
    int32_t *ids = NULL;
    size_t n = 0;
    int rc = sl_tokenizer_open(&t, args[0], &err);
    if (rc == 0)
        rc = gather(args + 1, n_args - 1, &list, &err);
    if (rc == 0 && list[strspn(list, " \t\r\n")]) /* no ids at all are an empty text */
        rc = cmd_parse_ids(list, &ids, &n, &err);
    if (rc == 0)
        rc = print_ids(t, ids, n, &err);
    free(list);
    free(ids);
    free(args);
    sl_tokenizer_close(t);
    return rc < 0 ? cmd_fail(&err) : cmd_flush();
}
