#!/bin/sh
# Models that contradict themselves: status 3, one line that names file and field, nothing on stdout.
. tests/cli/lib.sh
commands | grep -qx plan || skip "no command plan"
plan() { run plan --ctx 64 --ram 256M "$model" "$@"; }

fresh_model
plan
expect_status 0

model=$tmp/absent
plan
expect_refusal 3 "$tmp/absent"
model=$tmp/file
: >"$model"
plan
expect_refusal 3 "$model"
if [ "$(id -u)" != 0 ]; then
    fresh_model
    chmod 000 "$model"
    plan
    expect_refusal 3 "$model"
    chmod 700 "$model"
fi

# ---- shards
first=model-00001-of-000003.safetensors
fresh_model
rm "$model/$first"
plan
expect_refusal 3 "$first"
fresh_model
rm "$model"/*.index.json "$model/$first"
plan
expect_refusal 3 "missing"
fresh_model
rm "$model"/*.index.json "$model"/*.safetensors
plan
expect_refusal 3 "safetensors"
for size in 0 7 8 100 20000; do # without a length, in the header, in the data
    fresh_model
    truncate -s $size "$model/$first"
    plan
    expect_refusal 3 "$first"
done
for length in 0 1 99999999 9223372036854775807 -1; do
    fresh_model
    le64 $length | dd of="$model/$first" conv=notrunc status=none
    plan
    expect_refusal 3 "$first"
done
fresh_model
printf x >>"$model/$first"
plan
expect_refusal 3 "$first"

# ---- headers
header() { # HEADER BYTES TEXT
    one_shard "$1" "$2"
    plan
    expect_refusal 3 "$3"
    expect_err model.safetensors
}
a='"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}'
header '' 4 model.safetensors
header '{' 4 length
header '{ ' 4 JSON
header '[]' 4 JSON
header "{$a" 4 JSON
header "{$a,}" 4 JSON
header "{$a}x" 4 model.safetensors
header "{$a,$a}" 4 twice
header '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"shape":[4]}}' 4 twice
header '{"a":{"dtype":"U8","shape":[4]}}' 4 missing
header '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4],"x":1}}' 4 '"x"'
header '{"a":{"dtype":"Q7","shape":[4],"data_offsets":[0,4]}}' 4 '"Q7"'
header '{"a":{"dtype":"U8","shape":[-4],"data_offsets":[0,4]}}' 4 integer
header '{"a":{"dtype":"U8","shape":[4.0],"data_offsets":[0,4]}}' 4 integer
header '{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,4]}}' 4 2^64
header '{"a":{"dtype":"BF16","shape":[4294967296,4294967296],"data_offsets":[0,4]}}' 4 overflows
header '{"a":{"dtype":"U8","shape":[1,1,1,1,1,1,1,1,4],"data_offsets":[0,4]}}' 4 dimensions
header '{"a":{"dtype":"U8","shape":[5],"data_offsets":[0,4]}}' 4 "5 bytes"
header '{"a":{"dtype":"U8","shape":[4],"data_offsets":[4,0]}}' 4 "begin <= end"
header '{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,5]}}' 4 "4 bytes"
header "{$a,\"b\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[2,6]}}" 6 overlap
header "{$a,\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[6,8]}}" 8 hole
header "{$a}" 6 "end"
header '{"a":{"dtype":"U8","shape":[[[[[[[[4]]]]]]]],"data_offsets":[0,4]}}' 4 JSON
header "{\"__metadata__\":{\"x\":$(printf '[%.0s' $(seq 1000))$(printf ']%.0s' $(seq 1000))},$a}" 4 model.safetensors
header "{\"$(printf 'n%.0s' $(seq 300))\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}" 4 shorter
header "{\"a$(printf '\001')\":{}}" 4 control
one_shard "{$a}" 4 # a good header, but not this model's
plan
expect_refusal 3 "missing"

# A terminal's escape sequence in a name must not reach the terminal.
header '{"a\u001b[2J":{"dtype":"Q7","shape":[4],"data_offsets":[0,4]}}' 4 'a?[2J'

# ---- tensors that are not what the config says
fresh_model
LC_ALL=C sed -i 's/language_model.model.norm.weight/language_model.model.worn.weight/' "$model"/*.safetensors "$model"/*.index.json
plan
expect_refusal 3 language_model.model.norm.weight
fresh_model
edit config.json 's/"intermediate_size": 131/"intermediate_size": 133/'
plan
expect_refusal 3 mlp

# ---- index
index() { # SED-EXPRESSION TEXT
    fresh_model
    edit model.safetensors.index.json "$1"
    plan
    expect_refusal 3 "$2"
}
index 's/"model-00003-of-000003.safetensors"/"model-00009-of-000003.safetensors"/' model-00009-of-000003.safetensors
index 's/"model-00003-of-000003.safetensors"/"..\/evil.safetensors"/' "plain file name"
index 's/"language_model.lm_head.weight"/"language_model.lm_head.heavy"/' language_model.lm_head
index '/"language_model.lm_head.weight"/s/model-00003/model-00001/' language_model.lm_head.weight
index '/lm_head/d' language_model.lm_head.weight
index '/lm_head/p' language_model.lm_head.weight
index 's/weight_map/weight_chart/' weight_map
index '1s/{/[/' index.json

# ---- config.json
config() { # SED-EXPRESSION FIELD
    fresh_model
    edit config.json "$1"
    plan
    expect_refusal 3 "$2"
    expect_err config.json
}
config '1s/{/[/' line
config 's/"hidden_size": 96/"hidden_size": "96"/' hidden_size
config 's/"hidden_size": 96/"hidden_size": 96.5/' hidden_size
config 's/"hidden_size": 96/"hidden_size": 0/' hidden_size
config 's/"hidden_size": 96/"hidden_size": -96/' hidden_size
config 's/"hidden_size": 96/"hidden_size": 99999999999/' hidden_size
config '/"hidden_size"/d' hidden_size
config '/"kv_lora_rank"/d' kv_lora_rank
config '/"full_attn_layers": \[/,/\]/s/\b4\b/0/' full_attn_layers
config '/"full_attn_layers": \[/,/\]/s/\b9\b/94/' full_attn_layers
config '/"full_attn_layers": \[/,/\]/s/\b9\b/8/' full_attn_layers
config '/"kda_layers": \[/,/\]/s/\b3\b/4/' layers
config 's/"num_experts_per_token": 2/"num_experts_per_token": 9/' num_experts_per_token
config 's/"num_hidden_layers": 9/"num_hidden_layers": 10/' layers
config 's/"hidden_act": "situ"/"hidden_act": "relu"/' hidden_act
config 's/"moe_router_activation_func": "sigmoid"/"moe_router_activation_func": "softmax"/' moe_router_activation_func
config 's/"hidden_size": 96/"hidden_size": 96, "hidden_size": 96/' hidden_size
fresh_model
: >"$model/config.json"
plan
expect_refusal 3 config.json
rm "$model/config.json"
plan
expect_refusal 3 config.json
mkdir "$model/config.json"
plan
expect_refusal 3 config.json

# The flat form of config.json says the same.
fresh_model
run plan --json --ctx 64 --ram 256M "$model"
planned() { sed 's/,"[a-z0-9_]*_per_second":[0-9]*//g; s/,"predicted_seconds":[0-9.]*//' "$1"; } # not what was measured
planned "$out" >"$tmp/nested"
{
    echo '{'
    sed '1,/"text_config": {/d; /^  },\{0,1\}$/,$d' "$model/config.json"
    echo '}'
} >"$tmp/flat.json"
mv "$tmp/flat.json" "$model/config.json"
run plan --json --ctx 64 --ram 256M "$model"
expect_status 0
planned "$out" | cmp -s - "$tmp/nested" || bad "another plan than with the nested config"
finish
