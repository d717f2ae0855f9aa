"""Checkpoints that MindFormers and MindSpore wrote in the newer forms, and their contents.

They lie beside the repository where the project is developed; tests that need them skip elsewhere. Values follow
rules, so that `expected.json` need not hold them: element i of parameter number p is ``4096 p + i``, or for 16-bit
floats the bits ``0x3000 + (257 p + i) % 4096``, for 8-bit integers ``(31 p + i) % 256``, for bools
``(p + i + i // 3) % 2``.
"""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpus import CORPUS2
from tests.trees import SAFETENSORS_NAMES, Checkpoint, Value

needs_corpus2 = pytest.mark.skipif(not CORPUS2.is_dir(), reason="the corpus of newer forms is not on this machine")

#: MindSpore's dtype names by safetensors' ones.
DTYPES = {stored: name for name, stored in SAFETENSORS_NAMES.items() if name != "Int4"}


@cache
def expected(case: str) -> dict[str, Any]:
    """The entry of a case in `expected.json`."""
    result: dict[str, Any] = json.loads((CORPUS2 / case / "expected.json").read_text())
    return result


def full(case: str, key: str = "tensors") -> dict[str, Value]:
    """Every parameter of a case in full."""
    return {name: value_of(entry) for name, entry in expected(case)[key].items()}


def value_of(entry: dict[str, Any]) -> Value:
    """One entry of `expected.json` as a tensor."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    if "value" in entry:
        array = np.array(entry["value"], {"F32": "<f4", "I32": "<i4", "I64": "<i8"}[dtype]).reshape(shape)
        return Value(DTYPES[dtype], array.view(f"<u{array.itemsize}"))
    p, i = entry["p"], np.arange(math.prod(shape), dtype=np.int64)
    if entry["rule"] == "bits16":
        array = (0x3000 + (257 * p + i) % 4096).astype("<u2")
    elif entry["rule"] == "int8":
        array = ((31 * p + i) % 256).astype("u1")
    elif entry["rule"] == "bool":
        array = ((p + i + i // 3) % 2).astype("u1")
    else:
        counted = (4096 * p + i).astype({"F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}[dtype])
        array = counted.view(f"<u{counted.itemsize}")
    return Value(DTYPES[dtype], array.reshape(shape))


def iteration(case: str, number: int = 10) -> Path:
    """The directory of one iteration of a Checkpoint 2.0 case."""
    return CORPUS2 / case / "checkpoint" / f"iteration_{number:08d}"


def metadata(case: str) -> dict[str, Any]:
    """metadata.json of a Checkpoint 2.0 case."""
    result: dict[str, Any] = json.loads((iteration(case) / "metadata.json").read_text())
    return result


def is_state(name: str) -> bool:
    """Whether a parameter of the corpus belongs to the optimizer."""
    return name.startswith(("adam_", "exp_avg", "main_param.", "global_step", "learning_rate", "accu_grads."))


def known(checkpoint: Checkpoint) -> list[str]:
    """The optimizer's parameters of a checkpoint."""
    return [name for name in checkpoint if is_state(name)]
