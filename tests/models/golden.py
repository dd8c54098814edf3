"""Recorded runs of llama.cpp, described in `data/golden/README.md`."""

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

_FOLDER = Path(__file__).resolve().parent.parent / "data" / "golden"


@functools.cache
def read_golden(name: str) -> Any:
    return json.loads((_FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def check_logits(row: np.ndarray, record: dict, ids: list[int], *, within: float) -> None:
    top, at = np.array(record["top"]), np.asarray(record["at"])
    np.testing.assert_allclose(row[ids], at, atol=within)
    np.testing.assert_allclose(row[top[:, 0].astype(int)], top[:, 1], atol=within)
    moments = [row.mean(), row.std()]
    np.testing.assert_allclose(moments, [record["mean"], record["std"]], atol=within)
