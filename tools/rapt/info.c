/* info.c - rapt info: the library and the machine it runs on; rapt bench: how fast they are */
#include "commands.h"

#include "bench.h"

const option info_options[] = {{"--json", NULL, "print JSON"}, {0}};

const option bench_options[] = {
    {"--threads", "T", "so many; without it, one and then all"},
    {"--isa", "NAME", "the instruction set: auto, baseline, avx2, avx512 or neon"},
    {"--filter", "NAME", "only the shapes whose name has this in it"},
    {"--seconds", "S", "for each shape; 1"},
    {"--json", NULL, "print JSON"},
    {0},
};

int run_info(const arguments *a) {
    bool json = has_option(a, "--json"), is_first = true;
    char cpu[200];
    open_context(a);
    cpu_name(cpu, sizeof cpu);
    const char *isa = rapt_isa_name(rapt_context_isa(ctx));
    int threads = (int)rapt_context_num_threads(ctx);
    if (json) {
        printf("{\"version\": \"%s\", \"numerics_version\": %d, \"cpu\": ", rapt_version(), RAPT_NUMERICS_VERSION);
        print_json_string(cpu);
        printf(", \"isa\": \"%s\", \"available\": [", isa);
    } else {
        printf("version    %s, numerics %d\ncpu        %s\nisa        %s, of", rapt_version(), RAPT_NUMERICS_VERSION,
               cpu, isa);
    }
    for (int i = RAPT_ISA_BASELINE; i <= RAPT_ISA_NEON; i++) {
        if (!rapt_isa_available((rapt_isa)i)) continue;
        printf(json ? "%s\"%s\"" : "%s %s", is_first ? "" : json ? ", " : ",", rapt_isa_name((rapt_isa)i));
        is_first = false;
    }
    printf(json ? "], \"threads\": %d, \"backends\": [\"cpu\", \"reference\"]}\n"
                : "\nthreads    %d\nbackends   cpu, reference\n",
           threads);
    return SUCCESS;
}

static void show_shape(const char *shape, int number, int count, int threads) {
    char text[96] = "";
    if (shape != NULL) snprintf(text, sizeof text, "timing %s, %d of %d, threads: %d", shape, number, count, threads);
    show_progress(shape == NULL ? NULL : text);
}

int run_bench(const arguments *a) {
    bench_settings settings = {
        .program = "rapt",
        .threads = (int)integer_option(a, "--threads", 1, 4096, 0),
        .isa = isa_option(a),
        .filter = has_option(a, "--filter") ? text_option(a, "--filter") : "",
        .seconds = real_option(a, "--seconds", 0, 3600, 1),
        .json = has_option(a, "--json"),
        .progress = show_shape,
    };
    if (bench_count_shapes(settings.filter) == 0)
        fail_usage("--filter: no shape has '%s' in its name", settings.filter);
    bench_run(&settings);
    return SUCCESS;
}
