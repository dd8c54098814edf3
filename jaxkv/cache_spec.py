"""What the weights of a model fix of its cache: layers, heads, windows, ropes and states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from jaxkv.core.validate import check_count
from jaxkv.ops.mla import ValueSlice
from jaxkv.rope import NOT_GIVEN, NotGiven, Rope
from jaxkv.window import Window

Ropes = Rope | NotGiven | tuple[Rope | NotGiven | None, ...] | None
"""How keys turn with position: one rope for all layers, or one for each."""

ValueDim = int | slice | ValueSlice
"""How many numbers a value has, or which of those of its key they are."""

State = jax.ShapeDtypeStruct | tuple[Sequence[int], jax.typing.DTypeLike]
"""The shape and dtype of a state."""

X = TypeVar("X")


@dataclass(frozen=True, kw_only=True, repr=False)
class CacheSpec:
    """What the weights of a model fix of its cache. Frozen, hashable, no arrays.

    Made by `attention`, `recurrent`, `cross_attention` and `hybrid`; `make_cache` takes it, and
    `Cache.spec` is that of a cache. Specs are equal where their caches have the same layers,
    however that was written. A size that all layers share is stored as one number, another one as
    a tuple of one for each.

    kind: "attention", "recurrent", "cross_attention" or "hybrid".
    layers: L; of a hybrid one more than the highest number of a layer.
    kv_heads: K, the key/value heads.
    head_dim: D, the numbers of a key.
    value_dim: Dv, the numbers of a value, or which of those of its key they are, a `ValueSlice`.
    window: how far back tokens look, None for everything.
    rope: how keys were rotated when they come in; `NotGiven` where that was not said.
    states: for each state its name, shape and dtype, ordered by name.
    shard_dims: for each state that a mesh may split the name, the dimension and its parts.
    parts: of a hybrid the specs of its parts, each with the numbers of its layers.

    llama.cpp: `llama_hparams`.
    """

    kind: Literal["attention", "recurrent", "cross_attention", "hybrid"]
    layers: int
    kv_heads: int | tuple[int, ...] | None = None
    head_dim: int | tuple[int, ...] | None = None
    value_dim: int | ValueSlice | tuple[int | ValueSlice, ...] | None = None
    window: Window | None = None
    rope: Ropes = NOT_GIVEN
    states: tuple[tuple[str, tuple[int, ...], jnp.dtype], ...] = ()
    shard_dims: tuple[tuple[str, int, int], ...] = ()
    parts: tuple[tuple[CacheSpec, tuple[int, ...]], ...] = ()

    @staticmethod
    def attention(
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        value_dim: ValueDim | Sequence[ValueDim] | None = None,
        window: Window | None = None,
        rope: Ropes = NOT_GIVEN,
    ) -> CacheSpec:
        """Return the spec of layers that attend to the text.

        Args:
          layers: L, the attention layers.
          kv_heads: K, the key/value heads, of all layers or one number for each.
          head_dim: D, the numbers of a key, likewise.
          value_dim: Dv, the numbers of a value, likewise; by default D. A slice, where values are
            some of the numbers of their keys, as in latent attention (MLA): they take no bytes,
            and models give keys alone. The slice leaves out at least one number of the key, and
            all that its rope turns, which come first.
          window: how far back tokens look, see `Window`. None for everything.
          rope: how keys were rotated when they come in, for all layers or a tuple of one for each;
            None where keys carry no position. Left out, all works that moves no keys: `seq_add`,
            `seq_div`, `generation.context_shift` and `generation.self_extend` raise.

        Raises:
          TypeError: when a count is no integer, or a window or a rope is something else.
          ValueError: when a count is below 1 or above 2**31 - 1, or sizes and ropes do not fit the
            layers or each other.

        Examples:
          >>> CacheSpec.attention(layers=2, kv_heads=3, head_dim=64, window=Window.sliding(128))
          CacheSpec.attention(layers=2, kv_heads=3, head_dim=64, window=Window.sliding(128))

          Latent attention, whose values are the last 8 of 12 numbers:

          >>> CacheSpec.attention(layers=2, kv_heads=1, head_dim=12, value_dim=slice(4, None))
          CacheSpec.attention(layers=2, kv_heads=1, head_dim=12, value_dim=slice(4, 12))

        llama.cpp: `n_layer`, `n_head_kv`, `n_embd_head_k`, `n_embd_head_v`, `n_swa`.
        """
        layers = check_count(layers, "layers")
        heads = _check_layer_sizes(kv_heads, layers, "kv_heads")
        keys = _check_layer_sizes(head_dim, layers, "head_dim")
        values = keys if value_dim is None else _check_value_dims(value_dim, keys)
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
        )

    @staticmethod
    def recurrent(
        layers: int,
        states: Mapping[str, State],
        shard_dims: Mapping[str, tuple[int, int]] | None = None,
    ) -> CacheSpec:
        """Return the spec of layers that go on from a state.

        Their cache has cells for E + 1 states of each sequence, E being the `max_rollback` of
        `make_cache`, so there is always room. Sequences of one stream share cells after `seq_cp`,
        and what is shared is never written over: only a sequence's own states make place for its
        next ones. Between streams, `seq_cp` copies states, once for all targets of a stream.

        Edits and questions that differ from those of an attention cache:

        - `seq_rm` of an end is granted where a kept state stands right before it, or the whole
          sequence goes, and refused elsewhere: what a state has seen stays in it.
        - `seq_cp` gives the targets the states of the source as they were at the end of the range,
          in place of what they had. It is refused where none is kept that stands there.
        - `seq_add` moves the positions of states, for every sequence of the stream that shares
          them. It is refused where a position would turn negative.
        - `seq_div` drops the earlier states of the range, and divides the position of the current
          one.
        - `seq_pos_max` is the last position, and `seq_pos_min` the lowest that it can be cut back
          to.

        A cache is a value, so one that is kept is a checkpoint, and goes on as if nothing had been
        in between. Donation takes it away: its own, and that of what an edit made of it, which has
        the same buffers. So let the first step from there not donate, or copy the cache once. To
        keep one state while all is donated, share it: `seq_cp` to a sequence that is not used
        otherwise.

        Args:
          layers: L, the recurrent layers.
          states: by name, the shape and dtype of one sequence's state in one layer, as a
            `jax.ShapeDtypeStruct` or a pair `(shape, dtype)`.
          shard_dims: by name, the dimension of a state that a mesh may split, and the parts that
            it has, such as (0, heads). Others are whole on each device of a stream.

        Raises:
          TypeError: when a count is no integer, or `states` no mapping of names to shapes and
            dtypes.
          ValueError: when there are no states, a count is out of its range, or a split is of none
            of the states or does not divide it.

        Examples:
          >>> CacheSpec.recurrent(layers=2, states={"x": ((4, 8), "float32")})
          CacheSpec.recurrent(layers=2, states={'x': ((4, 8), 'float32')})

          A state of two numbers that forgets half of what it had with each token:

          >>> spec = CacheSpec.recurrent(layers=1, states={"x": ((2,), jnp.float32)})
          >>> cache = make_cache(spec, max_rollback=2)
          >>> def model(cache, ubatch):
          ...     x = read_states(cache, 0, ubatch)["x"]
          ...     after = [x]
          ...     for t in range(ubatch.tokens.shape[1]):
          ...         x = jnp.where(ubatch.valid[:, t, None], x / 2 + ubatch.tokens[:, t, None], x)
          ...         after.append(x)
          ...     last = ubatch.state_write_steps(cache.num_rollback_states(0) + 1)
          ...     x = jnp.take_along_axis(jnp.stack(after, 1), last[..., None], axis=1)
          ...     return write_states(cache, 0, ubatch, {"x": x})
          >>> plan = init_batch(cache, make_batch([8, 4, 2, 1]))
          >>> cache = model(apply(cache, plan), plan.ubatches[0])
          >>> print(show(cache))
          sequence 0 1 2 3

          Two tokens can be taken back, and no more:

          >>> [seq_rm(cache, 0, p0).ok.item() for p0 in (0, 1, 2, 3, 4)]
          [True, False, True, True, True]
          >>> cache, ok = seq_rm(cache, 0, 2)
          >>> plan = init_batch(cache, make_batch([0]))
          >>> read_states(apply(cache, plan), 0, plan.ubatches[0])["x"].tolist()  # 8 / 2 + 4
          [[8.0, 8.0]]

          Keep the cache, let the sequence go elsewhere, and come back to what was kept:

          >>> def step(cache, ubatch):
          ...     return model(apply(cache, ubatch), ubatch)
          >>> def tell(cache, *tokens):
          ...     return step(cache, init_batch(cache, make_batch(tokens)).check().ubatches[0])
          >>> checkpoint, once = cache, tell(cache, 6, 3)
          >>> cache, _ = seq_rm(tell(cache, 5, 5, 5), 0, 4)
          >>> again = tell(checkpoint, 6, 3)
          >>> jax.tree.all(jax.tree.map(np.array_equal, again, once))
          True

          A step that donates is given a copy, or the checkpoint is gone:

          >>> donating = jax.jit(step, donate_argnames="cache")
          >>> cache = donating(jax.tree.map(jnp.copy, checkpoint), plan.ubatches[0])
          >>> cache = donating(checkpoint, plan.ubatches[0])
          >>> checkpoint.buffers[0]["x"].is_deleted()
          True

          Two streams for four sequences: 1 shares the state of 0, and 2 and 3 share a copy of it:

          >>> cache = make_cache(spec, sequences=4, streams=2)
          >>> cache = apply(cache, init_batch(cache, make_batch([8])))
          >>> seq_cp(cache, 0, [1, 2, 3]).cache.num_used_cells().item()
          2

        llama.cpp: `llama_memory_recurrent`, `n_embd_r`, `n_embd_s`.
        """
        layers = check_count(layers, "layers")
        if not isinstance(states, Mapping):
            raise TypeError(
                f"expected states as a mapping of names to (shape, dtype), got {states!r}; name "
                f"each state"
            )
        if not states:
            raise ValueError("expected at least one state, got none; name those of a layer")
        shapes = {name: _state_shape(name, states[name]) for name in sorted(states)}
        return CacheSpec(
            kind="recurrent",
            layers=layers,
            states=tuple((name, x.shape, jnp.dtype(x.dtype)) for name, x in shapes.items()),
            shard_dims=_check_shard_dims(shapes, shard_dims or {}),
        )

    @staticmethod
    def cross_attention(
        layers: int,
        kv_heads: int | Sequence[int],
        head_dim: int | Sequence[int],
        value_dim: int | Sequence[int] | None = None,
    ) -> CacheSpec:
        """Return the spec of layers that look at what an encoder read: a part of a hybrid.

        An encoder reads the source of a sequence once, and its keys and values are written for each
        layer (`init_batch(encoder=True)`, `encode`). From then on every token of the text of that
        sequence sees all of it, whatever its position. A sequence that has no source sees zeros
        there.

        Forks (`seq_cp`, `seq_select`) have the source of what they go on from, in place of their
        own, whatever range of the text is copied unless it is empty; within a stream it is shared.
        `seq_rm` of a whole sequence, of a range that begins at 0 and has no end, forgets its
        source; a range with an end, `seq_add` and `seq_div` leave it alone. `seq_pos_min` and
        `seq_pos_max` tell of the text.

        Args:
          layers: L, the layers that look at a source.
          kv_heads: K, see `attention`.
          head_dim: D, likewise.
          value_dim: Dv, likewise.

        Raises:
          TypeError: when a count is no integer.
          ValueError: when a count is out of its range, or sizes do not fit the layers.

        Examples:
          Layer 0 is the self-attention of a decoder's only layer, and layer 1 its cross-attention:

          >>> sizes = dict(layers=1, kv_heads=1, head_dim=2)
          >>> text, source = CacheSpec.attention(**sizes), CacheSpec.cross_attention(**sizes)
          >>> spec = CacheSpec.hybrid((text, [0]), (source, [1]))
          >>> cache = make_cache(spec, cells=(8, 6), sequences=2)
          >>> cache = apply(cache, init_batch(cache, make_batch([[7, 8, 9], [5]]), encoder=True))
          >>> cache = apply(cache, init_batch(cache, make_batch([0, 3])))
          >>> print(show(seq_cp(cache, 0, 1).cache))
          part 0, layers 0
          owner    + + . . . . . .
          position 0 1 . . . . . .
          part 1, layers 1
          owner    + + + . . .
          position 0 1 2 . . .

        llama.cpp: `llama_cross`, which has the outputs of one encoder pass and no keys.
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
            rope=None,  # no verb of positions reaches a source
        )

    @staticmethod
    def hybrid(*parts: tuple[CacheSpec, Sequence[int]]) -> CacheSpec:
        """Return the spec of several caches that step together, each for some layers of a model.

        Args:
          parts: pairs of a spec and the numbers of the model's layers that it serves, in its own
            order, as many as it has. A layer that attends beside a recurrence is in both.

        Raises:
          TypeError: when an argument is not such a pair.
          ValueError: when there are no parts, a part is not given as many different layers as it
            has, a layer is given to several parts that keep keys, or to several that keep states,
            or there is no part beside one of `cross_attention`, or several of them.

        Examples:
          Layers 0, 1, 3 and 4 look back 4 positions, and layers 2 and 5 at everything:

          >>> sizes = dict(kv_heads=1, head_dim=2)
          >>> near = CacheSpec.attention(layers=4, window=Window.sliding(4), **sizes)
          >>> far = CacheSpec.attention(layers=2, **sizes)
          >>> cache = make_cache(
          ...     CacheSpec.hybrid((near, [0, 1, 3, 4]), (far, [2, 5])),
          ...     cells=(None, 64),
          ...     sequences=2,
          ... )
          >>> cache = apply(cache, init_batch(cache, make_batch([1, 2, 3])))
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
                f"expected one part for sources at most, and one for the text beside it, got "
                f"{of_sources} of {len(specs)} parts for sources; put all layers that look at a "
                f"source into one part"
            )
        if any(spec.kind == "hybrid" and spec._has_cross_attention for spec in specs):
            raise ValueError(
                "expected the part for sources as a part of its own, got a hybrid that has one; "
                "pass the parts of that"
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

    @property
    def _has_cross_attention(self) -> bool:
        """Whether it is about sources, or a part of it is."""
        return self.kind == "cross_attention" or any(
            part._has_cross_attention for part, _ in self.parts
        )

    def _array_kinds_of_layer(self, number: int) -> list[str]:
        """Return "keys" and "states", once for each part that keeps them for a layer."""
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
        fields = (f"{name}={_field_text(value)}" for name, value in shown.items())
        return f"CacheSpec.{self.kind}({', '.join(fields)})"


def _field_text(value: object) -> str:
    """Return how a field is printed; a rope by its pairs and how fast the slowest turns."""
    if isinstance(value, tuple) and any(isinstance(x, Rope | ValueSlice) for x in value):
        return f"({', '.join(map(_field_text, value))})"
    if isinstance(value, Rope):
        slowest = min(value.frequencies, default=0.0)
        return f"<Rope of {len(value.frequencies)} pairs, slowest {slowest:.3g}>"
    if isinstance(value, ValueSlice):
        return f"slice({value.first}, {value.last})"
    return repr(value)


def _collapse_if_equal(values: tuple[X, ...]) -> X | tuple[X, ...]:
    """Return what all layers share, or the values of each."""
    return values[0] if all(value == values[0] for value in values) else values


def _broadcast_to_layers(value: object, layers: int, name: str) -> tuple[object, ...]:
    """Return what a caller gave for each layer, from one for all or one for each."""
    values = tuple(value) if isinstance(value, Sequence) else (value,) * layers
    if len(values) != layers:
        raise ValueError(
            f"expected {name} for all layers or {layers}, one each, got {len(values)}; pass one "
            f"number if all are alike"
        )
    return values


def _check_layer_sizes(value: object, layers: int, name: str) -> tuple[int, ...]:
    """Return a size for each layer, from one for all or one for each."""
    return tuple(check_count(size, name) for size in _broadcast_to_layers(value, layers, name))


def _check_value_dims(value: object, keys: tuple[int, ...]) -> tuple[int | ValueSlice, ...]:
    """Return the size of values for each layer, or which numbers of a key they are."""

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
    """Raise unless a rope fits the keys of a layer, and leaves their values alone."""
    if not isinstance(rope, Rope | NotGiven | None):
        raise TypeError(
            f"expected a rope or None, got {rope!r}; make one, as make_rope(head_dim, base=10000.0)"
        )
    turned = 2 * len(rope.frequencies) if isinstance(rope, Rope) else 0
    if turned > key:
        raise ValueError(
            f"expected a rope of {key // 2} pairs at most for keys of {key}, got one of "
            f"{turned // 2}; make it for the head, make_rope({key})"
        )
    if isinstance(value, ValueSlice) and value.first < turned:
        raise ValueError(
            f"expected values after the {turned} numbers of a key that its rope turns, got numbers "
            f"{value.first} to {value.last - 1}; put those that are rotated first"
        )


def _state_shape(name: str, state: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of a state."""
    if hasattr(state, "shape"):
        return state
    if not isinstance(state, tuple) or len(state) != 2 or not isinstance(state[0], Sequence):
        raise TypeError(
            f"expected (shape, dtype) for the state {name}, got {state!r}; write ((), dtype) for "
            f"a single number"
        )
    shape, dtype = state
    sizes = tuple(check_count(size, f"each size of the state {name}", low=0) for size in shape)
    return jax.ShapeDtypeStruct(sizes, dtype)


def _check_shard_dims(
    shapes: Mapping[str, jax.ShapeDtypeStruct], splits: Mapping[str, tuple[int, int]]
) -> tuple[tuple[str, int, int], ...]:
    """Return the splits of states by name, dimension and parts, checked."""
    for name, (dimension, parts) in splits.items():
        sizes = shapes[name].shape if name in shapes else ()
        if not 0 <= dimension < len(sizes) or sizes[dimension] % check_count(parts, "parts"):
            raise ValueError(
                f"expected for a split a dimension of a state and parts that divide it, of "
                f"{ {state: shape.shape for state, shape in shapes.items()} }, got {name!r}: "
                f"{(dimension, parts)}; leave out what no mesh splits"
            )
    return tuple((name, *splits[name]) for name in sorted(splits))


def _check_part(pair: object) -> tuple[CacheSpec, tuple[int, ...]]:
    """Return a part of a hybrid and the numbers of its layers."""
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
