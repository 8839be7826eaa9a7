#!/bin/sh
# bench/disk.sh MODEL [ROUNDS] [RAM]: how much of the drive decode uses. Each round measures, one after another, the drive by
# `sluice bench disk` and by fio (if there) in the sizes and depth that the engine uses, and a run that caches nothing; a
# last row has the medians. Takes about 20 s a round; the first minute finds depth and piece size. MODEL is larger than the
# memory, or on a file system with O_DIRECT; RAM (default 1G) is so little that the trunk does not stay.
set -eu
. bench/lib.sh
model=$1 rounds=${2:-5} ram=${3:-1G} tokens=9
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
XDG_CACHE_HOME=$scratch
export XDG_CACHE_HOME
"$sluice" bench disk "$model" --seconds "${SECONDS_TO_CHOOSE:-30}" >&2
profile=$(ls "$scratch"/sluice/disk-*.json)
depth=$(json "$profile" depth) piece=$(json "$profile" piece_bytes)
run() { "$sluice" run "$model" --ids 1,2,3,4 -n "$1" --ram "$ram" --ctx 16 --ignore-eos --json >"$2"; }
# Bytes of decode: what a run reads beyond one that stops after the prompt.
run 1 "$scratch/first"
bytes() { echo $(($(json "$1" "$2") - $(json "$scratch/first" "$2"))); }
facts "$@"
echo "# depth $depth, piece $piece, decode of $((tokens - 1)) tokens in $ram"
echo "round,raw_stream_gb_s,raw_experts_gb_s,raw_gb_s,fio_gb_s,decode_gb_s,seconds_per_token,decode_to_raw,decode_to_fio,drive_busy,mean_depth"
for i in $(seq "$rounds"); do
    "$sluice" bench disk "$model" --depth "$depth" --piece "$piece" --seconds 4 --json >"$scratch/raw"
    fio=$(raw_drive "$(ls "$model"/*.safetensors | sed -n 2p)" "$piece" "$depth")
    run $tokens "$scratch/run"
    stream=$(($(bytes "$scratch/run" trunk) + $(bytes "$scratch/run" head))) experts=$(bytes "$scratch/run" experts)
    awk -v i="$i" -v s="$(json "$scratch/raw" stream_bytes_per_second)" -v e="$(json "$scratch/raw" expert_bytes_per_second)" \
        -v fio="${fio:-0}" -v sb="$stream" -v eb="$experts" -v wall="$(json "$scratch/run" decode_wall_seconds)" \
        -v busy="$(json "$scratch/run" decode_busy_seconds)" -v depth="$(json "$scratch/run" decode_depth)" -v n=$((tokens - 1)) 'BEGIN {
        raw = (sb + eb) / (sb / s + eb / e) / 1e9; got = (sb + eb) / wall / 1e9
        share = fio > 0 ? sprintf("%.3f", got / fio) : ""
        printf "%d,%.2f,%.2f,%.2f,%s,%.2f,%.3f,%.3f,%s,%.4f,%.1f\n", i, s / 1e9, e / 1e9, raw, fio, got, wall / n, got / raw,
            share, busy / wall, depth }'
done | tee "$scratch/rows"
for column in $(seq 2 11); do
    cut -d, -f"$column" "$scratch/rows" | sort -n | awk '{ v[NR] = $1 } END { printf ",%s", v[int((NR + 1) / 2)] }'
done | sed 's/^/median/'
echo
