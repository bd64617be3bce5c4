"""nn.MultiheadAttention with Rapt's kernels, and models with it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from rapt import _core
from rapt._cache import KVCache
from rapt._layer import rotary_fields
from rapt.torch import _kernels as kernels
from rapt.torch._attention import _is_autocast, _is_compiling, in_eager_mode, scaled_dot_product_attention, takes
from rapt.torch._encoder import TransformerEncoderLayer
from rapt.torch._functional import WEIGHTS, forward
from rapt.torch._results import empty_contiguous

Model = TypeVar("Model", bound=nn.Module)


_own, _out = itemgetter(*WEIGHTS[:5]), itemgetter("weight", "bias")


def _of(module: nn.Module, name: str) -> Tensor | None:
    own = module._parameters
    return own[name] if name in own else getattr(module, name, None)


def _parameters(module: nn.MultiheadAttention) -> tuple[Tensor | None, ...]:
    """As WEIGHTS has them."""
    if not _is_compiling():
        # The common case in few steps: the last call left none of this in the CPU's caches, so each of them takes long.
        own = module._parameters
        try:
            extra = (own["bias_k"], own["bias_v"]) if "bias_k" in own else (module.bias_k, module.bias_v)
            return *_own(own), *extra, *_out(module._modules["out_proj"]._parameters)  # type: ignore[union-attr]
        except (KeyError, AttributeError):  # pruned, parametrised or changed otherwise: not all are parameters
            pass
    out = module.out_proj
    return *(_of(module, name) for name in WEIGHTS[:-2]), _of(out, "weight"), _of(out, "bias")


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _key(module: MultiheadAttention, parameters: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    settings = (module.num_heads, module.head_dim, module.batch_first, module.add_zero_attn)
    return settings, *(p if p is None else (p.data_ptr(), _version(p), p.dtype) for p in parameters)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Packed:
    """A layer of the library with a module's weights.

    Addresses and versions tell most changes of the weights for certain. Writing through `.data` leaves both as they
    are, and shows in the fingerprint of all bytes.
    """

    def __init__(self, module: MultiheadAttention, parameters: tuple[Tensor | None, ...]) -> None:
        self.key = _key(module, parameters)
        self.kept = parameters  # memory with these addresses belongs to nobody else meanwhile
        self.fingerprint = _core.fingerprint(*parameters)  # before they are read: a write between the two shows
        named = {n: p for n, p in zip(WEIGHTS, parameters) if p is not None}
        self.layer = _core.Layer(
            embed_dim=module.embed_dim, num_heads=module.num_heads, num_kv_heads=module.num_kv_heads,
            head_dim=module.head_dim, kdim=module.kdim, vdim=module.vdim,
            bias="in_proj_bias" in named or "out_proj_bias" in named, add_bias_kv=module.bias_k is not None,
            add_zero_attn=module.add_zero_attn, batch_first=module.batch_first,
            dtype=_name(module.out_proj.weight.dtype),
        )  # fmt: skip
        with torch.no_grad():
            for name, memory in self.layer.tensors().items():
                target = torch.from_dlpack(memory)
                source = named.get(name.replace("out_proj.", "out_proj_"))
                if source is None:  # one of two biases, of a module that was changed
                    target.zero_()
                else:
                    target.copy_(source.reshape(target.shape))
        self.layer.commit()
        self.layer.train(False)

    def is_current(self, module: MultiheadAttention, parameters: tuple[Tensor | None, ...]) -> bool:
        if self.key != _key(module, parameters):
            return False
        return module._rapt_frozen or self.fingerprint == _core.fingerprint(*parameters)


def _takes_constant_mask(mask: Tensor) -> bool:
    if mask.dtype is torch.bool:
        return type(mask) is Tensor and mask.is_cpu and mask.layout is torch.strided and not mask.is_nested
    return takes(mask) and not (mask.requires_grad and torch.is_grad_enabled())


def _wants_gradient(tensors: tuple[Tensor | None, ...]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _outside_graphs(method: Any) -> Any:
    """The method, for which compiled code leaves its graph. (As a decorator it would import the compiler: seconds.)"""
    return torch.compiler.disable(method) if _is_compiling() else method


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention: the same arguments, parameters, state dict and behaviour.

    While training, or where a gradient is wanted, each call takes the parameters as they are. In eval mode without
    gradients the weights are packed once, and again when they changed, whoever wrote to them; `freeze_weights` spares
    the look at all of them that this takes. A query that sees no key attends to nothing: zeros and not NaN.

    Beyond PyTorch's: num_kv_heads below num_heads (heads of queries in groups share keys and values) and a head_dim of
    its own; in_proj_weight is [(num_heads + 2 * num_kv_heads) * head_dim, embed_dim] then, and biases and separate
    weights likewise, as in `rapt.MultiheadAttention`. Decoding with a cache: see `new_cache` and `forward`.
    """

    _num_kv_heads: int | None = None  # None: the layer is one that PyTorch has, too
    _rapt_frozen = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
    ) -> None:
        shared = num_heads if num_kv_heads is None else num_kv_heads
        if shared == num_heads and (head_dim is None or head_dim * num_heads == embed_dim):
            super().__init__(
                embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
            )  # fmt: skip
            return
        if embed_dim <= 0 or num_heads <= 0 or shared <= 0 or num_heads % shared:
            raise ValueError(
                f"rapt: embed_dim is {embed_dim}, num_heads {num_heads}, num_kv_heads {shared}: expected numbers above "
                "0, and num_heads to be a multiple of num_kv_heads"
            )
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"rapt: num_heads {num_heads} does not divide embed_dim {embed_dim}: pass head_dim")
        if head_dim is not None and head_dim <= 0:
            raise ValueError(f"rapt: head_dim is {head_dim}, expected a number above 0")
        # All but the sizes is PyTorch's: its attributes, with parameters that take no memory and are replaced.
        super().__init__(embed_dim, 1, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, "meta")
        self.num_heads = num_heads
        self._num_kv_heads = shared
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        rows, shared_rows = num_heads * self.head_dim, shared * self.head_dim
        sizes = {
            "in_proj_weight": (rows + 2 * shared_rows, embed_dim), "q_proj_weight": (rows, embed_dim),
            "k_proj_weight": (shared_rows, self.kdim), "v_proj_weight": (shared_rows, self.vdim),
            "in_proj_bias": (rows + 2 * shared_rows,), "bias_k": (1, 1, shared_rows), "bias_v": (1, 1, shared_rows),
        }  # fmt: skip
        for name, size in sizes.items():
            if getattr(self, name) is not None:
                setattr(self, name, nn.Parameter(torch.empty(size, device=device, dtype=dtype)))
        self.out_proj = NonDynamicallyQuantizableLinear(rows, embed_dim, bias=bias, device=device, dtype=dtype)
        # PyTorch's encoder layers have short cuts for an in_proj_weight of 3 * embed_dim rows; this closes them.
        self._qkv_same_embed_dim = False
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        before = self._qkv_same_embed_dim
        self._qkv_same_embed_dim = self.in_proj_weight is not None
        super()._reset_parameters()
        self._qkv_same_embed_dim = before

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.num_heads if self._num_kv_heads is None else self._num_kv_heads

    def extra_repr(self) -> str:
        """What PyTorch's layer does not have."""
        shown = [f"num_kv_heads={self.num_kv_heads}"] if self.num_kv_heads != self.num_heads else []
        if self.head_dim * self.num_heads != self.embed_dim:
            shown.append(f"head_dim={self.head_dim}")
        return ", ".join(shown)

    # ---- packed weights ----

    def repack(self) -> None:
        """Forgets packed weights; the next call packs anew."""
        self.__dict__.pop("_rapt_packed", None)

    def freeze_weights(self, frozen: bool = True) -> MultiheadAttention:
        """Promises that nobody writes to the parameters through `.data`, NumPy's views and the like.

        Calls with packed weights then compare addresses and versions only, which shows what optimisers, `copy_` and
        `load_state_dict` do, and do not read all weights for their fingerprint. That pays when there are few tokens in
        a call, in decoding above all. After writing nonetheless, `repack`.
        """
        self._rapt_frozen = frozen
        return self

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        state.pop("_rapt_packed", None)
        return state

    def train(self, mode: bool = True) -> MultiheadAttention:
        """As in PyTorch."""
        self.repack()
        return super().train(mode)

    def _packed(self, parameters: tuple[Tensor | None, ...]) -> _core.Layer:
        packed = self.__dict__.get("_rapt_packed")
        if packed is None or not packed.is_current(self, parameters):
            packed = self.__dict__["_rapt_packed"] = _Packed(self, parameters)
        return packed.layer

    def _takes_packed(self, inputs: tuple[Tensor, ...], parameters: tuple[Tensor | None, ...]) -> bool:
        query = inputs[0]
        if self.training or _is_autocast("cpu") or not in_eager_mode() or not (self.kdim and self.vdim):
            return False
        if _wants_gradient((*inputs, *parameters)):
            return False
        if not all(t is None or (takes(t) and t.dtype is query.dtype) for t in (*inputs, *parameters)):
            return False
        return query.ndim in (2, 3) and query.shape[-1] == self.embed_dim  # in this order: nested tensors have no shape

    def _forward_packed(
        self, inputs: Any, parameters: Any, options: dict[str, Any], kind: int, keys: int
    ) -> tuple[Tensor, Tensor | None]:
        """keys: how many are seen, without those that the layer adds."""
        query, key, value = inputs
        layer = self._packed(parameters)
        out = empty_contiguous(query)
        shown = None
        if kind:
            first = self.batch_first and query.ndim == 3
            n = (query.shape[0 if first else 1],) if query.ndim == 3 else ()
            heads = (self.num_heads,) if kind == kernels.HEAD_WEIGHTS else ()
            keys += (self.bias_k is not None) + self.add_zero_attn
            shown = options["weights"] = query.new_empty((*n, *heads, query.shape[1 if first else 0], keys))
            options["per_head_weights"] = kind == kernels.HEAD_WEIGHTS
        try:
            layer.forward(query, key, value, out, **options)
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"rapt: {error}") from None
        return out, shown

    # ---- decoding ----

    def new_cache(
        self, batch: int = 1, capacity: int = 2048, dtype: torch.dtype | None = None, window: int | None = None
    ) -> KVCache:
        """A cache for `forward`: room for `capacity` positions of each of `batch` sequences.

        dtype is what is stored, the weights' if not given. With a window, a query sees that many positions, its own
        included, and older ones make room. `freeze_weights` makes decoding about twice as fast.
        """
        stored = _name(self.out_proj.weight.dtype if dtype is None else dtype)
        return KVCache(
            None, batch, capacity, dtype=stored, window=window, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim
        )  # fmt: skip

    def _check_decoding(
        self, cache: Any, tensors: tuple[Tensor | None, ...], parameters: tuple[Tensor | None, ...], mask: Any = None
    ) -> None:
        if not isinstance(cache, KVCache):
            raise TypeError(f"rapt: cache is {type(cache)}, expected a KVCache, as new_cache() makes it")
        if _wants_gradient((*tensors, *parameters, mask)):
            raise RuntimeError("rapt: a cache has no gradient: decode within torch.no_grad() or inference_mode()")
        if self.training and self.dropout > 0:
            raise RuntimeError("rapt: a cache does without dropout: call eval() before decoding")
        if _is_autocast("cpu") or not in_eager_mode():
            raise NotImplementedError("rapt: a cache needs eager mode without autocast")
        dtype = self.out_proj.weight.dtype
        for t in (*tensors, *parameters):
            if t is not None and not (takes(t) and t.dtype is dtype):
                raise NotImplementedError(f"rapt: a cache needs dense tensors on the CPU, all of the weights' {dtype}")

    def append(self, key: Tensor, value: Tensor, cache: KVCache, lengths: Any = None) -> None:
        """Projects an encoder's keys and values into a cache, for forwards with key and value None."""
        _outside_graphs(self._append)(key, value, cache, lengths)

    def _append(self, key: Tensor, value: Tensor, cache: KVCache, lengths: Any) -> None:
        parameters = _parameters(self)
        self._check_decoding(cache, (key, value), parameters)
        try:
            self._packed(parameters).append(key, value, cache, lengths)
        except (ValueError, TypeError) as error:
            raise RuntimeError(f"rapt: {error}") from None

    def _decode(
        self, inputs: tuple[Tensor | None, ...], cache: KVCache, options: dict[str, Any], kind: int
    ) -> tuple[Tensor, Tensor | None]:
        query, key, _ = inputs
        if query is None or query.dim() not in (2, 3):
            raise RuntimeError("rapt: query is expected to have two or three dimensions")
        parameters = _parameters(self)
        self._check_decoding(cache, inputs, parameters, options["attn_mask"])
        keys = 0
        if kind:
            added = options["append_lengths"]
            length = query.shape[1 if self.batch_first and query.dim() == 3 else 0]
            keys = cache.longest(0 if key is None else length if added is None else added)
        return self._forward_packed(inputs, parameters, {"cache": cache, **options}, kind, keys)

    # ---- computing ----

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        append_lengths: Any = None,
        rotary: Mapping[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As in PyTorch. is_causal is a hint about attn_mask, which is used.

        cache: appends the keys and values of this call, and attends to all; with key and value None it appends nothing.
            Without gradients only. Queries stand where their tokens were appended, so that is_causal needs no mask: the
            same bits token by token as all at once. A mask is [.., L, S] with S the longest sequence after the call.
        append_lengths: with a cache, how many of the L tokens of each sequence are real.
        rotary: turns queries and keys by their positions, as in `rapt.MultiheadAttention`; in eager mode.
        """
        kind = kernels.NO_WEIGHTS
        if need_weights:
            kind = kernels.MEAN_WEIGHTS if average_attn_weights else kernels.HEAD_WEIGHTS
        turns = None if rotary is None else rotary_fields(rotary)
        if cache is not None:
            options = {
                "attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "append_lengths": append_lengths,
                "causal": is_causal and attn_mask is None, "rotary": turns,
            }  # fmt: skip
            return _outside_graphs(self._decode)((query, key, value), cache, options, kind)
        if append_lengths is not None or key is None or value is None:
            raise RuntimeError("rapt: append_lengths, and None for key and value, need a cache")
        if is_causal and attn_mask is None:
            raise RuntimeError("rapt: is_causal is a hint about attn_mask, which is needed with it, as in PyTorch")
        inputs = (query, key, value)
        parameters = _parameters(self)
        first = self.batch_first and query.dim() == 3
        if (
            not _is_compiling()
            and self._takes_packed(inputs, parameters)
            and (attn_mask is None or (attn_mask.dim() in (2, 3) and _takes_constant_mask(attn_mask)))
            and (key_padding_mask is None or _takes_constant_mask(key_padding_mask))
        ):
            options = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask, "rotary": turns}
            return self._forward_packed(inputs, parameters, options, kind, key.shape[1 if first else 0])
        tensors = (query, key, value, attn_mask, key_padding_mask, None, None, *parameters)
        dropout = self.dropout if self.training else 0.0
        result = forward(
            tensors, self.num_heads, self.embed_dim, self.add_zero_attn, dropout, first, kind, is_causal,
            self._num_kv_heads, turns,
        )  # fmt: skip
        if result is not None:
            return result
        if self._num_kv_heads is not None or turns is not None:
            raise NotImplementedError(
                "rapt: these tensors go to PyTorch's own layer, which has no num_kv_heads, head_dim or rotary"
            )
        return super().forward(
            query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
        )  # fmt: skip


# ---- models ----


def _shortcut_of(module: nn.Module) -> tuple[str, Any] | None:
    """The attribute that opens the short way around attention layers of Rapt's, and what closes it."""
    if isinstance(module, nn.TransformerEncoderLayer) and isinstance(module.self_attn, MultiheadAttention):
        return "activation_relu_or_gelu", 0
    if isinstance(module, nn.TransformerEncoder) and any(isinstance(m, MultiheadAttention) for m in module.modules()):
        return "use_nested_tensor", False
    return None


def convert(model: Model, back: bool = False) -> Model:
    """Makes every nn.MultiheadAttention in a model (or the model itself) one of Rapt's, in place; `back` undoes it.

    Parameters, hooks and identities stay. nn.TransformerEncoderLayer and nn.TransformerEncoder, which have a shorter
    way around their attention layer in eval mode, take the long one while converted. Subclasses of
    nn.MultiheadAttention have a forward of their own, perhaps, and stay what they are. So do, on the way back, layers
    with num_kv_heads or head_dim, which PyTorch does not have.
    """
    modules = list(model.modules())
    if back:
        for module in modules:
            if type(module) is MultiheadAttention and module._num_kv_heads is None:
                module.repack()
                module.__dict__.pop("_rapt_frozen", None)
                module.__class__ = nn.MultiheadAttention  # type: ignore[assignment]
        for module in modules:
            if "_rapt_shortcut" in module.__dict__ and _shortcut_of(module) is None:
                name, value = module.__dict__.pop("_rapt_shortcut")
                setattr(module, name, value)
                if type(module) is TransformerEncoderLayer:
                    module.__class__ = nn.TransformerEncoderLayer  # type: ignore[assignment]
        return model
    for module in modules:
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
    for module in modules:
        found = _shortcut_of(module)
        if found is not None and "_rapt_shortcut" not in module.__dict__:
            name, closed = found
            module.__dict__["_rapt_shortcut"] = name, getattr(module, name, closed)
            setattr(module, name, closed)
            if type(module) is nn.TransformerEncoderLayer:
                module.__class__ = TransformerEncoderLayer
    return model


def unconvert(model: Model) -> Model:
    """convert(model, back=True)."""
    return convert(model, back=True)


@contextmanager
def sdpa() -> Iterator[None]:
    """Within it, F.scaled_dot_product_attention is Rapt's, for all code that calls it by that name."""
    before = F.scaled_dot_product_attention
    F.scaled_dot_product_attention = scaled_dot_product_attention
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
