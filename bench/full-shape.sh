#!/bin/sh
# bench/full-shape.sh [SCRATCH-DIR]: all 93 layers and 896 experts of Kimi K3 in 8 GiB, as root.
# Lays the 1.56 TB checkpoint out on an XFS loop mount whose files share the extents of a small pool, so
# that every read goes to the drive; needs 15 GB there, mkfs.xfs, and about 15 minutes.
set -eu
. bench/lib.sh
scratch=$(mktemp -d -p "${1:-/var/tmp}")
loop=
cleanup() {
    umount "$scratch/mnt" 2>/dev/null || true
    [ -z "$loop" ] || losetup -d "$loop"
    rm -rf "$scratch"
}
trap cleanup EXIT
truncate -s 40G "$scratch/image"
mkfs.xfs -q -m reflink=1 "$scratch/image"
loop=$(losetup --show -f --direct-io=on "$scratch/image") # else the image is read through the page cache
mkdir "$scratch/mnt"
mount "$loop" "$scratch/mnt"
"$sluice" synth "$scratch/mnt/model" --preset k3 --reflink-pool 2 >&2
facts "$@"
echo "# apparent size $(du -s --apparent-size -B1 "$scratch/mnt/model" | cut -f1) bytes, on the drive $(du -B1 "$scratch/image" | cut -f1)"
echo "$row_header"
run_capped 8G "$scratch/mnt/model" 1,2,3,4 3
