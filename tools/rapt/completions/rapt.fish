# fish completion for rapt(1)
function __rapt_command_is # one of these; without any: there is none yet
    set -l words (commandline -opc)
    if test (count $argv) -eq 0
        test (count $words) -eq 1
    else
        test (count $words) -gt 1; and contains -- $words[2] $argv
    end
end
function __rapt_needs_name # after help
    __rapt_command_is help; and test (count (commandline -opc)) -eq 2
end
function __rapt_command # name, description
    complete -c rapt -n __rapt_command_is -a $argv[1] -d $argv[2]
    complete -c rapt -n __rapt_needs_name -a $argv[1] -d $argv[2]
end
function __rapt_option # commands, then the arguments of complete
    complete -c rapt -n "__rapt_command_is $argv[1]" $argv[2..]
end

complete -c rapt -n "not __rapt_command_is run check inspect convert plot" -f
__rapt_command run "Run a layer over an input"
__rapt_command check "Compare a layer's output"
__rapt_command inspect "List tensors and attention layers"
__rapt_command convert "Write a layer under other names"
__rapt_command plot "Draw attention weights"
__rapt_command bench "Time this machine"
__rapt_command info "Version, CPU, threads"
complete -c rapt -n __rapt_command_is -a help -d "List options"
complete -c rapt -n __rapt_command_is -l version -d "Print the version"
complete -c rapt -n "not __rapt_command_is help" -l help -d "List options"

set -l schemes "pytorch lucid separate llama wq scirs2 mlx bert gpt2"
__rapt_option "run check convert" -l prefix -x -d "What the names begin with"
__rapt_option "run check convert" -l heads -x -d "Query heads"
__rapt_option "run check convert" -l kv-heads -x -d "Key and value heads"
__rapt_option "run check convert" -l head-dim -x -d "Features of a head"
__rapt_option "run check convert" -l scale -x -d "What scores are multiplied by"
__rapt_option "run check convert" -l ignore-extra -d "Leave out tensors that are not known"
__rapt_option "run check convert" -l scheme -x -a "$schemes" -d "How tensors are named"
__rapt_option "run check convert" -l dtype -x -a "f32 f64 bf16 f16" -d "Element type"
__rapt_option "run check" -l input -r -F -d "Query, key and value"
__rapt_option "run check" -l key -r -F -d "Another key"
__rapt_option "run check" -l value -r -F -d "Another value"
__rapt_option "run check" -l seq-first -d "Batches are [L,N,E]"
__rapt_option "run check" -l causal -d "See no later key"
__rapt_option "run check" -l window -x -d "How far a query sees: W or LEFT,RIGHT"
__rapt_option "run check" -l mask -r -F -d "Attention mask"
__rapt_option "run check" -l padding -r -F -d "Key padding mask"
__rapt_option "run check" -l rope -x -a "10000 500000" -d "Base of rotary positions"
__rapt_option "run check" -l rope-dims -x -d "Features of a head that turn"
__rapt_option "run check" -l rope-interleaved -d "Pairs are neighbours"
__rapt_option "run check" -l rope-scaling -x -a "linear: ntk: llama3: yarn:" -d "Longer contexts"
__rapt_option "run check bench" -l threads -x -d "How many"
__rapt_option "run check bench" -l isa -x -a "auto baseline avx2 avx512 neon" -d "Instruction set"
__rapt_option "run check" -l backend -x -a "cpu reference" -d "What computes"
__rapt_option run -l output -r -F -d "Write the output"
__rapt_option run -l weights -r -F -d "Write the weights"
__rapt_option check -l expect -r -F -d "Expected output"
__rapt_option check -l expect-weights -r -F -d "Expected weights"
__rapt_option check -l tolerance -x -d "Share of the largest value"
__rapt_option "run check convert inspect bench info" -l json -d "Print JSON"
__rapt_option inspect -l layers -d "Only layers"
__rapt_option inspect -l tensors -d "Only tensors"
__rapt_option convert -l to-prefix -x -d "Prefix to write"
__rapt_option convert -l from-scheme -x -a "$schemes" -d "How read tensors are named"
__rapt_option plot -l head -x -d "One head"
__rapt_option plot -l sequence -x -d "One sequence"
__rapt_option plot -l tokens -r -F -d "Words"
__rapt_option plot -l query-tokens -r -F -d "Words of queries"
__rapt_option plot -l title -x -d "Text above"
__rapt_option plot -l svg -r -F -d "Write SVG"
__rapt_option plot -l png -r -F -d "Write PNG"
__rapt_option plot -l color -x -a "auto always never" -d "When"
__rapt_option bench -l filter -x -d "Shapes"
__rapt_option bench -l seconds -x -d "For each shape"
