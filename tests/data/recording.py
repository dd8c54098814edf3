"""What the scripts that record models of transformers share: transformers 5.23, torch 2.13.

A folder here is a model as models are published. Its `config.json` was there first, and says how
large the model is; a script makes random weights for it, and records what transformers computes.
"""

from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent


def make(name: str, seed: int) -> torch.nn.Module:
    """Make the model of a folder's config, with the random weights that transformers gives it."""
    config = transformers.AutoConfig.from_pretrained(HERE / name)
    torch.manual_seed(seed)
    return getattr(transformers, config.architectures[0])(config).eval()


def write(name: str, net: torch.nn.Module) -> None:
    """Write weights, as they are published."""
    net.save_pretrained(HERE / name)
    (HERE / name / "generation_config.json").unlink(missing_ok=True)


def record(name: str, file: str = "run.npz", **arrays) -> None:
    """Write what was computed, in 32 bits."""
    arrays = {key: np.asarray(array) for key, array in arrays.items()}
    narrow = {"i": np.int32, "f": np.float32, "b": bool}
    arrays = {key: array.astype(narrow[array.dtype.kind]) for key, array in arrays.items()}
    np.savez_compressed(HERE / name / file, **arrays)
