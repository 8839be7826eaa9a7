#!/bin/sh
# --mirror: the same tokens from any set of copies, copies that are none, copies that go bad in the middle.
. tests/cli/lib.sh
set -- --ids 3,141,59,26 -n 6 --ignore-eos --json --threads 2
tokens() { grep '"event":"token"' "$1"; }
field() { sed -n "s/.*\"$1\":\([0-9]*\).*/\1/p" "$out" | tail -n 1; }
# fresh NAME: a writable copy of the model's shards in $tmp/NAME
fresh() {
    rm -rf "${tmp:?}/$1"
    mkdir "$tmp/$1"
    cp $golden/*.safetensors "$tmp/$1"
    chmod -R u+w "$tmp/$1"
}
run run $golden "$@"
expect_status 0
cp "$out" "$tmp/plain"
expect_equal "$(field mirror_bytes)" 0

fresh a
fresh b
rm "$tmp/b/model-00001-of-000003.safetensors"
for io in auto pread; do
    for mirrors in "--mirror $tmp/a" "--mirror $tmp/b" "--mirror $tmp/a --mirror $tmp/b"; do
        # shellcheck disable=SC2086
        run run $golden "$@" $mirrors --io $io
        expect_status 0
        expect_no_err
        expect_equal "$(tokens "$out")" "$(tokens "$tmp/plain")"
        [ "$(field mirror_bytes)" -gt 0 ] || bad "nothing came from the mirrors"
        expect_equal "$(field mirrors_dropped)" 0
    done
done
run logits $golden --ids 3,141,59 -o "$tmp/logits"
run logits $golden --ids 3,141,59 -o "$tmp/mirrored" --mirror "$tmp/a"
cmp -s "$tmp/logits" "$tmp/mirrored" || bad "other logits with a mirror"
run plan $golden --mirror "$tmp/a"
expect_status 0

# ---- refusals
run run $golden "$@" --mirror "$tmp/absent"
expect_refusal 3 "mirror: $tmp/absent: found no copy of a shard"
mkdir "$tmp/empty"
run run $golden "$@" --mirror "$tmp/empty"
expect_refusal 3 "mirror: $tmp/empty: found no copy of a shard"
run run $golden "$@" --mirror $golden
expect_refusal 3 "found no copy of a shard"
mkdir "$tmp/links"
for f in $golden/*.safetensors; do ln -s "$PWD/$f" "$tmp/links/"; done
run run $golden "$@" --mirror "$tmp/links"
expect_refusal 3 "found no copy of a shard"
shard=model-00002-of-000003.safetensors
size=$(wc -c <$golden/$shard)
truncate -s 50000 "$tmp/b/$shard"
run run $golden "$@" --mirror "$tmp/a" --mirror "$tmp/b"
expect_refusal 3 "mirror: $tmp/b/$shard: found 50000 bytes, expected $size as of $golden/$shard"
truncate -s "$size" "$tmp/b/$shard" # as large as it should be, and half empty: a download that was not finished
run run $golden "$@" --mirror "$tmp/b"
expect_refusal 3 "mirror: $tmp/b/$shard: differs from $golden/$shard within 4096 bytes at offset"
fresh b
printf x | dd of="$tmp/b/$shard" bs=1 seek=20 conv=notrunc 2>/dev/null
run run $golden "$@" --mirror "$tmp/b"
expect_refusal 3 "mirror: $tmp/b/$shard: differs from"
rm "$tmp/b/$shard"
mkdir "$tmp/b/$shard"
run run $golden "$@" --mirror "$tmp/b"
expect_refusal 3 "$tmp/b/$shard: not a regular file"
many=
for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16; do many="$many --mirror $tmp/a"; done
# shellcheck disable=SC2086
run run $golden "$@" $many
expect_refusal 2 "--mirror: given more than 15 times"

# ---- a mirror that goes bad while tokens come: none is lost, none is wrong, one line tells
least=$("$sluice" plan $golden --ctx 900 --prefill-chunk 4 --json | sed 's/.*"minimum":\([0-9]*\).*/\1/')
set -- --ids 3,141,59,26 -n 800 --ignore-eos --json --threads 1 --ctx 900 --prefill-chunk 4 --ram "$least"
run run $golden "$@"
expect_status 0
cp "$out" "$tmp/plain"
for io in auto pread; do
    fresh a
    what="run --mirror, cut in the middle, --io $io"
    status=0
    # The pipe is narrow: the run waits for the reader, who cuts the mirror after the first tokens.
    { "$sluice" run $golden "$@" --mirror "$tmp/a" --io $io 2>"$err" || echo $? >"$tmp/status"; } | {
        for i in 1 2 3; do
            IFS= read -r line
            printf '%s\n' "$line"
        done
        truncate -s 50000 "$tmp/a"/*.safetensors
        cat
    } >"$out"
    [ ! -e "$tmp/status" ] || bad "exit status $(cat "$tmp/status")"
    expect_equal "$(tokens "$out" | cksum)" "$(tokens "$tmp/plain" | cksum)"
    expect_equal "$(field mirrors_dropped)" 1
    expect_equal "$(wc -l <"$err")" 1
    expect_err "its mirror is not used any more"
done
finish
