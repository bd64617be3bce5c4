"""rapt.torch's multi_head_attention_forward, MultiheadAttention and sdpa against PyTorch's."""

import copy
import gc
import inspect
import itertools
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch", minversion="2.10")

import rapt.torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from rapt.torch import _encoder as encoder  # noqa: E402
from rapt.torch import _functional as functional  # noqa: E402
from torch import nn  # noqa: E402
from torch.library import opcheck  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 1e-2}
E, H, N, L, S = 8, 2, 3, 4, 5


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
    torch.set_num_threads(1)


def close(ours, theirs, dtype=None):
    bound = TOLERANCE[dtype or ours.dtype]
    size = max(1.0, theirs.abs().max().item()) if theirs.numel() > 0 else 1.0
    torch.testing.assert_close(ours, theirs, atol=bound * size, rtol=bound)


def make(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64).mul(0.5).to(dtype).requires_grad_()


def weights(dtype, bias=True, separate=False, extra=False):
    w = {"in_proj_bias": make(3 * E, dtype=dtype) if bias else None, "out_proj_weight": make(E, E, dtype=dtype)}
    w["out_proj_bias"] = make(E, dtype=dtype) if bias else None
    w["in_proj_weight"] = None if separate else make(3 * E, E, dtype=dtype)
    if separate:
        w.update(q_proj_weight=make(E, E, dtype=dtype), k_proj_weight=make(E, 6, dtype=dtype))
        w.update(v_proj_weight=make(E, 7, dtype=dtype), use_separate_proj_weight=True)
    w["bias_k"], w["bias_v"] = (make(1, 1, E, dtype=dtype) for _ in "kv") if extra else (None, None)
    return w


def compare(arguments, dtype=None):
    """Results and the gradients of all tensors, twice: by the library's call and written out."""
    tensors = {k: v for k, v in arguments.items() if isinstance(v, torch.Tensor) and v.requires_grad}
    results = []
    for function in (rapt.torch.multi_head_attention_forward, F.multi_head_attention_forward):
        out, shown = function(**arguments)
        loss = (out * torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype)).sum()
        if shown is not None:
            loss = loss + (shown * torch.linspace(0, 3, shown.numel()).view(shown.shape).to(out.dtype)).sum()
        grads = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
        results.append((out, shown, grads))
    (out, shown, grads), (their_out, their_shown, their_grads) = results
    close(out, their_out, dtype)
    assert (shown is None) == (their_shown is None)
    if shown is not None:
        close(shown, their_shown, dtype)
    for name, a, b in zip(tensors, grads, their_grads):
        assert (a is None) == (b is None), name
        if a is not None:
            close(a, b, dtype)
    with torch.no_grad():
        again, shown_again = rapt.torch.multi_head_attention_forward(**arguments)
        close(again, out, dtype)
        if shown is not None:
            close(shown_again, shown, dtype)


def call(dtype=torch.float64, batched=True, same=False, separate=False, extra=False, bias=True, **more):
    lead = (N,) if batched else ()
    query = make(L, *lead, E, dtype=dtype)
    key = query if same else make(S, *lead, 6 if separate else E, dtype=dtype)
    value = query if same else make(S, *lead, 7 if separate else E, dtype=dtype)
    base = {"query": query, "key": key, "value": value, "embed_dim_to_check": E, "num_heads": H}
    return {**base, "add_zero_attn": False, "dropout_p": 0.0, **weights(dtype, bias, separate, extra), **more}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("written_out", [True, False])
def test_gradients_of_one_result(average, written_out):
    arguments = call(average_attn_weights=average)
    if written_out:  # as a mask of another type makes it
        arguments["attn_mask"] = torch.zeros(L, S)
    theirs = F.multi_head_attention_forward(**{**arguments, "attn_mask": None})
    for i in (0, 1):
        ours = rapt.torch.multi_head_attention_forward(**arguments)
        g = torch.randn_like(ours[i])
        for name in ("query", "value"):
            a, b = (
                torch.autograd.grad(r[i], arguments[name], g, retain_graph=True, allow_unused=True)[0]
                for r in (ours, theirs)
            )
            if b is not None:
                close(a, b)
            else:
                assert a is None or not a.any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_functional_types(dtype):
    compare(call(dtype), dtype)
    compare(call(dtype, same=True, need_weights=False), dtype)


def test_functional_arguments():
    for separate, extra, zero, bias, weights_ in itertools.product(
        [False, True], [False, True], [False, True], [False, True], [0, 1, 2]
    ):
        compare(
            call(
                separate=separate,
                extra=extra,
                add_zero_attn=zero,
                bias=bias,
                need_weights=weights_ > 0,
                average_attn_weights=weights_ > 1,
            )
        )
    compare(call(batched=False))
    compare(call(batched=False, same=True, average_attn_weights=False, extra=True, add_zero_attn=True))


@pytest.mark.parametrize("need", [False, True])
def test_functional_masks(need):
    f64 = torch.float64
    for extra in (False, True):
        more = {"need_weights": need, "extra": extra, "add_zero_attn": extra}
        two, three, padding = make(L, S), make(N * H, L, S), make(N, S)
        compare(call(attn_mask=two, **more))
        compare(call(attn_mask=three, **more))
        compare(call(key_padding_mask=padding, **more))
        compare(call(attn_mask=three, key_padding_mask=padding, **more))
        hidden = torch.zeros(N, S, dtype=torch.bool)
        hidden[1, 3:] = True
        compare(call(key_padding_mask=hidden, **more))
        later = torch.ones(L, S, dtype=torch.bool).triu(1)
        compare(call(attn_mask=later, key_padding_mask=hidden, is_causal=True, **more))
        compare(call(batched=False, attn_mask=make(H, L, S), key_padding_mask=make(S), **more))
        minus = torch.zeros(L, S, dtype=f64).masked_fill(later, float("-inf"))
        compare(call(attn_mask=minus, key_padding_mask=hidden, **more))


def test_functional_static():
    k, v = make(N * H, 7, E // H), make(N * H, 7, E // H)
    for zero in (False, True):
        compare(call(static_k=k, static_v=v, add_zero_attn=zero))
    compare(call(static_v=make(N * H, S, E // H)))


def test_functional_empty(monkeypatch):
    """Each size may be 0 where PyTorch takes that, in the backward too."""
    for sizes in itertools.product([0, 8], [0, 3], [0, 4], [0, 5]):
        for name, size in zip("ENLS", sizes):
            monkeypatch.setitem(globals(), name, size)
        for same, extra, need in itertools.product([False, True], repeat=3):
            if 0 not in sizes or (E == 0 and need):  # PyTorch divides by 0 there
                continue
            more = {"same": same, "extra": extra, "add_zero_attn": extra, "need_weights": need}
            compare(call(**more))
            keys = L if same else S
            if E > 0 and N > 0 and keys > 0:  # else PyTorch fails to reshape it
                compare(call(key_padding_mask=torch.zeros(N, keys, dtype=torch.bool), **more))


def test_functional_refusals():
    function = rapt.torch.multi_head_attention_forward
    with pytest.raises(RuntimeError, match="is_causal"):
        function(**call(is_causal=True))
    with pytest.raises(AssertionError):
        function(**{**call(), "embed_dim_to_check": 9})
    with pytest.raises(RuntimeError):
        function(**call(attn_mask=torch.zeros(L, S + 1)))
    with pytest.raises(RuntimeError):
        function(**call(key_padding_mask=torch.zeros(N, S + 1, dtype=torch.bool)))
    arguments = call()
    out, _ = function(**arguments)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(out.sum(), arguments["query"], create_graph=True)
    given, wanted = (inspect.signature(f) for f in (function, F.multi_head_attention_forward))
    assert [(p.name, p.default) for p in given.parameters.values()] == [
        (p.name, p.default) for p in wanted.parameters.values()
    ]


def test_functional_dropout():
    arguments = call(dropout_p=0.5)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(rapt.torch.multi_head_attention_forward(**arguments)[1])
    assert torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])
    compare({**arguments, "training": False})
    query = arguments["query"]

    def f(query):
        torch.manual_seed(3)
        return rapt.torch.multi_head_attention_forward(**{**arguments, "query": query})

    assert torch.autograd.gradcheck(f, (query,))


def test_functional_compile_autocast_and_func():
    arguments = call(torch.float32, attn_mask=make(L, S, dtype=torch.float32), extra=True)
    query = arguments.pop("query")

    def f(query, g=rapt.torch.multi_head_attention_forward):
        return g(query, **arguments)[0]

    close(torch.compile(f, backend="aot_eager", fullgraph=True)(query), f(query))
    close(torch.func.grad(lambda q: f(q).sum())(query), torch.autograd.grad(f(query).sum(), query)[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = f(query), f(query, F.multi_head_attention_forward)
        assert ours.dtype is theirs.dtype is torch.bfloat16
        close(ours, theirs)


# ---- the layer ----

LAYERS = [
    {},
    {"batch_first": True},
    {"bias": False, "batch_first": True},
    {"kdim": 6, "vdim": 7},
    {"add_bias_kv": True, "add_zero_attn": True, "batch_first": True},
    {"dtype": torch.float64},
]


def pair(**settings):
    theirs = nn.MultiheadAttention(E, H, **settings)
    with torch.no_grad():
        for p in theirs.parameters():
            p.normal_()
    ours = rapt.torch.MultiheadAttention(E, H, **settings)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def inputs(settings, batched=True):
    dtype = settings.get("dtype", torch.float32)
    sizes = [(L, E), (S, settings.get("kdim", E)), (S, settings.get("vdim", E))]
    lead = (0 if settings.get("batch_first") else 1) if batched else None
    return [make(*(s if lead is None else (*s[:lead], N, *s[lead:])), dtype=dtype) for s in sizes]


@pytest.mark.parametrize("settings", LAYERS)
def test_layer(settings):
    ours, theirs = pair(**settings)
    assert repr(ours) == repr(theirs) and list(ours.state_dict()) == list(theirs.state_dict())
    padding = torch.zeros(N, S, dtype=torch.bool)
    padding[0, 4:] = True
    later = torch.ones(L, S, dtype=torch.bool).triu(2)
    for training, grad in itertools.product([True, False], repeat=2):
        for module in (ours, theirs):
            module.train(training)
        with torch.set_grad_enabled(grad):
            for more in (
                {},
                {"need_weights": False},
                {"average_attn_weights": False, "attn_mask": later},
                {"key_padding_mask": padding, "attn_mask": later, "is_causal": True},
                {"attn_mask": torch.randn(N * H, L, S, dtype=settings.get("dtype"))},
            ):
                x = inputs(settings)
                for a, b in zip(ours(*x, **more), theirs(*x, **more)):
                    assert (a is None) == (b is None)
                    if a is not None:
                        close(a, b)
            x = inputs(settings, batched=False)
            close(ours(*x)[0], theirs(*x)[0])
            close(ours(*x)[1], theirs(*x)[1])
    ours(*inputs(settings))[0].sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


@pytest.mark.parametrize("settings", [{"kdim": 0}, {"vdim": 0}, {"kdim": 0, "vdim": 0}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_layer_without_features(settings, training):
    """Keys or values that are nothing but their biases."""
    ours, theirs = (module.train(training) for module in pair(**settings))
    x = inputs(settings)
    for a, b in zip(ours(*x), theirs(*x)):
        close(a, b)
    with torch.no_grad():
        close(ours(*x)[0], theirs(*x)[0])
    grads = [torch.autograd.grad(m(*x)[0].square().sum(), [*m.parameters()]) for m in (ours, theirs)]
    for a, b in zip(*grads):
        close(a, b)


@pytest.mark.parametrize("settings", [{}, {"batch_first": True}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
@pytest.mark.parametrize("training", [True, False])
def test_layer_empty(settings, training):
    ours, theirs = (module.train(training) for module in pair(**settings))
    for n, length, keys, same in itertools.product([0, N], [0, L], [0, S], [False, True]):
        if 0 not in (n, length, keys):
            continue
        lead = settings.get("batch_first", False)
        q, k = (make(n, size, E, dtype=torch.float32) for size in (length, keys))
        q, k = (t if lead else t.transpose(0, 1) for t in (q, k))
        k = q if same else k
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                (out, shown), (their_out, their_shown) = (m(q, k, k) for m in (ours, theirs))
                close(out, their_out)
                if their_shown is not None:  # PyTorch's fast path forgets them
                    close(shown, their_shown)
        grads = [torch.autograd.grad(m(q, k, k)[0].square().sum(), [q, k, *m.parameters()]) for m in (ours, theirs)]
        for a, b in zip(*grads):
            close(a, b)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_the_hint_is_not_taken_for_the_mask(training, need_weights):
    """It says that a mask is causal, which this one is not."""
    ours, theirs = (module.train(training) for module in pair(batch_first=True))
    x = torch.randn(N, L, E)
    mask = torch.randn(L, L)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            plain = ours(x, x, x, attn_mask=mask, need_weights=need_weights)[0]
            hinted = ours(x, x, x, attn_mask=mask, need_weights=need_weights, is_causal=True)[0]
            assert torch.equal(hinted, plain)
            close(plain, theirs(x, x, x, attn_mask=mask, need_weights=need_weights)[0])


def test_a_layer_that_drops_everything():
    ours, theirs = pair(dropout=1.0)
    x = torch.randn(L, N, E)
    for module in (ours, theirs):
        out, weights = module(x, x, x)
        assert torch.equal(out, module.out_proj.bias.expand(L, N, E)) and not weights.any()
        out.sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        assert torch.equal(a.grad, b.grad)
    close(ours.eval()(x, x, x)[0], theirs.eval()(x, x, x)[0])


def test_layer_signatures_and_refusals():
    for name in ("__init__", "forward"):
        given, wanted = (
            inspect.signature(getattr(c, name)) for c in (rapt.torch.MultiheadAttention, nn.MultiheadAttention)
        )
        more = [p for p in given.parameters.values() if p.name not in wanted.parameters]
        assert all(p.kind is p.KEYWORD_ONLY and p.default is None for p in more)
        assert [(p.name, p.default, p.kind) for p in given.parameters.values() if p not in more] == [
            (p.name, p.default, p.kind) for p in wanted.parameters.values()
        ]
    ours, _ = pair()
    x = inputs({})
    for training in (True, False):
        ours.train(training)
        with pytest.raises(RuntimeError, match="is_causal"), torch.no_grad():
            ours(*x, is_causal=True)
        with pytest.raises((RuntimeError, AssertionError)), torch.no_grad():
            ours(x[0][..., :4], *x[1:])


def test_copies():
    ours, _ = pair()
    ours.eval()
    x = inputs({})
    with torch.no_grad():
        expected = ours(*x)[0]
        for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
            assert type(copied) is rapt.torch.MultiheadAttention and "_rapt_packed" not in copied.__dict__
            assert torch.equal(copied(*x)[0], expected)


@pytest.mark.parametrize("settings", [{}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 7}, {"bias": False}], ids=str)
@pytest.mark.parametrize("same", [False, True])
def test_opcheck(settings, same):
    """Of the operator that stands for a layer's backward; test_torch_attention.py has the other two."""
    operators = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("rapt::")}
    assert operators == {"rapt::attention", "rapt::attention_backward", "rapt::layer_backward"}
    operator = torch.ops.rapt.layer_backward.default
    layer, _ = pair(**settings)
    x = inputs(settings)
    if same and "kdim" not in settings:
        x = [x[0]] * 3
    out, shown = layer(*x)
    node = out.grad_fn
    wanted = {name.replace(".", "_"): p for name, p in layer.named_parameters()}
    node.wanted = [name in wanted for name in functional.INPUTS + functional.WEIGHTS]
    d_out, d_shown = torch.randn_like(out), torch.randn_like(shown)
    functional.running[-1] = node  # as it is while the backward runs
    try:
        for given in ((d_out, None), (d_out, d_shown), (None, d_shown)):
            opcheck(operator, (*given, -1))
            results = dict(zip(functional.INPUTS + functional.WEIGHTS, operator(*given, -1)))
            loss = sum((a * b).sum() for a, b in zip((out, shown), given) if b is not None)
            for name, p in wanted.items():
                expected = torch.autograd.grad(loss, p, retain_graph=True, allow_unused=True)[0]
                close(results[name], torch.zeros_like(p) if expected is None else expected)
            second = operator(*(g if g is None else g.clone().requires_grad_() for g in given), -1)
            with pytest.raises(RuntimeError, match="no second derivative"):
                second[-2].sum().backward()
    finally:
        del functional.running[-1]


def test_layer_compiles():
    ours, theirs = pair(batch_first=True)
    x = torch.randn(N, L, E)
    for training in (True, False):
        ours.train(training), theirs.train(training)
        close(torch.compile(ours, backend="aot_eager", fullgraph=True)(x, x, x)[0], theirs(x, x, x)[0])
    program = torch.export.export(ours, (x, x, x))
    assert any(node.target is torch.ops.rapt.attention.default for node in program.graph.nodes)


def test_a_backward_frees_what_the_forward_kept():
    layer = rapt.torch.MultiheadAttention(E, H)
    x = torch.randn(L, E)
    out = layer(x, x, x)[0]
    seen = weakref.ref(x)
    del x
    loss = out.sum()
    loss.backward(retain_graph=True)
    first = layer.in_proj_weight.grad.clone()
    assert seen() is not None
    loss.backward()
    assert seen() is None and torch.equal(layer.in_proj_weight.grad, 2 * first)
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_hooks_on_saved_tensors_see_them_all():
    layer = rapt.torch.MultiheadAttention(E, H)
    x = torch.randn(L, E)
    expected = torch.autograd.grad(layer(x, x, x)[0].square().sum(), [*layer.parameters()])
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        loss = layer(x, x, x)[0].square().sum()
    x.fill_(float("nan"))
    for a, b in zip(torch.autograd.grad(loss, [*layer.parameters()]), expected):
        close(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_keep_nothing(reentrant):
    layer = rapt.torch.MultiheadAttention(E, H, dropout=0.3)
    x = torch.randn(L, E, requires_grad=True)
    seen = []

    def call(x):
        x = x + 1
        seen.append(weakref.ref(x))
        return layer(x, x, x)[0].square().sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(call(x), x)[0]
    torch.manual_seed(1)
    loss = checkpoint(call, x, use_reentrant=reentrant)
    assert seen[-1]() is None
    loss.backward()
    close(x.grad, expected)


@pytest.mark.parametrize("written_out", [False, True])
def test_gradients_with_their_sign_elsewhere(written_out):
    """PyTorch's negative views: what memory holds is not what they stand for."""
    layer = rapt.torch.MultiheadAttention(E, H)
    x = torch.randn(L, E, requires_grad=True)
    mask = torch.zeros(L, L, dtype=torch.float64 if written_out else torch.float32)
    for result in layer(x, x, x, attn_mask=mask):
        g = torch.randn(result.shape)
        found = [torch.autograd.grad(result, x, d, retain_graph=True)[0] for d in (torch._neg_view(g), -g)]
        assert torch.equal(*found)


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("backward", [False, True])
def test_results_are_freed(need_weights, backward):
    layer = rapt.torch.MultiheadAttention(E, H, batch_first=True)
    x = torch.randn(2, 3, E)
    results = [r for r in layer(x, x, x, need_weights=need_weights) if r is not None]
    alive = [weakref.ref(r) for r in (*results, results[0].grad_fn)]
    if backward:
        sum(r.sum() for r in results).backward()
    del results
    gc.collect()
    assert [r() for r in alive] == [None] * len(alive)


@pytest.mark.parametrize("activation", ["relu", "gelu", nn.ReLU(), F.silu])
@pytest.mark.parametrize("norm_first", [False, True])
def test_converted_encoder_layer(activation, norm_first, monkeypatch):
    layer = nn.TransformerEncoderLayer(
        E, H, 12, dropout=0.0, batch_first=True, activation=activation, norm_first=norm_first
    )
    x = torch.randn(N, L, E)
    expected = layer(x)
    text = repr(layer)
    rapt.torch.convert(layer).eval()
    assert repr(layer) == text
    in_place = []
    for function, replaced in dict(encoder._IN_PLACE).items():
        monkeypatch.setitem(encoder._IN_PLACE, function, lambda t, run=replaced: in_place.append(1) or run(t))
    close(layer(x), expected)
    assert not in_place  # the gradient needs what was there before
    with torch.no_grad():
        close(layer(x), expected)
        assert len(in_place) == isinstance(activation, str)
        seen = []
        for watch in (layer.linear1.register_forward_hook, nn.modules.module.register_module_forward_hook):
            with_hook = watch(lambda module, args, out: seen.append(out) if module is layer.linear1 else None)
            close(layer(x), expected)
            with_hook.remove()
        assert len(in_place) == isinstance(activation, str) and all((t < 0).any() for t in seen) and len(seen) == 2
        close(pickle.loads(pickle.dumps(layer))(x), expected)
        close(copy.deepcopy(layer)(x), expected)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("everywhere", [False, True])
def test_hooks_in_a_converted_encoder_layer(norm_first, everywhere):
    """They see all that they saw before, dropouts that do nothing included."""
    layer = nn.TransformerEncoderLayer(E, H, 12, batch_first=True, norm_first=norm_first)
    x = torch.randn(N, L, E)
    for kind in ("forward", "forward_pre"):
        seen = []

        def see(module, args, out=None, seen=seen):
            seen.append(type(module).__name__)

        if everywhere:
            hooks = [getattr(nn.modules.module, f"register_module_{kind}_hook")(see)]
        else:
            hooks = [getattr(m, f"register_{kind}_hook")(see) for m in layer.modules()]
        try:
            layer.train()(x)  # the long way, in PyTorch
            before = seen.copy()
            seen.clear()
            with torch.no_grad():
                rapt.torch.convert(layer).eval()(x)
            assert seen == before and seen.count("Dropout") == 3
        finally:
            for hook in hooks:
                hook.remove()
            rapt.torch.unconvert(layer)


def test_sdpa_context():
    q = torch.randn(1, 2, 3, 4)
    before = F.scaled_dot_product_attention
    with rapt.torch.sdpa():
        assert F.scaled_dot_product_attention is rapt.torch.scaled_dot_product_attention
        out = F.scaled_dot_product_attention(q, q, q, torch.zeros(3, 3, dtype=torch.bool))
        assert torch.equal(out, torch.zeros_like(q))
        assert F.scaled_dot_product_attention(q.to("meta"), q.to("meta"), q.to("meta")).is_meta
        module = nn.MultiheadAttention(4, 2)
        close(module(q[0], q[0], q[0], need_weights=False)[0], rapt.torch.convert(module)(q[0], q[0], q[0])[0])
    assert F.scaled_dot_product_attention is before


@pytest.mark.parametrize("need_weights", [False, True])
def test_nothing_is_kept(need_weights):
    """A trained layer's result goes with its last reference, without the garbage collector: there are no circles."""
    layer = rapt.torch.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 3, 8, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        for backward in (False, True):
            results = [r for r in layer(x, x, x, need_weights=need_weights) if r is not None]
            ends = [weakref.ref(end) for r in results for end in (r, r.grad_fn)]
            if backward:
                sum(r.sum() for r in results).backward()
            del results
            assert [end() for end in ends] == [None] * len(ends)
    finally:
        gc.enable()
