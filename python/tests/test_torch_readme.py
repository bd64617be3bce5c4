"""The code in the section on PyTorch of python/README.md runs, and does what its words say."""

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402

from test_readme import blocks, run  # noqa: E402


def test_functions_layers_and_models(monkeypatch):
    compile_with = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compile_with(f, backend="aot_eager"))  # no C++ compiler is needed
    first, decoding, _ = blocks("PyTorch")
    names = run(first, {})
    kinds = [type(m) for m in names["model"].modules() if isinstance(m, torch.nn.MultiheadAttention)]
    assert kinds == [rapt.torch.MultiheadAttention] * 2
    assert torch.allclose(names["y"], names["out"], atol=1e-5)
    assert torch.nn.functional.scaled_dot_product_attention is not rapt.torch.scaled_dot_product_attention
    run(decoding, names)
    assert names["cache"].lengths() == [20] and names["out"].shape == (1, 1, 512)


def test_transformers(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers", minversion="4.53")
    monkeypatch.chdir(tmp_path)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    transformers.LlamaForCausalLM(config).save_pretrained("my-model")
    model = run(blocks("PyTorch")[2], {})["model"]
    assert model.config._attn_implementation == "rapt"
