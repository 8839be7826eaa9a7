#!/bin/sh
# bench disk: what it reads, what it prints, the profile it keeps and what becomes of a broken one.
. tests/cli/lib.sh
XDG_CACHE_HOME=$tmp/cache
export XDG_CACHE_HOME
json() { sed -n "s/.*\"$1\":\(\"[^\"]*\"\|[a-z0-9.]*\).*/\1/p" "$2" | tail -n 1; }
profile() { ls "$tmp"/cache/sluice/disk-*.json; }

run bench disk $golden --seconds 0.1
expect_status 0
expect_out "GB/s, in file order"
expect_out "GB/s, at random places"
expect_out "chosen: "
expect_out "less than 256 MiB"
if grep -q "figures of the page cache" "$out"; then
    direct=false
else
    direct=true
    expect_out "kept for this device in $(profile)"
    expect_equal "$(ls "$tmp/cache/sluice" | wc -l)" 1
    expect_equal "$(json format "$(profile)") $(json version "$(profile)")" '"sluice-disk" 1'
    [ "$(json depth "$(profile)")" -ge 2 ] && [ "$(json piece_bytes "$(profile)")" -ge 131072 ] || bad "profile: $(cat "$(profile)")"
fi
rm -rf "$tmp/cache"

run bench disk $golden/model-00001-of-000003.safetensors --seconds 0.1 --json --dry-run
expect_status 0
expect_no_err
expect_equal "$(grep -o '"bytes_per_second":[1-9]' "$out" | wc -l)" 84
expect_equal "$(json profile "$out")" null
[ ! -e "$tmp/cache" ] || bad "--dry-run kept something"
run bench disk $golden --seconds 0.1 --io pread
expect_status 0
[ ! -e "$tmp/cache" ] || bad "--io pread kept something"
run bench disk $golden --seconds 0.1 --depth 4 --piece 64K --json
expect_status 0
expect_out '{"piece":65536,"depth":4,"stream_bytes_per_second":'
[ ! -e "$tmp/cache" ] || bad "one setting kept something"

mkdir "$tmp/empty"
run bench disk "$tmp/empty"
expect_refusal 3 "$tmp/empty: holds no *.safetensors of 4096 bytes or more to read; give a model, or any large file"
run bench disk "$tmp/absent"
expect_refusal 3 "$tmp/absent: No such file"
echo short >"$tmp/short"
run bench disk "$tmp/short"
expect_refusal 3 "$tmp/short: too short to measure with"
run bench nosuch $golden
expect_refusal 2 "found 'nosuch', expected disk"
run bench disk $golden --seconds 0
expect_refusal 2 "--seconds"
run bench disk $golden --depth 4
expect_refusal 2 "with --piece"
run bench disk $golden --depth 4 --piece 1000
expect_refusal 2 "a multiple of 4096"
run bench disk $golden --depth 5000 --piece 4096
expect_refusal 2 "1 to 1024"
if $direct; then
    : >"$tmp/file"
    XDG_CACHE_HOME=$tmp/file run bench disk $golden --seconds 0.1
    expect_refusal 1 ": Not a directory"
fi

# A run with a profile gives what one without gives; a broken profile costs one line.
run run $golden --ids 1,2,3 -n 2 --json
cp "$out" "$tmp/plain"
run bench disk $golden --seconds 0.1
if $direct; then
    file=$(profile)
    sed -i 's/"depth":[0-9]*,"piece_bytes":[0-9]*/"depth":3,"piece_bytes":8192/' "$file"
    run run $golden --ids 1,2,3 -n 2 --json
    expect_status 0
    expect_no_err
    expect_equal "$(grep token "$out" | grep -v done)" "$(grep token "$tmp/plain" | grep -v done)"
    [ "$(json reads "$out")" -gt "$(json reads "$tmp/plain")" ] || bad "the profile's small pieces were not used"
    sed 's/"file_system":"/&x/' "$file" >"$tmp/other"
    for text in '' '[]' '{' '{"format":"sluice-disk","version":2}' "$(sed 's/"depth":3/"depth":0/' "$file")" \
        "$(sed 's/"depth":3/"depth":1025/' "$file")" "$(sed 's/:8192/:8191/' "$file")" "$(sed 's/:8192/:1e9/' "$file")" \
        "$(sed 's/"depth":3/"depth":"3"/' "$file")" "$(sed 's/per_second":[0-9]*/per_second":-1/' "$file")"; do
        printf %s "$text" >"$file"
        run run $golden --ids 1,2,3 -n 2
        expect_status 0
        expect_err "disk profile ignored: $file"
        expect_equal "$(grep -c 'disk profile' "$err")" 1
    done
    cp "$tmp/other" "$file" # of another file system: no use, no fault
    run run $golden --ids 1,2,3 -n 2 -q
    expect_status 0
    expect_no_err
fi
[ "$(json reads "$tmp/plain")" -gt 0 ] || bad "run --json: no reads counted"
awk "BEGIN { exit !($(json decode_busy_seconds "$tmp/plain") <= $(json decode_wall_seconds "$tmp/plain") + 0.001) }" ||
    bad "run --json: the drive was busy for longer than the wall clock: $(cat "$tmp/plain")"
finish
