#!/bin/sh
# The budget holds by the kernel's own count: a run inside a cgroup of that size, without swap.
. tests/cli/lib.sh
model=tests/data/golden/tiny-k3-a
[ -d $model ] || skip "$model is absent"
commands | grep -qx run || skip "no command run"

what="tiny-k3-a in a cgroup"
for ram in 64M 96M 256M; do
    status=0
    tests/e2e/ram-cgroup.sh $ram "$sluice" run --ids 72,101,108,108,111 --ctx 256 -n 8 --ignore-eos --json \
        --ram $ram $model >"$out" 2>"$err" || status=$?
    [ $status = 77 ] && skip "$(tail -n 1 "$err")"
    expect_status 0
    sed -n 's/.*"id":\([0-9]*\).*/\1/p' "$out" >"$tmp/ids"
    [ -s "$tmp/first" ] || cp "$tmp/ids" "$tmp/first"
    cmp -s "$tmp/ids" "$tmp/first" || bad "other tokens than under the first budget"
    echo "$ram: $(tail -n 1 "$err") $(sed -n 's/.*\("peak_rss_bytes":[0-9]*\).*/\1/p' "$out")"
    rss=$(sed -n 's/.*"peak_rss_bytes":\([0-9]*\).*/\1/p' "$out")
    [ "${rss:-0}" -gt 0 ] && [ "$rss" -le $((${ram%M} << 20)) ] || bad "peak RSS '$rss' above $ram"
done
finish
