/* main.c - rapt: attention layers on the command line */
#include "commands.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#define FILES "FILE is an .npy, a .safetensors with one tensor in it, FILE.safetensors:NAME, or - for a stream."
#define ROTARY                                                                                                         \
    "\nNo tensor says that a model has rotary positions, as Llama and most others of its kind do: --rope does."
#define CHECKPOINT "a .safetensors file or a model.safetensors.index.json"

static const command commands[] = {
    {"run",
     "LAYER",
     "Runs the attention layer of a checkpoint over an input.",
     "LAYER is " CHECKPOINT ".\n" FILES "\nAn input file with tensors query, key and value gives all three." ROTARY,
     run_run,
     {layer_options, as_options, input_options, rotary_options, run_options, machine_options}},
    {"check",
     "LAYER",
     "Runs a layer and compares its output; exits with 1 if they differ.",
     "LAYER is " CHECKPOINT ".\n" FILES
     "\nThe usual tolerance is 1e-12 in f64, 1e-5 in f32, 5e-3 in f16, 3e-2 in bf16." ROTARY,
     run_check,
     {layer_options, as_options, input_options, rotary_options, check_options, machine_options}},
    {"inspect",
     "FILE",
     "Lists the tensors of a checkpoint and the attention layers in it.",
     "FILE is " CHECKPOINT ".",
     run_inspect,
     {inspect_options}},
    {"convert",
     "IN OUT",
     "Writes a layer of a checkpoint with other names or in another type.",
     "IN is " CHECKPOINT ", OUT a .safetensors file; - is a stream.\nNames: pytorch, lucid, separate, llama, wq, "
     "scirs2, mlx, bert or gpt2; "
     "rapt(1) lists them.",
     run_convert,
     {layer_options, convert_options}},
    {"plot",
     "WEIGHTS",
     "Draws attention weights [L,S], [H,L,S] or [N,H,L,S] in the terminal, as SVG or as PNG.",
     "WEIGHTS is what `rapt run --weights` writes: an .npy, .safetensors, or - for a stream.",
     run_plot,
     {plot_options}},
    {"bench",
     "",
     "Times attention and the layer beside what the machine can do at most.",
     NULL,
     run_bench,
     {bench_options}},
    {"info", "", "Prints the version, the CPU, its instruction sets and threads.", NULL, run_info, {info_options}},
};
enum { COMMANDS = sizeof commands / sizeof *commands };

static void print_general_help(void) {
    printf("usage: rapt COMMAND [arguments]\nMulti-head attention on the command line.\n\n");
    for (int i = 0; i < COMMANDS; i++) printf("  %-8s %s\n", commands[i].name, commands[i].summary);
    printf("\n`rapt help COMMAND` lists a command's options; `rapt --version` prints the version.\n");
}

static const command *find_command(const char *name) {
    const char *names[COMMANDS];
    for (int i = 0; i < COMMANDS; i++) {
        names[i] = commands[i].name;
        if (strcmp(names[i], name) == 0) return &commands[i];
    }
    const char *nearest = nearest_word(name, COMMANDS, names);
    if (nearest == NULL) fail_usage("there is no command '%s'", name);
    fail_usage("there is no command '%s', did you mean %s?", name, nearest);
}

/* A file that is opened must not become a standard stream that was closed: what is meant for that stream would go into
 * the file. What takes its place cannot be used, so that using it is an error. */
static void occupy_standard_streams(void) {
    for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; stream++) {
        if (fcntl(stream, F_GETFD) < 0 && open("/dev/null", stream == STDIN_FILENO ? O_WRONLY : O_RDONLY) != stream)
            exit(FAILURE);
    }
}

static int dispatch(int argc, char **argv) {
    if (argc < 2) fail_usage("a command is expected");
    const char *first = argv[1];
    if (strcmp(first, "--version") == 0) {
        printf("rapt %s\n", rapt_version());
        return SUCCESS;
    }
    bool help = strcmp(first, "help") == 0;
    if ((help && argc == 2) || strcmp(first, "--help") == 0 || strcmp(first, "-h") == 0) {
        print_general_help();
        return SUCCESS;
    }
    if (first[0] == '-') fail_usage("a command is expected before %s", first);
    const command *c = find_command(help ? argv[2] : first);
    if (help || wants_help(c, argc - 2, argv + 2)) {
        print_help(c);
        return SUCCESS;
    }
    arguments a = parse_arguments(c, argc - 2, argv + 2);
    return c->run(&a);
}

int main(int argc, char **argv) {
    occupy_standard_streams();
    int status = dispatch(argc, argv);
    close_output();
    return status;
}
