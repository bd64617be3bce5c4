#!/bin/bash
# completions_test.sh SHELL RAPT COMPLETIONS - what a shell offers at the end of lines that begin with rapt. Exits with 77
# where the shell is not installed.
set -euo pipefail
shell=$1 tool=$2 completions=$3
command -v "$shell" >/dev/null || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export HOME=$work
touch layer.safetensors

# ---- each shell reads lines and prints, for each, the words that it offers, and a line with a dot ----

offer_bash() {
    bash --norc --noprofile -c '
        . "$1/rapt.bash"
        while IFS= read -r line; do
            read -ra COMP_WORDS <<<"${line//=/ = }" # as readline does it
            [[ $line != *" " ]] || COMP_WORDS+=("")
            COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
            _rapt
            printf "%s\n" "${COMPREPLY[@]}" .
        done' bash "$completions"
}

offer_fish() {
    fish --no-config -c '
        source $argv[1]/rapt.fish
        while read -l line
            complete -C $line | string replace -r "\t.*" ""
            echo .
        end' "$completions"
}

# zsh completes in its line editor alone: one of its own, on a terminal that the test holds.
offer_zsh() {
    zsh -f -c '
        zmodload zsh/zpty
        zpty editor zsh -f -i
        zpty -w editor "source $PWD/setup"
        zpty -r editor seen "*READY*"
        while IFS= read -r line; do
            zpty -w -n editor "$line"$'\''\t\a'\''
            zpty -r editor seen "*DONE*"
        done
        zpty -d editor
        cat offered' zsh
}
cat >setup <<END
PS1= fpath=($completions \$fpath)
autoload -Uz compinit && compinit -u -D
compadd() {
    local -a hits
    builtin compadd -O hits "\$@"
    print -rl -- \$hits >>$work/offered
    builtin compadd "\$@"
}
done-with-line() { print . >>$work/offered; zle -I; print DO''NE; BUFFER=; }
zle -N done-with-line
bindkey '^I' list-choices '^G' done-with-line
print REA''DY
END

# ---- what is expected: a line, and the words ----

options_of() { "$tool" help "$1" | sed -n 's/^  \(--[a-z-]*\).*/\1/p' | tr '\n' ' '; }
{
    for command in run check inspect convert plot bench info; do
        echo "rapt $command --|$(options_of $command)"
    done
    cat <<'END'
rapt |bench check convert help info inspect plot run
rapt ins|inspect
rapt --|--help --version
rapt help |bench check convert info inspect plot run
rapt help run |
rapt run layer.safetensors --he|--head-dim --heads --help
rapt run --dtype |bf16 f16 f32 f64
rapt run --dtype=b|bf16
rapt run --rope |10000 500000
rapt check --isa avx|avx2 avx512
rapt convert run out --from-scheme ll|llama
rapt plot w.npy --color a|always auto
rapt run --heads |
rapt run lay|layer.safetensors
rapt check x --input lay|layer.safetensors
rapt convert in lay|layer.safetensors
rapt info lay|
rapt frobnicate --dt|
END
} >expected

cut -d '|' -f 1 expected >lines
"offer_$shell" <lines >words 2>errors || { cat errors; exit 1; }
[ ! -s errors ] || { cat errors; exit 1; }
status=0
while IFS='|' read -r line expected; do
    offered=()
    while IFS= read -r -u 3 word && [ "$word" != . ]; do offered+=("${word#*=}"); done
    offered=$(printf '%s\n' "${offered[@]}" | sed '/^$/d' | LC_ALL=C sort -u | tr '\n' ' ')
    expected=$(printf '%s\n' $expected | sed '/^$/d' | LC_ALL=C sort -u | tr '\n' ' ')
    [ "$offered" = "$expected" ] || { echo "$shell: '$line' offers $offered- expected $expected"; status=1; }
done <expected 3<words
exit $status
