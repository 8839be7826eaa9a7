#!/bin/sh
# sluice run: the golden continuation, its output forms, and what it refuses.
. tests/cli/lib.sh
commands | grep -qx run || skip "no command run"
small="--ram 128M --threads 2"

# golden NAME KEY: prompt ids, or the greedy continuation, of golden.json as a list
golden_ids() {
    sed 's/"name":/\n&/g' $golden/golden.json | grep "^\"name\":\"$1\"" |
        case $2 in
        prompt) sed 's/^"name":"[^"]*","ids":\[\([^]]*\)\].*/\1/' ;;
        greedy) sed 's/.*"greedy":{"ids":\[\([^]]*\)\].*/\1/' ;;
        esac | tr -d ' '
}
printed_ids() { sed -n 's/.*"event":"token".*"id":\([0-9]*\),.*/\1/p' "$out" | tr '\n' ',' | sed 's/,$//'; }

for name in five chat-frame; do
    # shellcheck disable=SC2086
    run run $small --json -n 32 --ignore-eos --ids "$(golden_ids $name prompt)" $golden
    expect_status 0
    expect_equal "$(printed_ids)" "$(golden_ids $name greedy)"
    expect_equal "$(wc -l <"$out")" 33
    expect_out '"finish_reason":"length"'
    expect_out '"tokens":32,'
done

# Text in, text out. The first 256 ids are the bytes themselves.
run run $small -n 8 --ignore-eos $golden "Drqt" # not among the golden prompts
expect_status 0
cp "$out" "$tmp/text"
run run $small -n 8 --ignore-eos --ids 68,114,113,116 $golden
cmp -s "$out" "$tmp/text" || bad "other text than for the same prompt as text"
printf Drqt >"$tmp/prompt"
run run $small -n 8 --ignore-eos --prompt-file "$tmp/prompt" $golden
cmp -s "$out" "$tmp/text" || bad "other text than for the same prompt as argument"
what="sluice run MODEL -"
"$sluice" run $small -n 8 --ignore-eos $golden - <"$tmp/prompt" >"$out" 2>"$err" || bad "failed"
cmp -s "$out" "$tmp/text" || bad "other text than for the same prompt as argument"
run -q run $small -n 1 --ids 1 $golden
expect_no_err

# Options that repeat, and all that shape the sampling, end as they should.
run -q run $small -n 8 --ignore-eos --stop "never said" --stop "nor this" --temperature 0.5 --top-p 0.9 --top-k 5 \
    --min-p 0.01 --seed 3 --ids 1,2 $golden
expect_status 0
expect_no_err

# Sampling is a function of the seed; the limits that leave one token are greedy.
set -- $small --json -n 12 --ignore-eos --ids "$(golden_ids five prompt)"
for limit in "--top-k 1" "--top-p 0.000001" "--min-p 1"; do
    # shellcheck disable=SC2086
    run run "$@" --temperature 1.5 $limit $golden
    expect_equal "$(printed_ids)" "$(golden_ids five greedy | cut -d, -f1-12)"
done
run run "$@" --temperature 2 --seed 7 $golden
first=$(printed_ids)
run run "$@" --temperature 2 --seed 7 --threads 1 --prefill-chunk 1 --io pread $golden
expect_equal "$(printed_ids)" "$first"
run run "$@" --temperature 2 --seed 8 $golden
[ "$(printed_ids)" != "$first" ] || bad "the seed changes nothing"

# A trace has a line for each position and MoE layer, and is the same however the passes were cut.
routed() { sed 's/"pass":[0-9]*,//' "$1" | LC_ALL=C sort; }
run run $small -n 4 --ignore-eos --trace "$tmp/trace" --ids 1,2,3,4,5 $golden
expect_status 0
layers=$(sed -n '2,$s/.*"layer":\([0-9]*\),.*/\1/p' "$tmp/trace" | sort -u | wc -l)
expect_equal "$(wc -l <"$tmp/trace")" $((1 + 8 * layers))
expect_equal "$(sed -n '$s/.*"pass":\([0-9]*\),"pos":\([0-9]*\),.*/\1 \2/p' "$tmp/trace")" "3 7"
run run $small -n 4 --ignore-eos --trace "$tmp/trace2" --prefill-chunk 2 --ids 1,2,3,4,5 $golden
expect_equal "$(sed -n '$s/.*"pass":\([0-9]*\),.*/\1/p' "$tmp/trace2")" 5
expect_equal "$(routed "$tmp/trace2")" "$(routed "$tmp/trace")"
run run $small -n 4 --ids 1 --trace "$tmp/none/trace" $golden
expect_status 1
expect_err "$tmp/none/trace"
mkfifo "$tmp/fifo"
run run $small -n 4 --ids 1 --trace "$tmp/fifo" $golden
expect_status 2
expect_err "not a regular file"
[ -p "$tmp/fifo" ] || bad "the pipe is gone"

# ---- refusals
refuse() { # STATUS TEXT ARG...
    status_=$1 text_=$2
    shift 2
    # shellcheck disable=SC2086
    run run $small "$@"
    expect_refusal "$status_" "$text_"
}
refuse 2 "vocabulary" --ids 512 $golden
refuse 2 "" --ids 1,-1 $golden
refuse 2 "'x'" --ids 1,x $golden
refuse 2 "empty" --ids "" $golden
refuse 2 "" --ids 1 $golden text
refuse 2 "" --ids 1 --prompt-file "$tmp/prompt" $golden
refuse 2 "empty" $golden ""
refuse 2 "context" --ctx 4 --ids 1,2,3,4,5 $golden
refuse 2 "" --temperature -1 --ids 1 $golden
refuse 2 "" --top-p 1.5 --ids 1 $golden
refuse 2 "" --min-p -0.5 --ids 1 $golden
refuse 2 "" --special refuse $golden "<|end_of_msg|>"
refuse 3 absent --prompt-file "$tmp/absent" $golden
: >"$tmp/prompt"
refuse 2 "empty" --prompt-file "$tmp/prompt" $golden
printf 'a\377b' >"$tmp/prompt"
refuse 2 "UTF-8" --prompt-file "$tmp/prompt" $golden
head -c 3000 /dev/urandom >"$tmp/prompt"
refuse 2 "UTF-8" --prompt-file "$tmp/prompt" $golden
head -c 3000 /dev/zero >"$tmp/prompt"
refuse 2 "context" --ctx 100 --prompt-file "$tmp/prompt" $golden
refuse 1 "" --prompt-file "$tmp" $golden
refuse 3 "$tmp/absent" --ids 1 "$tmp/absent"

SL_CPU=mmx
export SL_CPU
refuse 2 "SL_CPU" --ids 1 $golden
unset SL_CPU

# Standard output that closes or fills: status 1, one line, at once.
what="run >&-"
status=0
# shellcheck disable=SC2086
"$sluice" run $small --ids 1 -n 4 $golden >&- 2>"$err" || status=$?
: >"$out"
expect_refusal 1 "standard output"
what="run >/dev/full"
status=0
# shellcheck disable=SC2086
"$sluice" run $small --json --ids 1 -n 4 $golden >/dev/full 2>"$err" || status=$?
expect_refusal 1 "standard output"
what="run | true"
mkfifo "$tmp/pipe"
# shellcheck disable=SC2086
{ "$sluice" run $small --json --ids 1 -n 400 --ignore-eos $golden >"$tmp/pipe" 2>"$err"; echo $? >"$tmp/status"; } &
head -n 1 <"$tmp/pipe" >/dev/null
wait $!
status=$(cat "$tmp/status")
expect_refusal 1 "standard output"

# SIGINT and SIGTERM at some moments: status 130 (or the run was over), and no token that is wrong.
for signal in INT TERM; do
    for delay in 0.002 0.01 0.05 0.2; do
        what="run, SIG$signal after $delay s"
        # `timeout` sends the signal, since shells start background jobs with SIGINT ignored.
        status=0
        # shellcheck disable=SC2086
        timeout -s $signal --preserve-status $delay "$sluice" run $small --json -n 3000 --ctx 3008 --ignore-eos \
            --ids "$(golden_ids chat-frame prompt)" $golden >"$out" 2>"$err" || status=$?
        # before the handler is there, the signal itself ends the process
        case $status in 130 | 143) ;; *) bad "exit status $status" ;; esac
        got=$(printed_ids | cut -d, -f1-32)
        case ",$(golden_ids chat-frame greedy)," in
        ",$got,"*) ;;
        *) [ -z "$got" ] || bad "other ids than an undisturbed run" ;;
        esac
    done
done
finish
