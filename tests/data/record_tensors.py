"""Record what Hugging Face transformers makes of folders with unusual tensors.

Run where torch 2.13 and transformers 5.24 are installed, after `record_settings.py`: `PYTHONPATH=.
python tests/data/record_tensors.py`. It writes `settings/tensors.json.gz`.

A folder here is the base folder of a family in `settings`, with files added, changed or removed.
Values of a tensor follow from a name, which is not always its own: `old.lm_head.weight` gives other
values than `lm_head.weight`.
"""

import json
import logging
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from tests.data.record_settings import logits_of
from tests.models import recorded_settings as recorded

Content = dict[str, tuple[str, tuple[int, ...], str]]
"""Name of a tensor -> name that its values follow from, its shape, its type."""
Case = tuple[str, str, dict[str, Any], dict[str, Content], dict[str, Any]]
"""Name, family, config, safetensors files, JSON files."""
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
VISION = dict(hidden_size=8, image_size=8, intermediate_size=8, num_attention_heads=2)
VISION |= dict(num_hidden_layers=1, patch_size=4)


def content(shapes: recorded.Shapes) -> Content:
    return {name: (name, shape, "F32") for name, shape in shapes.items()}


def tensor_like(
    name: str, like: Content, at: str, kind: str = "F32"
) -> tuple[str, tuple[int, ...], str]:
    """Values that follow from `name`, with the shape of tensor `at`."""
    return name, like[at][1], kind


def rename_tensors(one: Content, *pairs: tuple[str, str]) -> Content:
    """Tensors under other names, with the same values."""
    out = {}
    for name, value in one.items():
        for old, new in pairs:
            if re.match(old, name):
                name = re.sub(old, new, name, count=1)
                break
        out[name] = value
    return out


def without(one: Content, *names: str) -> Content:
    return {name: value for name, value in one.items() if name not in names}


EMBEDDINGS = {"mamba2": "backbone.embeddings.weight", "t5": "shared.weight"}
HEAD = "lm_head.weight"
FAMILIES = "llama mistral qwen2 qwen3 qwen3_moe olmo2 gemma3_text mamba2 granitemoehybrid"
FAMILIES += " recurrent_gemma lfm2 falcon_h1 qwen3_next deepseek_v2 deepseek_v3 gpt_oss t5"


def heads(bases: dict[str, recorded.Variant]) -> Iterator[Case]:
    """Every family: tied or not or unsaid, with and without a head, with another embedding."""
    for family, base in bases.items():
        embedding = EMBEDDINGS.get(family, "model.embed_tokens.weight")
        tensors = content(base.shapes)
        head = {HEAD: tensor_like(HEAD, tensors, embedding)}
        neither = without(tensors, HEAD)
        for tied in (True, False, None):
            config = base.config | {"tie_word_embeddings": tied}
            if tied is None:
                config.pop("tie_word_embeddings")
            yield f"{family}: tied {tied}, head", family, config, {FILE: neither | head}, {}
            yield f"{family}: tied {tied}, no head", family, config, {FILE: neither}, {}
            alone = without(neither, embedding) | head
            yield f"{family}: tied {tied}, head alone", family, config, {FILE: alone}, {}


def gemmas(base: recorded.Variant) -> Iterator[Case]:
    """A text_config and a top level that agree or not, with and without a head."""
    text = content(base.shapes)
    left_out = "tie_word_embeddings", "architectures"
    inner = {key: value for key, value in base.config.items() if key not in left_out}
    names = ("^model", "language_model.model"), ("^lm_head", "language_model.lm_head")
    head = {"language_model.lm_head.weight": tensor_like(HEAD, text, "model.embed_tokens.weight")}
    for top in (True, False, None):
        for below in (True, False, None):
            for present in (True, False):
                tie = {} if below is None else {"tie_word_embeddings": below}
                config = {"model_type": "gemma3", "text_config": inner | tie}
                config |= {"vision_config": VISION | {"model_type": "siglip_vision_model"}}
                config["mm_tokens_per_image"] = 4
                config["architectures"] = ["Gemma3ForConditionalGeneration"]
                config |= {} if top is None else {"tie_word_embeddings": top}
                tensors = rename_tensors(text, *names) | (head if present else {})
                has = "head" if present else "no head"
                name = f"gemma3: top tied {top}, text tied {below}, {has}"
                yield name, "gemma3", config, {FILE: tensors}, {}
    config = config | {"tie_word_embeddings": False}
    tops = {HEAD: head["language_model.lm_head.weight"]}
    models = "model.language_model language_model.model language_model model model.text_model"
    for old, new in [*(("^model", new) for new in models.split()), ("^model\\.", "")]:
        tensors = rename_tensors(text, (old, new)) | tops
        yield f"gemma3: names of {new or 'nothing'}", "gemma3", config, {FILE: tensors}, {}


def idefics(base: recorded.Variant) -> Iterator[Case]:
    inner = base.config | {"pad_token_id": 0}
    config = {"model_type": "idefics3", "text_config": inner, "image_token_id": 47}
    config |= {"vision_config": VISION | {"model_type": "idefics3_vision"}, "scale_factor": 2}
    text = content(base.shapes)
    for tied in (None, True, False):
        tie = {} if tied is None else {"tie_word_embeddings": tied}
        for new in ("model.text_model", "model.language_model", "model"):
            tensors = rename_tensors(text, ("^model", new))
            name = f"idefics3: names of {new}, tied {tied}"
            yield name, "idefics3", config | tie, {FILE: tensors}, {}


def names(base: recorded.Variant) -> Iterator[Case]:
    config, text = base.config, content(base.shapes)
    news = "model.text_model. model.language_model. language_model.model. language_model. "
    news += "transformer. model.model. module.model. _orig_mod.model. base_model.model.model."
    for new in ("", *news.split()):
        tensors = rename_tensors(text, (r"^model\.", new))
        yield f"llama: names of {new or 'nothing'}", "llama", config, {FILE: tensors}, {}
    tensors = without(rename_tensors(text, (r"^model\.", "")), HEAD)
    yield "llama: names of nothing, no head", "llama", config, {FILE: tensors}, {}
    tied = config | {"tie_word_embeddings": True}
    yield "llama: names of nothing, no head, tied", "llama", tied, {FILE: tensors}, {}
    half = rename_tensors(text, (r"^model\.layers\.0\.", "layers.0."))
    yield "llama: names of nothing in one layer", "llama", config, {FILE: half}, {}
    both = text | {"norm.weight": tensor_like("other.norm.weight", text, "model.norm.weight")}
    yield "llama: a norm under both names", "llama", config, {FILE: both}, {}
    pairs = ("^model", "language_model.model"), ("^lm_head", "language_model.lm_head")
    whole = rename_tensors(text, *pairs)
    yield "llama: all names of language_model", "llama", config, {FILE: whole}, {}


def missing(bases: dict[str, recorded.Variant]) -> Iterator[Case]:
    """Tensors absent, too many, or of other shapes and types."""
    for family in ("llama", "mistral", "qwen2", "olmo2"):
        base = bases[family]
        text = content(base.shapes)
        biases = {}
        for one in "qkv":
            weight = f"model.layers.0.self_attn.{one}_proj.weight"
            bias = weight.replace("weight", "bias")
            biases[bias] = (bias, base.shapes[weight][:1], "F32")
        if family != "qwen2":
            yield f"{family}: biases of q, k, v", family, base.config, {FILE: text | biases}, {}
        else:
            yield "qwen2: no biases", family, base.config, {FILE: without(text, *biases)}, {}
    base, text = bases["llama"], content(bases["llama"].shapes)
    config, layer = base.config, "model.layers.1."
    biased = config | {"attention_bias": True}
    yield "llama: attention_bias, no biases", "llama", biased, {FILE: text}, {}
    for name in ("model.norm.weight", f"{layer}input_layernorm.weight"):
        yield f"llama: no {name}", "llama", config, {FILE: without(text, name)}, {}
    for name in (f"{layer}mlp.up_proj.weight", f"{layer}self_attn.q_proj.weight"):
        yield f"llama: no {name}", "llama", config, {FILE: without(text, name)}, {}
    gone = without(text, *(name for name in text if name.startswith(layer)))
    yield "llama: no layer 1", "llama", config, {FILE: gone}, {}
    more = text | {n.replace(".1.", ".2."): value for n, value in text.items() if ".1." in n}
    yield "llama: a layer more", "llama", config, {FILE: more}, {}
    rotary = text | {"model.layers.0.self_attn.rotary_emb.inv_freq": ("other.sinks", (8,), "F32")}
    yield "llama: inv_freq of other values", "llama", config, {FILE: rotary}, {}
    query = "model.layers.0.self_attn.q_proj.weight"
    yield "llama: unknown tensor", "llama", config, {FILE: text | {"extra.weight": text[query]}}, {}
    up = f"{layer}mlp.up_proj.weight"
    for title, name, shape in [
        ("a norm too short", "model.norm.weight", (16,)),
        ("a norm of two axes", "model.norm.weight", (1, 32)),
        ("q transposed", query, base.shapes[query][::-1]),
        ("up and down transposed", up, base.shapes[up][::-1]),
        ("a larger vocabulary", "model.embed_tokens.weight", (64, 32)),
        ("a smaller head", HEAD, (40, 32)),
    ]:
        changed = text | {name: (name, shape, "F32")}
        yield f"llama: {title}", "llama", config, {FILE: changed}, {}
    for kind in ("F16", "BF16", "F64", "F8_E4M3", "I8"):
        changed = text | {query: (query, base.shapes[query], kind)}
        yield f"llama: q in {kind}", "llama", config, {FILE: changed}, {}
    base, text = bases["qwen3_moe"], content(bases["qwen3_moe"].shapes)
    gone = [name for name in text if ".0.mlp.experts.5." in name]
    yield "qwen3_moe: no expert 5", "qwen3_moe", base.config, {FILE: without(text, *gone)}, {}
    gone = [name for name in text if name.endswith("layers.0.mlp.experts.5.up_proj.weight")]
    yield "qwen3_moe: no up of expert 5", "qwen3_moe", base.config, {FILE: without(text, *gone)}, {}
    seven = {name.replace(".5.", ".6."): text[name] for name in text if ".experts.5." in name}
    yield "qwen3_moe: an expert more", "qwen3_moe", base.config, {FILE: text | seven}, {}


def files(base: recorded.Variant) -> Iterator[Case]:
    """Several files in a folder. Values of tensors of `old` follow from other names."""
    config, text = base.config, content(base.shapes)
    old = {name: (f"old.{name}", shape, kind) for name, (_, shape, kind) in text.items()}
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    first = {name: text[name] for name in list(text)[::2]}
    second = without(text, *first)
    listed = {name: shards[name in second] for name in text}
    index = {INDEX: {"metadata": {"total_size": 1}, "weight_map": listed}}
    olds = {shards[0]: {k: old[k] for k in first}, shards[1]: {k: old[k] for k in second}}
    halves = {shards[0]: first, shards[1]: second}
    lists = {INDEX: {"metadata": {}, "weight_map": dict.fromkeys(text, FILE)}}
    few = {name: shard for name, shard in listed.items() if "norm" not in name}
    some = {INDEX: {"metadata": {}, "weight_map": few}}
    swapped = {INDEX: {"metadata": {}, "weight_map": {k: shards[k in first] for k in text}}}
    doubled = {shards[0]: first | olds[shards[1]], shards[1]: second | olds[shards[0]]}
    named = config | {"transformers_weights": "weights.safetensors"}
    for title, files, jsons in [
        ("shards and index", halves, index),
        ("old shards and their index, newer model", {FILE: text} | olds, index),
        ("index of absent shards, model", {FILE: text}, index),
        ("shards, no index", halves, {}),
        ("shards, no index, newer model", {FILE: text} | olds, {}),
        ("one shard absent", {shards[0]: first}, index),
        ("index of model", {FILE: text}, lists),
        ("index without norms that the shards have", halves, some),
        ("index without metadata", halves, {INDEX: {"weight_map": listed}}),
        ("index names the other shard", halves, swapped),
        ("every tensor in both shards", doubled, index),
        ("model.fp16 beside model", {FILE: text, "model.fp16.safetensors": old}, {}),
        ("model.fp16 alone", {"model.fp16.safetensors": text}, {}),
        ("consolidated beside model", {FILE: text, "consolidated.safetensors": old}, {}),
        ("consolidated alone", {"consolidated.safetensors": text}, {}),
        ("another name alone", {"weights.safetensors": text}, {}),
        ("transformers_weights", {FILE: old, "weights.safetensors": text}, {}),
        ("adapter beside model", {FILE: text, "adapter_model.safetensors": {}}, {}),
    ]:
        kept = named if title == "transformers_weights" else config
        yield f"files: {title}", "llama", kept, files, jsons


def t5s(base: recorded.Variant) -> Iterator[Case]:
    tensors = without(content(base.shapes), HEAD)
    shared = "shared.weight"
    for tied in (True, False, None):
        config = base.config | {"tie_word_embeddings": tied}
        if tied is None:
            config.pop("tie_word_embeddings")
        for names in (
            ["encoder.embed_tokens.weight"],
            ["decoder.embed_tokens.weight"],
            ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight", HEAD],
        ):
            more = {name: tensor_like(name, tensors, shared) for name in names}
            title = " and ".join(name.removesuffix(".weight") for name in names)
            yield f"t5: tied {tied}, own {title}", "t5", config, {FILE: tensors | more}, {}
        more = {"encoder.embed_tokens.weight": tensor_like(shared, tensors, shared)}
        alone = without(tensors, shared) | more
        yield f"t5: tied {tied}, encoder.embed_tokens alone", "t5", config, {FILE: alone}, {}
    config = base.config
    like = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    none = without(tensors, like)
    yield "t5: no relative_attention_bias", "t5", config, {FILE: none}, {}
    bias = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    more = {bias.replace("block.0", "block.1"): tensor_like("other." + bias, tensors, bias)}
    yield "t5: relative_attention_bias of block 1", "t5", config, {FILE: tensors | more}, {}
    bias = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = {bias: tensor_like(bias, tensors, like)}
    yield "t5: relative_attention_bias of EncDecAttention", "t5", config, {FILE: tensors | more}, {}


DTYPES = {
    "F32": torch.float32,
    "F64": torch.float64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}


def load(family: str, folder: Path) -> tuple[Any, dict[str, Any]]:
    kinds = {"t5": "T5ForConditionalGeneration", "idefics3": "AutoModelForImageTextToText"}
    make = getattr(transformers, kinds.get(family, "AutoModelForCausalLM"))
    net, info = make.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return net.eval(), {key: sorted(map(str, value)) for key, value in info.items() if value}


def find_name(values: torch.Tensor, candidates: list[str]) -> str:
    """Return the first name whose random values are the given ones."""
    for name in candidates:
        if (recorded.random_tensor(name, tuple(values.shape)) == values.numpy()).all():
            return name
    return "newly initialised"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage().strip())


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(30)
    transformers.logging.disable_progress_bar()
    logger, lines = logging.getLogger("transformers"), Lines()
    logger.handlers = [lines]
    bases = {family: recorded.read(family)[0] for family in FAMILIES.split()}
    cases = [*heads(bases), *gemmas(bases["gemma3_text"]), *idefics(bases["llama"])]
    cases += [*names(bases["llama"]), *missing(bases), *files(bases["llama"]), *t5s(bases["t5"])]
    embeddings = [HEAD, "model.embed_tokens.weight", *EMBEDDINGS.values()]
    embeddings += [f"{side}.embed_tokens.weight" for side in ("encoder", "decoder")]
    out = []
    for name, family, config, safetensors, jsons in cases:
        lines.lines.clear()
        one = dict(name=name, family=family, config=config, files=safetensors, json=jsons)
        said = ""
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "config.json").write_text(json.dumps(config))
            for file, value in jsons.items():
                (folder / file).write_text(json.dumps(value))
            for file, tensors in safetensors.items():
                values = {
                    key: torch.tensor(recorded.random_tensor(source, tuple(shape))).to(DTYPES[kind])
                    for key, (source, shape, kind) in tensors.items()
                }
                save_file(values, folder / file, {"format": "pt"})
            try:
                net, info = load(family, folder)
                vision = re.compile("vision|multi_modal|connector")
                info = {k: [x for x in v if not vision.search(x)] for k, v in info.items()}
                info = {key: value for key, value in info.items() if value}
                one |= info
                sources = [f"{old}{key}" for old in ("", "old.") for key in embeddings]
                head = find_name(net.get_output_embeddings().weight, sources)
                embed = find_name(net.get_input_embeddings().weight, sources)
                said = f"head={head} embed={embed}"
                if family == "t5":
                    said += f" encoder={find_name(net.encoder.embed_tokens.weight, sources)}"
                    said += f" decoder={find_name(net.decoder.embed_tokens.weight, sources)}"
                if "missing_keys" not in info:
                    one["logits"] = logits_of(family, net)
            except Exception as error:
                text = (str(error).strip() or repr(error)).replace(temporary, "FOLDER")
                text = " ".join(text.split("\n")[:2])
                one["refused"] = f"{type(error).__name__}: {text}"[:250]
        print(f"{name:60} {said} {one.get('refused', '')}")
        for key in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if key in one:
                print(f"      {key}: {len(one[key])} {one[key][:3]}")
        for line in lines.lines:
            print("      |", line[:300].replace("\n", " / "))
        out.append(one)
    recorded.write("tensors", {}, out)


if __name__ == "__main__":
    with torch.no_grad():
        main()
