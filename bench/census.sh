#!/bin/sh
# bench/census.sh [DIR]: how long opening the released census takes, and how much memory. From the project's root, after make;
# the headers are written to a temporary directory in DIR (default: TMPDIR, else /tmp). Bar: 1 s, 64 MB.
set -eu
sluice=${SLUICE:-bin/sluice} runs=7
dir=$(mktemp -d -p "${1:-${TMPDIR:-/tmp}}")
trap 'rm -rf "$dir"' EXIT
now() { date +%s%N | cut -c1-13; } # milliseconds
echo "commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d)"
echo "machine: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) CPUs, Linux $(uname -r | cut -d- -f1)," \
    "$(stat -f -c %T "$dir"), load $(cut -d' ' -f1 /proc/loadavg)"
start=$(now)
"$sluice" synth "$dir" --preset k3 --headers-only >/dev/null
echo "synth --preset k3 --headers-only: $(($(now) - start)) ms, $(du -sm "$dir" | cut -f1) MB on the drive"
# Headers leave the page cache when they were read, so every run but the first reads from the drive.
i=0
while [ $i -lt $runs ]; do
    start=$(now)
    peak=$("$sluice" inspect --json "$dir" | sed -n 's/.*"peak_rss_bytes":\([0-9]*\)}$/\1/p')
    echo "inspect: $(($(now) - start)) ms, peak $((peak / 1000000)) MB"
    i=$((i + 1))
done
