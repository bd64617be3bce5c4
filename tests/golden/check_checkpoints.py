"""Shows that checkpoints go both ways between PyTorch and Rapt, and makes the golden ones of the tests.

    make checkpoints                                              all of that with PyTorch in build/parity
    pip install torch==2.15.0 numpy safetensors                   or by hand:
    python check_checkpoints.py ../../build/release/librapt.so    PyTorch to Rapt and back
    python check_checkpoints.py --write                           write checkpoint_*.safetensors beside this script

A layer's state dict goes through safetensors.torch.save_file with the number of heads, which no tensor shows, as
metadata, is loaded by Rapt with no option, computes the same, is saved by Rapt, and is loaded by PyTorch again, strictly
and bit by bit. The same state dict without metadata is loaded with the number of heads alone, and so is one layer of a
model of several, by its name; nobody says which scheme it is.

checkpoint_fused.safetensors and checkpoint_separate.safetensors are state dicts as PyTorch writes them;
checkpoint_expected.safetensors holds, for each, NAME.query, NAME.key, NAME.value (float32) and NAME.out (float64).
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

HERE = Path(__file__).resolve().parent
HEADS = 2
CASES: dict[str, dict] = {
    "fused": dict(embed_dim=8, num_heads=HEADS, batch_first=True),
    "separate": dict(embed_dim=8, num_heads=HEADS, kdim=6, vdim=4, batch_first=True),
    "bare": dict(embed_dim=8, num_heads=HEADS, bias=False, batch_first=True),
    "bias_kv": dict(embed_dim=8, num_heads=HEADS, add_bias_kv=True, batch_first=True),
}
GOLDEN = ["fused", "separate"]


def draw(*shape: int) -> Tensor:
    """Multiples of a power of two, which do not depend on the CPU as randn's last bits do."""
    return torch.randint(-(1 << 20), 1 << 20, shape).to(torch.float32) / (1 << 20)


def make_layer(name: str) -> nn.MultiheadAttention:
    torch.manual_seed(sorted(CASES).index(name))
    layer = nn.MultiheadAttention(**CASES[name]).eval()
    for parameter in layer.parameters():
        parameter.data = draw(*parameter.shape)
    return layer


def make_inputs(layer: nn.MultiheadAttention) -> list[Tensor]:
    return [draw(2, 3, layer.embed_dim), draw(2, 5, layer.kdim), draw(2, 5, layer.vdim)]


def expected(name: str, layer: nn.MultiheadAttention, inputs: list[Tensor]) -> Tensor:
    """In float64, from float32 weights and inputs."""
    exact = nn.MultiheadAttention(**CASES[name], dtype=torch.float64).eval()
    exact.load_state_dict(layer.state_dict())
    with torch.no_grad():
        return exact(*(x.to(torch.float64) for x in inputs), need_weights=False)[0]


def write_golden() -> None:
    tensors = {}
    for name in GOLDEN:
        layer = make_layer(name)
        save_file(layer.state_dict(), HERE / f"checkpoint_{name}.safetensors")
        inputs = make_inputs(layer)
        for role, x in zip(["query", "key", "value", "out"], [*inputs, expected(name, layer, inputs)]):
            tensors[f"{name}.{role}"] = x.contiguous()
    save_file(tensors, HERE / "checkpoint_expected.safetensors")


# ---------------------------------------------------------------------------------------------- Rapt


class RaptTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int), ("device", ctypes.c_int),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32),
                ("shape", ctypes.c_int64 * 8), ("stride", ctypes.c_int64 * 8)]

    @classmethod
    def of(cls, x: Tensor) -> RaptTensor:
        return cls(x.data_ptr(), 1, 0, 0, x.ndim, (ctypes.c_int64 * 8)(*x.shape), (ctypes.c_int64 * 8)(*x.stride()))


class LoadOptions(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_size_t), ("prefix", ctypes.c_char_p), ("scheme", ctypes.c_int),
                ("num_heads", ctypes.c_int64), ("num_kv_heads", ctypes.c_int64), ("head_dim", ctypes.c_int64),
                ("set_dtype", ctypes.c_bool), ("dtype", ctypes.c_int), ("ignore_metadata", ctypes.c_bool),
                ("batch_first", ctypes.c_bool), ("causal", ctypes.c_bool), ("add_zero_attn", ctypes.c_bool),
                ("set_scale", ctypes.c_bool), ("scale", ctypes.c_double), ("dropout", ctypes.c_double),
                ("ignore_extra", ctypes.c_bool)]

    @classmethod
    def of(cls, heads: int, prefix: str | None) -> LoadOptions:
        name = None if prefix is None else prefix.encode()
        return cls(struct_size=ctypes.sizeof(cls), prefix=name, num_heads=heads, num_kv_heads=-1, head_dim=-1)


class Rapt:
    """As much of the library as this script needs."""

    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.rapt_error_message.restype = ctypes.c_char_p
        self.context = self.new("rapt_context_create", None)

    def call(self, name: str, *args) -> None:
        if getattr(self.library, name)(*args) != 0:
            raise RuntimeError(self.library.rapt_error_message(self.context).decode())

    def new(self, name: str, *args) -> ctypes.c_void_p:
        result = ctypes.c_void_p()
        self.call(name, *args, ctypes.byref(result))
        return result

    def load(self, path: Path, heads: int | None = None, prefix: str | None = None) -> ctypes.c_void_p:
        """With no option but these."""
        checkpoint = self.new("rapt_checkpoint_open", self.context, str(path).encode())
        options = None if heads is None else ctypes.byref(LoadOptions.of(heads, prefix))
        layer = self.new("rapt_mha_load", self.context, checkpoint, options)
        self.library.rapt_checkpoint_close(checkpoint)
        return layer

    def forward(self, layer: ctypes.c_void_p, inputs: list[Tensor]) -> Tensor:
        """Of inputs [N, L, E]; the layer takes [L, N, E], as PyTorch's does where nobody says batch_first."""
        inputs = [x.transpose(0, 1).contiguous() for x in inputs]
        out = torch.empty_like(inputs[0])
        views = [ctypes.byref(RaptTensor.of(x)) for x in inputs]
        self.call("rapt_mha_forward", self.context, layer, *views, None, ctypes.byref(RaptTensor.of(out)))
        return out.transpose(0, 1)


def by_number_of_heads(rapt: Rapt, name: str, folder: Path) -> float:
    """Returns the largest difference of the outputs of a plain state dict, and of a layer of a model."""
    layer = make_layer(name)
    inputs = make_inputs(layer)
    out = expected(name, layer, inputs)
    model = nn.ModuleDict({"before": make_layer("bare"), "encoder": nn.ModuleDict({"attention": layer}),
                           "head": nn.Linear(8, 3)})
    save_file(layer.state_dict(), folder / "plain.safetensors")
    save_file(model.state_dict(), folder / "model.safetensors")
    differences = []
    for file, prefix in [("plain.safetensors", None), ("model.safetensors", "encoder.attention.")]:
        loaded = rapt.load(folder / file, HEADS, prefix)
        differences.append((rapt.forward(loaded, inputs).to(torch.float64) - out).abs().max())
        rapt.library.rapt_mha_destroy(loaded)
    return torch.stack(differences).max().item()  # NaN if one of them is


def there_and_back(rapt: Rapt, name: str, folder: Path) -> float:
    """Returns the largest difference of the outputs."""
    layer = make_layer(name)
    inputs = make_inputs(layer)
    save_file(layer.state_dict(), folder / "torch.safetensors", metadata={"num_heads": str(HEADS)})
    loaded = rapt.load(folder / "torch.safetensors")
    difference = (rapt.forward(loaded, inputs).to(torch.float64) - expected(name, layer, inputs)).abs().max().item()
    rapt.call("rapt_mha_save", rapt.context, loaded, str(folder / "rapt.safetensors").encode(), None)
    rapt.library.rapt_mha_destroy(loaded)

    fresh = nn.MultiheadAttention(**CASES[name])
    fresh.load_state_dict(load_file(folder / "rapt.safetensors"), strict=True)
    for key, value in layer.state_dict().items():
        if not torch.equal(fresh.state_dict()[key], value):
            raise ValueError(f"{name}: {key} came back with other bits")
    return difference


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?", help="librapt.so")
    parser.add_argument("--write", action="store_true", help="write the golden checkpoints")
    args = parser.parse_args()
    if args.write:
        write_golden()
    if args.library:
        rapt = Rapt(args.library)
        for name in CASES:
            with tempfile.TemporaryDirectory() as folder:
                difference = there_and_back(rapt, name, Path(folder))
                plain = by_number_of_heads(rapt, name, Path(folder))
            print(f"{name:9} PyTorch to Rapt and back: the same bits, outputs differ by {difference:.1e}; "
                  f"without metadata, by name: {plain:.1e}")
            if not (difference <= 1e-5 and plain <= 1e-5):
                raise SystemExit(1)
    if not args.write and not args.library:
        parser.print_help()


if __name__ == "__main__":
    main()
