"""Writes tests/golden/rotary.txt: rotary positions as Hugging Face Transformers computes them.

pip install torch transformers==5.23.0

Lines of `scaling dims base factor original_length length low_turns high_turns given_amplitude mscale mscale_all_dim
unrounded_bounds amplitude`, then the speeds of all pairs; and of `apply interleaved dims position`, with base 10000, then eight
numbers and what they turn into when the first `dims` turn.
"""

import sys

import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as apply_to_first_interleaved
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as apply_to_first_halves
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as apply_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as apply_halves

BASE = 10000.0
CASES = [  # scaling, dims, base, parameters, length
    ("plain", 64, BASE, {"rope_type": "default"}, 0),
    ("plain", 128, 500000.0, {"rope_type": "default"}, 0),
    ("linear", 64, BASE, {"rope_type": "linear", "factor": 4.0}, 0),
    ("ntk", 64, BASE, {"rope_type": "dynamic", "factor": 2.0}, 8192),
    ("ntk", 64, BASE, {"rope_type": "dynamic", "factor": 2.0}, 1024),
    ("llama3", 128, 500000.0, {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                               "original_max_position_embeddings": 8192}, 0),
    ("llama3", 64, 500000.0, {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                              "original_max_position_embeddings": 8192}, 0),
    ("yarn", 128, BASE, {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}, 0),
    ("yarn", 64, 1000000.0, {"rope_type": "yarn", "factor": 4.0, "beta_fast": 24.0, "beta_slow": 2.0,
                             "original_max_position_embeddings": 32768}, 0),
    ("yarn", 64, BASE, {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                        "original_max_position_embeddings": 2048}, 0),
    # gpt-oss's; half of each head as GPT-NeoX has it, where the bounds are dims of that half; DeepSeek's two factors
    ("yarn", 64, 150000.0, {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                            "original_max_position_embeddings": 4096}, 0),
    ("yarn", 32, BASE, {"rope_type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5, "truncate": False,
                        "original_max_position_embeddings": 300}, 0),
    ("yarn", 32, BASE, {"rope_type": "yarn", "factor": 8.0, "partial_rotary_factor": 0.5,
                        "original_max_position_embeddings": 300}, 0),
    ("yarn", 64, BASE, {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2,
                        "original_max_position_embeddings": 4096}, 0),
]


def speeds(dims: int, base: float, parameters: dict, length: int) -> tuple[torch.Tensor, float]:
    head_dim = round(dims / parameters.get("partial_rotary_factor", 1))
    config = LlamaConfig(hidden_size=head_dim * 2, num_attention_heads=2, head_dim=head_dim, max_position_embeddings=2048,
                         rope_theta=base, rope_parameters={"rope_theta": base, **parameters})
    kind = parameters["rope_type"]
    if kind == "default":
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
        rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq, rotary.attention_scaling
    return ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length or None)


def turned(x: torch.Tensor, position: int, interleaved: bool, dims: int) -> torch.Tensor:
    angles = position * BASE ** (-torch.arange(0, dims, 2, dtype=torch.float64) / dims)
    both = torch.cat([angles, angles]).view(1, 1, -1)
    is_part = dims < x.numel()
    x = x.view(1, 1, 1, -1)
    if interleaved and not is_part:
        return apply_interleaved(x, angles.sin().view(1, 1, -1), angles.cos().view(1, 1, -1)).flatten()
    apply = apply_to_first_interleaved if interleaved else apply_to_first_halves if is_part else apply_halves
    return apply(x, x, both.cos(), both.sin())[0].flatten()


def main() -> None:
    with open(sys.argv[1] if len(sys.argv) > 1 else "tests/golden/rotary.txt", "w") as out:
        for scaling, dims, base, parameters, length in CASES:
            inverse, amplitude = speeds(dims, base, parameters, length)
            original = parameters.get("original_max_position_embeddings", 2048)
            low = parameters.get("low_freq_factor", parameters.get("beta_slow", 1.0))
            high = parameters.get("high_freq_factor", parameters.get("beta_fast", 32.0))
            given = parameters.get("attention_factor", 0)
            print(scaling, dims, base, parameters.get("factor", 1.0), original, length, low, high, given,
                  parameters.get("mscale", 0), parameters.get("mscale_all_dim", 0), int(not parameters.get("truncate", True)),
                  f"{amplitude:.9g}", *(f"{speed:.9g}" for speed in inverse.tolist()), file=out)
        torch.manual_seed(1)
        for dims in (8, 4, 6):
            for interleaved in (False, True):
                for position in (0, 1, 57, 4095):
                    x = torch.rand(8, dtype=torch.float64) * 2 - 1
                    numbers = [*x.tolist(), *turned(x, position, interleaved, dims).tolist()]
                    print("apply", int(interleaved), dims, position, *(f"{number:.17g}" for number in numbers), file=out)


main()
