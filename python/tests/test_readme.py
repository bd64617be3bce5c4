"""The code in python/README.md runs, and does what its words say. The section on PyTorch: test_torch_readme.py."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rapt

TEXT = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(heading: str) -> list[str]:
    """The code of the section under a heading, or with "" of what stands before the first."""
    sections = {}
    for part in re.split(r"^(?=## )", TEXT, flags=re.MULTILINE):
        name = part.split("\n", 1)[0][3:] if part.startswith("## ") else ""
        sections[name] = re.findall(r"^```python\n(.*?)^```$", part, flags=re.MULTILINE | re.DOTALL)
    return sections[heading]


def run(code: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(code, "README.md", "exec"), names)
    return names


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_first_steps() -> None:
    rapt.MultiheadAttention(512, 32).save("model.safetensors", scheme="llama", prefix="model.layers.0.self_attn.")
    (code,) = blocks("")
    names = run(code, {})
    assert names["y"].shape == (2, 8, 128, 64) and names["cache"].lengths() == [10, 10]
    assert names["gradients"]["query"].shape == names["x"].shape and rapt.layers("layer.safetensors")


def test_beneath_it() -> None:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    names: dict[str, Any] = {"np": np, "rapt": rapt, "q": array(2, 8, 16, 64), "d_out": array(2, 8, 16, 64)}
    names.update(k=array(2, 2, 16, 64), v=array(2, 2, 16, 64), w=array(1536, 512), o=array(512, 512))
    names.update(x=array(10, 2, 512), dy=array(10, 2, 512), y=np.zeros((10, 2, 512), np.float32))
    names.update(dx=np.zeros((10, 2, 512), np.float32), dw=np.zeros((1536, 512), np.float32))
    (code,) = blocks("Beneath it")
    run(code, names)
    for name in ("y", "dx", "dw"):
        assert names[name].any()
    assert np.isfinite(names["lse"]).all() and all(g.any() for g in names["gradients"].values())


def test_every_block_is_run() -> None:
    """A new one needs a place above, or in test_torch_readme.py."""
    assert TEXT.count("```python\n") == len(blocks("")) + len(blocks("Beneath it")) + len(blocks("PyTorch")) == 5
