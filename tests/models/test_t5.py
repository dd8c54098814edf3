"""T5: tiny random models against transformers, through the loops of jaxkv."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxkv
import models
from jaxkv import loops, make_batch
from models.cli.main import main

DATA = Path(__file__).parent.parent / "data"
CLOSE = dict(rtol=0, atol=2e-5)
BEST = loops.sampling.make_sampler()
VARIANTS = ["t5_gated", "t5_tied"]


class Recorded:
    """A model, and what transformers did with it."""

    def __init__(self, name):
        self.model = models.load(DATA / name)
        with np.load(DATA / name / "run.npz") as run:
            self.run = dict(run)
        self.sources = np.split(self.run["sources"], [self.run["lengths"][0]])
        self.greedy, self.logits = self.run["greedy"], self.run["logits"]

    def read(self, sequences=(0, 1), **options):
        """A memory that holds the two sources."""
        options = {"cells": 96, "source_cells": 56, "sequences": 4} | options
        memory = self.model.make_memory(**options)
        batch = make_batch(self.sources, sequences=list(sequences))
        return jaxkv.encode(self.model.encoder, self.model.weights, memory, batch)

    def tell(self, memory, lists, sequences):
        """The memory with tokens told to sequences, and the logits of all of them."""
        count = sum(map(len, lists))
        batch = make_batch(lists, sequences=sequences, outputs=np.ones(count, bool))
        return jaxkv.prefill(self.model.forward, self.model.weights, memory, batch)


@pytest.fixture(scope="module", params=VARIANTS)
def recorded(request):
    return Recorded(request.param)


@pytest.mark.nightly
def test_two_sources_side_by_side_are_what_transformers_makes_of_each(recorded):
    """Prompts first, and then a token at a time."""
    memory = recorded.read()
    memory, logits = recorded.tell(memory, recorded.greedy[:, :16].tolist(), [0, 1])
    np.testing.assert_allclose(logits.reshape(2, 16, -1), recorded.logits[:, :16], **CLOSE)
    for i in range(16, 20):
        memory, logits = recorded.tell(memory, recorded.greedy[:, i : i + 1].tolist(), [0, 1])
        np.testing.assert_allclose(logits, recorded.logits[:, i], **CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "streams", [1, *(pytest.param(n, marks=pytest.mark.nightly) for n in (2, 4))]
)
def test_greedy_texts_are_those_of_generate(recorded, streams):
    memory = recorded.read(sequences=(1, 2), streams=streams)
    memory, logits = recorded.tell(memory, recorded.greedy[:, :1].tolist(), [1, 2])
    state, first = loops.begin(BEST, memory, logits, sequences=[1, 2])
    run = recorded.model.forward, BEST, recorded.model.weights
    *_, picked = jaxkv.decode(*run, memory, state, steps=23)
    found = np.concatenate([first.tokens, picked.tokens], axis=1)
    np.testing.assert_array_equal(found, recorded.greedy[:, 1:])


@pytest.mark.nightly
def test_forks_and_cuts_go_on_with_their_source(recorded):
    memory = recorded.read()
    memory, _ = recorded.tell(memory, recorded.greedy[:, :12].tolist(), [0, 1])
    memory = jaxkv.seq_cp(memory, 0, [2, 3], 0, 8)  # as it was after 8 tokens
    memory, _ = jaxkv.seq_rm(memory, 1, 10)
    memory, _ = jaxkv.seq_rm(memory, 0)  # the source of its forks stays
    lists = [recorded.greedy[1, 10:14].tolist(), recorded.greedy[0, 8:12].tolist()]
    _, logits = recorded.tell(memory, lists, [1, 3])
    np.testing.assert_allclose(logits[:4], recorded.logits[1, 10:14], **CLOSE)
    np.testing.assert_allclose(logits[4:], recorded.logits[0, 8:12], **CLOSE)


@pytest.mark.nightly
def test_beams_are_those_of_generate(recorded):
    memory = recorded.read()
    memory, logits = recorded.tell(memory, [[0]], [0])
    _, beams = loops.beam(
        recorded.model.forward,
        recorded.model.weights,
        memory,
        logits,
        width=3,
        steps=8,
        sequences=[0, 2, 3],
    )
    np.testing.assert_array_equal(beams.tokens[0], recorded.run["beam"][1:])
    np.testing.assert_allclose(beams.scores[0], recorded.run["score"], atol=1e-4)


@pytest.mark.nightly
def test_what_a_config_says(tmp_path, capsys):
    def told(name, **changes):
        config = json.loads((DATA / name / "config.json").read_text()) | changes
        kept = {key: value for key, value in config.items() if value is not None}
        (tmp_path / "config.json").write_text(json.dumps(kept))
        return models.load_shapes(tmp_path)

    for name, older in [("t5_gated", False), ("t5_tied", None)]:
        model, wanted = told(name), models.load(DATA / name)
        assert model.config == wanted.config
        shapes = jax.tree.map(lambda x: x.shape, (model.weights, wanted.weights))
        assert shapes[0] == shapes[1]
        # Older files say of the head what newer ones say of the scale.
        before = told(name, scale_decoder_outputs=None, tie_word_embeddings=older)
        assert before.config == wanted.config
    assert told("t5_gated", num_decoder_layers=None).config.layers == 3  # as many as the encoder
    for changes, text in [
        ({"feed_forward_proj": "gated-silu"}, "feed_forward_proj = 'gated-silu' where 'relu' or"),
        ({"relative_attention_max_distance": 4}, "more than half the buckets"),
        ({"num_layers": None}, "no num_layers"),
        ({"d_kv": None}, "no head_dim"),
    ]:
        with pytest.raises(models.ModelError, match=text):
            told("t5_gated", **changes)
    sizes = told("t5_tied").memory_shapes(cells=8, source_cells=16, sequences=2)
    keys = [part.buffers.k[0].shape for part in jaxkv.hybrid.parts_of(sizes)]
    assert keys == [(1, 3, 8, 8), (1, 3, 16, 8)]
    assert main(["generate", "--model", str(DATA / "t5_tied"), "a text"]) == 2
    assert "reads a source with an encoder" in capsys.readouterr().err
