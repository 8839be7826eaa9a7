#!/bin/sh
# Help, version, usage errors, lost output, external commands.
. tests/cli/lib.sh

run --version
expect_status 0
expect_equal "$(cat "$out")" "sluice $(sed -n 's/^#define SL_VERSION "\(.*\)"/\1/p' include/sluice.h)"
expect_no_err
run --help
expect_status 0
expect_out "Usage: sluice COMMAND"
expect_no_err
cp "$out" "$tmp/help"
run help
cmp -s "$out" "$tmp/help" || bad "differs from --help"

run
expect_refusal 2 "no command given"
run nosuch
expect_refusal 2 "unknown command 'nosuch'"
run --nosuch
expect_refusal 2 "unknown option '--nosuch'"
run ../bin/sluice
expect_refusal 2 "unknown command"
run ''
expect_refusal 2 "unknown command ''"
run "two
lines"
expect_refusal 2 "unknown command 'two?lines'"

for name in $(commands); do
    run "$name" --help
    expect_status 0
    expect_out "Usage: sluice $name"
    expect_no_err
    cp "$out" "$tmp/help"
    run help "$name"
    expect_status 0
    cmp -s "$out" "$tmp/help" || bad "differs from $name --help"
    run "$name" --no-such-option
    expect_refusal 2 "unknown option '--no-such-option'"
    run "$name"
    expect_refusal 2 "missing argument"
    run "${name}x"
    expect_refusal 2 "did you mean '$name'?"
done

# Output that cannot be written is an error, in words, never silence.
what="--help >/dev/full"
: >"$out"
status=0
"$sluice" --help >/dev/full 2>"$err" || status=$?
expect_refusal 1 "cannot write to standard output"
what="--help >&-"
status=0
"$sluice" --help >&- 2>"$err" || status=$?
expect_refusal 1 "cannot write to standard output"

# An unknown name is a program beside this one, then on the PATH.
mkdir "$tmp/bin" "$tmp/path"
cp "$sluice" "$tmp/bin/sluice"
for dir in bin path; do
    printf '#!/bin/sh\necho %s "$SL_LOG" "$@"\nexit 7\n' $dir >"$tmp/$dir/sluice-extra"
    chmod +x "$tmp/$dir/sluice-extra"
done
sluice=$tmp/bin/sluice
PATH=$tmp/path:$PATH
run -v extra 'a b' --c
expect_status 7
expect_equal "$(cat "$out")" "bin info a b --c"
rm "$tmp/bin/sluice-extra"
run help extra
expect_equal "$(cat "$out")" "path warn --help"

SL_LOG=loud
export SL_LOG
run --version
expect_refusal 2 "SL_LOG: 'loud' is none of"
finish
