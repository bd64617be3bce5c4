#!/bin/sh
# What `make run` shows: a layer that PyTorch trained over a sentence, what it gives, and who looks at whom.
# usage: run.sh RAPT     (the tool)
set -eu
rapt=$(cd "$(dirname "$1")" && pwd)/rapt
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp "$(dirname "$0")"/../examples/data/sentence.* "$work"
cd "$work"

show() { # what it shows, arguments
    printf '\n# %s\n' "$1"
    shift
    printf '$ rapt %s\n' "$*"
    "$rapt" "$@"
}
show "A layer that PyTorch trained, over a sentence" \
    run sentence.safetensors --heads 4 --input sentence.safetensors:input --weights weights.npy
show "Is its output PyTorch's?" \
    check sentence.safetensors --heads 4 --input sentence.safetensors:input --expect sentence.safetensors:expected_output
show "What the second head looks at" \
    plot weights.npy --head 2 --tokens sentence.txt
