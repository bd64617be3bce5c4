# bash completion for rapt(1)
_rapt() {
    local word=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} options=
    local schemes="pytorch lucid separate llama wq scirs2 mlx bert gpt2"
    COMPREPLY=()
    if [ "$COMP_CWORD" = 1 ] || { [ "$COMP_CWORD" = 2 ] && [ "$command" = help ]; }; then
        mapfile -t COMPREPLY < <(compgen -W "run check inspect convert plot bench info help --help --version" -- "$word")
        return
    fi
    case $previous in
    --scheme | --from-scheme) options=$schemes ;;
    --dtype) options="f32 f64 bf16 f16" ;;
    --isa) options="auto baseline avx2 avx512 neon" ;;
    --backend) options="cpu reference" ;;
    --color) options="auto always never" ;;
    --prefix | --to-prefix | --heads | --kv-heads | --head-dim | --scale | --window | --threads | --tolerance | --head | --sequence | --title | --filter | --seconds)
        return
        ;;
    esac
    if [ -n "$options" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$options" -- "$word")
        return
    fi
    local layer="--prefix --heads --kv-heads --head-dim --scale --scheme --dtype"
    local forward="$layer --input --key --value --seq-first --causal --window --mask --padding --threads --isa --backend"
    case $command in
    run) options="$forward --output --weights" ;;
    check) options="$forward --expect --expect-weights --tolerance --json" ;;
    inspect) options="--layers --tensors --json" ;;
    convert) options="$layer --to-prefix --from-scheme" ;;
    plot) options="--head --sequence --tokens --query-tokens --title --svg --png --color" ;;
    bench) options="--threads --isa --filter --seconds --json" ;;
    info) options="--json" ;;
    esac
    if [[ $word == -* ]]; then
        mapfile -t COMPREPLY < <(compgen -W "$options --help" -- "$word")
    else
        compopt -o filenames 2>/dev/null
        mapfile -t COMPREPLY < <(compgen -f -- "$word")
    fi
}
complete -F _rapt rapt
