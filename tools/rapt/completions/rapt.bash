# bash completion for rapt(1)
_rapt() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} choices= options=
    local commands="run check inspect convert plot bench info"
    COMPREPLY=()
    # --name=value is three words to readline
    if [ "$word" = = ]; then
        word=
    elif [ "$previous" = = ]; then
        previous=${COMP_WORDS[COMP_CWORD - 2]}
    fi
    case $previous in
    --scheme | --from-scheme) choices="pytorch lucid separate llama wq scirs2 mlx bert gpt2" ;;
    --dtype) choices="f32 f64 bf16 f16" ;;
    --isa) choices="auto baseline avx2 avx512 neon" ;;
    --backend) choices="cpu reference" ;;
    --color) choices="auto always never" ;;
    --rope) choices="10000 500000" ;;
    --prefix | --to-prefix | --heads | --kv-heads | --head-dim | --scale | --window | --rope-dims | --rope-scaling | --threads | --tolerance | --head | \
        --sequence | --title | --filter | --seconds) return ;;
    esac
    local layer="--prefix --heads --kv-heads --head-dim --scale --ignore-extra --scheme --dtype"
    local forward="$layer --input --key --value --seq-first --causal --window --mask --padding --rope --rope-dims \
        --rope-interleaved --rope-scaling --threads --isa --backend"
    case $command in
    run) options="$forward --output --weights --json" ;;
    check) options="$forward --expect --expect-weights --tolerance --json" ;;
    inspect) options="--layers --tensors --json" ;;
    convert) options="$layer --to-prefix --from-scheme --json" ;;
    plot) options="--head --sequence --tokens --query-tokens --title --svg --png --color" ;;
    bench) options="--threads --isa --filter --seconds --json" ;;
    info) options="--json" ;;
    esac
    if [ "$COMP_CWORD" = 1 ]; then
        choices="$commands help"
        [[ $word != -* ]] || choices="--help --version"
    elif [ "$command" = help ]; then
        [ "$COMP_CWORD" != 2 ] || choices=$commands
    elif [ -z "$choices" ] && [[ $word == -* ]]; then
        choices="$options --help"
    fi
    if [ -n "$choices" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$choices" -- "$word")
    elif [[ $command != bench && $command != info && $command != help ]]; then
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -F _rapt rapt
