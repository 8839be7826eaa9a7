#!/bin/sh
# The trained model that ships: facts, a chat turn, a tool call, stop strings; and `make demo` itself.
. tests/cli/lib.sh
commands | grep -qx run || skip "no command run"
model=models/demo

run run -q -n 4 $model "The capital of France is"
expect_status 0
expect_equal "$(head -c 7 "$out")" " Paris."
right=0
while read -r country capital; do
    run run -q -n 4 $model "The capital of $country is"
    case $(cat "$out") in " $capital."*) right=$((right + 1)) ;; *) echo "$country: $(cat "$out")" ;; esac
done <<END
Japan Tokyo
Kenya Nairobi
Peru Lima
Norway Oslo
Egypt Cairo
Canada Ottawa
END
expect_equal $right 6

chat='<|open|>message role="user"<|sep|>Could you tell me the capital of Peru?<|close|>message<|sep|><|end_of_msg|>'\
'<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
run run --json -q $model "$chat"
expect_status 0
expect_out '"finish_reason":"stop"'
run run -q $model "$chat"
expect_equal "$(cat "$out")" 'The user asks for the capital of Peru. It is Lima.<|close|>think<|sep|><|open|>response<|sep|>'\
'The capital of Peru is Lima.<|close|>response<|sep|><|close|>message<|sep|>'

# Stop strings, one and several: the text ends before the first that is complete.
run run -q -n 60 --stop "<|close|>" $model "$chat"
expect_status 0
expect_equal "$(cat "$out")" "The user asks for the capital of Peru. It is Lima."
run run -q -n 60 --stop nowhere --stop " It is" --stop "<|close|>" $model "$chat"
expect_status 0
expect_equal "$(cat "$out")" "The user asks for the capital of Peru."
run run --json -q -n 60 --stop Lima --ignore-eos --temperature 0.5 --top-p 0.9 --top-k 5 --min-p 0.01 --seed 3 $model "$chat"
expect_status 0
expect_out '"event":"done"'

what="scripts/demo"
SLUICE=$sluice scripts/demo >"$out" 2>"$err" || bad "it failed"
expect_no_err
expect_out ' Paris.'
expect_out '<|open|>call tool="get_weather" index="1"<|sep|><|open|>argument key="city" type="string"<|sep|>Rome<|close|>'
finish
