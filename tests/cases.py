"""The corpus cases as the tests use them: strategies read naively, full tensors, expected slices."""

from __future__ import annotations

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.corpus import CORPUS, FIXTURES
from tests.reference import Strategy
from tests.trees import Value, read_strategy_files


class Case(NamedTuple):
    """One compile of MindSpore's: the strategy it wrote and the slices it cut."""

    name: str
    path: Path
    strategy: Strategy
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]
    params: dict[str, list[str]]
    slices: dict[str, Any]

    @property
    def directory(self) -> Path:
        return self.path / "strategy"

    @property
    def unsharded(self) -> list[str]:
        """Accumulated gradients whose record claims an optimizer shard that is not made."""
        return [name for name in self.shapes if name.startswith("accu_grads.")]

    def full(self, offset: bool = True) -> dict[str, Value]:
        """Every parameter in full: 32-bit elements counting up, from another start for each parameter.

        Without `offset` all start at 0, as float32, which is what `slices.json` was made from.
        """
        result = {}
        for index, (name, shape) in enumerate(self.shapes.items()):
            count = int(np.prod(shape, dtype=int))
            if offset:
                array = np.arange(count, dtype="<u4") + 65537 * index
            else:
                array = np.arange(count, dtype="<f4").view("<u4")
            result[name] = Value("Float32", array.astype("<u4").reshape(shape))
        return result

    def expected(self, name: str, rank: int) -> tuple[list[int], str] | None:
        """Shape and hash of MindSpore's own slice, or None where it did not make one."""
        entry = self.slices["classes"][self.params[name][1]]
        index = self.slices["ranks"].index(rank)
        if entry.get("error") or entry["sha256_16"][index] is None:
            return None
        return entry["slice_shape"][index], entry["sha256_16"][index]


def sha256_16(array: Any) -> str:
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def case_directory(name: str) -> Path:
    """The path of a case, preferably in the fixtures."""
    return FIXTURES / name if (FIXTURES / name).is_dir() else CORPUS / name


@cache
def load(name: str) -> Case:
    path = case_directory(name)
    description = json.loads((path / "case.json").read_text())
    strategy = read_strategy_files(sorted((path / "strategy").glob("*.ckpt")))
    classes = description["layout_classes"]
    shapes = {param: tuple(classes[label[0]]["full_shape"]) for param, label in description["params"].items()}
    dtypes = {param: classes[label[0]]["dtype"] for param, label in description["params"].items()}
    slices = json.loads((path / "slices.json").read_text())
    return Case(name, path, strategy, shapes, dtypes, description["params"], slices)


def case_names(root: Path) -> list[str]:
    return sorted(path.parent.name for path in root.glob("*/slices.json")) if root.is_dir() else []


IN_FIXTURES = case_names(FIXTURES)
EVERYWHERE = sorted({*IN_FIXTURES, *case_names(CORPUS)})


def all_cases() -> list[Any]:
    """Every case as a pytest parameter; those that only the corpus has are long."""
    return [pytest.param(name, id=name, marks=() if name in IN_FIXTURES else pytest.mark.long) for name in EVERYWHERE]
