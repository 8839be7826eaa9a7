#!/bin/sh
# bench/real-widths.sh [SCRATCH-DIR]: five layers of 128 experts at the released widths, in 3 GiB and more.
# Needs 21 GB of scratch and a few minutes.
set -eu
. bench/lib.sh
scratch=$(mktemp -d -p "${1:-/var/tmp}")
trap 'rm -rf "$scratch"' EXIT
"$sluice" synth "$scratch/model" --preset k3 --layers 5 --experts 128 >&2
facts "$@"
echo "$row_header"
for ram in 3G 6G 12G; do
    run_capped $ram "$scratch/model" 1,2,3,4 6
done
