"""`CacheSpec`: the layers, heads, windows, ropes and states of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import numpy as np

from jaxkv.core.validate import check_count
from jaxkv.ops.storage.latent import ValueSlice
from jaxkv.rope import NOT_GIVEN, NotGiven, Rope
from jaxkv.window import Window

Ropes = Rope | NotGiven | tuple[Rope | NotGiven | None, ...] | None
"""One rope for all layers, or a tuple with one rope for each layer."""

ValueDim = int | slice | ValueSlice
"""Size of a value, or the slice of the key that is used as the value."""

State = jax.ShapeDtypeStruct | tuple[Sequence[int], jax.typing.DTypeLike]
"""Shape and dtype of a state or of a user field."""

X = TypeVar("X")


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheSpec:
    """Cache layout of a model. Frozen, hashable, without arrays.

    The methods `attention`, `recurrent`, `cross_attention` and `hybrid` make specs. Sizes or ropes
    that differ between layers are tuples with one entry for each layer.

    kind: "attention", "recurrent", "cross_attention" or "hybrid".
    layers: L, the number of layers; for a hybrid spec, one more than the highest layer number.
    kv_heads, head_dim: K and D, the number of key/value heads and the size of a key.
    value_dim: Dv, the size of a value; a `ValueSlice` if each value is a slice of its key.
    window: `Window` of all layers; None for no limit.
    rope: rotation of the keys that models pass to `attend`; a `NotGiven` if no rope was given.
    states: name, shape and dtype of each state, ordered by name.
    shard_dims: a tuple (name, dimension, n) for each state that a mesh may split; see `recurrent`.
    fields: name, shape for one cell, and dtype of each user field, ordered by name.
    parts: pairs of a spec and layer numbers, one pair for each part of a hybrid spec.

    llama.cpp: `llama_hparams`.
    """

    kind: Literal["attention", "recurrent", "cross_attention", "hybrid"]
    layers: int
    kv_heads: int | tuple[int, ...] | None = None
    head_dim: int | tuple[int, ...] | None = None
    value_dim: int | ValueSlice | tuple[int | ValueSlice, ...] | None = None
    window: Window | None = None
    rope: Ropes = NOT_GIVEN
    states: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    shard_dims: tuple[tuple[str, int, int], ...] = ()
    fields: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    parts: tuple[tuple[CacheSpec, tuple[int, ...]], ...] = ()

    @staticmethod
    def attention(
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        value_dim: ValueDim | Sequence[ValueDim] | None = None,
        window: Window | None = None,
        rope: Ropes = NOT_GIVEN,
        fields: Mapping[str, State] | None = None,
    ) -> CacheSpec:
        """Return the spec of self-attention layers.

        Args:
          layers: L, the number of layers.
          kv_heads: K, the number of key/value heads; one number, or one for each layer.
          head_dim: D, the size of a key; one number, or one for each layer.
          value_dim: Dv, the size of a value: one number, or one for each layer; default D. A slice
            means that values are slices of the keys, as in latent attention (MLA). Values that are
            slices are not stored, and models pass only keys. The slice must begin after the numbers
            that the rope rotates, and must leave out at least one number of the key.
          window: `Window` of all layers; None for no limit.
          rope: rotation of the keys that models pass to `attend`: one rope, or a tuple with one
            rope for each layer. None means that keys are not rotated. If no rope is given,
            `seq_add`, `seq_div`, `generation.context_shift` and `generation.self_extend` raise.
          fields: dict from the name of each user field to a `jax.ShapeDtypeStruct`, or to a tuple
            `(shape, dtype)`. The shape is that of one cell; see `Cache.with_fields`.

        Raises:
          ValueError: If a count is below 1 or above 2**31 - 1.
          ValueError: If a list does not have L entries, or a rope or slice is invalid for the keys.

        Examples:
          >>> CacheSpec.attention(layers=2, kv_heads=3, head_dim=64, window=Window.sliding(128))
          CacheSpec.attention(layers=2, kv_heads=3, head_dim=64, window=Window.sliding(128))
          >>> CacheSpec.attention(layers=2, kv_heads=1, head_dim=12, value_dim=slice(4, None))
          CacheSpec.attention(layers=2, kv_heads=1, head_dim=12, value_dim=slice(4, 12))

        llama.cpp: `n_layer`, `n_head_kv`, `n_embd_head_k`, `n_embd_head_v`, `n_swa`.
        """
        layers = check_count(layers, "layers")
        heads = _check_layer_sizes(kv_heads, layers, "kv_heads")
        keys = _check_layer_sizes(head_dim, layers, "head_dim")
        values = keys if value_dim is None else _normalise_value_dims(value_dim, keys)
        if window is not None and not isinstance(window, Window):
            raise TypeError(
                f"expected a window or None, got {window!r}; make one, as jaxkv.Window.sliding(128)"
            )
        ropes = rope if isinstance(rope, tuple) else (rope,) * layers
        if len(ropes) != layers:
            raise ValueError(
                f"expected one rope for all layers or {layers}, one each, got {len(ropes)}; leave "
                f"None for a layer whose keys do not turn"
            )
        for layer_rope, key, value in zip(ropes, keys, values, strict=True):
            _check_rope(layer_rope, key, value)
        return CacheSpec(
            kind="attention",
            layers=layers,
            kv_heads=_collapse_if_equal(heads),
            head_dim=_collapse_if_equal(keys),
            value_dim=_collapse_if_equal(values),
            window=window,
            rope=_collapse_if_equal(ropes),
            fields=_check_shapes(fields or {}, "field"),
        )

    @staticmethod
    def recurrent(
        layers: int,
        states: Mapping[str, State],
        shard_dims: Mapping[str, tuple[int, int]] | None = None,
    ) -> CacheSpec:
        """Return the spec of recurrent layers.

        A batch always fits, since the cache has cells for E + 1 states of each sequence. E is the
        argument `max_rollback` of `make_cache`. `seq_pos_min` returns the position of the
        sequence's oldest stored state. For edits of states, see `seq_rm`, `seq_cp`, `seq_add` and
        `seq_div`. To keep a state while steps donate buffers, copy the sequence to an unused
        sequence with `seq_cp`.

        Args:
          layers: L, the number of layers.
          states: dict from the name of each state to a `jax.ShapeDtypeStruct`, or to a tuple
            `(shape, dtype)`. The shape is that of one sequence in one layer.
          shard_dims: dict from names of states to tuples (dimension, n), for states that a mesh may
            split. The dimension consists of n equal blocks, for example of n heads.

        Raises:
          ValueError: If there are no states, or a count is out of range.
          ValueError: If `shard_dims` contains an unknown state, a dimension that the state does not
            have, or a number n that does not divide the size of the dimension.

        Examples:
          The last two tokens of the sequence can be removed:

          >>> spec = CacheSpec.recurrent(layers=1, states={"x": ((2,), jnp.float32)})
          >>> cache = make_cache(spec, max_rollback=2)
          >>> cache = prefill(forward, params, cache, [8, 4, 2, 1]).cache
          >>> [seq_rm(cache, 0, p0).ok.item() for p0 in (0, 1, 2, 3, 4)]
          [True, False, True, True, True]

        llama.cpp: `llama_memory_recurrent`, `n_embd_r`, `n_embd_s`.
        """
        layers = check_count(layers, "layers")
        arrays = _check_shapes(states, "state")
        if not arrays:
            raise ValueError("expected at least one state, got none; name those of a layer")
        shapes = {name: shape for name, shape, _ in arrays}
        return CacheSpec(
            kind="recurrent",
            layers=layers,
            states=arrays,
            shard_dims=_check_shard_dims(shapes, shard_dims or {}),
        )

    @staticmethod
    def cross_attention(
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        value_dim: int | Sequence[int] | None = None,
    ) -> CacheSpec:
        """Return the spec of cross-attention layers, for a part of a hybrid cache.

        The function `encode` writes the keys and values of an encoder source once. Each token of a
        sequence then attends to the whole source of the sequence, regardless of positions. Without
        a source, the output is zero.

        For edits of encoder sources, see `seq_rm` and `seq_cp`. Shifts, `seq_pos_min` and
        `seq_pos_max` ignore sources.

        Args:
          layers: L, the number of cross-attention layers.
          kv_heads: K, the number of key/value heads; one number, or one for each layer.
          head_dim: D, the size of a key; one number, or one for each layer.
          value_dim: Dv, the size of a value; one number, or one for each layer; default D.

        Raises:
          ValueError: If a count is out of range, or a list of sizes does not have L entries.

        Examples:
          A decoder layer with self-attention as layer 0 and cross-attention as layer 1:

          >>> sizes = dict(layers=1, kv_heads=1, head_dim=2)
          >>> text, source = CacheSpec.attention(**sizes), CacheSpec.cross_attention(**sizes)
          >>> spec = CacheSpec.hybrid((text, [0]), (source, [1]))
          >>> cache = make_cache(spec, cells=(8, 6))
          >>> cache = encode(encoder, params, cache, make_batch([7, 8, 9])).cache
          >>> [part.num_used_cells().item() for part in cache.parts]
          [0, 3]

        llama.cpp: `llama_cross`, which stores the outputs of one encoder pass and no keys.
        """
        layers = check_count(layers, "layers")
        keys = _check_layer_sizes(head_dim, layers, "head_dim")
        return CacheSpec(
            kind="cross_attention",
            layers=layers,
            kv_heads=_collapse_if_equal(_check_layer_sizes(kv_heads, layers, "kv_heads")),
            head_dim=_collapse_if_equal(keys),
            value_dim=_collapse_if_equal(
                keys if value_dim is None else _check_layer_sizes(value_dim, layers, "value_dim")
            ),
            rope=None,  # positions of a source never change
        )

    @staticmethod
    def hybrid(*parts: tuple[CacheSpec, Sequence[int]]) -> CacheSpec:
        """Return the spec of a cache of several parts, each for some layers of a model.

        Args:
          parts: pairs of a spec and a list of layer numbers of the model, one number for each layer
            of the spec. A model layer with both attention and recurrence is in two parts.

        Raises:
          ValueError: If there are no parts, or the same layer number is twice in one part.
          ValueError: If a part does not have one number for each layer of its spec.
          ValueError: If two parts with keys, or two parts with states, contain the same layer.
          ValueError: If there are several `cross_attention` parts, if all parts are
            `cross_attention`, or if a hybrid part contains a `cross_attention` part.

        Examples:
          Layers 0, 1, 3 and 4 have a window of 4 positions; layers 2 and 5 have no window:

          >>> sizes = dict(kv_heads=1, head_dim=2)
          >>> near = CacheSpec.attention(layers=4, window=Window.sliding(4), **sizes)
          >>> far = CacheSpec.attention(layers=2, **sizes)
          >>> spec = CacheSpec.hybrid((near, [0, 1, 3, 4]), (far, [2, 5]))
          >>> cache = make_cache(spec, cells=(None, 64), sequences=2)
          >>> cache = prefill(forward, params, cache, [1, 2, 3]).cache
          >>> [part.num_used_cells().item() for part in cache.parts]
          [3, 3]

        llama.cpp: `llama_kv_cache_iswa`, `llama_memory_hybrid`.
        """
        if not parts:
            raise ValueError("expected at least one part, got none; pass (spec, layers) pairs")
        pairs = tuple(_check_part(pair) for pair in parts)
        specs = [spec for spec, _ in pairs]
        of_sources = sum(spec._has_cross_attention for spec in specs)
        if of_sources > 1 or of_sources == len(specs):
            raise ValueError(
                f"expected at most one cross_attention part, and another part, got {of_sources} of "
                f"{len(specs)} parts; put all cross-attention layers into one part"
            )
        if any(spec.kind == "hybrid" and spec._has_cross_attention for spec in specs):
            raise ValueError(
                "expected the cross_attention part as a direct part, got one in a hybrid part; "
                "pass the parts of that hybrid"
            )
        numbers = sorted({number for _, layers in pairs for number in layers})
        made = CacheSpec(kind="hybrid", layers=1 + numbers[-1], parts=pairs)
        for number in numbers:
            kept = made._array_kinds_of_layer(number)
            if len(kept) > len(set(kept)):
                raise ValueError(
                    f"expected one part at most whose keys or states a layer uses, got several "
                    f"for layer {number}; list it in one of them"
                )
        return made

    def group_layers(self, *groups: Sequence[int]) -> CacheSpec:
        """Return a hybrid spec that stores groups of layers of an attention spec as separate parts.

        Each part has its own cells, so that layers may store different tokens (`evict`), or have
        different numbers of cells (the argument `cells` of `make_cache`, one number for each
        group). Each part also has its own user fields. Layer numbers do not change. Each further
        part adds the time of planning a part.

        Args:
          groups: lists of layer numbers, in which each layer occurs once.

        Raises:
          ValueError: If the spec is not of attention layers, or a layer is missing or repeated.

        Examples:
          >>> spec = CacheSpec.attention(layers=3, kv_heads=1, head_dim=2)
          >>> cache = make_cache(spec.group_layers([0], [1, 2]), cells=(64, 32))
          >>> [part.table.num_cells for part in cache.parts]
          [64, 32]
        """
        layers = [layer for group in groups for layer in group]
        if self.kind != "attention" or sorted(layers) != list(range(self.layers)):
            raise ValueError(
                f"expected groups of all layers 0 to {self.layers - 1} of an attention spec, got "
                f"{groups} of a spec of kind {self.kind!r}; list each layer in one group"
            )
        return CacheSpec.hybrid(*((self._select_layers(group), group) for group in groups))

    def _select_layers(self, layers: Sequence[int]) -> CacheSpec:
        """Return the spec of some attention layers."""

        def select(value: Any) -> Any:
            if not isinstance(value, tuple):
                return value
            return _collapse_if_equal(tuple(value[layer] for layer in layers))

        names = "kv_heads", "head_dim", "value_dim", "rope"
        sizes = {name: select(getattr(self, name)) for name in names}
        return replace(self, layers=len(layers), **sizes)

    @property
    def _has_cross_attention(self) -> bool:
        return self.kind == "cross_attention" or any(
            part._has_cross_attention for part, _ in self.parts
        )

    def _array_kinds_of_layer(self, number: int) -> list[str]:
        """Return "keys" or "states" for each part with arrays of the layer."""
        if self.kind != "hybrid":
            return ["states" if self.kind == "recurrent" else "keys"]
        owners = [(part, layers.index(number)) for part, layers in self.parts if number in layers]
        return [kept for part, inner in owners for kept in part._array_kinds_of_layer(inner)]

    def __repr__(self) -> str:
        if self.kind == "hybrid":
            return f"CacheSpec.hybrid({', '.join(map(repr, self.parts))})"
        shown: dict[str, object] = {"layers": self.layers}
        if self.kind == "recurrent":
            shown["states"] = {name: (shape, dtype.name) for name, shape, dtype in self.states}
            if self.shard_dims:
                shown["shard_dims"] = {name: tuple(split) for name, *split in self.shard_dims}
        else:
            shown |= {"kv_heads": self.kv_heads, "head_dim": self.head_dim}
            if self.value_dim != self.head_dim:
                shown["value_dim"] = self.value_dim
            if self.window is not None:
                shown["window"] = self.window
            if self.kind == "attention" and self.rope != NOT_GIVEN:
                shown["rope"] = self.rope
            if self.fields:
                shown["fields"] = {name: (shape, dtype.name) for name, shape, dtype in self.fields}
        fields = (f"{name}={_field_text(value)}" for name, value in shown.items())
        return f"CacheSpec.{self.kind}({', '.join(fields)})"


def _field_text(value: object) -> str:
    if isinstance(value, tuple) and any(isinstance(x, Rope) for x in value):
        return f"({', '.join(map(_field_text, value))})"
    if isinstance(value, Rope):
        slowest = min(value.frequencies, default=0.0)
        return f"<Rope of {len(value.frequencies)} pairs, slowest {slowest:.3g}>"
    return repr(value)


def _collapse_if_equal(values: tuple[X, ...]) -> X | tuple[X, ...]:
    return values[0] if all(value == values[0] for value in values) else values


def _broadcast_to_layers(value: object, layers: int, name: str) -> tuple[object, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,) * layers
    if len(values) != layers:
        raise ValueError(
            f"expected {name} for all layers or {layers}, one each, got {len(values)}; pass one "
            f"number for all layers"
        )
    return values


def _check_layer_sizes(value: object, layers: int, name: str) -> tuple[int, ...]:
    return tuple(check_count(size, name) for size in _broadcast_to_layers(value, layers, name))


def _normalise_value_dims(value: object, keys: tuple[int, ...]) -> tuple[int | ValueSlice, ...]:
    def make_value_slice(part: slice, key: int) -> ValueSlice:
        ends = range(*part.indices(key))
        if part.step not in (None, 1) or not 0 < len(ends) < key:
            raise ValueError(
                f"expected values as neighbouring numbers of a key of {key}, some and not all, got "
                f"{part}; give keys a number more where they are all of it"
            )
        return ValueSlice(ends.start, ends.stop)

    def check_value_dim(dim: object, key: int) -> int | ValueSlice:
        if isinstance(dim, ValueSlice):
            dim = slice(dim.first, dim.last)
        return (
            make_value_slice(dim, key) if isinstance(dim, slice) else check_count(dim, "value_dim")
        )

    dims = _broadcast_to_layers(value, len(keys), "value_dim")
    return tuple(check_value_dim(dim, key) for dim, key in zip(dims, keys, strict=True))


def _check_rope(rope: object, key: int, value: int | ValueSlice) -> None:
    """Raise if `rope` is not a rope, or is invalid for keys of size `key`.

    A rope is invalid if it rotates more numbers than a key has, or numbers of the value slice.
    """
    if not isinstance(rope, Rope | NotGiven | None):
        raise TypeError(
            f"expected a rope or None, got {rope!r}; make one, as Rope.make(head_dim, base=10000.0)"
        )
    turned = 2 * len(rope.frequencies) if isinstance(rope, Rope) else 0
    if turned > key:
        raise ValueError(
            f"expected a rope of {key // 2} pairs at most for keys of {key}, got one of "
            f"{turned // 2}; make it for the head, Rope.make({key})"
        )
    if isinstance(value, ValueSlice) and value.first < turned:
        raise ValueError(
            f"expected values after the {turned} numbers of a key that its rope turns, got numbers "
            f"{value.first} to {value.last - 1}; put those that are rotated first"
        )


def _check_shapes(
    arrays: Mapping[str, State], kind: str
) -> tuple[tuple[str, tuple[int, ...], np.dtype], ...]:
    """Return name, shape and dtype of each array, ordered by name; `kind` is "state" or "field"."""
    if not isinstance(arrays, Mapping):
        raise TypeError(
            f"expected {kind}s as a mapping of names to (shape, dtype), got {arrays!r}; name "
            f"each {kind}"
        )
    return tuple((name, *_check_shape(f"{kind} {name}", arrays[name])) for name in sorted(arrays))


def _check_shape(name: str, array: Any) -> tuple[tuple[int, ...], np.dtype]:
    if hasattr(array, "shape"):
        return array.shape, np.dtype(array.dtype)
    if not isinstance(array, tuple) or len(array) != 2 or not isinstance(array[0], Sequence):
        raise TypeError(
            f"expected (shape, dtype) for the {name}, got {array!r}; write ((), dtype) for "
            f"a single number"
        )
    shape, dtype = array
    sizes = tuple(check_count(size, f"each size of the {name}", low=0) for size in shape)
    return sizes, np.dtype(dtype)


def _check_shard_dims(
    shapes: Mapping[str, tuple[int, ...]], splits: Mapping[str, tuple[int, int]]
) -> tuple[tuple[str, int, int], ...]:
    for name, (dimension, parts) in splits.items():
        sizes = shapes.get(name, ())
        if not 0 <= dimension < len(sizes) or sizes[dimension] % check_count(parts, "parts"):
            raise ValueError(
                f"expected a dimension of a state, and parts that divide it, of "
                f"{ {**shapes} }, got {name!r}: "
                f"{(dimension, parts)}; leave out states that no mesh splits"
            )
    return tuple((name, *splits[name]) for name in sorted(splits))


def _check_part(pair: object) -> tuple[CacheSpec, tuple[int, ...]]:
    if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], CacheSpec)):
        raise TypeError(
            f"expected pairs of a CacheSpec and its layers, got {type(pair)}; write "
            f"CacheSpec.hybrid((spec, [0, 1]), ...)"
        )
    spec, layers = pair
    numbers = tuple(check_count(layer, "a layer", low=0) for layer in layers)
    if len(set(numbers)) != len(numbers) or len(numbers) != spec.layers:
        raise ValueError(
            f"expected the numbers of a part's {spec.layers} layers, each once, got {numbers}; "
            f"number them as the model does"
        )
    return spec, numbers
