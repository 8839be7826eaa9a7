#!/bin/sh
# Vocabularies that are broken: status 3, one line that names the file, nothing on stdout.
. tests/cli/lib.sh

broken() { # SED-EXPRESSION TEXT
    fresh_model
    edit tiktoken.model "$1"
    run tokenize "$model" a
    expect_refusal 3 "$2"
    expect_err tiktoken.model
}
broken '5s/.*/*** 4/' 5
broken '5s/ .*/ 3/' 3
broken '5s/ .*/ 7/' 7
broken '5s/ .*//' 5
broken '5s/ .*/ -4/' 5
broken '5d' 5
broken '5s/^[^ ]*/AAA/' 5
broken '5s/^[^ ]*//' 5
fresh_model
: >"$model/tiktoken.model"
run tokenize "$model" a
expect_refusal 3 tiktoken.model
fresh_model
edit tokenizer_config.json '1s/{/[/'
run tokenize "$model" a
expect_refusal 3 tokenizer_config.json

finish
