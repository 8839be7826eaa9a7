#!/bin/sh
# sluice inspect: the released census to the last number, JSON, and what is missing.
. tests/cli/lib.sh
k3=$tmp/k3

run synth "$k3" --preset k3 --headers-only
expect_status 0
expect_out "497220 tensors in 96 shards"
grep -q '"total_size": 1560860324864}' "$k3/model.safetensors.index.json" || bad "another total_size"
run inspect "$k3"
expect_status 0
expect_no_err
for text in "93 layers, hidden size 7168, vocabulary 163840" "KKKM x 23, M" "16 of 896 experts" \
    "a token uses 104.19 B of 2.78 T parameters: 3.75 %" "33030144 parameters, 17547264 bytes" "96 shards, 497220 tensors" \
    "missing      nothing"; do
    expect_out "$text"
done
run inspect --json "$k3"
expect_status 0
expect_equal "$(wc -l <"$out")" 1
for text in '"parameters":2779484478208,"active_parameters":104189614848' '"bytes":1560860324864' \
    '{"kind":"routed experts","tensors":494592,"parameters":2722740830208,"active_parameters":48620371968,"bytes":1446456066048}' \
    '{"kind":"vision and other","tensors":168,"parameters":447358976,"active_parameters":0,"bytes":894717952}' \
    '"bytes_per_token":25829572608' '"state":{"sequence_bytes":464633856,"position_bytes":55296}'; do
    expect_out "$text"
done

# Opening it takes little memory: the peak of the whole process (a sanitizer's own memory is not counted).
peak=$(sed -n 's/.*"peak_rss_bytes":\([0-9]*\)}$/\1/p' "$out")
[ "${SL_QUICK:-}" = 1 ] || [ "$peak" -le $((64 << 20)) ] || bad "$peak bytes at the peak, expected at most 64 MiB"

# An unfinished download.
rm "$k3/model-00005-of-000096.safetensors" "$k3/model-00094-of-000096.safetensors"
run inspect "$k3"
expect_status 3
expect_no_err
expect_out "2 of 96 shards: model-00005-of-000096.safetensors, model-00094-of-000096.safetensors"
expect_out "5409 of 497052 tensors: language_model.model.layers.4."
run inspect --json "$k3"
expect_status 3
expect_out '"missing":{"shards":["model-00005-of-000096.safetensors","model-00094-of-000096.safetensors"],"tensors":5409,'
rm -rf "$k3"

for model in a b; do
    run inspect "tests/data/golden/tiny-k3-$model"
    expect_status 0
    expect_out "missing      nothing"
    run inspect --json "tests/data/golden/tiny-k3-$model"
    expect_status 0
done
mkdir "$tmp/m"
cp tests/data/golden/tiny-k3-b/model-*[12]-of* tests/data/golden/tiny-k3-b/config.json "$tmp/m/"
run inspect "$tmp/m"
expect_status 3
expect_out "tensors: language_model.model.embed_tokens.weight"

run inspect
expect_refusal 2 "missing argument"
run inspect "$tmp/none"
expect_refusal 3 "none/config.json"
run inspect "$tmp/m/config.json"
expect_refusal 3 "config.json"
rm "$tmp/m"/model-*
run inspect "$tmp/m"
expect_refusal 3 "no *.safetensors file"
finish
