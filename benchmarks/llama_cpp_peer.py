"""llama.cpp decoding the same weights, through llama-cpp-python's low-level functions.

It is optional: `pip install llama-cpp-python` (it compiles C++). It reads files, so the weights are
first written to one, as float32 or as Q8_0:

    python -m benchmarks.llama_cpp_peer smollm2.gguf --kind f32
"""

import argparse
import ctypes
import functools
import tempfile
from importlib.util import find_spec
from pathlib import Path

import gguf
import numpy as np

from models.checkpoints.open import open_checkpoint

KINDS = {"f32": gguf.GGMLQuantizationType.F32, "q8_0": gguf.GGMLQuantizationType.Q8_0}
_FILE_TYPES = {"f32": gguf.LlamaFileType.ALL_F32, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def available() -> bool:
    """Whether llama-cpp-python can be imported here."""
    return find_spec("llama_cpp") is not None


def write(source: Path, target: Path, kind: str) -> None:
    """Copy a GGUF file with its matrices in another form.

    Args:
      source: a GGUF file.
      target: where to write.
      kind: "f32" or "q8_0"; vectors are float32 in either.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    skipped = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
    for name, field in reader.fields.items():
        if not name.startswith(skipped):
            of = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], of)
    writer.add_file_type(_FILE_TYPES[kind])
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        form = KINDS[kind] if values.ndim == 2 else KINDS["f32"]
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@functools.cache
def weights_file(model: str, kind: str) -> Path:
    """Write the weights of a model into a temporary file, once per process."""
    target = Path(tempfile.mkdtemp()) / f"{model}-{kind}.gguf"
    write(Path(open_checkpoint(model).source), target, kind)
    return target


class LlamaCppPeer:
    """B sequences in step, float32 keys and values, a stream for each.

    `prefill` empties the cache and feeds a prompt to each. `step` feeds the last chosen tokens and
    chooses the next. `rewind` removes the generated tokens.

    Args:
      path: a GGUF file.
      cells: N, for each sequence.
      batch: B.
      threads: how many to use.
      ubatch: tokens computed at once.
    """

    def __init__(self, path: Path, *, cells: int, batch: int, threads: int, ubatch: int = 512):
        import llama_cpp

        self.api = api = llama_cpp
        # It logs every layer.
        self._quiet = api.llama_log_callback(lambda *_: None)
        api.llama_log_set(self._quiet, ctypes.c_void_p(0))
        api.llama_backend_init()
        options = api.llama_model_default_params()
        options.n_gpu_layers = 0
        self.model = api.llama_model_load_from_file(str(path).encode(), options)
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot read {path}")
        options = api.llama_context_default_params()
        options.n_ctx, options.n_seq_max = cells * batch, batch
        options.n_batch, options.n_ubatch = max(ubatch, batch), max(ubatch, batch)
        options.n_threads = options.n_threads_batch = threads
        options.type_k = options.type_v = int(KINDS["f32"])
        options.kv_unified = False
        self.context = api.llama_init_from_model(self.model, options)
        self.cache = api.llama_get_memory(self.context)
        self.width = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self.model))
        self.batch, self.ubatch, self.prompt = batch, ubatch, 0
        self._batch = api.llama_batch_init(max(ubatch, batch), 0, 1)

    def prefill(self, tokens: np.ndarray) -> None:
        """Empty the cache and feed a prompt to each sequence, `[B, P]`."""
        self.api.llama_memory_clear(self.cache, True)
        self.prompt, self._position = tokens.shape[1], tokens.shape[1]
        self.chosen = np.zeros(self.batch, np.int64)
        for seq, row in enumerate(tokens.tolist()):
            for start in range(0, len(row), self.ubatch):
                part = row[start : start + self.ubatch]
                last = start + len(part) == len(row)
                self._decode([(t, start + i, seq) for i, t in enumerate(part)], last)
            self.chosen[seq] = self._best(len(part) - 1)
        self._first = self.chosen.copy()

    def step(self) -> None:
        """Generate one token of each sequence."""
        tokens = [(int(t), self._position, s) for s, t in enumerate(self.chosen)]
        self._decode(tokens, True, each=True)
        self._position += 1
        for i in range(self.batch):
            self.chosen[i] = self._best(i)

    def rewind(self) -> None:
        """Remove the tokens generated since the prompt."""
        for seq in range(self.batch):
            self.api.llama_memory_seq_rm(self.cache, seq, self.prompt, -1)
        self._position, self.chosen = self.prompt, self._first.copy()

    def _decode(self, tokens: list[tuple[int, int, int]], last: bool, each: bool = False) -> None:
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, (token, position, seq) in enumerate(tokens):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = last and (each or i == len(tokens) - 1)
        if self.api.llama_decode(self.context, batch):
            raise RuntimeError("llama.cpp has no room for the batch")

    def _best(self, i: int) -> int:
        logits = self.api.llama_get_logits_ith(self.context, i)
        return int(np.ctypeslib.as_array(logits, shape=(self.width,)).argmax())


def main() -> None:
    """Write the weights of a model to a GGUF file."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--kind", choices=sorted(KINDS), default="f32")
    parser.add_argument("--model", default="smollm2", help="what models.checkpoints.open opens")
    args = parser.parse_args()
    write(Path(open_checkpoint(args.model).source), args.target, args.kind)
    print(f"{args.target}: {args.target.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
