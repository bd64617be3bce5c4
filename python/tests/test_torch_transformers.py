"""attn_implementation="rapt" in small models with random weights: the logits and tokens of "sdpa" and "eager"."""

import pytest

torch = pytest.importorskip("torch", minversion="2.10")
transformers = pytest.importorskip("transformers", minversion="4.53")

import rapt.torch  # noqa: E402
from rapt.torch import _transformers  # noqa: E402

TEXT = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
LLAMA = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
MODELS = {
    "bert": ("BertForMaskedLM", transformers.BertConfig(**TEXT)),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4, n_positions=64)),
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**LLAMA)),
    "qwen2": (
        "Qwen2ForCausalLM",
        transformers.Qwen2Config(**LLAMA, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "t5": (
        "T5ForConditionalGeneration",
        transformers.T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
    ),
}


def build(name, implementation):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    config._attn_implementation = implementation
    config.pad_token_id = 0
    config.bos_token_id, config.eos_token_id = 1, None
    config.decoder_start_token_id = 0
    model = getattr(transformers, kind)(config).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return model


@pytest.fixture(scope="module", autouse=True)
def registered():
    rapt.torch.register_transformers()
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", MODELS)
def test_model(name, monkeypatch):
    tokens = torch.randint(2, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    mask[1, :4] = 0  # left padding
    logits, texts, gradients = {}, {}, {}
    calls = []
    ours = _transformers.scaled_dot_product_attention
    monkeypatch.setattr(_transformers, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or ours(*a, **k))
    for implementation in ("eager", "sdpa", "rapt"):
        model = build(name, implementation)
        assert model.config._attn_implementation == implementation
        more = {"decoder_input_ids": tokens[:, :6]} if name == "t5" else {}
        out = model(input_ids=tokens, attention_mask=mask, **more).logits
        logits[implementation] = out[mask.bool()] if name != "t5" else out
        logits[implementation].square().mean().backward()
        gradients[implementation] = [p.grad for p in model.parameters() if p.grad is not None]
        if name != "bert":
            with torch.no_grad():
                texts[implementation] = model.generate(
                    input_ids=tokens, attention_mask=mask, max_new_tokens=12, do_sample=False
                )  # fmt: skip
        assert bool(calls) == (implementation == "rapt")
    for other in ("eager", "sdpa"):
        size = logits[other].abs().max().item()
        torch.testing.assert_close(logits["rapt"], logits[other], atol=2e-5 * size, rtol=1e-4)
        assert len(gradients["rapt"]) == len(gradients[other])
        for a, b in zip(gradients["rapt"], gradients[other]):
            torch.testing.assert_close(a, b, atol=1e-4 * max(1.0, b.abs().max().item()), rtol=1e-3)
        if texts:
            assert torch.equal(texts["rapt"], texts[other])
