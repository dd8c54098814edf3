"""Record the logits of tiny models with one setting changed, from Hugging Face transformers.

Run where torch 2.13 and transformers 5.24 are installed: `PYTHONPATH=. python
tests/data/record_settings.py [model_type ...]`. It writes `settings/<model_type>.json.gz`.

The variants of a family follow from the fields of its config class. `tests/models/
recorded_settings.py` reads the files, and says how weights, tokens and logits are made.
"""

import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.models import recorded_settings as recorded

HERE = Path(__file__).parent
Config = dict[str, Any]
LARGEST = 3_000_000  # bytes of the weights of a variant

# The changed settings, which `settings_changed.json` contains:
# bases: for each family, the folder of its config, and keys of it changed or left out such that
#   every setting has an effect.
# coarse: settings that are 0.05, or a change has no effect.
# dead: settings of training, of labels, of what is returned, and of generation: changed together.
# values: values instead of those by the rule in `other_values`.
# kinds: kinds of layers of a model with a list of them, each for a third layer and beyond too.
# undeclared: keys that the class of a family does not declare, but files of it or of others have.
# several: several keys changed, as an older file has them.
# filled: values of fields that are null in the base or absent from it.
CHANGED: Config = json.loads((HERE / "settings_changed.json").read_text())
DEAD, YARN, LLAMA3 = (CHANGED[name] for name in ("dead", "yarn", "llama3"))
KEPT = {"model_type", "architectures", *DEAD}
ACTIVATIONS = ["gelu", "gelu_pytorch_tanh", "relu", "silu", "quick_gelu", "none_such"]
FULL, SLIDING = "full_attention", "sliding_attention"


def ropes(dim: int) -> Iterator[tuple[str, Config]]:
    """Yield the name and the keys of a rope; `dim` counts the rotated numbers of a head."""
    ramp = [1.0 + 0.5 * i for i in range(dim // 2)]
    long = {"rope_type": "longrope", "short_factor": ramp, "long_factor": ramp[::-1]}
    long |= {"original_max_position_embeddings": 32, "factor": 4.0}
    linear = {"rope_type": "linear", "factor": 4.0}
    yield "linear", linear
    yield "dynamic", {"rope_type": "dynamic", "factor": 4.0}
    yield "yarn", YARN
    yield "llama3", LLAMA3
    yield "longrope", long
    yield "proportional", {"rope_type": "proportional", "partial_rotary_factor": 0.5}
    yield "default, partial", {"rope_type": "default", "partial_rotary_factor": 0.5}
    yield "type alone", {"type": "linear", "factor": 4.0}
    yield "two types", {"type": "linear", "rope_type": "default", "factor": 4.0}
    yield "unknown", {"rope_type": "none_such", "factor": 4.0}
    yield "empty", {}
    yield "linear, partial", linear | {"partial_rotary_factor": 0.5}
    yield "linear, factor 0.5", linear | {"factor": 0.5}
    yield "linear, no factor", {"rope_type": "linear"}
    yield "linear, int factor", linear | {"factor": 4}
    yield "linear, null factor", linear | {"factor": None}
    yield "linear, text factor", linear | {"factor": "4.0"}
    yield "linear, unknown key", linear | {"attention_factor": 0.5}
    yield "null type", {"rope_type": None, "factor": 4.0}
    yield (
        "dynamic, original",
        {"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 32},
    )
    yield "dynamic, alpha", {"rope_type": "dynamic", "factor": 1.0, "alpha": 100.0}
    yield "mrope", {"type": "mrope", "mrope_section": [2, 1, 1]}
    yield "su", {"type": "su"} | {key: long[key] for key in long if key != "rope_type"}
    for change in CHANGED["yarn_changes"]:
        yield f"yarn, {json.dumps(change)}", YARN | change
    short = {key: YARN[key] for key in ("rope_type", "factor")}
    yield "yarn, no original", short
    yield "yarn, no factor", {key: YARN[key] for key in YARN if key != "factor"}
    for key in LLAMA3:
        if key != "rope_type":
            yield f"llama3, no {key}", {k: LLAMA3[k] for k in LLAMA3 if k != key}
    yield "llama3, low above high", LLAMA3 | {"low_freq_factor": 8.0}
    yield "llama3, low is high", LLAMA3 | {"low_freq_factor": 4.0}
    yield "llama3, partial", LLAMA3 | {"partial_rotary_factor": 0.5}
    for change in (
        {"attention_factor": 0.5},
        {"factor": None},
        {"factor": 1.0},
        {"original_max_position_embeddings": 64},
        {"long_factor": [1.0]},
        {"long_factor": ramp},
        {"short_factor": None},
        {"partial_rotary_factor": 0.5},
    ):
        yield f"longrope, {json.dumps(change)}", long | change
    yield "longrope, no factor", {key: long[key] for key in long if key != "factor"}
    yield (
        "proportional, factor",
        {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 4.0},
    )
    yield "proportional, whole", {"rope_type": "proportional"}


FEW = 11  # of the ropes above, in families other than llama
YARNS = ("deepseek_v2", "deepseek_v3", "gpt_oss")  # and these record all options of yarn


def rope_changes(family: str, base: Config) -> Iterator[tuple[str, Config, tuple[str, ...]]]:
    """Yield name, changed keys and absent keys of the variants of rotary embeddings."""
    old = base["rope_parameters"]
    nested = next((value for value in old.values() if isinstance(value, dict)), None)
    flat = nested or old
    theta = {"rope_theta": flat["rope_theta"]}
    theta |= {key: flat[key] for key in ("partial_rotary_factor",) if key in flat}
    size = base.get("head_dim") or base["hidden_size"] // base["num_attention_heads"]
    dim = int(size * flat.get("partial_rotary_factor", 1))
    for i, (name, keys) in enumerate(ropes(dim)):
        listed = family in YARNS and name.startswith("yarn") or family == "llama"
        if i < FEW or listed:
            inside = theta | keys if keys else {}
            changed = {FULL: inside, SLIDING: old[SLIDING]} if nested else inside
            more = {"max_position_embeddings": 32} if name.startswith("dynamic") else {}
            if "max_position_embeddings" not in base:
                more = {}
            yield f"rope_parameters: {name}", {"rope_parameters": changed} | more, ()
    gone = ("rope_parameters",)
    yield "rope_scaling: no rope_parameters", {"rope_scaling": YARN, **theta}, gone
    if family in ("llama", "deepseek_v3", "gpt_oss", "gemma3_text", "qwen3_next", "qwen3_5_text"):
        linear = {"type": "linear", "factor": 4.0}
        yield "rope_scaling: old form", {"rope_scaling": linear, **theta}, gone
        yield "rope_scaling: null", {"rope_scaling": None, "rope_theta": 50.0}, gone
        yield "rope_scaling: empty", {"rope_scaling": {}, "rope_theta": 50.0}, gone
        yield "rope_theta: no rope_parameters", {"rope_theta": 50.0}, gone
        yield "rope_theta: null", {"rope_theta": None}, gone
        inside = {"rope_scaling": linear | {"rope_theta": 50.0}, "rope_theta": 7.0}
        yield "rope_theta: inside and outside", inside, gone
    yield (
        "rope_scaling: beside rope_parameters",
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        (),
    )
    by_kind = {FULL: flat | {"rope_theta": 50.0}, SLIDING: {"rope_type": "linear", "factor": 4.0}}
    by_kind[SLIDING] |= theta
    yield "rope_parameters: by kind of layer", {"rope_parameters": by_kind}, ()
    if family == "llama":
        number = {"rope_type": "default", "rope_theta": "500.0"}
        yield "rope_parameters: text theta", {"rope_parameters": number}, ()
        yield "rope_parameters: int theta", {"rope_parameters": number | {"rope_theta": 500}}, ()
        yield "rope_parameters: null theta", {"rope_parameters": number | {"rope_theta": None}}, ()
        yield "rope_parameters: a list", {"rope_parameters": [500.0]}, ()
        outside = {"rope_parameters": YARN | theta, "original_max_position_embeddings": 16}
        yield "original_max_position_embeddings: beside yarn", outside, ()


def other_values(key: str, value: Any) -> list[Any]:
    """Return other values of a key."""
    if key in CHANGED["values"]:
        return [one for one in CHANGED["values"][key] if one != value]
    if key == "layer_types":
        known = [[kinds[i % 2] for i in range(len(value))] for kinds in CHANGED["kinds"]]
        return [value[::-1], *known, value[:-1], [*value, FULL], []]
    if isinstance(value, bool):
        return [not value]
    if key.endswith(("act", "activation")):
        return [one for one in ACTIVATIONS if one != value]
    if isinstance(value, int):
        return (
            [value + 1] if "layers" in key or key.startswith(("n_shared", "first")) else [2 * value]
        )
    if isinstance(value, float):
        return [1.5 * value]
    return []


def changes(family: str, base: Config) -> Iterator[tuple[str, Config, tuple[str, ...]]]:
    """Yield name, changed keys and absent keys of every variant."""
    filled = CHANGED["filled"]
    fields = {one.name: one for one in dataclasses.fields(transformers.CONFIG_MAPPING[family])}
    yield "base", {}, ()
    yield "dead keys", {key: DEAD[key] for key in DEAD if key in fields}, ()
    yield "dead keys absent", {}, tuple(key for key in DEAD if key in base)
    yield "architectures", {"architectures": ["LlamaModel"]}, ()
    for key in [*base, *(key for key in fields if key not in base)]:
        if key in KEPT or key == "rope_parameters" or key.startswith("_"):
            continue
        value = base.get(key)
        for one in other_values(key, value) or ([filled[key]] if key in filled else []):
            yield f"{key}: {json.dumps(one)}", {key: one}, ()
    for key in base:
        if key not in KEPT:
            yield f"{key}: absent", {}, (key,)
    for key, field in fields.items():
        if key not in KEPT and "None" in str(field.type) and base.get(key) is not None:
            yield f"{key}: null", {key: None}, ()
    for key, value in CHANGED["undeclared"].items():
        if key not in fields and key not in base:
            yield f"{key}: {json.dumps(value)}", {key: value}, ()
    for more in CHANGED["several"].get(family, []):
        yield json.dumps(more)[1:-1], more, ()
    if "rope_parameters" in base:
        yield from rope_changes(family, base)


def read_config(folder: Path) -> Any:
    return transformers.AutoConfig.from_pretrained(folder)


def auto_class(family: str) -> Any:
    return (
        transformers.T5ForConditionalGeneration
        if family == "t5"
        else transformers.AutoModelForCausalLM
    )


def shapes_of(family: str, config: Any, folder: Path) -> recorded.Shapes:
    """Return the shapes of the tensors that transformers saves."""
    make = auto_class(family)
    with torch.device("meta"):
        net = make._from_config(config) if family == "t5" else make.from_config(config)
    size = sum(one.numel() * 4 for one in net.parameters())
    if size > LARGEST or net.config.num_hidden_layers > 12:
        raise MemoryError
    torch.manual_seed(0)
    net = make._from_config(config) if family == "t5" else make.from_config(config)
    net.float().save_pretrained(folder / "saved")
    (file,) = (folder / "saved").glob("*.safetensors")
    with safe_open(file, "numpy") as reader:
        return {name: tuple(reader.get_slice(name).get_shape()) for name in list(reader.keys())}


def logits_of(family: str, net: Any) -> np.ndarray:
    """Return the logits of a model, in float64 where transformers does not fix float32."""
    net.eval()
    if hasattr(net, "set_experts_implementation") and "expert" in str(net).lower():
        net.set_experts_implementation("eager")  # others lack float64
    if family == "t5":
        given = {"input_ids": torch.tensor(recorded.SOURCE)[None]}
        given |= {"decoder_input_ids": torch.tensor(recorded.TARGET)[None]}
    else:
        given = {"input_ids": torch.tensor(recorded.TOKENS)[None]}
    logits = net.double()(**given, use_cache=False).logits[0].numpy()
    if not np.isfinite(logits).all():
        raise ArithmeticError("logits are not finite")
    return recorded.project_logits(logits)


def load_and_run(family: str, folder: Path) -> np.ndarray:
    net, info = auto_class(family).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    if any(info.values()):
        sys.exit(f"expected all tensors of {folder} in the model, and no others; got {info}")
    return logits_of(family, net)


def record(family: str) -> None:
    start = time.time()
    known = CHANGED["bases"][family]
    base = json.loads((HERE / known["folder"] / "config.json").read_text())
    base = base.get("text_config", base)
    base |= {"vocab_size": recorded.VOCAB} | known["changes"]
    base |= {key: 0.05 for key in CHANGED["coarse"] if key in base}
    base = {key: value for key, value in base.items() if key not in known["without"]}
    if "rope_parameters" in known["changes"]:
        base["rope_parameters"].setdefault("rope_type", "default")
    base_shapes, variants = {}, []
    for title, changed, gone in changes(family, base):
        config = {key: value for key, value in (base | changed).items() if key not in gone}
        variant: dict[str, Any] = {"name": title}
        if changed:
            variant["config"] = changed
        if gone:
            variant["without"] = gone
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            (folder / "config.json").write_text(json.dumps(config))
            at = "config"
            try:
                read = read_config(folder)
                at = "model"
                shapes = shapes_of(family, read, folder)
                base_shapes = base_shapes or shapes
                gap = {key: shape for key, shape in shapes.items() if base_shapes.get(key) != shape}
                gap |= {key: None for key in base_shapes if key not in shapes}
                if gap:
                    variant["tensors"] = gap
                save_file(
                    recorded.random_tensors(shapes), folder / "model.safetensors", {"format": "pt"}
                )
                at = "forward"
                variant["logits"] = load_and_run(family, folder)
            except MemoryError:
                continue
            except Exception as error:
                lines = " ".join((str(error).strip() or repr(error)).split("\n")[:2])
                variant |= {"refused": f"{type(error).__name__}: {lines}"[:200], "at": at}
        variants.append(variant)
    file = recorded.FOLDER / f"{family}.json.gz"
    recorded.write(
        family, {"config": base, "tensors": base_shapes}, [dict(one) for one in variants]
    )
    scale = np.abs(variants[0]["logits"]).max() if "logits" in variants[0] else 1.0
    for one in variants if "-v" in sys.argv else []:
        if "logits" in one:
            effect = (
                np.abs(one["logits"] - variants[0]["logits"]).max() / scale
                if one["logits"].shape == variants[0]["logits"].shape
                else -1
            )
            print(f"  {effect:9.2g}  {one['name']}")
        else:
            print(f"  {one['at']:>9}  {one['name']}   {one['refused'][:110]}")
    refused = sum("refused" in one for one in variants)
    print(
        f"{family}: {len(variants)} variants, {refused} refused, {file.stat().st_size} bytes, "
        f"{time.time() - start:.0f} s",
        flush=True,
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity(50)
    transformers.logging.disable_progress_bar()
    names = [name for name in sys.argv[1:] if name != "-v"]
    with torch.no_grad():
        for family in names or CHANGED["bases"]:
            record(family)
