"""Tokenizers: the same ids as the original libraries, and text of complete characters."""

import json
import random
from datetime import datetime
from functools import partial
from io import BytesIO

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, normalizers, pre_tokenizers, processors, trainers

from models.checkpoints.open import open_checkpoint
from models.errors import ModelError
from models.text.chat import render
from models.text.tokenizer import Tokenizer
from tests.models import tiny_files
from tests.models.golden import read_golden

TEXT = """Once upon a time there was a little table of cells. It's 2024, and the cells remember
12345 positions; they're kept, moved and forgotten.\n\n\n    def shift(cell):\n\treturn cell + 1\n
Der Schlüssel passt überall: größer, schöner. Ключ и значение. 鍵と値 🗝️ — naïve café…
"""
HARD = [
    *("", " ", "  two spaces"),
    "I'LL say it's 1234567 o'clock\n\n  and   then ",
    "\r\n\t x\u00a0y\u3000z",
    "👩‍👩‍👧‍👦 flags 🇯🇵 and é e\u0301",
    "鍵と値 ключ מפתח x㐀 x㑀 x㔀 x㘀 [key] (value",
    "a\x00b\x7f",
]
CUTS = ["2345", " xぁ"]  # divided before "45", and before a byte that follows " x" above
REFUSED = [
    (None, "no chat template"),
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{{ messages.append(1) }}", "do not fit the model.s chat template"),
    ("{{ messages.__class__.__mro__ }}", "do not fit the model.s chat template"),
    ("{% if %}", "do not fit the model.s chat template"),
]


@pytest.fixture(scope="module")
def smollm2():
    return open_checkpoint().tokenizer


def check_recorded(tokenizer, model):
    recorded = read_golden("models")
    for run in recorded[model]:
        assert tokenizer.prompt(run["prompt"]) == run["tokens"]
        assert tokenizer.decode(run["tokens"]) == run["prompt"]
        assert tokenizer.decode(run["greedy"]) == run["text"]
    tokens = recorded[f"{model}_nll"]["tokens"]
    assert tokenizer.prompt(tokenizer.decode(tokens)) == tokens


def test_tokenizer_smollm2_matches_recorded(smollm2):
    check_recorded(smollm2, "smollm2")
    assert (smollm2.eos, smollm2.prefix, smollm2.suffix) == (2, (), ())
    assert smollm2.named_ends == {0, 2} and smollm2.size == 49152


@pytest.mark.nightly
def test_tokenizer_gemma3_matches_recorded(gemma3):
    tokenizer = gemma3.tokenizer
    check_recorded(tokenizer, "gemma3")
    assert (tokenizer.eos, tokenizer.prefix) == (1, (2,))
    assert tokenizer.prompt("<bos>x", special=True).count(2) == 1
    assert tokenizer.encode("<end_of_turn>", special=True) == [106]
    for text in [*HARD, TEXT]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def stream_ids(tokenizer, ids):
    stream = tokenizer.stream()
    return "".join(map(stream.feed, ids)), stream.end()


def test_decode_and_stream_give_back_encoded_text(smollm2):
    rng = random.Random(0)
    noise = ["".join(chr(rng.randrange(1, 0xD800)) for _ in range(50)) for _ in range(50)]
    for text in [*HARD, TEXT, *noise]:
        ids = smollm2.encode(text)
        assert smollm2.decode(ids) == text and stream_ids(smollm2, ids) == (text, "")


def test_stream_of_any_ids_equals_decode(smollm2):
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(smollm2.size) for _ in range(20)]
        assert "".join(stream_ids(smollm2, ids)) == smollm2.decode(ids)
    cut = smollm2.encode("🗝")[:-1]
    assert cut and stream_ids(smollm2, cut) == ("", "\ufffd")  # complete characters
    assert smollm2.decode([10**6, -1]) == ""  # not tokens


def test_encode_control_tokens_on_request(smollm2):
    text = "<|im_start|>user\nhi<|im_end|>"
    plain, special = smollm2.encode(text), smollm2.encode(text, special=True)
    assert not {1, 2} & set(plain) and (special[0], special[-1]) == (1, 2)
    assert smollm2.decode(special) == "user\nhi"
    assert smollm2.decode(special, special=True) == text
    assert smollm2.encode(text) == plain  # the next call is unaffected


def write_gguf(path, fields):
    named = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    return tiny_files.write_gguf(path, {}, fields=named)


def train_byte_level(cut):
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer, inner.decoder = cut, decoders.ByteLevel()
    options = dict(vocab_size=1000, special_tokens=["<|begin|>", "<|im_end|>"], show_progress=False)
    letters = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        [TEXT, *HARD], trainers.BpeTrainer(initial_alphabet=letters, **options)
    )
    before = dict(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    inner.post_processor = processors.TemplateProcessing(**before)
    return inner


def write_folder(folder, inner=None, **settings):
    params = {"none": np.zeros(1, np.float32)}
    tiny_files.write_folder(folder, params, tokenizer_config=settings)
    if inner is not None:
        inner.save(str(folder / "tokenizer.json"))
    return open_checkpoint(folder)


def split(*patterns):
    cuts = [pre_tokenizers.Split(tokenizers.Regex(one), "isolated") for one in patterns]
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([*cuts, letters])


NEWER = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN35 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
# The letters of the vocabulary of DeepSeek V2 in the tested texts.
CASED, MARKS = r"\s?[A-Za-zÀ-ÖØ-öЀ-ӿ]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+"
EAST_ASIAN = "[一-龥ࠀ-一가-\ud7ff]+"


@pytest.mark.parametrize(
    ("pre", "cut"),
    [
        ("gpt-2", pre_tokenizers.ByteLevel(add_prefix_space=False)),
        ("qwen2", split(NEWER % r"\p{N}")),
        ("llama-bpe", split(NEWER % r"\p{N}{1,3}")),
        ("qwen35", split(QWEN35)),
        ("deepseek-v3", split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),
        ("gpt-4o", split(O200K)),
        ("dbrx", split(NEWER % r"\p{N}{1,3}")),
        ("tekken", split(O200K.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace("{1,3}", ""))),
        ("deepseek-llm", split("[\r\n]", CASED, MARKS, r"\s+$", EAST_ASIAN, r"\p{N}+")),
        ("deepseek-coder", split("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", EAST_ASIAN, r"\p{N}")),
        ("default", split(r"[\p{P}$+<=>^~|]+", GPT_2, r"\p{N}+", "[0-9]{3}")),
    ],
)
def test_byte_level_folder_and_gguf_match_library(tmp_path, pre, cut):
    inner = train_byte_level(cut)
    named = dict(bos_token={"__type": "AddedToken", "content": "<|begin|>"}, eos_token="<|im_end|>")
    folder = write_folder(tmp_path / "hf", inner, **named).tokenizer
    model = json.loads(inner.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    kinds = [3, 3] + [1] * (len(vocabulary) - 2)
    fields = {"model": "gpt2", "pre": pre, "tokens": vocabulary, "token_type": kinds}
    fields |= {"merges": [" ".join(merge) for merge in model["merges"]]}
    fields |= {"bos_token_id": 0, "eos_token_id": 1, "add_bos_token": True}
    file = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", fields)).tokenizer
    for text in [*HARD, *CUTS, TEXT]:
        ids = inner.encode(text, add_special_tokens=False).ids
        assert folder.encode(text) == file.encode(text) == ids
        assert folder.prompt(text) == file.prompt(text) == [0, *ids]
        assert folder.decode(ids) == file.decode(ids) == text == inner.decode(ids)
    for tokenizer in (folder, file):
        assert tokenizer.encode("a<|im_end|>", special=True)[-1] == 1
        assert (tokenizer.prefix, tokenizer.eos, tokenizer.named_ends) == ((0,), 1, {1})
        assert tokenizer.control == {"<|begin|>": 0, "<|im_end|>": 1}


@pytest.mark.parametrize("space_first", [True, False])
def test_sentencepiece_gguf_matches_library(tmp_path, space_first):
    trained, own = BytesIO(), ["<|im_end|>", "▁▁"]
    options = dict(model_type="bpe", vocab_size=420, byte_fallback=True, character_coverage=0.98)
    options |= dict(normalization_rule_name="identity", remove_extra_whitespaces=False)
    options |= dict(add_dummy_prefix=space_first, user_defined_symbols=own, minloglevel=2)
    options |= dict(sentence_iterator=iter(TEXT.splitlines() * 3), model_writer=trained)
    sentencepiece.SentencePieceTrainer.train(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    ids = range(theirs.vocab_size())

    def kind(id):
        asked = ((theirs.is_unknown, 2), (theirs.is_control, 3), (theirs.is_byte, 6))
        known = (number for holds, number in asked if holds(id))
        return next(known, 4 if theirs.id_to_piece(id) in own else 1)

    fields = {
        "model": "llama",
        # llama.cpp's converter writes spaces as spaces in user-defined tokens.
        "tokens": [theirs.id_to_piece(id).replace("▁▁", "  ") for id in ids],
        "scores": [theirs.get_score(id) for id in ids],
        "token_type": [kind(id) for id in ids],
        "bos_token_id": theirs.bos_id(),
        "eos_token_id": theirs.eos_id(),
        "add_space_prefix": space_first,
    }
    ours = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", fields)).tokenizer
    for text in [*HARD[:-1], TEXT]:
        assert ours.encode(text) == theirs.encode(text), text
        assert ours.prompt(text) == [theirs.bos_id(), *theirs.encode(text)]
        assert ours.decode(ours.encode(text)) == text
    assert ours.encode("</s>") != ours.encode("</s>", special=True) == [theirs.eos_id()]
    # The end of a turn is a control token, even if the file calls it user-defined.
    end = theirs.piece_to_id("<|im_end|>")
    assert (
        ours.named_ends == {theirs.eos_id(), end} == {*ours.encode("</s><|im_end|>", special=True)}
    )
    assert end not in ours.encode("<|im_end|>")
    # A stream continues a text, so the space of its first word stays.
    assert ours.stream().feed(theirs.piece_to_id("▁t")) == " t"


def test_gemma4_gguf_matches_library(tmp_path):
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<turn|>"]
    special += [f"<0x{i:02X}>" for i in range(256)]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")  # of training
    options = dict(vocab_size=600, special_tokens=special, show_progress=False)
    inner.train_from_iterator([TEXT] * 2, trainers.BpeTrainer(limit_alphabet=60, **options))
    model = json.loads(inner.to_str())["model"]
    vocabulary = sorted(model["vocab"], key=model["vocab"].get)
    inner.pre_tokenizer = pre_tokenizers.Sequence([])
    fields = {"model": "gemma4", "tokens": vocabulary, "bos_token_id": 2, "eos_token_id": 1}
    fields["token_type"] = [3, 3, 3, 2, 3] + [6] * 256 + [1] * (len(vocabulary) - 261)
    fields["merges"] = [" ".join(merge) for merge in model["merges"]]
    file = open_checkpoint(write_gguf(tmp_path / "tiny.gguf", fields)).tokenizer
    for text in [*HARD, *CUTS, TEXT]:
        ids = inner.encode(text).ids
        assert file.encode(text) == ids and file.prompt(text) == [2, *ids]
        assert file.decode(ids) == text
    assert file.encode("a<eos>", special=True)[-1] == file.eos == 1
    assert 4 in file.named_ends


PIECES = {
    "model": "llama",
    "tokens": ["<unk>", "<s>", "</s>", "▁", "a", "b", "▁a", *(f"<0x{i:02X}>" for i in range(256))],
    "token_type": [2, 3, 3, 1, 1, 1, 1] + [6] * 256,
}
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture
def tokenizer_of(tmp_path):
    return lambda fields: open_checkpoint(write_gguf(tmp_path / "tiny.gguf", fields)).tokenizer


def test_gguf_ids_left_out_are_those_of_llama_cpp(tokenizer_of):
    pieces = tokenizer_of(PIECES)
    assert (pieces.prefix, pieces.eos) == ((1,), 2) and pieces.prompt("a b") == [1, 6, 3, 5]
    assert tokenizer_of(PIECES | {"add_bos_token": False}).prefix == ()
    letters = tokenizer_of({"model": "gpt2", "pre": "llama-bpe", "tokens": LETTERS})
    assert (letters.prefix, letters.eos) == ((), None)


def test_gguf_with_an_empty_piece(tokenizer_of):
    more = {"tokens": [*PIECES["tokens"], ""], "token_type": [*PIECES["token_type"], 1]}
    pieces = tokenizer_of(PIECES | more)
    assert pieces.prompt("a b") == [1, 6, 3, 5] and pieces.decode([4, 263]) == "a"


def test_gguf_ids_outside_of_the_vocabulary_are_left_out(tmp_path, tokenizer_of):
    ids = dict.fromkeys(("bos_token_id", "eos_token_id", "padding_token_id"), 2**32 - 1)
    pieces = tokenizer_of(PIECES | ids | {"unknown_token_id": 1000})
    assert (pieces.prefix, pieces.eos) == ((1,), 2) and pieces.prompt("a b") == [1, 6, 3, 5]
    fields = {"model": "gpt2", "tokens": LETTERS, "bos_token_id": 256, "add_bos_token": True}
    assert tokenizer_of(fields).prefix == ()
    fields |= {"eos_token_id": 2**32 - 1, "eot_token_id": 3, "eos_token_ids": [4, 5]}
    assert open_checkpoint(write_gguf(tmp_path / "ends.gguf", fields)).end_tokens == {3, 4, 5}


@pytest.mark.parametrize("key", ["add_bos_token", "add_space_prefix"])
@pytest.mark.parametrize("value", ["false", 0, [False]])
def test_gguf_flag_of_another_type_is_refused(tokenizer_of, key, value):
    with pytest.raises(ModelError, match=f"expected true or false for tokenizer.ggml.{key}"):
        tokenizer_of(PIECES | {key: value})


def test_gguf_text_of_several_ids_is_decoded_from_each(tokenizer_of):
    letters = tokenizer_of({"model": "gpt2", "tokens": [*LETTERS, "!"]})
    assert letters.decode([LETTERS.index("!"), 256, 257, -1]) == "!!" and letters.size == 257


def test_folder_with_sentencepiece_rules(tmp_path):
    vocabulary = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5}
    vocabulary |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    options = dict(byte_fallback=True, unk_token="<unk>")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [("▁", "a")], **options))
    inner.add_special_tokens(["<s>"])
    spaces = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    inner.normalizer = normalizers.Sequence(spaces)
    pieces = [decoders.Replace("▁", " "), decoders.ByteFallback()]
    inner.decoder = decoders.Sequence([*pieces, decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    before = dict(single="<s> $A", special_tokens=[("<s>", 1)])
    inner.post_processor = processors.TemplateProcessing(**before)
    tokenizer = write_folder(tmp_path / "hf", inner, bos_token="<s>").tokenizer
    assert tokenizer.prompt("a b") == [1, 5, 2, 4]
    for text in ("a b", "鍵 a", " a"):
        assert tokenizer.decode(tokenizer.prompt(text)) == text


def make_chat_tokenizer(template):
    renders = template and partial(render, template, bos_token="<b>", eos_token="<e>")
    return Tokenizer(to_ids=None, to_bytes=None, size=256, control={}, render=renders)


def test_chat_template_functions():
    template = (
        "{{ bos_token }}{% for m in messages %}\n    {{ m.content | tojson }}\n"
        "{% if loop.first %}{% break %}{% endif %}{% endfor %}"
        "{{ eos_token }}{{ tools }}{{ strftime_now('%Y') }}{{ add_generation_prompt }}"
    )
    said = make_chat_tokenizer(template).chat([{"role": "user", "content": "é<"}], tools=3)
    assert said == f'<b>    "é<"\n<e>3{datetime.now().year}True'


def test_chat_template_marks_answers():
    said = "{% if m.role == 'user' %}?{% else %}{% generation %}{{ m.content }}{% endgeneration %}"
    template = "{% for m in messages %}" + said + "{% endif %}{% endfor %}"
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    assert make_chat_tokenizer(template).chat(turns) == "?a?"


def test_chat_refused_templates_raise():
    for template, message in REFUSED:
        with pytest.raises(ModelError, match=message):
            make_chat_tokenizer(template).chat([{"role": "user", "content": "hi"}])


def test_folder_chat_template_places(tmp_path):
    inner = train_byte_level(pre_tokenizers.ByteLevel())
    hi = [{"role": "user", "content": "hi"}]
    several = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    for template, said in (("s", "s"), (several, "d")):
        held = write_folder(tmp_path / "a", inner, chat_template=template)
        assert held.tokenizer.chat(hi) == said
    (tmp_path / "a" / "chat_template.jinja").write_text("f")  # has priority
    assert open_checkpoint(tmp_path / "a").tokenizer.chat(hi) == "f"


def test_folder_chat_template_may_use_every_special_token(tmp_path):
    inner, names = train_byte_level(pre_tokenizers.ByteLevel()), ("pad", "sep", "unk", "mask")
    inner.add_special_tokens([f"<{name}>" for name in names])
    tokens = {f"{name}_token": f"<{name}>" for name in names}
    template = "{{ messages[0].content }}" + "".join(f"{{{{ {name} }}}}" for name in tokens)
    held = write_folder(tmp_path / "a", inner, chat_template=template, **tokens)
    said = held.tokenizer.chat([{"role": "user", "content": "hi"}])
    assert said == "hi<pad><sep><unk><mask>"


@pytest.mark.parametrize("side", ["left", "right"])
def test_folder_truncation_and_padding_have_no_effect(tmp_path, side):
    inner, prompts = train_byte_level(pre_tokenizers.ByteLevel()), []
    for name in ("plain", "cut"):
        held = write_folder(tmp_path / name, inner, model_max_length=4)
        prompts.append([held.tokenizer.prompt(text) for text in ("a", TEXT)])
        inner.enable_truncation(4, direction=side)
        inner.enable_padding(direction=side, length=16)
    assert prompts[0] == prompts[1] and len(prompts[0][1]) > 16


def test_tokenizer_refused_files_raise(tmp_path):
    def file(**fields):
        return open_checkpoint(write_gguf(tmp_path / f"{fields.get('model')}.gguf", fields))

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    broken = [write_folder(tmp_path / name) for name in ("cut", "odd", "settings")]
    for name, text in (("cut", "{"), ("odd", "{}"), ("settings", "{}")):
        (tmp_path / name / "tokenizer.json").write_text(text)
    (tmp_path / "settings" / "tokenizer_config.json").write_text("[")
    for held, message in [
        (file(model="bert", tokens=["a"]), "tokenizer of kind .*, got 'bert'"),
        (file(model="gpt2", pre="odd", tokens=["a"]), r"qwen2.*, got 'odd'"),
        (file(), r"None\.gguf has no tokenizer"),
        (file(model="none"), r"none\.gguf has no tokenizer"),
        (write_folder(tmp_path / "bare"), r"no tokenizer\.json"),
        (broken[0], r"/cut/tokenizer\.json is not JSON"),
        (broken[1], r"/odd/tokenizer\.json or tokenizer_config\.json cannot be read"),
        (broken[2], r"/settings/tokenizer_config\.json is not JSON"),
        (write_folder(tmp_path / "words", words), r"/words/tokenizer\.json: .*decoder, got none"),
    ]:
        with pytest.raises(ModelError, match=message):
            _ = held.tokenizer
    assert file(eos_token_id=5).stop_tokens == {5}  # token ids suffice
