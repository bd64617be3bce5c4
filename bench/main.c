/* main.c - the benchmark as a program of its own
 *
 *     rapt_bench [--threads T] [--isa NAME] [--filter NAME] [--seconds S] [--json]
 *     rapt_bench --serve [--threads T] [--isa NAME]
 */
#include "bench.h"

#include <stdio.h>
#include <stdlib.h>

static rapt_isa isa_by_name(const char *name) {
    for (int isa = RAPT_ISA_AUTO; isa <= RAPT_ISA_NEON; isa++) {
        if (strcmp(rapt_isa_name((rapt_isa)isa), name) == 0) return (rapt_isa)isa;
    }
    fprintf(stderr, "rapt_bench: --isa %s is none of auto, baseline, avx2, avx512, neon\n", name);
    exit(2);
}

int main(int argc, char **argv) {
    bench_settings o = {.program = "rapt_bench", .filter = "", .seconds = 1};
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (strcmp(argv[i], "--json") == 0) {
            o.json = true;
            continue;
        }
        if (strcmp(argv[i], "--serve") == 0) {
            o.serve = true;
            continue;
        }
        if (value != NULL && strcmp(argv[i], "--threads") == 0) {
            o.threads = atoi(value);
        } else if (value != NULL && strcmp(argv[i], "--isa") == 0) {
            o.isa = isa_by_name(value);
        } else if (value != NULL && strcmp(argv[i], "--filter") == 0) {
            o.filter = value;
        } else if (value != NULL && strcmp(argv[i], "--seconds") == 0) {
            o.seconds = atof(value);
        } else {
            fprintf(stderr, "usage: rapt_bench [--threads T] [--isa NAME] [--filter NAME] [--seconds S] [--json]\n"
                            "       rapt_bench --serve [--threads T] [--isa NAME]\n"
                            "Without --threads: one thread, then all.\n");
            return 2;
        }
        i++;
    }
    bench_run(&o);
    return 0;
}
