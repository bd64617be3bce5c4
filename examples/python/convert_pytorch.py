"""A PyTorch model on Rapt: convert it, compare, time, then let one learn to sort letters and look at its attention.

`make python-example` runs it; editors that know `# %%` run it cell by cell, as a notebook. Needs torch and matplotlib.
"""

# %% A model as it comes: PyTorch's own encoder, and the line that gives it Rapt
import copy
import time
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import rapt.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

torch.manual_seed(1)
torch.set_num_threads(1)  # for both, so that the times compare the code; more help only models larger than these
rapt.set_num_threads(1)
layer = nn.TransformerEncoderLayer(
    d_model=128, nhead=4, dim_feedforward=256, dropout=0.0, batch_first=True,
    activation="gelu",  # a rounding may tip a ReLU over its kink, and then gradients differ by what one unit gives
)  # fmt: skip
theirs = nn.TransformerEncoder(layer, num_layers=6)
ours = copy.deepcopy(theirs)

rapt.torch.convert(ours)  # in place; the parameters, optimizers, hooks and checkpoints stay what they were

count = sum(isinstance(module, rapt.torch.MultiheadAttention) for module in ours.modules())
x = torch.randn(1, 1024, 128)  # long, so that attention is a good part of the work
print(f"model     {type(ours).__name__}, {count} attention layers converted, input {list(x.shape)}")

# %% The same numbers, forward and backward
d_out = torch.randn_like(x)  # the gradient that comes from whatever follows the encoder


def results(model: nn.Module) -> dict[str, Tensor]:
    out = model(x)
    gradients = torch.autograd.grad(out, tuple(model.parameters()), d_out)
    return {"output": out.detach(), "gradients": torch.cat([gradient.flatten() for gradient in gradients])}


expected = results(theirs)
for name, result in results(ours).items():
    difference = (result - expected[name]).abs().max() / expected[name].abs().max()
    print(f"{name:9} at most {difference:.1e} of the largest value from PyTorch's")
    assert difference < 1e-5


# %% The time of both: in turn, so that they meet the same machine, and the best of each
def forward(model: nn.Module) -> None:
    with torch.inference_mode():
        model.eval()(x)


def training_step(model: nn.Module) -> None:
    model.train()(x).backward(d_out)


def seconds(work: Callable[[nn.Module], None], model: nn.Module) -> float:
    begin = time.perf_counter()
    work(model)
    return time.perf_counter() - begin


for work in (forward, training_step):
    rounds = [[seconds(work, model) for model in (theirs, ours)] for _ in range(12)]
    before, after = (1e3 * min(times) for times in zip(*rounds))
    name = work.__name__.replace("_step", "")
    print(f"{name:9} {before:.1f} ms with PyTorch, {after:.1f} ms with Rapt: {before / after:.2f} times as fast")

# %% A model that learns: twelve letters in, the same letters out, in the order of the alphabet
LENGTH, WIDTH, LETTERS, STEPS = 12, 64, 26, 500


class Sorter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, WIDTH)
        self.places = nn.Parameter(0.5 * torch.randn(LENGTH, WIDTH))
        encoder_layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(encoder_layer, num_layers=2)
        self.head = nn.Linear(WIDTH, LETTERS)

    def forward(self, letters: Tensor) -> Tensor:  # [N, LENGTH] to logits [N, LENGTH, LETTERS]
        return self.head(self.encoder(self.letters(letters) + self.places))


sorter = rapt.torch.convert(Sorter())
optimizer = torch.optim.AdamW(sorter.parameters())
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=STEPS)
begin = time.perf_counter()
for step in range(1, STEPS + 1):
    letters = torch.randint(LETTERS, (128, LENGTH))
    loss = F.cross_entropy(sorter(letters).transpose(1, 2), letters.sort().values)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    if step % 100 == 0:
        print(f"step {step:4} loss {loss:.4f}, {time.perf_counter() - begin:.1f} s")

sorter.eval()
with torch.inference_mode():
    letters = torch.randint(LETTERS, (1000, LENGTH))
    right = (sorter(letters).argmax(-1) == letters.sort().values).float().mean()
print(f"test      {right:.1%} of the letters of {len(letters)} new words are where they belong")
assert right > 0.98

# %% What it looks at: the weights of the last attention layer, the mean of its heads
WORD = "transformers"
with torch.inference_mode():
    letters = torch.tensor([[ord(letter) - ord("a") for letter in WORD]])
    written = "".join(chr(ord("a") + letter) for letter in sorter(letters).argmax(-1)[0])
    hidden = sorter.encoder.layers[0](sorter.letters(letters) + sorter.places)
    weights = sorter.encoder.layers[1].self_attn(hidden, hidden, hidden)[1][0]  # [LENGTH, LENGTH]
print(f"sorted    {WORD} -> {written}")

same = torch.tensor([[read == write for read in WORD] for write in written])
found, chance = weights[same].sum() / LENGTH, same.sum() / same.numel()
print(f"attention {found:.0%} of it is on the letter to be written; by chance it were {chance:.0%}")

# %% The picture: a row for each letter written, a column for each letter read, rings where they are the same
figure, axes = plt.subplots(figsize=(5.6, 5.2), layout="constrained")
image = axes.imshow(weights, cmap="YlGnBu", vmin=0)
rows, columns = same.nonzero(as_tuple=True)
axes.scatter(columns, rows, s=300, facecolors="none", edgecolors="#e4572e", linewidths=1.6)
for ticks, text in ((axes.set_xticks, WORD), (axes.set_yticks, written)):
    ticks(range(LENGTH), text, family="monospace", fontsize=13)
axes.xaxis.tick_top()
axes.tick_params(length=0)
axes.spines[:].set_visible(False)
axes.set_xticks([i - 0.5 for i in range(1, LENGTH)], minor=True)
axes.set_yticks([i - 0.5 for i in range(1, LENGTH)], minor=True)
axes.grid(which="minor", color="white", linewidth=1.5)
axes.tick_params(which="minor", length=0)
figure.suptitle(f"Sorting “{WORD}”: where the model looks for each letter", fontsize=12)
axes.set_xlabel("letters read", labelpad=8)
axes.set_ylabel("letters written")
bar = figure.colorbar(image, shrink=0.6, label="attention, mean of 4 heads")
bar.outline.set_visible(False)
picture = Path("sorting.png").absolute()
figure.savefig(picture, dpi=100)
print(f"picture   {picture}")
