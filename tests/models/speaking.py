"""Tiny models of the test data that generate meaningless letters."""

import functools
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import models
from models.chat.speaker import Speaker
from models.text.chat import render
from models.text.tokenizer import Tokenizer
from tests.models.tiny_files import DATA

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
CELLS = 64  # in most tests: programs of one size are shared


@functools.cache
def tiny(name):
    model = models.load(DATA / name)
    size = model.checkpoint.config["vocab_size"]
    vars(model)["stop_tokens"] = frozenset()
    vars(model)["tokenizer"] = Tokenizer(
        to_ids=lambda text, special: [ord(letter) % size for letter in text],
        to_bytes=lambda id: bytes([97 + id % 26]),
        size=size,
        control={},
        render=partial(render, TEMPLATE),
    )
    return model


@pytest.fixture(scope="session")
def speaker():
    return Speaker(model=tiny("llama_tied"), max_tokens=6, ubatch_size=32)


@pytest.fixture(scope="session")
def two_turns(speaker):
    """A chat of two turns; `copy_chat` before a test continues it, which donates its cache."""
    return say(speaker, speaker.begin(conversations=3, cells=CELLS), "One", "Two")


def say(speaker, chat, *messages, **options):
    for message in messages:
        chat = speaker.answer(speaker.ask(chat, message), **options)
    return chat


def copy_chat(chat):
    return replace(chat, cache=jax.tree.map(jnp.copy, chat.cache))


def next_answer(speaker, chat):
    return say(speaker, copy_chat(chat), "And then").now.turns[-1].answer
