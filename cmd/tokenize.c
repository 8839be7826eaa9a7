/* sluice tokenize: text to token ids. */
#include "cmd.h"

#include <stdlib.h>
#include <string.h>

enum { TEXT_MAX = 1 << 30 };

int cmd_tokenize(int argc, char **argv)
{
    static const char *const modes[] = { "allow", "plain", "refuse", NULL }; /* in the order of sl_special */
    const char *file = NULL;
    int special = SL_SPECIAL_ALLOW;
    const cmd_option options[] = {
        { "--file", NULL, CMD_STR, &file, "FILE", "Read the text from FILE", NULL },
        { "--special", NULL, CMD_CHOICE, &special, "HOW",
          "Names of special tokens in the text become their ids (allow, the default), are ordinary text "
          "(plain) or an error (refuse)", modes },
        { 0 },
    };
    const cmd_spec spec = {
        .usage = "tokenize MODEL [TEXT|-] [options]",
        .about = "Prints the token ids of the text: the argument, a file, or standard input.",
        .options = options,
        .min_args = 1,
        .max_args = 2,
    };
    const char **args = calloc((size_t)argc + 1, sizeof *args);
    if (!args)
        return cmd_error(1, "out of memory");
    const int n_args = cmd_parse(&spec, argc, argv, args);
    const char *model = args[0], *text = n_args == 2 && strcmp(args[1], "-") != 0 ? args[1] : NULL;
    free(args);
    if (n_args < 0)
        return n_args == -1 ? 0 : CMD_USAGE;
    if (n_args == 2 && file)
        return cmd_error(CMD_USAGE, "tokenize: both a text and --file");

    sl_err err;
    char *read_text = NULL;
    size_t len = text ? strlen(text) : 0, n = 0;
    sl_tokenizer *t = NULL;
    int32_t *ids = NULL;
    int rc = sl_tokenizer_open(&t, model, &err);
    if (rc == 0 && !text)
        rc = cmd_read_text(file, &read_text, &len, TEXT_MAX, &err);
    if (rc == 0)
        rc = sl_tokenizer_encode(t, text ? text : read_text, len, (enum sl_special)special, &ids, &n, &err);
    for (size_t i = 0; i < n; i++)
        printf(i ? " %d" : "%d", ids[i]);
    if (rc == 0)
        putchar('\n');
    free(read_text);
    sl_free(ids);
    sl_tokenizer_close(t);
    return rc < 0 ? cmd_fail(&err) : cmd_flush();
}
