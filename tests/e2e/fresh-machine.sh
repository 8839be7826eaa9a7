#!/bin/bash
# fresh-machine.sh [demo|test]...   as root; slow, run by hand
# Do `make demo` and `make test` each succeed as the first command on a clean clone in a new Debian 12?
# Makes a minimal root with debootstrap, adds make, git and ca-certificates, clones this checkout into
# copies of it and runs the command there. The package mirror is the one that this machine uses.
# Environment: ROOT=DIR is where the roots are made (a new temporary directory; some GB); KEEP=1 keeps them.
set -euo pipefail
cd "$(dirname "$0")/../.."
source=$PWD suite=bookworm
[ "$(id -u)" = 0 ] || { echo "needs root" >&2; exit 77; }
command -v debootstrap >/dev/null || { echo "needs debootstrap" >&2; exit 77; }
[ $# -gt 0 ] || set -- demo test

# The first Debian (not security, not third-party) source of $suite, in either format of apt.
mirror=$({ cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null || true; } |
    sed -n "s/^deb \(\[[^]]*\] \)\?\([^ ]*\) $suite main.*/\2/p" | head -n 1)
[ -n "$mirror" ] || mirror=$({ cat /etc/apt/sources.list.d/*.sources 2>/dev/null || true; } | awk -v suite=$suite '
    /^URIs:/ { uri = $2 }
    /^Suites:/ { for (i = 2; i <= NF; i++) if ($i == suite && !found) { print uri; found = 1 } }')
[ -n "$mirror" ] || { echo "no source of $suite in /etc/apt" >&2; exit 77; }

top=$(realpath "${ROOT:-$(mktemp -d)}")
unmount() {
    for m in dev sys proc; do
        for root in "$top"/*/; do
            mountpoint -q "$root$m" && umount "$root$m"
        done
    done
    return 0
}
cleanup() {
    unmount
    if grep -q " $top/" /proc/mounts; then # never remove a tree that something is mounted into
        echo "still mounted under $top: left alone" >&2
    elif [ -z "${KEEP:-}" ]; then
        rm -rf --one-file-system "$top"/{pristine,demo,test} && rmdir --ignore-fail-on-non-empty "$top"
    fi
}
trap cleanup EXIT
trap 'exit 130' INT TERM

if [ ! -e "$top/pristine/.complete" ]; then
    echo "== debootstrap $suite"
    debootstrap --variant=minbase --include=make,git,ca-certificates $suite "$top/pristine" "$mirror" \
        >"$top/debootstrap.log" || { tail "$top/debootstrap.log"; exit 1; }
    # How this machine reaches the mirror holds in there too.
    for f in /etc/apt/apt.conf /etc/apt/apt.conf.d/*proxy* /etc/resolv.conf /etc/hosts; do
        [ ! -e "$f" ] || cp -L "$f" "$top/pristine$f"
    done
    [ ! -d /usr/local/share/ca-certificates ] ||
        cp -rL /usr/local/share/ca-certificates "$top/pristine/usr/local/share/"
    chroot "$top/pristine" update-ca-certificates >/dev/null 2>&1
    touch "$top/pristine/.complete"
fi

failed=0
for target in "$@"; do
    root=$top/$target
    echo "== make $target"
    rm -rf --one-file-system "$root"
    cp -a --reflink=auto "$top/pristine" "$root"
    git clone -q --no-hardlinks "$source" "$root/root/sluice"
    mount -t proc proc "$root/proc"
    for m in sys dev; do mount --bind "/$m" "$root/$m"; done # cgroups stay outside: that test is skipped
    start=$(date +%s)
    if chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 \
        ${http_proxy:+http_proxy="$http_proxy"} ${https_proxy:+https_proxy="$https_proxy"} \
        sh -c "cd /root/sluice && make $target" >"$top/$target.log" 2>&1 </dev/null; then
        verdict=ok
    else
        verdict=FAILED failed=1
    fi
    tail -n "$([ $verdict = ok ] && echo 3 || echo 60)" "$top/$target.log" | sed 's/^/    /'
    echo "make $target: $verdict ($(($(date +%s) - start)) s)"
    unmount
    [ -n "${KEEP:-}" ] || rm -rf --one-file-system "$root"
done
exit $failed
