"""Snapshot files: safetensors with a JSON description and checksums in the metadata."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from jaxkv.core.validate import check_count

if TYPE_CHECKING:
    from jaxkv.snapshot.description import Json, SnapshotContent, SnapshotDescription

FORMAT = "jaxkv.snapshot"
VERSION = 2

_REQUIRED = ("cache", "sequences", "tokens", "model", "arrays")
"""Keys of each description; files before `notes` do not have the key `notes`."""

MAX_NESTING = 64
"""Largest depth of lists and dicts in `model_id` and `notes`."""

UNFINISHED = ".jaxkv-unfinished"
"""End of the names of temporary folders."""

Source = str | os.PathLike | bytes
"""Path of a snapshot file, or the bytes of a snapshot."""

_PLAIN = {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_PLAIN |= {"float16", "float32", "float64", "complex64"}
"""Names of the dtypes that safetensors and NumPy both support."""


@dataclass(frozen=True, kw_only=True)
class SnapshotFile:
    """An open snapshot with a checked description; arrays are read on access.

    seed: hash of the description, which includes the checksums of all arrays.
    nbytes: size of the file.
    """

    description: SnapshotDescription
    arrays: dict[str, tuple[np.dtype, tuple[int, ...]]]
    seed: int
    nbytes: int
    _read: Callable[[str], np.ndarray]

    def __getitem__(self, name: str) -> np.ndarray:
        """Read an array; raise a ValueError if the array does not match the description."""
        (dtype, shape), stored = self.arrays[name], self._read(name)
        plain = dtype.name in _PLAIN
        form = (dtype, shape) if plain else (np.uint8, (math.prod(shape) * dtype.itemsize,))
        if (stored.dtype, stored.shape) != form:
            raise ValueError(
                f"expected {name} of {dtype} {shape}, got it stored as {stored.dtype} "
                f"{stored.shape}; the snapshot is damaged"
            )
        expected, actual = self.description["arrays"][name]["sha256"], _sha256(stored)
        if actual != expected:
            raise ValueError(
                f"expected {name} with the checksum {expected[:12]}, got {actual[:12]}; the "
                "snapshot is damaged"
            )
        if dtype == np.bool_ and np.any(_bytes_of(stored) > 1):
            raise ValueError(
                f"expected bytes of 0 and 1 in {name}, got others; the snapshot was changed after "
                "it was saved, save it again"
            )
        return _bytes_of(stored).view(dtype).reshape(shape)

    def check(self) -> None:
        """Read each array; raise a ValueError if an array does not match the description."""
        for name in self.arrays:
            self[name]


def write_file(
    path: str | os.PathLike, description: SnapshotContent, arrays: Mapping[str, np.ndarray]
) -> None:
    """Write a snapshot to a temporary folder next to `path`, then move the file to `path`.

    If the process is killed, the temporary folder remains. The next call removes it, except on
    Windows. A folder also contains the temporary file that safetensors writes and renames, which
    would lose a lock.
    """
    module, path = _import_safetensors(), _resolve_path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"expected a folder {path.parent} for {path}, got none; make it")
    stored, metadata = _pack(description, arrays)
    _remove_abandoned_files(path.parent)
    with _locked_folder(path) as folder:
        temporary = folder / "snapshot"
        try:
            module.numpy.save_file(stored, temporary, metadata)
            _sync_to_disk(temporary)
            os.replace(temporary, path)
        except module.SafetensorError as error:  # for example, on a full disk
            raise OSError(
                f"expected to write {path}, got {error}; free some space, or pass another path"
            ) from error


def json_round_trip(value: object, name: str) -> Json:
    """Encode and decode a value as JSON; raise a TypeError if the value is not a JSON value.

    Raise a ValueError if lists and dicts are nested more than 64 deep.

    >>> json_round_trip(("a", 1), "model")
    ['a', 1]
    """
    try:
        plain = json.loads(json.dumps(value, allow_nan=False))
        _check_nesting(plain, MAX_NESTING)
        return plain
    except RecursionError:
        raise ValueError(
            f"expected {name} with at most {MAX_NESTING} levels of lists and dicts, got more; "
            "flatten them"
        ) from None
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"expected {name} that JSON holds, got {value!r} ({error}); pass strings, numbers, "
            "lists or dicts"
        ) from None


def file_bytes(description: SnapshotContent, arrays: Mapping[str, np.ndarray]) -> bytes:
    """Return a snapshot as the bytes of a file."""
    return _import_safetensors().numpy.save(*_pack(description, arrays))


@contextmanager
def open_file(source: Source) -> Iterator[SnapshotFile]:
    """Open a snapshot and check the description; each array is checked when it is read."""
    module = _import_safetensors()
    if isinstance(source, bytes | bytearray | memoryview):
        data = bytes(source)
        with _translate_read_errors(module):
            arrays = module.numpy.load(data)
        end = 8 + int.from_bytes(data[:8], "little")
        yield _file_from_metadata(
            json.loads(data[8:end]).get("__metadata__"), arrays, arrays.__getitem__, len(data)
        )
        return
    path = _resolve_path(source)
    size = path.stat().st_size
    if size == 0:
        raise ValueError(f"expected a snapshot, got the empty file {path}; save it again")
    with _translate_read_errors(module):
        reader = module.safe_open(path, framework="np")
    with reader as file:
        yield _file_from_metadata(file.metadata(), file.keys(), file.get_tensor, size)


def _pack(
    description: SnapshotContent, arrays: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Return the arrays as the file stores them, and the metadata of the file."""
    stored = {name: _plain_array(array) for name, array in arrays.items()}
    entries = {
        name: {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "sha256": _sha256(stored[name]),
        }
        for name, array in arrays.items()
    }
    text = json.dumps({**description, "arrays": entries}, allow_nan=False)
    metadata = {"format": FORMAT, "version": str(VERSION), "description": text}
    return stored, {**metadata, "sha256": hashlib.sha256(text.encode()).hexdigest()}


def _plain_array(array: np.ndarray) -> np.ndarray:
    """Return a contiguous array, as `[n]` uint8 bytes if `_PLAIN` does not contain the dtype."""
    return np.ascontiguousarray(array) if array.dtype.name in _PLAIN else _bytes_of(array)


def _file_from_metadata(
    metadata: dict[str, str] | None,
    names: Iterable[str],
    read: Callable[[str], np.ndarray],
    size: int,
) -> SnapshotFile:
    metadata = metadata or {}
    if metadata.get("format") != FORMAT:
        raise ValueError(
            f"expected a snapshot, with the format {FORMAT} in its metadata, got "
            f"{metadata.get('format')}; it was written by something else than jaxkv.snapshot"
        )
    if metadata.get("version") != str(VERSION):
        raise ValueError(
            f"expected a snapshot of version {VERSION}, got version {metadata.get('version')}; "
            f"read it with the jaxkv that wrote it"
        )
    text = metadata.get("description", "")
    expected, actual = metadata.get("sha256", ""), hashlib.sha256(text.encode()).hexdigest()
    if expected != actual:
        raise ValueError(
            f"expected a description with the checksum {expected[:12]}, got {actual[:12]}; the "
            f"snapshot is damaged"
        )
    description, arrays = _parse_description(text)
    if set(names) != set(arrays):
        odd = sorted(set(names) ^ set(arrays))
        raise ValueError(
            f"expected the arrays that are described, got others, {odd[:4]}; the snapshot is "
            "damaged"
        )
    seed = int(actual[:8], 16)
    return SnapshotFile(description=description, arrays=arrays, seed=seed, nbytes=size, _read=read)


def _parse_description(
    text: str,
) -> tuple[SnapshotDescription, dict[str, tuple[np.dtype, tuple[int, ...]]]]:
    """Return a description, and the dtype and shape of each array.

    Raises a ValueError if a key is absent, lists and dicts are nested too deep, a number is not
    finite, or JAX does not have the dtype of an array.
    """
    try:
        description: Any = json.loads(text, parse_float=_parse_finite, parse_constant=_parse_finite)
        _check_nesting(description, MAX_NESTING + 1)
        entries = {name: description[name] for name in _REQUIRED}["arrays"]
        for entry in entries.values():
            bytes.fromhex(entry["sha256"])
            jax.dtypes.canonicalize_dtype(jnp.dtype(str(entry["dtype"])))  # None is float64
            for size in entry["shape"]:
                check_count(size, "a size of an array", low=0)
        return description, {
            name: (jnp.dtype(entry["dtype"]), tuple(entry["shape"]))
            for name, entry in entries.items()
        }
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError, SyntaxError) as error:
        raise_no_cache(error)  # NumPy parses the name of a dtype as Python


def raise_no_cache(error: Exception) -> NoReturn:
    """Raise the ValueError for a description that does not describe a cache.

    The message quotes the message of `error` if jaxkv raised it, but not if Python or NumPy did.
    """
    cause = " ".join(str(error).split())
    if not re.fullmatch("expected .* got .*; .*", cause):
        cause = "a key is missing or unknown, or a value has another type"
    raise ValueError(
        f"expected a snapshot that describes a cache, got one that does not ({shorten(cause)}); it "
        "was not written by jaxkv.snapshot"
    ) from None


def shorten(value: object) -> str:
    """Return a text of a value, without the middle of a long text."""
    text = str(value)
    return text if len(text) < 200 else f"{text[:120]} ... {text[-60:]}"


def _parse_finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"expected finite numbers, got {text}; save the snapshot again")
    return number


def _check_nesting(value: Json, levels: int) -> None:
    """Raise a RecursionError if lists and dicts are nested more than `levels` deep."""
    items: list[Any] = [value]
    for _ in range(levels):
        items = [
            item
            for outer in items
            if isinstance(outer, list | dict)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
    if any(isinstance(item, list | dict) for item in items):
        raise RecursionError(f"expected at most {levels} levels of lists, got more; flatten them")


@contextmanager
def _locked_folder(path: Path) -> Iterator[Path]:
    """Make a temporary folder next to `path`; lock it, and remove it at the end."""
    while True:
        folder = Path(tempfile.mkdtemp(UNFINISHED, ".snapshot.", path.parent))
        lock = _lock(folder, wait=True)
        if folder.exists():
            break
        _unlock(lock)  # The save of another process removed the folder before it was locked.
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        _unlock(lock)


def _remove_abandoned_files(folder: Path) -> None:
    """Remove the temporary folders of killed processes; those of other processes are locked.

    Earlier versions of jaxkv left files.
    """
    for path in folder.glob(f".*{UNFINISHED}"):
        lock = _lock(path, wait=False)
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):
                path.unlink(missing_ok=True)
        _unlock(lock)


def _lock(path: Path, *, wait: bool) -> int | None:
    """Open and lock a file or folder; return its descriptor, or None if that is not possible."""
    handle = None
    try:
        import fcntl

        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # on Windows, or locked
        _unlock(handle)
        return None
    return handle


def _unlock(lock: int | None) -> None:
    """Close the descriptor of a locked file or folder."""
    if lock is not None:
        os.close(lock)


def _resolve_path(path: str | os.PathLike) -> Path:
    """Return the real path of a file; raise an OSError for a folder or a device.

    Links are followed, because a rename would replace the link.
    """
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        raise OSError(
            f"expected the path of a file, got {path}, a folder or a device; give another path"
        )
    return path


def _sha256(array: np.ndarray) -> str:
    return hashlib.sha256(_bytes_of(array).data).hexdigest()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the bytes of an array, `[n]` uint8."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _sync_to_disk(path: Path) -> None:
    """Give a file the permissions that new files have by default, and flush the file to disk."""
    mask = os.umask(0)
    os.umask(mask)
    os.chmod(path, 0o666 & ~mask)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


@contextmanager
def _translate_read_errors(module: ModuleType) -> Iterator[None]:
    try:
        yield
    except module.SafetensorError as error:
        raise ValueError(
            f"expected a snapshot, got a file that safetensors cannot read ({error}); save it again"
        ) from None


def _import_safetensors() -> ModuleType:
    try:
        import safetensors
        import safetensors.numpy
    except ImportError:
        raise ImportError(
            "expected the package safetensors for a snapshot, got none; pip install safetensors"
        ) from None
    return safetensors
