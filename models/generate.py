"""Texts from prompts: several at once, side by side in one memory."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import loops
from jaxkv.loops.generation import Sample
from models.model import Model

Finish = Literal["stop", "length", "full"]
"""Why a text ends: a stop token came, it has all the tokens asked for, or the memory is full."""

Streams = Literal["unified", "split"]
"""Whether all texts share the cells of the memory, or each has its own."""

OnText = Callable[[int, str, bool], None]
"""`(which text, what is new of it, whether it ends there)`."""

_compiles = 0


def _count(event: str, duration: float, **tags: Any) -> None:
    del duration, tags
    global _compiles
    # Also sent when the program comes from the compilation cache on disk: it is a new one here.
    _compiles += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_count)


def compiles() -> int:
    """Count the programs that were compiled, or read from disk, since this module is loaded."""
    return _compiles


@dataclass(frozen=True, kw_only=True)
class Text:
    """What came of one prompt.

    prompt_tokens: what it began with.
    tokens: what was generated, without the stop token.
    text: those tokens in characters.
    finish: why it ends.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish: Finish


@dataclass(frozen=True, kw_only=True)
class Generated:
    """Texts, in the order of their prompts, and what making them took.

    compile_seconds: until everything was compiled; the other times begin after it.
    prompt_seconds: until the first token of each text was picked.
    decode_seconds: from then to the end.
    decoded: tokens picked in that time, stop tokens included.
    cells: what the memory holds at most, not counting what windows let it forget.
    used: how many of them are in use at the end.
    nbytes: of the whole memory.
    compiles: programs compiled after the warm-up; 0, or something is wrong.
    """

    texts: list[Text]
    compile_seconds: float
    prompt_seconds: float
    decode_seconds: float
    decoded: int
    cells: int
    used: int
    nbytes: int
    compiles: int


def generate_texts(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    sample: Sample,
    max_tokens: int = 128,
    cells: int | None = None,
    ubatch_size: int = 512,
    streams: Streams = "unified",
    steps_per_dispatch: int = 8,
    on_text: OnText | None = None,
    on_compile: Callable[[int, int], None] | None = None,
) -> Generated:
    """Continue prompts together, as sequences of one memory, each as it would go on alone.

    Everything is compiled before anything runs, so that times are those of running.

    Args:
      model: see `models.load`.
      prompts: their tokens, at least one each.
      sample: picks tokens; a tree, so that it can be passed to a compiled program: a `Sampler`, or
        any function in `jax.tree_util.Partial`.
      max_tokens: the most tokens to generate for each prompt.
      cells: of the memory, of each stream where it is split; by default what the prompts and texts
        need, see `cells_for`.
      ubatch_size: the most tokens of a prompt that are computed at once.
      streams: "unified", one pool of cells for all texts, or "split", a stream for each.
      steps_per_dispatch: tokens of each text that are generated before the host looks at them.
      on_text: called with each piece of text as soon as it is there.
      on_compile: called with the number of programs that are compiled and of those there are.

    Raises:
      RefusedError: when the prompts do not fit the memory, before anything is compiled or run.
      ValueError: when there is no prompt, one is empty, or a number is below 1.
    """
    for name, got in {"max_tokens": max_tokens, "steps_per_dispatch": steps_per_dispatch}.items():
        if got < 1:
            raise ValueError(f"{name} must be at least 1, got {got}")
    if not prompts or not all(map(len, prompts)):
        raise ValueError("wanted prompts of at least one token each, got none, or one without any")
    if streams not in ("unified", "split"):
        raise ValueError(f'streams must be "unified" or "split", got {streams!r}')
    if cells is None:
        cells = cells_for(prompts, max_tokens, streams)
    count = len(prompts) if streams == "split" else 1
    memory = model.make_memory(
        cells=cells, sequences=len(prompts), streams=count, ubatch_size=ubatch_size
    )
    batch = jaxkv.make_batch([np.asarray(prompt, np.int32) for prompt in prompts])
    plan = jaxkv.init_batch(memory, batch, ubatch_size=ubatch_size).check()

    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    ids = jnp.arange(len(prompts), dtype=jnp.int32)
    stop = jnp.asarray(sorted(model.stop_tokens), jnp.int32)
    # The first token comes with the prompts. The rest is cut evenly: a shorter last dispatch would
    # be another program, so it runs over the end by a few tokens at most instead.
    dispatches = -(-(max_tokens - 1) // steps_per_dispatch)
    steps = -(-(max_tokens - 1) // dispatches) if dispatches else 0

    def start(token: jax.Array, active: np.ndarray) -> loops.DecodeState:
        return loops.DecodeState(
            token=token,
            sequence=ids,
            active=jnp.asarray(active),
            full=jnp.asarray(np.zeros((), np.bool_)),
        )

    began = perf_counter()
    jobs = []
    blanks = {}
    for ubatch in plan.ubatches:
        shape = ubatch.tokens.shape, ubatch.outputs.shape
        if shape not in blanks:
            step = loops.step_of(model.forward)
            jobs.append(step.lower(model.weights, *jaxkv.split(memory), ubatch))
            out = jobs[-1].out_info[2]
            blanks[shape] = jnp.zeros(out.shape, out.dtype)
    if steps:
        args = sample, model.weights, memory, start(ids, np.ones(len(prompts), np.bool_)), stop
        jobs.append(_dispatch.lower(model.forward, *args, steps=steps))
    _compile(jobs, on_compile)
    # What is small is run instead, on logits of zeros.
    rows = plan.collect([blanks[u.tokens.shape, u.outputs.shape] for u in plan.ubatches])
    _pick(sample, rows, ids, jnp.asarray(lengths))
    jaxkv.used(memory)
    del blanks, rows
    jax.block_until_ready((memory, model.weights))
    warm, compile_seconds = compiles(), perf_counter() - began

    began = perf_counter()
    writers = [_Writer(i, model, max_tokens, on_text) for i in range(len(prompts))]
    memory, rows = jaxkv.prefill(
        model.forward, model.weights, memory, batch, ubatch_size=ubatch_size, donate=True
    )
    token = _pick(sample, rows, ids, jnp.asarray(lengths))
    first = np.asarray(token)
    prompt_seconds = perf_counter() - began

    began = perf_counter()
    for writer, one in zip(writers, first, strict=True):
        writer.write([one])
    decoded = 0
    if steps:
        running = start(token, np.array([writer.finish is None for writer in writers]))
    while any(writer.finish is None for writer in writers):
        memory, running, out = _dispatch(
            model.forward, sample, model.weights, memory, running, stop, steps=steps
        )
        for writer, row in zip(writers, np.asarray(out), strict=True):
            decoded += writer.write(row[row >= 0])
        if running.full:
            for writer in writers:
                if writer.finish is None:
                    writer.end("full")
    decode_seconds = perf_counter() - began

    # Of a memory of parts, those with a window hold fewer.
    used = max(int(part) for part in jax.tree.leaves(jaxkv.used(memory)))
    return Generated(
        texts=[
            Text(
                prompt_tokens=[int(token) for token in prompt],
                tokens=writer.tokens,
                text="".join(writer.pieces),
                finish=writer.finish,
            )
            for prompt, writer in zip(prompts, writers, strict=True)
        ],
        compile_seconds=compile_seconds,
        prompt_seconds=prompt_seconds,
        decode_seconds=decode_seconds,
        decoded=decoded,
        cells=cells * count,
        used=used,
        nbytes=jaxkv.nbytes(memory),
        compiles=compiles() - warm,
    )


def _compile(jobs: list[Any], tell: Callable[[int, int], None] | None) -> None:
    """Compile what was lowered, side by side: XLA compiles a program on one core, mostly."""
    tell = tell or (lambda done, total: None)
    tell(0, len(jobs))
    with ThreadPoolExecutor(max_workers=4) as pool:
        # jit finds what is compiled here, since it keeps what it lowered for the same arguments.
        for done, job in enumerate(as_completed([pool.submit(job.compile) for job in jobs]), 1):
            job.result()
            tell(done, len(jobs))


def cells_for(
    prompts: Sequence[Sequence[int]], max_tokens: int, streams: Streams = "unified"
) -> int:
    """Count the cells that prompts and their texts need, rounded up to a multiple of 256.

    Where the memory is split it is the longest that counts, since every stream has as many.

    Examples:
      >>> cells_for([[1, 2, 3], [4, 5]], 128), cells_for([[1, 2, 3], [4, 5]], 128, "split")
      (512, 256)
    """
    # The last token of a text is never put into the memory.
    needed = [len(prompt) + max_tokens - 1 for prompt in prompts]
    most = max(needed) if streams == "split" else sum(needed)
    return -(-most // 256) * 256


@dataclass(kw_only=False)
class _Writer:
    """One text while it grows."""

    index: int
    model: Model
    max_tokens: int
    on_text: OnText | None
    tokens: list[int] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    finish: Finish | None = None

    def __post_init__(self):
        self.stream = self.model.tokenizer.stream()

    def write(self, tokens: Sequence[int]) -> int:
        """Take what was generated, up to where the text ends; returns how many tokens that is."""
        if self.finish is not None:
            return 0
        piece, taken = "", 0
        finish = None
        for token in map(int, tokens):
            taken += 1
            if token in self.model.stop_tokens:
                finish = "stop"
                break
            self.tokens.append(token)
            piece += self.stream.feed(token)
            if len(self.tokens) == self.max_tokens:
                finish = "length"
                break
        if finish is not None:
            self.end(finish, piece)
        elif piece:
            self._tell(piece, False)
        return taken

    def end(self, finish: Finish, piece: str = "") -> None:
        self.finish = finish
        self._tell(piece + self.stream.end(), True)

    def _tell(self, piece: str, done: bool) -> None:
        self.pieces.append(piece)
        if self.on_text is not None:
            self.on_text(self.index, piece, done)


@jax.jit
def _pick(
    sample: Sample, logits: jax.Array, sequences: jax.Array, positions: jax.Array
) -> jax.Array:
    return sample(logits, sequences, positions)


@partial(jax.jit, static_argnames=("forward", "steps"), donate_argnames="memory")
def _dispatch(
    forward: Callable,
    sample: Sample,
    weights: Any,
    memory: Any,
    running: loops.DecodeState,
    stop: jax.Array,
    *,
    steps: int,
) -> tuple[Any, loops.DecodeState, jax.Array]:
    return jaxkv.decode(forward, sample, weights, memory, running, stop, steps=steps)
