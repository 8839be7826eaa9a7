#!/bin/sh
# tokenize and detokenize: sources of text, special tokens, what is refused.
. tests/cli/lib.sh
model=tests/data/golden/tokenizer
line='Hello 中 <|open|>x'

run tokenize $model "$line"
expect_status 0
expect_no_err
expect_equal "$(cat "$out")" "3890 78 220 1263 255 220 4003 87"
# shellcheck disable=SC2046
run detokenize $model $(cat "$out")
expect_status 0
expect_no_err
expect_equal "$(cat "$out")" "$line"
run tokenize --special plain $model "$line"
expect_equal "$(cat "$out")" "3890 78 220 1263 255 867 91 498 273 91 29 87"
run tokenize --special refuse $model "$line"
expect_refusal 2 "special token <|open|> at offset 10"

printf '%s' "$line" >"$tmp/text"
run tokenize $model --file "$tmp/text"
expect_equal "$(cat "$out")" "3890 78 220 1263 255 220 4003 87"
what='sluice tokenize from standard input, detokenize to standard output'
expect_equal "$("$sluice" tokenize $model <"$tmp/text" | "$sluice" detokenize $model)" "$line"
expect_equal "$("$sluice" tokenize $model - <"$tmp/text" | "$sluice" detokenize $model -)" "$line"
run tokenize $model
expect_status 0
expect_equal "$(od -An -c "$out" | tr -d ' ')" '\n'

run detokenize $model 1263,255 161
expect_status 0
expect_equal "$(od -An -tx1 "$out" | tr -d ' \n')" e4b8adefbfbd0a
run detokenize $model 64 4256
expect_refusal 2 "id 4256, expected 0 to 4255"
run detokenize $model 64 x
expect_refusal 2 "'x' is not a token id"
run tokenize $model text --file "$tmp/text"
expect_refusal 2 "both a text and --file"
printf 'a\377' >"$tmp/text"
run tokenize $model --file "$tmp/text"
expect_refusal 2 "byte 0xff at offset 1, expected UTF-8"
run tokenize "$tmp" text
expect_refusal 3 "$tmp/tiktoken.model: No such file"
echo 'IQ== 1' >"$tmp/tiktoken.model"
echo '{}' >"$tmp/tokenizer_config.json"
run tokenize "$tmp" text
expect_refusal 3 "$tmp: tiktoken.model: line 1: rank \"1\", expected 0 to 0, one for each line"
finish
