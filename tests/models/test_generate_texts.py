"""`generate_texts`: batches of prompts, ends of texts, and compilation."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import jaxkv
from models.compiling import counting
from models.generate import generate_texts
from models.room import cells_for
from models.run import Options

PROMPTS = ["once upon", "a time", "one two"]


@pytest.fixture
def texts(letters_model):
    def texts(*, model=letters_model, on_compile=None, cells=256):
        tokens = [letters_model.tokenizer.prompt(prompt) for prompt in PROMPTS]
        options = Options(max_tokens=9, cells=cells)
        return generate_texts(model, tokens, options, on_compile=on_compile)

    return texts


def test_counting_counts_and_leaves_no_listener():
    with counting() as outer:
        with counting() as inner, counting(traces=True) as heard:
            jax.jit(lambda x: x * 5 + 1)(jnp.ones(3))
            assert 0 < inner() < heard()
        jax.jit(lambda x: x * 7 + 1)(jnp.ones(3))
        assert 0 < inner() < outer()


@pytest.mark.nightly
def test_generate_texts_stop_token_ends_its_text_alone(texts, letters_model):
    plain = texts().texts
    stop = next(t for t in plain[0].tokens[2:] if t not in plain[0].tokens[:2])
    at = plain[0].tokens.index(stop)
    model = replace(letters_model)
    vars(model)["stop_tokens"] = frozenset({stop, plain[1].tokens[0]})
    ended = texts(model=model).texts
    assert (ended[0].tokens, ended[0].finish) == (plain[0].tokens[:at], "stop")
    assert ended[0].text == letters_model.tokenizer.decode(ended[0].tokens)
    assert (ended[1].tokens, ended[1].text, ended[1].finish) == ([], "", "stop")
    if not model.stop_tokens & set(plain[2].tokens):
        assert ended[2] == plain[2]


def test_generate_texts_too_long_is_refused_before_compiling(texts):
    with pytest.raises(jaxkv.PlanRefusedError):
        texts(cells=10, on_compile=lambda done, total: pytest.fail("compiling"))


def test_cells_for_rounds_up_to_256():
    assert cells_for([[0] * 100, [0] * 28], 65) == 256
    assert cells_for([[0] * 100, [0] * 29], 65) == 512
    assert cells_for([[0] * 192, [0] * 192], 65, "split") == 256
    assert cells_for([[0] * 193, [0] * 29], 65, "split") == 512
