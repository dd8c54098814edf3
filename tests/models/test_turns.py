"""Chat templates: the tokens that a turn adds, and the rest after turns are removed."""

from dataclasses import replace
from functools import partial

import pytest

from models.checkpoints.open import open_checkpoint
from models.errors import ModelError
from models.text.chat import render
from models.text.turns import frame_of, tokens_of_turn


@pytest.fixture(scope="module")
def tokenizer():
    """That of SmolLM2; its weights are not read."""
    return open_checkpoint("smollm2").tokenizer


def test_tokens_of_turn_together_are_those_of_template(tokenizer):
    messages, tokens = [*BRIEF], []
    for question, answer in (("Who are you?", "A model."), ("Since when?", ""), ("Ah", "Yes, 7.")):
        messages.append({"role": "user", "content": question})
        tokens += tokens_of_turn(tokenizer, messages) + tokenizer.encode(answer)
        messages.append({"role": "assistant", "content": answer})
    messages.append({"role": "user", "content": "Go on"})
    tokens += tokens_of_turn(tokenizer, messages)
    assert tokens == tokenizer.prompt(tokenizer.chat(messages), special=True)


TEMPLATES = {
    "chatml": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    # Like Gemma's: no separate system role, and contents are stripped.
    "folded": "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first, rest = '', messages %}{% endif %}"
    "{% for m in rest %}<|im_start|>{{ m.role }}\n{{ first if loop.first else '' }}"
    "{{ m.content | trim }}<|im_end|>\n{% endfor %}<|im_start|>model\n",
    # Like that of Llama 2: no control token before an answer.
    "brackets": "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|im_end|>{% endif %}{% endfor %}",
}
BRIEF = ({"role": "system", "content": "Be brief."},)
FRAMES = [(name, ()) for name in TEMPLATES] + [("chatml", BRIEF), ("folded", BRIEF)]


@pytest.mark.parametrize(("name", "system"), FRAMES, ids=str)
def test_frame_of_without_first_turn_is_a_conversation(tokenizer, name, system):
    tokenizer = replace(tokenizer, render=partial(render, TEMPLATES[name]))
    frame = frame_of(tokenizer, system)
    first = [*system, {"role": "user", "content": "One"}]
    both = [*first, {"role": "assistant", "content": "Uno"}, {"role": "user", "content": "Two"}]
    one, two = tokens_of_turn(tokenizer, first), tokens_of_turn(tokenizer, both)
    rest = one[: frame.keep] + two[frame.closing :]
    assert rest == tokens_of_turn(tokenizer, [*system, {"role": "user", "content": "Two"}])


def test_turns_of_template_that_leaves_out_messages_raises(speaker):
    bare, template = replace(speaker.model), "{{ messages[-1].content }}"
    vars(bare)["tokenizer"] = replace(speaker.model.tokenizer, render=partial(render, template))
    with pytest.raises(ModelError, match="leaves out messages of a conversation"):
        replace(speaker, model=bare).begin(conversations=1, cells=10**12)
