"""The attention layer, its files and its gradients."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rapt import _core
from rapt._arrays import check_torch, empty_like, finish, numpy_dtype, with_shapes
from rapt._cache import KVCache

_ROTARY_SCALINGS = ("plain", "linear", "ntk", "llama3", "yarn")


class State:
    """What `MultiheadAttention.forward(..., state=)` keeps for `backward`; its next forward writes over it."""

    def __init__(self) -> None:
        self.core = _core.State()
        self.inputs: dict[str, Any] = {}


class MultiheadAttention:
    """PyTorch's nn.MultiheadAttention, with its arguments, numbers and names of parameters.

    Beyond it: num_kv_heads below num_heads (grouped heads), a head_dim of its own, layers that are always causal, a
    scale, and a seed that gives the same first weights everywhere. dtype is float32, float64, bfloat16 or float16;
    device is the CPU, by name or as PyTorch's.
    """

    core: _core.Layer

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
        dtype: Any = "float32",
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        seed: int = 0,
    ) -> None:
        if device is not None and str(device) not in ("cpu", "cpu:0"):
            raise ValueError(f"device is {str(device)!r}, expected 'cpu': this build has no other backend")
        self._set_core(
            _core.Layer(
                embed_dim=embed_dim,
                num_heads=num_heads,
                dropout=dropout,
                bias=bias,
                add_bias_kv=add_bias_kv,
                add_zero_attn=add_zero_attn,
                kdim=kdim,
                vdim=vdim,
                batch_first=batch_first,
                dtype=dtype,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                causal=causal,
                scale=scale,
                seed=seed,
            )
        )

    def _set_core(self, core: _core.Layer) -> None:
        self.core = core
        settings = core.settings()
        self.embed_dim: int = settings["embed_dim"]
        self.num_heads: int = settings["num_heads"]
        self.num_kv_heads: int = settings["num_kv_heads"]
        self.head_dim: int = settings["head_dim"]
        self.kdim: int = settings["kdim"]
        self.vdim: int = settings["vdim"]
        self.batch_first: bool = settings["batch_first"]
        self.dropout: float = settings["dropout"]
        self.dtype: str = settings["dtype"]
        self._extra_keys = settings["add_bias_kv"] + settings["add_zero_attn"]

    # ---- computing ----

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
        append_lengths: Any = None,
        causal_offset: int | str | Sequence[int] | Any = None,
        window: tuple[int | None, int | None] | None = None,
        key_lengths: Any = None,
        key_start: Any = None,
        scale: float | None = None,
        rotary: Mapping[str, Any] | None = None,
        state: State | None = None,
    ) -> tuple[Any, Any]:
        """The output and the attention weights (None unless need_weights), as PyTorch's forward.

        query is [L,N,E], with batch_first [N,L,E], or [L,E]; key and value alike. Masks block where they are true, or
        are added. is_causal needs no mask, and L == S unless causal_offset says how to align (0: at the first key).

        cache: appends the keys and values of this call, and attends to all; with key and value None it appends nothing.
        append_lengths: with a cache, how many of the L tokens of each sequence are real.
        causal_offset, window, key_lengths, key_start, scale: as in `rapt.scaled_dot_product_attention`.
        rotary: turns queries and keys by their positions: a dict with base, interleaved, dims, positions and so on, the
            fields of rapt_rotary; scaling is "plain", "linear", "ntk", "llama3" or "yarn".
        state: keeps what `backward` needs. The inputs must stay as they are until then.
        """
        check_torch(query, key, value, attn_mask, key_padding_mask)
        try:
            shaped = hasattr(query, "shape") and hasattr(key, "shape") and hasattr(value, "shape")
        except RuntimeError as error:  # PyTorch's of its nested tensors
            raise TypeError(f"a tensor has no shape: pass one that is padded, with key_lengths ({error})") from None
        if not shaped:
            query, key, value = with_shapes(query=query, key=key, value=value)
        options: dict[str, Any] = {
            "key_padding_mask": key_padding_mask,
            "attn_mask": attn_mask,
            "causal": is_causal,
            "cache": cache,
            "append_lengths": append_lengths,
            "key_lengths": key_lengths,
            "key_start": key_start,
            "scale": scale,
            "state": None if state is None else state.core,
        }
        if window is not None:
            options["left"], options["right"] = window
        if isinstance(causal_offset, str):
            if causal_offset != "bottom_right":
                raise ValueError(f'causal_offset is {causal_offset!r}, expected integers or "bottom_right"')
            options["align_bottom_right"] = True
        elif causal_offset is not None and np.ndim(causal_offset):
            options["offsets"] = causal_offset
        elif causal_offset:
            options["offset"] = causal_offset
        elif (
            causal_offset is not None and is_causal
        ):  # at the first key: not the default, so that nobody gets it unasked
            options["right"] = min(0, options.get("right") or 0)
        if rotary is not None:
            options["rotary"] = rotary_fields(rotary)

        shape = tuple(query.shape)
        out, weights = empty_like(query, shape, None), None
        if need_weights:
            weights = empty_like(
                query, self._weights_shape(shape, key, cache, append_lengths, average_attn_weights), None
            )
            options["weights"] = weights
            options["per_head_weights"] = not average_attn_weights
        self.core.forward(query, key, value, out, **options)
        if state is not None:
            state.inputs = {"query": query, "key": key, "value": value}
        return finish(query, out), finish(query, weights)

    __call__ = forward

    def _weights_shape(
        self, shape: tuple[int, ...], key: Any, cache: KVCache | None, append_lengths: Any, average: bool
    ) -> tuple[int, ...]:
        """[N,L,S'], [N,H,L,S'], or the same without N; sizes that fit nothing are left for the library to refuse."""
        batched = len(shape) == 3
        length_at = 1 if batched and self.batch_first else 0
        batch = (shape[1 - length_at],) if batched else ()
        if cache is None:
            keys = key.shape[length_at] if len(key.shape) == len(shape) else 0
        elif key is None:
            keys = cache.longest()
        else:
            keys = cache.longest(shape[length_at] if append_lengths is None else append_lengths)
        heads = () if average else (self.num_heads,)
        return (*batch, *heads, shape[length_at] if len(shape) > 1 else 0, keys + self._extra_keys)

    def append(self, key: Any, value: Any, cache: KVCache, lengths: Any = None) -> None:
        """Projects an encoder's keys and values into a cache, for forwards with key and value None."""
        self.core.append(key, value, cache, lengths)

    def backward(self, state: State, d_out: Any, d_weights: Any = None) -> dict[str, Any]:
        """Gradients of the forward that filled the state, from those of its results.

        By name: query, key and value, and every parameter as `state_dict` names it. An array that was given for several
        of query, key and value has one gradient, their sum, under the first of the names.
        """
        found: dict[str, Any] = {}
        wanted: dict[str, Any] = {}
        for name, array in state.inputs.items():
            earlier = next((n for n, other in state.inputs.items() if other is array), name)
            if array is not None and earlier == name:
                found[name] = empty_like(array, tuple(array.shape), None)
            wanted[name] = found.get(earlier)
        for name, parameter in self.state_dict().items():
            found[name] = np.empty_like(parameter)
            wanted[name.replace(".", "_")] = found[name]
        self.core.backward(state.core, d_out, d_weights, wanted)
        return {name: finish(state.inputs.get(name, array), array) for name, array in found.items()}

    # ---- parameters ----

    def state_dict(self) -> dict[str, np.ndarray]:
        """The parameters by PyTorch's names, as views: after writing to one, `commit`."""
        kind = numpy_dtype(self.dtype)
        return {name: np.asarray(view).view(kind) for name, view in self.core.tensors().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copies arrays of the same names and shapes and any floating-point type into the parameters, and commits."""
        own = self.core.tensors()
        wrong = sorted(set(own) ^ set(state_dict))
        if wrong:
            raise ValueError(
                "state_dict has "
                + ", ".join(n if n in state_dict else f"no {n}" for n in wrong)
                + f"; expected {list(own)}"
            )
        arrays = dict(zip(own, with_shapes(**{name: state_dict[name] for name in own})))
        for name, view in own.items():
            if tuple(arrays[name].shape) != view.shape:
                raise ValueError(f"{name} has shape {tuple(arrays[name].shape)}, expected {view.shape}")
        for name, view in own.items():
            array = arrays[name]
            _core.copy(array.detach() if hasattr(array, "detach") else array, view)
        self.commit()

    def commit(self) -> None:
        """Takes over what was written to the parameters; no forward may run meanwhile."""
        self.core.commit()

    @property
    def num_parameters(self) -> int:
        """Scalars in all."""
        return sum(int(np.prod(view.shape)) for view in self.core.tensors().values())

    @property
    def training(self) -> bool:
        """Whether dropout is drawn; a new layer trains."""
        return self.core.settings()["training"]

    def train(self, mode: bool = True) -> MultiheadAttention:
        """Dropout is drawn, or not."""
        self.core.train(mode)
        return self

    def eval(self) -> MultiheadAttention:
        """Dropout is not drawn."""
        return self.train(False)

    # ---- files ----

    def save(
        self, path: str | os.PathLike[str], *, scheme: str = "pytorch", prefix: str | None = None, dtype: Any = None
    ) -> None:
        """Writes a safetensors file under a scheme's names, which `rapt.load` reads without further settings."""
        self.core.save(path, scheme=_scheme(scheme), prefix=prefix, dtype=dtype)

    @classmethod
    def _of(cls, core: _core.Layer) -> MultiheadAttention:
        layer = cls.__new__(cls)
        layer._set_core(core)
        return layer

    def __getstate__(self) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layer.safetensors")
            self.save(path)
            with open(path, "rb") as file:
                return {"safetensors": file.read(), "training": self.training}

    def __setstate__(self, state: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "layer.safetensors")
            with open(path, "wb") as file:
                file.write(state["safetensors"])
            self._set_core(_core.load(path))
        self.train(state["training"])

    def __repr__(self) -> str:
        return repr(self.core)


def load(
    path: str | os.PathLike[str],
    prefix: str | None = None,
    num_heads: int | None = None,
    *,
    scheme: str = "auto",
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    dtype: Any = None,
    batch_first: bool = False,
    causal: bool = False,
    add_zero_attn: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    ignore_extra: bool = False,
) -> MultiheadAttention:
    """The attention layer below a prefix of a safetensors file or of an index (model.safetensors.index.json).

    Without a prefix, the only one there. num_heads or head_dim is needed unless Rapt wrote the file. `rapt.layers`
    lists what a file has. A layer with tensors that Rapt does not compute with is refused unless ignore_extra.
    """
    os.stat(path)  # for a FileNotFoundError
    core = _core.load(
        path,
        prefix=prefix,
        num_heads=num_heads,
        scheme=_scheme(scheme),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        batch_first=batch_first,
        causal=causal,
        add_zero_attn=add_zero_attn,
        scale=scale,
        dropout=dropout,
        ignore_extra=ignore_extra,
    )
    return MultiheadAttention._of(core)


def save(
    layer: MultiheadAttention,
    path: str | os.PathLike[str],
    *,
    scheme: str = "pytorch",
    prefix: str | None = None,
    dtype: Any = None,
) -> None:
    """layer.save: the counterpart of `load`, which reads the file without further settings."""
    if not isinstance(layer, MultiheadAttention):
        raise TypeError(f"layer is {type(layer)}, expected a rapt.MultiheadAttention")
    layer.save(path, scheme=scheme, prefix=prefix, dtype=dtype)


def layers(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The attention layers in a checkpoint: prefix, scheme, sizes (0: the file does not tell)."""
    os.stat(path)
    return _core.layers(path)


def _scheme(name: str) -> int:
    if name not in _core.schemes:
        raise ValueError(f"scheme is {name!r}, expected one of {', '.join(_core.schemes)}")
    return _core.schemes.index(name)


def rotary_fields(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the binding takes them, with the scaling's number for its name."""
    scaling = settings.get("scaling", "plain")
    if scaling not in _ROTARY_SCALINGS:
        raise ValueError(f"rotary scaling is {scaling!r}, expected one of {', '.join(_ROTARY_SCALINGS)}")
    return {**settings, "scaling": _ROTARY_SCALINGS.index(scaling)}
