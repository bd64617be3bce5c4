/* schemes.c - what other software calls the tensors of an attention layer */
#include "schemes.h"

#define PYTORCH_BIAS_KV                                                                                                \
    { "bias_k", "bias_v" }
#define DOTTED(q, k, v, out)                                                                                           \
    {q ".weight", k ".weight", v ".weight", out ".weight"}, { q ".bias", k ".bias", v ".bias", out ".bias" }

/* Of two layouts of a scheme that fit, the first is saved. */
const rapt_layout rapt_layouts[RAPT_LAYOUTS] = {
    {RAPT_SCHEME_PYTORCH,
     false,
     {"in_proj_weight", NULL, NULL, "out_proj.weight"},
     {"in_proj_bias", NULL, NULL, "out_proj.bias"},
     PYTORCH_BIAS_KV},
    {RAPT_SCHEME_PYTORCH, /* kdim or vdim: the weights are apart, the bias is not */
     false,
     {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
     {"in_proj_bias", NULL, NULL, "out_proj.bias"},
     PYTORCH_BIAS_KV},
    {RAPT_SCHEME_LUCID,
     false,
     {"in_proj_weight", NULL, NULL, "out_proj_weight"},
     {"in_proj_bias", NULL, NULL, "out_proj_bias"},
     PYTORCH_BIAS_KV},
    {RAPT_SCHEME_LUCID,
     false,
     {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj_weight"},
     {"in_proj_bias", NULL, NULL, "out_proj_bias"},
     PYTORCH_BIAS_KV},
    {RAPT_SCHEME_SEPARATE, false, DOTTED("q_proj", "k_proj", "v_proj", "out_proj"), PYTORCH_BIAS_KV}, /* fairseq's */
    {RAPT_SCHEME_LLAMA, false, DOTTED("q_proj", "k_proj", "v_proj", "o_proj"), {NULL}},
    {RAPT_SCHEME_WQ, false, DOTTED("wq", "wk", "wv", "wo"), {NULL}},
    {RAPT_SCHEME_WQ, false, {"wq", "wk", "wv", "wo"}, {"bq", "bk", "bv", "bo"}, {NULL}},
    {RAPT_SCHEME_SCIRS2, true, {"w_q", "w_k", "w_v", "w_o"}, {"b_q", "b_k", "b_v", "b_o"}, {NULL}},
    {RAPT_SCHEME_MLX, false, DOTTED("query_proj", "key_proj", "value_proj", "out_proj"), {NULL}},
    {RAPT_SCHEME_BERT, false, DOTTED("self.query", "self.key", "self.value", "output.dense"), {NULL}},
    {RAPT_SCHEME_GPT2,
     true,
     {"c_attn.weight", NULL, NULL, "c_proj.weight"},
     {"c_attn.bias", NULL, NULL, "c_proj.bias"},
     {NULL}},
};

const char *rapt_scheme_name(rapt_scheme scheme) {
    switch (scheme) {
    case RAPT_SCHEME_AUTO: return "auto";
    case RAPT_SCHEME_PYTORCH: return "pytorch";
    case RAPT_SCHEME_LUCID: return "lucid";
    case RAPT_SCHEME_SEPARATE: return "separate";
    case RAPT_SCHEME_LLAMA: return "llama";
    case RAPT_SCHEME_WQ: return "wq";
    case RAPT_SCHEME_SCIRS2: return "scirs2";
    case RAPT_SCHEME_MLX: return "mlx";
    case RAPT_SCHEME_BERT: return "bert";
    case RAPT_SCHEME_GPT2: return "gpt2";
    }
    return NULL;
}

bool rapt_layout_has(const rapt_layout *layout, const char *name) {
    for (int i = 0; i < 4; i++) {
        if (layout->weight[i] != NULL && strcmp(layout->weight[i], name) == 0) return true;
        if (layout->bias[i] != NULL && strcmp(layout->bias[i], name) == 0) return true;
    }
    for (int i = 0; i < 2; i++)
        if (layout->bias_kv[i] != NULL && strcmp(layout->bias_kv[i], name) == 0) return true;
    return false;
}

bool rapt_is_bystander(const char *name) {
    /* GPT-2's causal masks, and what an example keeps with its layer */
    static const char *const names[] = {"bias", "masked_bias", "input",           "query",
                                        "key",  "value",       "expected_output", "expected_weights"};
    /* norms before and after the layer, as BERT and ESM have them */
    static const char *const beginnings[] = {"LayerNorm.", "output.LayerNorm."};
    /* tables of rotary positions, which the caller's options describe */
    static const char *const parts[] = {"rotary_", "rope.", "inv_freq"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (strcmp(name, names[i]) == 0) return true;
    for (size_t i = 0; i < sizeof beginnings / sizeof *beginnings; i++)
        if (strncmp(name, beginnings[i], strlen(beginnings[i])) == 0) return true;
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (strstr(name, parts[i]) != NULL) return true;
    return false;
}

bool rapt_is_scheme(rapt_scheme scheme) { return rapt_scheme_name(scheme) != NULL; }

const rapt_layout *rapt_layout_to_save(rapt_scheme scheme, bool inputs_have_one_size) {
    for (int i = 0; i < RAPT_LAYOUTS; i++) {
        bool is_fused = rapt_layouts[i].weight[1] == NULL;
        if (rapt_layouts[i].scheme == scheme && (inputs_have_one_size || !is_fused)) return &rapt_layouts[i];
    }
    return NULL;
}
