#!/bin/sh
# The cache simulator replays the engine's policy call by call: its hits are those that the engine counted.
. tests/cli/lib.sh
commands | grep -qx run || skip "no command run"
command -v python3 >/dev/null || skip "no python3"
field() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$out"; }

run synth "$tmp/model" --preset tiny --experts 64
expect_status 0
run plan --json --ctx 64 "$tmp/model"
minimum=$(field minimum)
for more in 1500 2500 4000; do
    set -- --threads 1 --ram $((minimum + more * 1024)) --ctx 64 --prefill-chunk 2
    run plan --json "$@" "$tmp/model"
    slots=$(field expert_slots)
    [ "$slots" -gt 0 ] || continue
    run run "$@" --json --temperature 3 -n 24 --ignore-eos --ids 9,8,7,6,5 --trace "$tmp/trace" "$tmp/model"
    expect_status 0
    counted="$(field requests) $(field hits)"
    what="tools/sim/cache.py, $slots slots"
    python3 tools/sim/cache.py --prompt 0 --slots "$slots" --trace "$tmp/trace" >"$out" 2>"$err" || bad "failed"
    expect_equal "$(sed -n "s/^$slots layer:lru-times //p" "$out")" "$counted"
    [ "${counted#* }" -gt 0 ] && compared=yes
done
what="budgets"
[ "${compared:-no}" = yes ] || bad "none with a hit"
what="tools/sim/cache.py without data"
python3 tools/sim/cache.py --recorded "$tmp/absent" >"$out" 2>"$err" && bad "succeeded"
expect_err "skipped"
finish
