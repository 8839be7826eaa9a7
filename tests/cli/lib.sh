# Helpers for tests/cli/*.sh and tests/e2e/*.sh; source this file first: . tests/cli/lib.sh
# $SLUICE is the program under test. Each `run` leaves its exit status in $status, and what it printed in
# the files $out and $err. A failed expectation is printed and the script goes on; `finish` ends it.
# shellcheck shell=sh
set -u
sluice=${SLUICE:-bin/sluice}
tmp=$(mktemp -d) || exit 1
trap 'rm -rf "$tmp"' EXIT
trap 'exit 130' INT TERM
out=$tmp/out err=$tmp/err failures=0 what=

skip() {
    echo "skipped: $*"
    exit 77
}
bad() {
    echo "FAIL: $what: $*"
    sed 's/^/  stdout: /' "$out" | head -n 5
    sed 's/^/  stderr: /' "$err" | head -n 5
    failures=$((failures + 1))
}
finish() {
    [ $failures = 0 ] || echo "$failures expectations failed"
    [ $failures = 0 ]
    exit
}
# run ARG...: the program with these arguments, nothing on standard input
run() {
    what="sluice $*"
    status=0
    "$sluice" "$@" </dev/null >"$out" 2>"$err" || status=$?
}
expect_status() { [ "$status" = "$1" ] || bad "exit status $status, expected $1"; }
expect_out() { grep -qF -- "$1" "$out" || bad "'$1' is not on stdout"; }
expect_err() { grep -qF -- "$1" "$err" || bad "'$1' is not on stderr"; }
expect_no_out() { [ ! -s "$out" ] || bad "something on stdout"; }
expect_no_err() { [ ! -s "$err" ] || bad "something on stderr"; }
expect_equal() { [ "$1" = "$2" ] || bad "'$1', expected '$2'"; }
# How every refusal looks: the status, nothing on stdout, one line on stderr that begins with the name.
expect_refusal() { # STATUS TEXT
    expect_status "$1"
    expect_no_out
    [ "$(wc -l <"$err")" = 1 ] || bad "$(wc -l <"$err") lines on stderr, expected 1"
    grep -q '^sluice: ' "$err" || bad "stderr does not begin with 'sluice: '"
    expect_err "$2"
}
# Names of the built-in commands.
commands() { "$sluice" --help | sed -n '/^Commands:/,/^$/s/^  \([a-z]*\) .*/\1/p'; }

# ---- models, good and bad -------------------------------------------------------------------
golden=tests/data/golden/tiny-k3-b
# le64 N: the eight bytes of N, least significant first
le64() {
    n=$1
    for _ in 1 2 3 4 5 6 7 8; do
        # shellcheck disable=SC2059
        printf "\\$(printf %03o $((n & 255)))"
        n=$((n >> 8 & 0x00ffffffffffffff))
    done
}
# shard FILE HEADER BYTES: a safetensors file with this header and as many zero bytes of data
shard() {
    { le64 ${#2} && printf %s "$2" && head -c "$3" /dev/zero; } >"$1"
}
# fresh_model: a new writable copy of the small golden model in $model
fresh_model() {
    model=$tmp/model
    rm -rf "$model"
    cp -r $golden "$model"
    chmod -R u+w "$model"
}
# one_shard HEADER BYTES: the model's shards and index replaced by one made of these
one_shard() {
    fresh_model
    rm "$model"/*.safetensors "$model"/*.index.json
    shard "$model/model.safetensors" "$1" "$2"
}
# edit FILE SED-EXPRESSION: changes a file of $model; the change must take
edit() {
    cp "$model/$1" "$tmp/before"
    sed -i "$2" "$model/$1"
    cmp -s "$tmp/before" "$model/$1" && { what="edit $1 $2"; bad "changed nothing"; }
}
