#!/bin/sh
# sluice synth: complete, reproducible, never half there, and never over something else.
. tests/cli/lib.sh
a=$tmp/a b=$tmp/b

sums() { (cd "$1" && find . -type f ! -name .sluice-synth -exec sha256sum {} + | sort -k 2); }

run synth "$a" --preset tiny --seed 7
expect_status 0
expect_out "10 shards"
expect_no_err
run inspect "$a"
expect_status 0
expect_out "KKKM x 2, M"
expect_out "nothing"
sums "$a" >"$tmp/a.sums"
expect_equal "$(find "$a" -name '*.tmp.*' | wc -l)" 0

# The same options: the same bytes, also over an earlier output; another seed: others.
run synth --preset=tiny --seed=7 "$b"
sums "$b" | cmp -s - "$tmp/a.sums" || bad "not the bytes of the first run"
run synth "$b" --preset tiny --seed 8
expect_status 0
same=$(sums "$b" | grep -cxFf "$tmp/a.sums")
expect_equal "$same" 5 # the index and four small files
run synth "$b" --preset tiny --layers 3
expect_status 0
expect_equal "$(find "$b" -name '*.safetensors' | wc -l)" 4
run inspect "$b"
expect_out "KKM"
run synth "$b" --preset tiny --seed 7
sums "$b" | cmp -s - "$tmp/a.sums" || bad "something of the runs before is left"

# Shape.
run synth "$b" --preset tiny --layers 6 --experts 3 --vocab 700 --full-attn 1,5 --res-block 2
expect_status 0
run inspect --json "$b"
expect_status 0
expect_out '"layer_map":"MKKKMK"'
expect_out '"vocab":700,"res_block":2,"experts":3,"experts_per_token":3'
expect_out '"missing":{"shards":[],"tensors":0,"first":[]}'
run synth "$b" --preset tiny --res-block 0 --layers 2
expect_status 0
run inspect "$b"
expect_out "residuals    ordinary"
run tokenize "$a" 'Hi<|sep|>'
expect_status 0
expect_equal "$(cat "$out")" "39 72 261"

# Every expert of the released widths and every shard's data begin at a multiple of 4096.
run synth "$b" --preset k3 --layers 2 --experts 20 --headers-only
expect_status 0
expect_equal "$(du -k "$b" | awk '{ print ($1 < 4000) }')" 1
run inspect --json "$b"
expect_status 0
expect_out '"expert":{"parameters":33030144,"bytes":17547264,'
for shard in "$b"/model-*; do
    header=$(od -A n -t u8 -N 8 "$shard")
    expect_equal $(((header + 8) % 4096)) 0
done

# Refusals.
run synth "$b"
expect_refusal 2 "--preset"
run synth --preset tiny
expect_refusal 2 "missing argument"
run synth "$b" --preset huge
expect_refusal 2 "'huge'"
run synth "$b" --preset tiny --layers 0
expect_refusal 2 "num_hidden_layers"
run synth "$b" --preset tiny --layers 1025
expect_refusal 2 "layers"
run synth "$b" --preset tiny --experts 0
expect_refusal 2 "num_experts"
run synth "$b" --preset tiny --experts 65536
expect_refusal 2 "num_experts"
run synth "$b" --preset tiny --vocab 511
expect_refusal 2 "--vocab"
for list in 0 10 3,3 x 3,,4 -1; do
    run synth "$b" --preset tiny "--full-attn=$list"
    expect_refusal 2 "--full-attn"
done
run synth "$b" --preset tiny --headers-only --reflink-pool 2
expect_refusal 2 "--reflink-pool"
run synth "$b" --preset tiny --reflink-pool 2
expect_refusal 2 "multiple of 4096"
expect_equal "$(find "$b" -name config.json | wc -l)" 1 # nothing of that touched what was there
mkdir "$tmp/other"
echo precious >"$tmp/other/config.json"
run synth "$tmp/other" --preset tiny
expect_refusal 2 "not empty"
expect_equal "$(cat "$tmp/other/config.json")" precious
run synth "$tmp/other/config.json" --preset tiny
expect_refusal 2 "config.json"
run synth "$tmp/no/such" --preset tiny
expect_refusal 1 "no/such"
# Larger than any drive: known before a byte is written.
run synth "$tmp/c" --preset k3 --layers 1024 --experts 1024 --vocab 600
expect_refusal 1 "free"
expect_equal "$(find "$tmp/c" -type f ! -name .sluice-synth | wc -l)" 0
# A limit met while writing: no half file under a final name.
rm -rf "$tmp/c"
what="sluice synth under ulimit -f"
(ulimit -f 4000 && "$sluice" synth "$tmp/c" --preset tiny --vocab 8192 >"$out" 2>"$err")
status=$?
expect_refusal 1 "model-00010-of-000010.safetensors"
expect_equal "$(find "$tmp/c" -name 'model-00010-*' -o -name config.json -o -name '*.tmp.*' | wc -l)" 0
run synth "$tmp/c" --preset tiny
expect_status 0
sums "$tmp/c" | grep -q model-00010 || bad "not taken up again"
finish
