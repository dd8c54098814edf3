"""Configs and tokenizers of Hugging Face folders, as the package `transformers` reads them.

The package is imported only for such folders, since the import takes seconds. It needs no PyTorch.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from models.checkpoints.config import Config
from models.checkpoints.ranges import LAYERS
from models.errors import ModelError, NoTokenizerError, first_line
from models.json_file import read_json
from models.kinds import check, whole

_WITHOUT_EFFECT = (
    # Origin of the file, training, and outputs in addition to logits.
    "architectures attention_dropout chunk_size_feed_forward classifier_dropout dropout_rate dtype "
    "id2label initializer_factor initializer_range label2id output_hidden_states "
    "output_router_logits pretraining_tp problem_type return_dict router_aux_loss_coef "
    "transformers_version w_init_variance_scale "
    # Tokens, and choices of a program that generates text.
    "bos_token_id eos_token_id is_decoder max_position_embeddings num_logits_to_keep pad_token_id "
    "use_cache "
    # The classes convert these to other keys, or check that they agree with others.
    "block_types expand full_attn_idxs mamba_d_ssm mamba_expand max_window_layers "
    "use_sliding_window "
    # Choices of the implementation of Mamba.
    "chunk_size mamba_chunk_size residual_in_fp32 time_step_floor "
    "time_step_max time_step_min time_step_rank"
)


_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
"""Files without which `transformers` makes an empty tokenizer."""


@contextmanager
def transformers_of(source: str) -> Iterator[Any]:
    """Import `transformers`, and silence its warnings while the context lasts.

    An exception of the package inside the context becomes a `ModelError` that names `source`.

    Raises:
      ModelError: If the package is not installed.
    """
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # it advises to install PyTorch
    try:
        import transformers
    except ModuleNotFoundError:
        raise ModelError(
            f"{source}: to read Hugging Face folders, the package transformers is needed; get it "
            'with: pip install "transformers>=5"'
        ) from None
    logging = transformers.logging
    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield transformers
    except ModelError:
        raise
    except Exception as error:  # classes of configs and tokenizers raise many kinds
        lines = str(error).strip().splitlines() or [""]
        text = f"{lines[0]} {lines[-1].strip()}" if len(lines) > 1 else first_line(error)
        raise ModelError(
            f"{source} cannot be read by transformers ({text[:200].rstrip('.')}); download it "
            "again."
        ) from error
    finally:
        logging.set_verbosity(level)


def read_config(folder: Path) -> Config:
    """Return the settings of the language model in a folder, with the defaults of its class.

    Keys that the class does not declare are left out, since they have no effect.

    Raises:
      ModelError: If the folder has no `config.json`, `transformers` cannot read it, or a value is
        out of range.
    """
    path = folder / "config.json"
    top = read_json(path)
    if not top:
        raise ModelError(
            f"{folder} has no config.json, so it is not a Hugging Face model folder; give the "
            "folder that contains config.json and *.safetensors, or the path of a .gguf file."
        )
    if not isinstance(top.get("model_type"), str):
        raise ModelError(
            f'{path} has no model_type, so its family is unknown; add one, such as "model_type": '
            '"llama".'
        )
    for part in (top, top.get("text_config")):  # a class makes a list of this length
        for key in ("num_hidden_layers", "num_layers", "num_decoder_layers"):
            if isinstance(part, dict) and part.get(key) is not None:
                check(part[key], whole(0, LAYERS), key, str(path))
    with transformers_of(str(path)) as transformers:
        known = top["model_type"] in transformers.CONFIG_MAPPING
        if not known and top.get("auto_map"):
            raise ModelError(
                f"{path}: the class of model_type {top['model_type']!r} is Python code in the "
                "model's repository (trust_remote_code), which is not run; give another model."
            )
        if not known:
            raise ModelError(
                f"{path}: expected a model_type that transformers {transformers.__version__} "
                f"knows, got {top['model_type']!r}; install a newer version, or give another model."
            )
        whole_model = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
        made = whole_model.get_text_config()
        if getattr(made, "rope_parameters", None):  # as models do, after undeclared keys are set
            made.standardize_rope_params()
        values = _values(made)
        if made is not whole_model:  # the head belongs to the larger model
            values["tie_word_embeddings"] = whole_model.tie_word_embeddings
            if made.model_type == "gemma3_text":  # a soft limit that the larger model lacks
                values["final_logit_softcapping"] = None
        return Config(values, str(path), _defaults(type(made)))


def _values(made: Any) -> dict[str, Any]:
    """Return the settings of a config object, completed with the defaults of the model's code."""
    by_layer = _settings_by_layer(made)
    declared = {field.name for field in fields(made)}
    computed = {"head_dim", "scale_decoder_outputs", "tie_word_embeddings"}
    computed |= {"dense_act_fn", "is_gated_act", "num_hidden_layers"}
    if "layer_types" in type(made).attribute_map or hasattr(type(made), "layer_types"):
        computed.add("layer_types")
    values = {name: getattr(made, name) for name in declared | computed if hasattr(made, name)}
    values |= {"model_type": made.model_type, "per_layer_config": by_layer}
    if values.get("head_dim") is None and values.get("num_attention_heads"):
        values["head_dim"] = made.hidden_size // made.num_attention_heads
    if "layer_types" not in values and "sliding_window" in declared:  # one window for all layers
        kind = "full_attention" if made.sliding_window is None else "sliding_attention"
        values["layer_types"] = [kind] * made.num_hidden_layers
    return values


def _settings_by_layer(made: Any) -> dict[int, dict[str, Any]]:
    """Return the settings of each layer that has others, by layer number.

    Afterwards, a setting of `made` has the value for the layers that have no other.
    """
    spec = getattr(made, "_heterogeneity_spec", None)
    if spec is None:
        return {}
    made.allow_global_per_layer_attribute_access = True
    return {layer: dict(others) for layer, others in spec.per_layer_overrides.items()}


def _defaults(kind: type) -> dict[str, Any]:
    made = kind()
    _settings_by_layer(made)
    return {"per_layer_config": {}} | {
        field.name: getattr(made, field.name)
        for field in fields(made)
        if field.name not in _WITHOUT_EFFECT.split()
    }


def read_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, an object of `transformers`.

    Raises `ModelError` if the folder has no tokenizer, or `transformers` cannot read it.
    """
    files = [folder / name for name in _VOCABULARIES if (folder / name).is_file()]
    if not files:
        raise NoTokenizerError(
            f"{folder} has no {' or '.join(_VOCABULARIES)}; write one with save_pretrained of a "
            "tokenizer."
        )
    try:
        with transformers_of(f"{files[0]} or tokenizer_config.json") as transformers:
            return transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ModelError:
        for path in sorted(folder.glob("*token*.json")):
            read_json(path)  # raises for the file that is not JSON
        raise
