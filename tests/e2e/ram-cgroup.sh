#!/bin/sh
# ram-cgroup.sh LIMIT COMMAND [ARG]...   LIMIT in bytes, or with K, M, G (of 1024)
# Runs COMMAND in a memory cgroup of its own with that limit and no swap, then prints the cgroup's own
# maximum as the last line of standard error: `ram-cgroup: peak BYTES limit BYTES status N`.
# Exit status: the command's; 137 when it was killed for memory; 77 when no cgroup can be made here.
# The cgroup also counts page cache, which the kernel drops under pressure: a peak at the limit
# without a kill means files were read through the cache, not that memory ran out.
set -u
[ $# -ge 2 ] || { echo "usage: $0 LIMIT COMMAND [ARG]..." >&2; exit 2; }
case $1 in
*K) limit=$((${1%K} << 10)) ;;
*M) limit=$((${1%M} << 20)) ;;
*G) limit=$((${1%G} << 30)) ;;
*) limit=$(($1)) ;;
esac
shift
unavailable() { echo "ram-cgroup: $*" >&2; exit 77; }

group=
if [ -w /sys/fs/cgroup/memory/memory.limit_in_bytes ] || [ -d /sys/fs/cgroup/memory ]; then
    own=$(sed -n 's/^[0-9]*:memory:\(.*\)/\1/p' /proc/self/cgroup)
    base=/sys/fs/cgroup/memory$own
    [ -d "$base" ] || base=/sys/fs/cgroup/memory # inside a container the path is relative to another root
    group=$base/sluice-test-$$ peak=memory.max_usage_in_bytes
    mkdir "$group" 2>/dev/null || unavailable "cannot create $group"
    trap 'rmdir "$group" 2>/dev/null' EXIT
    echo "$limit" >"$group/memory.limit_in_bytes" || unavailable "cannot set a limit"
    # Where swap is accounted, memory and swap together get the same limit; else it must be off.
    if [ -e "$group/memory.memsw.limit_in_bytes" ]; then
        echo "$limit" >"$group/memory.memsw.limit_in_bytes" || unavailable "cannot limit swap"
    elif [ "$(wc -l </proc/swaps)" -gt 1 ]; then
        echo 0 >"$group/memory.swappiness" || unavailable "swap is on and cannot be limited"
    fi
elif [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    base=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)
    [ -d "$base" ] || base=/sys/fs/cgroup
    # A group with processes in it cannot hand controllers to its children: try here, then at the root.
    for parent in "$base" /sys/fs/cgroup; do
        echo +memory >"$parent/cgroup.subtree_control" 2>/dev/null
        grep -qw memory "$parent/cgroup.subtree_control" 2>/dev/null || continue
        mkdir "$parent/sluice-test-$$" 2>/dev/null && { group=$parent/sluice-test-$$; break; }
    done
    [ -n "$group" ] || unavailable "no cgroup with the memory controller can be made"
    trap 'rmdir "$group" 2>/dev/null' EXIT
    peak=memory.peak
    echo "$limit" >"$group/memory.max" || unavailable "cannot set a limit"
    [ ! -e "$group/memory.swap.max" ] || echo 0 >"$group/memory.swap.max"
    [ -e "$group/$peak" ] || unavailable "this kernel does not keep memory.peak"
else
    unavailable "no memory cgroups"
fi

# The shell that becomes the command enters the group first, so that all it allocates is counted.
sh -c 'echo $$ >"$1/cgroup.procs" && shift && exec "$@"' sh "$group" "$@"
status=$?
echo "ram-cgroup: peak $(cat "$group/$peak") limit $limit status $status" >&2
exit $status
