"""Makes data/sentence.safetensors and .txt, which `make run` shows: a sentence and a trained attention layer.

    pip install torch==2.15.0 numpy safetensors
    python make_sentence.py

The layer is an nn.MultiheadAttention whose four heads are trained to look at the previous word, at the word
that is meant, at the same word elsewhere, and at the next word. The file holds its state dict, the sentence's
embeddings (`input` [1,L,64]) and what PyTorch computes from them in float64 (`expected_output` [1,L,64],
`expected_weights` [1,4,L,L]), all as float32.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

OUTPUT = Path(__file__).resolve().parent / "data" / "sentence.safetensors"
WORDS = "the animal did not cross the street because it was too tired".split()
HEAD_NAMES = ("previous word", "what is meant", "same word", "next word")
# Which words a word refers to, by position; the others look at themselves.
REFERENCES = {
    0: (1,),  # the -> animal
    2: (1, 4),  # did -> animal, cross
    3: (4,),  # not -> cross
    4: (1, 6),  # cross -> animal, street
    5: (6,),  # the -> street
    8: (1,),  # it -> animal
    9: (8,),  # was -> it
    10: (11,),  # too -> tired
    11: (8, 1),  # tired -> it, animal
}
EMBED_DIM = 64
STEPS = 40  # enough to tell the heads apart; more would leave nothing but ones and zeros
LEARNING_RATE = 5e-3


def embed_words() -> Tensor:
    """[L, E]: one random vector for each distinct word, of length about 4."""
    vectors = {word: torch.randn(EMBED_DIM) / 2 for word in dict.fromkeys(WORDS)}
    return torch.stack([vectors[word] for word in WORDS])


def embed_positions() -> Tensor:
    """[L, E]: the sinusoids of "Attention Is All You Need"."""
    position = torch.arange(len(WORDS), dtype=torch.float32).unsqueeze(1)
    frequency = torch.exp(torch.arange(0, EMBED_DIM, 2) * (-math.log(10000.0) / EMBED_DIM))
    angles = position * frequency
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)


def even_map(seen: list[list[int]]) -> Tensor:
    """[L, L]: each row shares its attention evenly among the words it sees."""
    rows = torch.zeros(len(WORDS), len(WORDS))
    for row, columns in zip(rows, seen):
        row[columns] = 1.0 / len(columns)
    return rows


def target_maps() -> Tensor:
    """[H, L, L]: where each head should look."""
    positions = range(len(WORDS))
    previous = [[max(i - 1, 0)] for i in positions]
    meant = [list(REFERENCES.get(i, (i,))) for i in positions]
    elsewhere = [[j for j in positions if j != i and WORDS[j] == WORDS[i]] or [i] for i in positions]
    following = [[min(i + 1, len(WORDS) - 1)] for i in positions]
    return torch.stack([even_map(seen) for seen in (previous, meant, elsewhere, following)])


def attend(layer: nn.MultiheadAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    return layer(x, x, x, need_weights=True, average_attn_weights=False)


def train(layer: nn.MultiheadAttention, x: Tensor, target: Tensor) -> float:
    """Trains the layer's weights towards the maps; returns the last cross-entropy above the targets' own."""
    optimizer = torch.optim.Adam(layer.parameters(), lr=LEARNING_RATE)
    own_entropy = torch.special.entr(target).sum(-1).mean()
    excess = torch.tensor(0.0)
    for _ in range(STEPS):
        _, weights = attend(layer, x)
        # The floor keeps the logarithm finite where a weight underflows.
        excess = -(target * weights[0].clamp_min(1e-30).log()).sum(-1).mean() - own_entropy
        optimizer.zero_grad()
        excess.backward()
        optimizer.step()
    return excess.item()


def to_bytes(tensors: dict[str, Tensor], metadata: dict[str, str]) -> bytes:
    """The file's bytes with its metadata sorted: safetensors writes it in another order on every run."""
    raw = save(tensors, metadata)
    data_start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:data_start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + raw[data_start:]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    layer = nn.MultiheadAttention(EMBED_DIM, len(HEAD_NAMES), bias=True, batch_first=True)
    x = (embed_words() + embed_positions()).unsqueeze(0)
    target = target_maps()
    excess = train(layer, x, target)

    with torch.no_grad():
        output, weights = attend(copy.deepcopy(layer).to(torch.float64), x.to(torch.float64))
    tensors = {name: parameter.detach() for name, parameter in layer.state_dict().items()}
    tensors |= {"input": x, "expected_output": output.float(), "expected_weights": weights.float()}
    metadata = {
        "words": " ".join(WORDS),
        "heads": str(len(HEAD_NAMES)),
        "head_names": "|".join(HEAD_NAMES),
        "torch": torch.__version__.split("+")[0],
    }
    OUTPUT.parent.mkdir(exist_ok=True)
    OUTPUT.with_suffix(".txt").write_text(" ".join(WORDS) + "\n")  # for `rapt plot --tokens`
    OUTPUT.write_bytes(to_bytes({name: tensor.contiguous() for name, tensor in tensors.items()}, metadata))

    worst = (weights[0].float() - target).abs().amax((1, 2))
    print(f"{OUTPUT.name}: {OUTPUT.stat().st_size} bytes, cross-entropy above the targets' {excess:.4f}")
    for name, error in zip(HEAD_NAMES, worst.tolist()):
        print(f"  {name}: within {error:.3f} of its map")


if __name__ == "__main__":
    main()
