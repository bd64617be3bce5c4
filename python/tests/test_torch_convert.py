"""rapt.torch.convert and unconvert: which modules change, and what models with them compute."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
from torch import nn  # noqa: E402

E, H, N, L, S = 16, 2, 2, 5, 6
Rapt = rapt.torch.MultiheadAttention


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture
def no_shortcuts(monkeypatch):
    """Fails where PyTorch computes attention, or a layer around it, by itself."""
    names = ("_native_multi_head_attention", "_transformer_encoder_layer_fwd", "_nested_tensor_from_mask")
    for name in names:
        monkeypatch.setattr(torch, name, lambda *a, **k: pytest.fail("PyTorch's own"))
    monkeypatch.setattr(nn.MultiheadAttention, "forward", lambda *a, **k: pytest.fail("PyTorch's own"))
    return monkeypatch


def causal(length, dtype=torch.bool):
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    return mask if dtype is torch.bool else torch.zeros(length, length, dtype=dtype).masked_fill(mask, float("-inf"))


def padding(length=S):
    mask = torch.zeros(N, length, dtype=torch.bool)
    mask[1, length - 2 :] = True
    return mask


def transformer_calls():
    source, target = torch.randn(N, S, E), torch.randn(N, L, E)
    keys = {"src_key_padding_mask": padding(), "memory_key_padding_mask": padding()}
    hidden = torch.rand(N * H, L, S) < 0.3
    hidden[..., 0] = False
    yield source, target, {}
    yield source, target, {**keys, "tgt_key_padding_mask": padding(L)}
    yield source, target, {"tgt_mask": causal(L), "tgt_is_causal": True, **keys}
    yield source, target, {"tgt_mask": causal(L, torch.float32), "src_mask": causal(S, torch.float32)}
    yield source, target, {"src_mask": causal(S), "src_is_causal": True, "memory_mask": hidden}
    yield source, target, {"memory_mask": torch.randn(L, S), "tgt_mask": causal(L, torch.float32)}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("settings", [{}, {"norm_first": True}, {"activation": "gelu", "bias": False}], ids=str)
def test_transformer(training, settings, no_shortcuts):
    model = nn.Transformer(E, H, 2, 2, 32, dropout=0.0, batch_first=True, **settings).train(training)
    attention = model.encoder.layers[0].self_attn
    kinds, keys, text = [type(m) for m in model.modules()], list(model.state_dict()), repr(model)
    state = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    assert rapt.torch.convert(model) is model
    assert type(attention) is Rapt and attention is model.encoder.layers[0].self_attn
    assert list(model.state_dict()) == keys and repr(model) == text
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == state
    calls = list(transformer_calls())
    with torch.no_grad():
        ours = [model(source, target, **options) for source, target, options in calls]
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for other in copies:
        with torch.no_grad():
            assert torch.equal(other(*calls[0][:2]), ours[0])
    no_shortcuts.undo()
    rapt.torch.convert(model)  # twice is as good as once
    for other in (model, *copies):
        assert rapt.torch.unconvert(other) is other
        assert [type(m) for m in other.modules()] == kinds
        assert not any(name.startswith("_rapt") for m in other.modules() for name in vars(m))
        with torch.no_grad():
            for (source, target, options), out in zip(calls, ours):
                torch.testing.assert_close(out, other(source, target, **options), atol=2e-5, rtol=2e-5)
    rapt.torch.unconvert(model)
    assert [type(m) for m in model.modules()] == kinds


def test_shortcuts_are_open_again():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 32, batch_first=True), 2).eval()
    before = [vars(m).get("activation_relu_or_gelu") for m in model.modules()]
    x = torch.randn(N, S, E)
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding())
        rapt.torch.convert(model)
        assert not model.use_nested_tensor
        ours = model(x, src_key_padding_mask=padding())
        rapt.torch.unconvert(model)
        assert model.use_nested_tensor
        assert [vars(m).get("activation_relu_or_gelu") for m in model.modules()] == before
        assert torch.equal(model(x, src_key_padding_mask=padding()), plain)
    torch.testing.assert_close(ours[~padding()], plain[~padding()], atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
def test_encoders_under_autocast(dtype, norm_first, hidden):
    """Their result has the type of PyTorch's way with gradients, whose norms compute in float32; its fast path has
    none of them apart, and gives the lower type."""
    layer = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x, mask = torch.randn(N, S, E), padding() if hidden else None
    with torch.autocast("cpu", dtype):
        with torch.no_grad():
            fast = model(x, src_key_padding_mask=mask)
        theirs = model(x, src_key_padding_mask=mask)
        rapt.torch.convert(model)
        results = [model(x, src_key_padding_mask=mask)]
        with torch.no_grad():
            results.append(model(x, src_key_padding_mask=mask))
    assert fast.dtype is dtype and theirs.dtype is torch.float32
    bound = {torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for ours in results:
        assert ours.dtype is theirs.dtype
        torch.testing.assert_close(ours, theirs, atol=bound, rtol=bound)


class Doubled(nn.MultiheadAttention):
    def forward(self, *args, **options):
        out, weights = super().forward(*args, **options)
        return 2 * out, weights


def test_subclasses_stay():
    """They may compute something else, as this one does."""
    quantizable = pytest.importorskip("torch.ao.nn.quantizable")
    model = nn.ModuleList([Doubled(E, H), nn.MultiheadAttention(E, H), quantizable.MultiheadAttention(E, H)])
    x = torch.randn(L, N, E)
    before = [m(x, x, x)[0] for m in model]
    kinds = [type(m) for m in model]
    rapt.torch.convert(model)
    assert [type(m) for m in model] == [Doubled, Rapt, kinds[2]]
    for module, out in zip(model, before):
        torch.testing.assert_close(module(x, x, x)[0], out, atol=1e-5, rtol=1e-5)

    class Own(Rapt):
        pass

    model.append(Own(E, H))
    rapt.torch.unconvert(model)
    assert [type(m) for m in model] == [*kinds, Own]


def test_encoders_of_subclasses_keep_their_shortcuts():
    layer = nn.TransformerEncoderLayer(E, H, 32, batch_first=True)
    layer.self_attn = Doubled(E, H, batch_first=True)
    mixed = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True)
    mixed.layers[1].self_attn = nn.MultiheadAttention(E, H, batch_first=True)
    rapt.torch.convert(mixed)
    assert mixed.layers[0].activation_relu_or_gelu == 1 and mixed.layers[1].activation_relu_or_gelu == 0
    assert not mixed.use_nested_tensor
    rapt.torch.unconvert(mixed)
    assert mixed.layers[1].activation_relu_or_gelu == 1 and mixed.use_nested_tensor
    rapt.torch.convert(layer)
    assert "_rapt_shortcut" not in vars(layer)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantized_models():
    """Dynamic quantisation reaches the linear layers around a converted layer, not the layer."""
    quantization = pytest.importorskip("torch.ao.quantization")
    model = rapt.torch.convert(nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True).eval())
    if not torch.backends.quantized.supported_engines or torch.backends.quantized.engine == "none":
        pytest.skip("PyTorch was built without quantised kernels")
    quantized = quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    assert type(quantized.self_attn) is Rapt and type(quantized.linear1) is not nn.Linear
    x = torch.randn(N, L, E)
    with torch.no_grad():
        torch.testing.assert_close(quantized(x), model(x), atol=0.1, rtol=0.1)


def test_shared_and_single_modules():
    shared = nn.MultiheadAttention(E, H)
    model = nn.ModuleDict({"a": shared, "b": nn.ModuleList([shared])})
    rapt.torch.convert(model)
    assert type(shared) is Rapt and model["a"] is model["b"][0]
    assert type(rapt.torch.convert(nn.MultiheadAttention(E, H))) is Rapt
    assert rapt.torch.convert(nn.Linear(2, 2)).weight.shape == (2, 2)


def test_hooks_and_training_go_on():
    """A model trains on over both conversions as it would without."""
    torch.manual_seed(1)
    theirs = nn.TransformerEncoderLayer(E, H, 32, dropout=0.0, batch_first=True)
    ours = copy.deepcopy(theirs)
    seen = []
    ours.self_attn.register_forward_hook(lambda module, args, out: seen.append(type(module)))
    x = torch.randn(N, L, E)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (ours, theirs)]
    for step in range(6):
        if step in (1, 4):
            rapt.torch.convert(ours)
        if step == 3:
            rapt.torch.unconvert(ours)
        for model, optimizer in zip((ours, theirs), optimizers):
            optimizer.zero_grad()
            (model(x) - x.flip(1)).square().mean().backward()
            optimizer.step()
    assert seen == [nn.MultiheadAttention, Rapt, Rapt, nn.MultiheadAttention, Rapt, Rapt]
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("norm_first", [True, False])
def test_decoder_layer_step_by_step(norm_first):
    """A decoder layer's parts with caches, one token at a time, against the whole layer with masks."""
    layer = nn.TransformerDecoderLayer(E, H, 32, dropout=0.0, batch_first=True, norm_first=norm_first).eval()
    layer.requires_grad_(False)
    target, memory = torch.randn(N, L, E), torch.randn(N, S, E)
    theirs = layer(target, memory, tgt_mask=causal(L), tgt_is_causal=True)
    rapt.torch.convert(layer)
    torch.testing.assert_close(layer(target, memory, tgt_mask=causal(L), tgt_is_causal=True), theirs)
    own, cross = layer.self_attn.new_cache(N, L), layer.multihead_attn.new_cache(N, S)
    layer.multihead_attn.append(memory, memory, cross)

    def attend_to_own(x):
        return layer.self_attn(x, x, x, is_causal=True, cache=own, need_weights=False)[0]

    def attend_to_memory(x):
        return layer.multihead_attn(x, None, None, cache=cross, need_weights=False)[0]

    steps = []
    for x in target.split(1, 1):
        if norm_first:
            x = x + attend_to_own(layer.norm1(x))
            x = x + attend_to_memory(layer.norm2(x))
            x = x + layer._ff_block(layer.norm3(x))
        else:
            x = layer.norm1(x + attend_to_own(x))
            x = layer.norm2(x + attend_to_memory(x))
            x = layer.norm3(x + layer._ff_block(x))
        steps.append(x)
    torch.testing.assert_close(torch.cat(steps, 1), theirs)
