"""Other libraries that run a model here: llama.cpp and transformers, where they are installed."""

from collections.abc import Sequence
from typing import Any

import models
from benchmarks import llama_cpp_peer, machine, transformers_peer


def peers_of(
    model: models.Model, name: str, *, cells: int, batch: int, files: Sequence[str] = ("f32",)
) -> dict[str, Any]:
    """Make the peers with the same weights, and print the names of missing ones.

    Args:
      model: the model.
      name: its name for `models.load`.
      cells: N, for each sequence.
      batch: B, the sequences in step.
      files: the kinds of files that llama.cpp reads, "f32" and "q8_0".

    Returns:
      By name, objects with `prefill`, `step`, `rewind` and `chosen`.
    """
    options = {"cells": cells, "batch": batch, "threads": machine.threads()}
    peers = {}
    if llama_cpp_peer.available():
        for kind in files:
            path = llama_cpp_peer.weights_file(name, kind)
            peers[f"llama.cpp {kind}"] = llama_cpp_peer.LlamaCppPeer(path, **options)
    else:
        print("llama-cpp-python is not installed here: pip install llama-cpp-python")
    if not transformers_peer.available():
        print("transformers is not installed here: pip install torch transformers")
    elif model.checkpoint.architecture == "llama":
        tensors = {one: model.checkpoint.tensors[one].read() for one in model.checkpoint.tensors}
        for kind in ("static", "dynamic"):
            peers[f"transformers, {kind}"] = transformers_peer.TransformersPeer(
                tensors, model.checkpoint.config, cache=kind, **options
            )
    return peers
