# bench/lib.sh - what the end-to-end measurements share. Sourced, from the project's root, after make.
sluice=${SLUICE:-bin/sluice}

# The facts every result begins with.
facts() {
    echo "# commit $(git rev-parse --short HEAD 2>/dev/null || echo unknown), $(date -u +%Y-%m-%d), $0 $*"
    echo "# machine: $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) CPUs," \
        "$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo) kB, Linux $(uname -r), load $(cut -d' ' -f1 /proc/loadavg)"
}

# json FILE NAME: the number of that name, the last one if it occurs more than once.
json() { sed -n "s/.*\"$2\":\([0-9.]*\).*/\1/p" "$1" | tail -n 1; }

# raw_drive FILE [PIECE] [DEPTH]: the drive alone, GB/s: the size and depth of the engine, past the page cache; nothing
# without fio.
raw_drive() {
    command -v fio >/dev/null || return 0
    fio --name=raw --filename="$1" --readonly --rw=read --bs="${2:-512K}" --iodepth="${3:-64}" --direct=1 --ioengine=io_uring \
        --runtime=5 --time_based --output-format=json 2>/dev/null |
        sed -n '/"read"/,/"write"/s/.*"bw_bytes" : \([0-9]*\).*/\1/p' | head -n 1 | awk '{ printf "%.2f", $1 / 1e9 }'
}

# run_capped LIMIT DIR IDS TOKENS: one row of CSV for a run in a cgroup of LIMIT with --ram LIMIT.
row_header="ram,prompt_tokens,tokens,seconds_prefill,seconds_per_token,bytes_per_token,planned_bytes_per_token,cgroup_peak_bytes,limit_bytes,raw_drive_gb_s,gb_s"
run_capped() {
    out=$(mktemp) err=$(mktemp) first=$(mktemp) plan=$(mktemp)
    # Decode's bytes are the difference of two runs that differ in their number of tokens.
    "$sluice" plan "$2" --ram "$1" --ctx $((4 + $4)) --prefill-chunk 4 --json >"$plan"
    raw=$(raw_drive "$(ls "$2"/model-00002-*.safetensors)")
    "$sluice" run "$2" --ids "$3" -n 1 --ram "$1" --ctx $((4 + $4)) --prefill-chunk 4 --ignore-eos --json >"$first" 2>/dev/null
    sh tests/e2e/ram-cgroup.sh "$1" "$sluice" run "$2" --ids "$3" -n "$4" --ram "$1" --ctx $((4 + $4)) \
        --prefill-chunk 4 --ignore-eos --json >"$out" 2>"$err"
    peak=$(sed -n 's/.*ram-cgroup: peak \([0-9]*\) limit.*/\1/p' "$err")
    total() { echo $(($(json "$1" trunk) + $(json "$1" experts) + $(json "$1" head) + $(json "$1" embed))); }
    bytes=$((($(total "$out") - $(total "$first")) / ($4 - 1)))
    seconds=$(json "$out" seconds_decode)
    awk -v r="$1" -v s="$seconds" -v n="$4" -v b="$bytes" -v p="$(json "$plan" predicted_bytes)" -v peak="$peak" \
        -v pre="$(json "$out" seconds_prefill)" -v raw="$raw" -v lim="$(json "$out" ram_budget_bytes)" 'BEGIN {
        printf "%s,4,%d,%s,%.2f,%.0f,%.0f,%s,%s,%s,%.2f\n", r, n, pre, s / (n - 1), b, p, peak, lim, raw, b * (n - 1) / s / 1e9 }'
    rm -f "$out" "$err" "$first" "$plan"
}
