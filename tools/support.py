"""Write the page of supported verbs per kind of cache: `python -m tools.support`.

A verb *works* on a cache if the table shows its effect, the table has no fault, and the sequence
can continue. Otherwise it is refused with a named reason. Any other outcome is a mistake, and
raises.
"""

if __name__ == "__main__":  # compiled as in the tests; must be set before importing jax
    import conftest  # noqa: F401

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxkv
from jaxkv import CacheSpec, generation, serving, sharding, snapshot
from tests.helpers import edit_sequences
from tests.helpers.caches import GROUPS, HEADS, ROPE, SIZE, SMALL, SPLIT, VOCABULARY, WINDOW

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "support.md"
TOKENS = 12
"""Tokens of the text for each verb: more than a window's cache has cells for."""

SAID = (np.arange(4) + TOKENS + 1) % VOCABULARY
"""The model's next tokens."""

YES, NONE = "yes", "-"


# ------------------------------------------------------------------------------------- the kinds


def columns() -> dict[str, tuple[Callable[[], Any], str]]:
    """List each kind: its name, its constructor, and its layers for `edit_sequences.compute`."""
    kinds = {
        "one pool": replace(SMALL, cells=32),
        "a stream each": replace(SPLIT, cells=16),
        "groups": replace(GROUPS, cells=32),
        "window": replace(WINDOW, cells=7),
    }
    made = {name: (kind.make, "aa") for name, kind in kinds.items()}
    made["states"] = edit_sequences.make, "rr"
    made["states, rollback 3"] = lambda: edit_sequences.make(kept=3), "rr"
    made["attention and states"] = hybrid, "ar"
    made["text and sources"] = with_source, "as"
    return made


def hybrid() -> Any:
    """Make a cache with a layer of attention and one of states with three checkpoints."""
    attention = CacheSpec.attention(layers=1, kv_heads=HEADS, head_dim=SIZE, rope=ROPE)
    states = CacheSpec.recurrent(layers=1, states=edit_sequences.STATES)
    spec = CacheSpec.hybrid((attention, [0]), (states, [1]))
    return jaxkv.make_cache(spec, cells=32, sequences=3, max_rollback=3)


def with_source() -> Any:
    """Make a cache with a layer of attention, one of cross-attention, and a source."""
    sizes = dict(layers=1, kv_heads=HEADS, head_dim=SIZE)
    text, sources = CacheSpec.attention(**sizes, rope=ROPE), CacheSpec.cross_attention(**sizes)
    spec = CacheSpec.hybrid((text, [0]), (sources, [1]))
    cache = jaxkv.make_cache(spec, cells=(32, 8), sequences=3)
    (ubatch,) = jaxkv.init_batch(cache, jaxkv.make_batch([1, 2, 3]), encoder=True).ubatches
    zeros = jnp.zeros((*ubatch.valid.shape, HEADS, SIZE))
    return jaxkv.write_kv(jaxkv.apply(cache, ubatch), 1, zeros, zeros).cache


@functools.cache
def model(layers: str) -> Callable[..., Any]:
    """Make a model that writes every layer and returns the number after that of the token."""

    def forward(params: Any, step: jaxkv.Step) -> tuple[jaxkv.Step, jax.Array]:
        step, _ = edit_sequences.compute(step, layers)
        said = (step.tokens.reshape(-1)[step.outputs] + 1) % VOCABULARY
        logits = jax.nn.one_hot(said, VOCABULARY)
        if "s" in layers:  # zeros for a source, NaN where it must not be read
            q = jnp.zeros((*step.valid.shape, HEADS, SIZE))
            logits += jnp.sum(jaxkv.attend(step, layers.index("s"), q)[1])
        return step, logits

    return forward


# -------------------------------------------------------------------------------------- the verbs


class Refused(Exception):
    """A verb was refused; the message is the name of the reason."""


class Trial:
    """A cache of one kind with a text of `TOKENS` tokens in sequence 0."""

    def __init__(self, make: Callable[[], Any], layers: str) -> None:
        self.empty, self.forward = make(), model(layers)
        self.cache, self.logits = self.told(self.empty, range(1, TOKENS + 1))

    def told(self, cache: Any, tokens: Any, seq: int = 0) -> tuple[Any, jax.Array]:
        """Run some tokens of a sequence, or raise with the reason of the plan."""
        batch = jaxkv.make_batch(list(tokens), sequences=seq)
        plan = jaxkv.init_batch(cache, batch, ubatch_size=4)
        if not plan.ok:
            raise Refused(jaxkv.Reason(int(plan.reason[seq])).name)
        cache, logits, *_ = jaxkv.prefill(self.forward, None, cache, batch, plan=plan)
        return cache, logits

    def goes_on(self, cache: Any, last: int, seq: int = 0) -> str:
        """Return that it works if a sequence ends at a position, and accepts one more token."""
        assert cache.seq_pos_max(seq).item() == last
        assert not any(map(int, cache.check().values()))
        after, _ = self.told(cache, [7], seq)
        assert after.seq_pos_max(seq).item() == last + 1
        return YES

    def granted(self, cache: Any, ok: Any, last: int, seq: int = 0) -> str:
        """Return that it works, or that the verb was refused and left the cache unchanged."""
        if ok:
            return self.goes_on(cache, last, seq)
        assert self.goes_on(cache, TOKENS - 1) == YES
        raise Refused("ok is False")

    def other(self, same_stream: bool) -> int | None:
        """Find another sequence, of the same stream or of another one."""
        spec = self.cache.table.spec
        sharing = spec.sequences // spec.streams
        return next(
            (q for q in range(1, spec.sequences) if (q // sharing == 0) == same_stream), None
        )


def prompt(trial: Trial) -> str:
    return trial.goes_on(trial.cache, TOKENS - 1)


def whole(trial: Trial) -> str:
    return trial.granted(*jaxkv.seq_rm(trial.cache, 0), -1)


def end(trial: Trial, count: int = 2) -> str:
    left = TOKENS - count
    return trial.granted(*jaxkv.seq_rm(trial.cache, 0, left), left - 1)


def half(trial: Trial) -> str:
    return end(trial, TOKENS // 2)


def middle(trial: Trial) -> str:
    cache, ok = jaxkv.seq_rm(trial.cache, 0, TOKENS - 4, TOKENS - 3)
    return trial.granted(cache, ok, TOKENS - 1)


def fork(trial: Trial, same_stream: bool = True) -> str:
    dst = trial.other(same_stream)
    if dst is None:
        return NONE
    cache, ok = jaxkv.seq_cp(trial.cache, 0, dst)
    shared = cache.num_used_cells() == trial.cache.num_used_cells()
    assert shared == same_stream
    return trial.granted(cache, ok, TOKENS - 1, dst)


def copy(trial: Trial) -> str:
    return fork(trial, same_stream=False)


def part_of_it(trial: Trial) -> str:
    dst = trial.other(True) or trial.other(False)
    return trial.granted(*jaxkv.seq_cp(trial.cache, 0, dst, 0, TOKENS - 2), TOKENS - 3, dst)


def select(trial: Trial) -> str:
    dst = trial.other(True) or trial.other(False)
    cache, _ = trial.told(trial.cache, [9], dst)
    cache = jaxkv.seq_select(cache, [dst, 0], [0, dst]).cache
    assert cache.seq_pos_max(dst) == TOKENS - 1
    return trial.goes_on(cache, 0)


def travel(trial: Trial) -> str:
    chat, ok = jaxkv.extract(trial.cache, 0, cells=TOKENS)
    assert ok
    waiting = sharding.move(chat, jax.devices()[0], memory_kind="pinned_host")
    dst = trial.other(True) or trial.other(False)
    cache = jaxkv.seq_rm(trial.cache, 0).cache
    return trial.granted(*jaxkv.insert(cache, waiting, 0, dst), TOKENS - 1, dst)


def file(trial: Trial) -> str:
    data = snapshot.save(trial.cache, sequences=0)
    return trial.goes_on(snapshot.load(data, into=trial.empty), TOKENS - 1)


def keep(trial: Trial) -> str:
    dst = trial.other(True) or trial.other(False)
    cache, _ = trial.told(trial.cache, [9], dst)
    cache = jaxkv.seq_keep(cache, 0).cache
    assert cache.seq_pos_max(dst) == -1
    return trial.goes_on(cache, TOKENS - 1)


def move(trial: Trial) -> str:
    cache, ok = jaxkv.seq_add(trial.cache, 0, 0, -1, delta=5)
    return trial.granted(jaxkv.apply(cache, jaxkv.init_update(cache)), ok, TOKENS + 4)


def divide(trial: Trial) -> str:
    cache, ok = jaxkv.seq_div(trial.cache, 0, 0, -1, divisor=2)
    return trial.granted(jaxkv.apply(cache, jaxkv.init_update(cache)), ok, (TOKENS - 1) // 2)


def defrag(trial: Trial) -> str:
    cache, _ = trial.told(trial.cache, [9], 1)
    cache, ok = jaxkv.seq_rm(cache, 0)
    assert ok
    cache = jaxkv.apply(cache, jaxkv.defrag_plan(cache))
    assert jaxkv.defrag_plan(cache).num_changes == 0
    return trial.goes_on(cache, 0, 1)


def checkpoint(trial: Trial) -> str:
    trial.told(trial.cache, [8, 9])
    return trial.goes_on(trial.cache, TOKENS - 1)


def back(trial: Trial) -> str:
    table = trial.cache.table
    later, _ = trial.told(trial.cache, [8])
    cache, ok = jaxkv.rewind(later, to=table)
    if not ok:
        raise Refused("ok is False")
    return trial.goes_on(cache, TOKENS - 1)


def traced(trial: Trial) -> str:
    @jax.jit
    def program(cache: Any) -> Any:
        plan = jaxkv.plan_step(cache, jnp.array([7]))
        step, _ = trial.forward(None, jaxkv.apply(cache, plan))
        return step.cache, plan.ok

    cache, ok = program(trial.cache)
    return trial.goes_on(cache, TOKENS) if ok else NONE


def mapped(trial: Trial) -> str:
    two = jax.tree.map(lambda x: jnp.stack([x, x]), trial.cache)
    cut, ok = jax.vmap(lambda cache: jaxkv.seq_rm(cache, 0))(two)
    assert ok.all()
    return trial.goes_on(jax.tree.map(lambda x: x[1], cut), -1)


def begun(trial: Trial, **options: Any) -> tuple[Any, Any]:
    sampler = generation.make_sampler()
    return sampler, generation.init_decode(
        trial.cache, logits=trial.logits, sampler=sampler, **options
    ).state


def generate(trial: Trial) -> str:
    sampler, state = begun(trial)
    cache, state, *_ = picked = jaxkv.decode(
        trial.forward, None, trial.cache, state, num_tokens=3, sampler=sampler
    )
    assert (picked.tokens[0] == SAID[1:4]).all()
    return trial.goes_on(cache, TOKENS + 2)


def guess(trial: Trial) -> str:
    sampler, state = begun(trial)
    draft = generation.prompt_lookup([range(1, TOKENS + 1)], num_draft_tokens=2)
    cache, _, *_ = made = generation.speculate(
        trial.forward, None, trial.cache, state, drafter=draft, num_tokens=3, sampler=sampler
    )
    assert (made.tokens[0] == SAID[1:4]).all()
    return trial.goes_on(cache, TOKENS + 2)


def shared(trial: Trial) -> str:
    if (seq := trial.other(same_stream=True)) is None:
        return NONE
    cache = jaxkv.seq_cp(trial.cache, 0, seq).cache
    batch = jaxkv.make_batch([7], sequences=[[0, seq]])
    cache, *_ = jaxkv.prefill(trial.forward, None, cache, batch)
    assert cache.seq_pos_max(seq) == TOKENS
    return trial.goes_on(cache, TOKENS)


def search(trial: Trial) -> str:
    cache, *_ = beams = generation.beam(
        trial.forward, None, trial.cache, trial.logits, num_beams=2, num_tokens=2
    )
    assert (beams.tokens[0] == SAID[:2]).all()
    assert not any(map(int, cache.check().values()))
    return YES


def context_shift(trial: Trial) -> str:
    return trial.granted(
        *generation.context_shift(trial.cache, 0, num_keep=1, num_discard=2), TOKENS - 3
    )


def self_extend(trial: Trial) -> str:
    cache, ok, _ = generation.self_extend(trial.cache, 0, 0, group=2, width=4)
    return trial.granted(cache, ok, TOKENS // 2 - 1)


def requests(trial: Trial) -> str:
    ask = [serving.Request(prompt=[1, 2, 3], max_new_tokens=2)] * 4
    engine = serving.Engine(trial.forward, None, trial.empty, prefill_chunk=4, tokens_per_step=2)
    for request in ask:
        engine.submit(request)
    assert [result.tokens.tolist() for result in engine.results()] == [[4, 5]] * 4
    return YES


ROWS: dict[str, Callable[[Trial], str]] = {
    "a prompt, and a token more": prompt,
    "`plan_step` inside of `jit`": traced,
    "a token of two sequences": shared,
    "an edit under `vmap`": mapped,
    "`seq_rm` of a sequence": whole,
    "`seq_rm` of the last 2 tokens": end,
    "`seq_rm` of the last 6": half,
    "`seq_rm` in its middle": middle,
    "`seq_cp` within a stream": fork,
    "`seq_cp` to another stream": copy,
    "`seq_cp` of a part": part_of_it,
    "`seq_select`": select,
    "`extract` and `insert`": travel,
    "`snapshot.save` and `load`": file,
    "`seq_keep`": keep,
    "`seq_add`, `init_update`": move,
    "`seq_div`, `init_update`": divide,
    "`defrag_plan`": defrag,
    "a cache kept as a checkpoint": checkpoint,
    "`rewind`": back,
    "`decode`": generate,
    "`generation.speculate`": guess,
    "`generation.beam`": search,
    "`generation.context_shift`": context_shift,
    "`generation.self_extend`": self_extend,
    "`serving.Engine`": requests,
}


def tried(verb: Callable[[Trial], str], trial: Trial) -> str:
    """Try a verb: the result, or the name of the reason."""
    try:
        return verb(trial)
    except Refused as refusal:
        return str(refusal)
    except (ValueError, jaxkv.PlanRefusedError) as error:
        return type(error).__name__


def matrix() -> str:
    """Try every verb on every kind and draw the table in Markdown; equal rows are one row."""
    trials = {name: Trial(*column) for name, column in columns().items()}
    names: dict[tuple[str, ...], list[str]] = {}
    for name, verb in ROWS.items():
        names.setdefault(tuple(tried(verb, trial) for trial in trials.values()), []).append(name)
    lines = ["| | " + " | ".join(trials) + " |", "|---" * (len(trials) + 1) + "|"]
    for answers, same in names.items():
        lines.append(f"| {'; '.join(same)} | " + " | ".join(answers) + " |")
    return "\n".join(lines)


def parted(page: str) -> tuple[str, str, str]:
    """Split a page at the marks around its table."""
    head, rest = page.split("<!-- begin -->\n")
    table, tail = rest.split("\n<!-- end -->")
    return head + "<!-- begin -->\n", table, "\n<!-- end -->" + tail


if __name__ == "__main__":
    head, _, tail = parted(PAGE.read_text())
    PAGE.write_text(head + matrix() + tail)
