/* dispatch.c - which ISA's kernels a context uses */
#include "cpu.h"

extern const rapt_cpu_kernels rapt_kernels_baseline_f32, rapt_kernels_baseline_f64;
extern const rapt_cpu_kernels rapt_kernels_avx2_f32, rapt_kernels_avx2_f64;
extern const rapt_cpu_kernels rapt_kernels_avx512_f32, rapt_kernels_avx512_f64;
extern const rapt_cpu_kernels rapt_kernels_neon_f32, rapt_kernels_neon_f64;

typedef struct isa_entry {
    rapt_isa isa;
    const char *name;
    bool (*is_available)(void);
    const rapt_cpu_kernels *f32, *f64;
} isa_entry;

static bool always(void) { return true; }

/* What this build has, worst first. */
static const isa_entry isa_table[] = {
    {RAPT_ISA_BASELINE, "baseline", always, &rapt_kernels_baseline_f32, &rapt_kernels_baseline_f64},
#ifdef RAPT_HAVE_AVX2
    {RAPT_ISA_AVX2, "avx2", os_cpu_has_avx2_fma, &rapt_kernels_avx2_f32, &rapt_kernels_avx2_f64},
#endif
#ifdef RAPT_HAVE_AVX512
    {RAPT_ISA_AVX512, "avx512", os_cpu_has_avx512, &rapt_kernels_avx512_f32, &rapt_kernels_avx512_f64},
#endif
#ifdef RAPT_HAVE_NEON
    {RAPT_ISA_NEON, "neon", always, &rapt_kernels_neon_f32, &rapt_kernels_neon_f64},
#endif
};
enum { ISA_COUNT = sizeof isa_table / sizeof *isa_table };

const char *rapt_isa_name(rapt_isa isa) {
    switch (isa) {
    case RAPT_ISA_AUTO: return "auto";
    case RAPT_ISA_BASELINE: return "baseline";
    case RAPT_ISA_AVX2: return "avx2";
    case RAPT_ISA_AVX512: return "avx512";
    case RAPT_ISA_NEON: return "neon";
    }
    return "unknown";
}

static const isa_entry *available_entry(rapt_isa isa) {
    for (int i = 0; i < ISA_COUNT; i++) {
        if (isa_table[i].isa == isa && isa_table[i].is_available()) return &isa_table[i];
    }
    return NULL;
}

bool rapt_isa_available(rapt_isa isa) { return isa == RAPT_ISA_AUTO || available_entry(isa) != NULL; }

static const isa_entry *best_entry(void) {
    int best = ISA_COUNT - 1;
    while (!isa_table[best].is_available()) best--;
    return &isa_table[best];
}

static rapt_status refuse(rapt_context *context, rapt_status status, const char *source, const char *value) {
    char list[100] = "";
    for (int i = 0; i < ISA_COUNT; i++) {
        if (!isa_table[i].is_available()) continue;
        if (list[0] != '\0') strncat(list, ", ", sizeof list - strlen(list) - 1);
        strncat(list, isa_table[i].name, sizeof list - strlen(list) - 1);
    }
    return rapt_fail(context, status, "%s is \"%s\", expected one that this build and CPU have: %s", source, value,
                     list);
}

atomic_int rapt_cpu_kind;

rapt_status rapt_choose_isa(rapt_context *context, rapt_isa wanted) {
    const isa_entry *entry;
    const char *text = os_environment("RAPT_ISA");
    if (wanted < RAPT_ISA_AUTO || wanted > RAPT_ISA_NEON) {
        return rapt_fail(context, RAPT_ERROR_ARGUMENT, "config.isa is %d, which is no rapt_isa", (int)wanted);
    }
    if (wanted != RAPT_ISA_AUTO) {
        entry = available_entry(wanted);
        if (entry == NULL) return refuse(context, RAPT_ERROR_UNSUPPORTED, "config.isa", rapt_isa_name(wanted));
    } else if (text != NULL && *text != '\0' && strcmp(text, "auto") != 0) {
        entry = NULL;
        for (int i = 0; i < ISA_COUNT; i++) {
            if (strcmp(isa_table[i].name, text) == 0) entry = available_entry(isa_table[i].isa);
        }
        if (entry == NULL) return refuse(context, RAPT_ERROR_UNSUPPORTED, "RAPT_ISA", text);
    } else {
        entry = best_entry();
    }
    int unknown = 0;
    atomic_compare_exchange_strong(&rapt_cpu_kind, &unknown, (int)os_kind_of_cpu());
    context->isa = entry->isa;
    context->kernels[0] = entry->f32;
    context->kernels[1] = entry->f64;
    return RAPT_OK;
}
