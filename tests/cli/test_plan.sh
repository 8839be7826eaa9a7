#!/bin/sh
# Budgets: what is refused, what the refusal says, and that it is true.
. tests/cli/lib.sh
commands | grep -qx plan || skip "no command plan"
field() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$out"; }

run plan --json --ram 256M --ctx 512 --threads 1 $golden
expect_status 0
expect_no_err
minimum=$(field minimum)
longest=$(field max_context)
expect_equal "$(field budget)" $((256 << 20))
[ "$(field total)" -le $((256 << 20)) ] || bad "total above the budget"
sum=0
for part in reserve index state scratch ring inflight trunk cache; do sum=$((sum + $(field $part))); done
expect_equal "$sum" "$(field total)"
run plan --ram 256M $golden
expect_status 0
expect_out "read per decoded token"

# What a refusal names works, and less (a MiB, in which budgets are named) does not.
run plan --json --ram "$minimum" --ctx 512 --threads 1 $golden
expect_status 0
run plan --json --ram $((minimum - (1 << 20))) --ctx 512 --threads 1 $golden
expect_refusal 5 "$minimum"
run plan --json --ram 256M --ctx "$longest" --threads 1 $golden
expect_status 0
run plan --json --ram 256M --ctx $((longest + 1)) --threads 1 $golden
expect_refusal 5 "$longest"
for command in plan run logits; do
    commands | grep -qx $command || continue
    case $command in
    run) set -- --ids 1 ;;
    logits) set -- --ids 1 -o "$tmp/logits" ;;
    *) set -- ;;
    esac
    run $command --ram 1M "$@" $golden
    expect_refusal 5 "needed"
    [ ! -e "$tmp/logits" ] || bad "left a file"
    run $command --ram 0 "$@" $golden
    expect_refusal 2 "--ram"
    run $command --ram 8Q "$@" $golden
    expect_refusal 2 "'8Q' is not a size"
    run $command --ctx 99999999999 "$@" $golden
    expect_refusal 2 "--ctx"
    run $command --io magic "$@" $golden
    expect_refusal 2 "'magic' is none of"
done

# Time: from a drive that was named, since the one here may not have been measured.
run plan --json --ram 256M --drive-bandwidth 1G --threads 1 $golden
expect_status 0
expect_out '"predicted_seconds":'
expect_equal "$(field stream_bytes_per_second)" $((1 << 30))
run plan --ram 256M --drive-bandwidth 1G $golden
expect_out "s a token, from a drive that reads the trunk at 1.07 GB/s"
run plan --ram 256M --drive-bandwidth fast $golden
expect_refusal 2 "--drive-bandwidth"

# What a decoded token is said to read is what it reads, within 10 %, with nothing, some and all of it resident. The
# random weights of synth call for experts nearly alike, once the token is drawn and not the likeliest.
run synth "$tmp/synth" --preset tiny --experts 64
expect_status 0
run plan --json --ctx 256 --threads 1 "$tmp/synth"
minimum=$(field minimum)
all=0
for more in 0 2000 2600 3500 4500 5200 65536; do
    set -- --ram $((minimum + more * 1024)) --ctx 256 --threads 1 --prefill-chunk 1 "$tmp/synth"
    run plan --json "$@"
    expect_status 0
    predicted=$(field predicted_bytes)
    for n in 126 246; do
        run run --json --temperature 5 --ignore-eos --ids 1 -n $n "$@"
        expect_status 0
        all=$(($(field trunk) + $(field experts) + $(field head) + $(field embed) - all))
    done
    read_=$((all / 120)) all=0
    what="$2 bytes of RAM"
    [ $((read_ * 10)) -ge $((predicted * 9)) ] && [ $((read_ * 10)) -le $((predicted * 11)) ] ||
        bad "$read_ bytes a token, $predicted were predicted"
done

# The latent cache grows by the 4-byte latent of each full-attention layer, and little else.
run plan --json --ram 256M --ctx 4096 --threads 1 tests/data/golden/tiny-k3-a
[ "$(field state_per_position)" -le $((7 * 48 * 4 + 1024)) ] || bad "$(field state_per_position) bytes a position"
finish
