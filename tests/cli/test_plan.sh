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

# The latent cache grows by the 4-byte latent of each full-attention layer, and little else.
run plan --json --ram 256M --ctx 4096 --threads 1 tests/data/golden/tiny-k3-a
[ "$(field state_per_position)" -le $((7 * 48 * 4 + 1024)) ] || bad "$(field state_per_position) bytes a position"
finish
