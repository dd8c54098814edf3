"""Record GGUF files of the tiny models that `record_models.py` made, with llama.cpp's converter.

Run where torch 2.13, transformers 5.24 and gguf 0.19 are installed, with the path of a checkout of
llama.cpp: `python tests/data/record_gguf.py LLAMA_CPP [NAME...]`. The checkout inside the source
distribution of llama-cpp-python 0.3.36 was used.

The file `gguf/NAME.gguf` contains the model of the folder `NAME` in float32, without a tokenizer.
"""

import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
NAMES = ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h", "nemotron_h_latent"]
NAMES += ["nemotron_h_dense"]
NAMES += ["gemma3n", "gemma4", "gemma4_experts", "llama4", "deepseek_v2", "deepseek_v2_groups"]
NAMES += ["deepseek_v3", "deepseek_v32", "olmo2", "llama_llama3", "gemma3", "gpt_oss_mxfp4"]
NAMES += ["mamba2", "granite_hybrid_experts", "lfm2", "falcon_h1"]

ADDED = {
    **dict.fromkeys(("nemotron_h", "nemotron_h_latent"), {"mamba_d_head": 8}),
    "nemotron_h_dense": {"mamba_d_head": 8, "hybrid_override_pattern": "M-*-"},
    "falcon_h1": {"head_dim": 6},
    "granite_hybrid_experts": {"layer_types": ["mamba", "attention", "mamba"]},
    **dict.fromkeys(("deepseek_v3", "deepseek_v32"), {"scoring_func": "sigmoid"}),
}
"""Config keys that the converter needs, and the classes of transformers do not have."""
WITHOUT_CLASS = ("nemotron_h_dense", "granite_hybrid_experts")
"""Models whose config is not read by a class, which adds experts, or renames kinds of layers."""


def convert(name: str) -> None:
    """Convert the folder `name` to a GGUF file."""
    import gguf
    import torch
    from conversion import ModelBase, get_model_architecture, get_model_class

    config = json.loads((HERE / name / "config.json").read_text()) | ADDED.get(name, {})
    size = config.get("text_config", config)["vocab_size"]
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        (here / "config.json").write_text(json.dumps(config))
        (here / "model.safetensors").symlink_to(HERE / name / "model.safetensors")
        # The converter of Gemma counts these tokens.
        tokens = {"vocab": {str(i): i for i in range(size)}}
        (here / "tokenizer.json").write_text(json.dumps({"model": tokens, "added_tokens": []}))
        kind = get_model_class(get_model_architecture(ModelBase.load_hparams(here, False), "text"))

        class WithoutTokenizer(kind):
            model_arch = kind.model_arch
            no_mtp = name == "qwen3_next"  # the folder lacks this head

            def set_vocab(self) -> None:
                self._set_vocab_none()
                self.gguf_writer.add_vocab_size(size)

        path, options = HERE / "gguf" / f"{name}.gguf", {"model_name": name}
        if name in WITHOUT_CLASS:
            options["hparams"] = config
        if name == "nemotron_h_dense":
            for key in ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"):
                del config[key]
        with torch.inference_mode():
            model = WithoutTokenizer(here, gguf.LlamaFileType.ALL_F32, path, **options)
            model.write()


if __name__ == "__main__":
    checkout, *names = sys.argv[1:]
    sys.path[:0] = [checkout, str(Path(checkout) / "gguf-py")]
    for name in names or NAMES:
        convert(name)
