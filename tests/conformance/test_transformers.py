"""Hugging Face's own library saves and loads the directories; it has an environment of its own.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conformance import oracles

pytestmark = pytest.mark.filterwarnings("default")


def save(directory: Path, dtype: str = "float32", size: str = "20KB", seed: int = 7) -> dict[str, Any]:
    return {"do": "save", "directory": str(directory), "dtype": dtype, "max_shard_size": size, "seed": seed}


def load(directory: Path) -> dict[str, Any]:
    return {"do": "load", "directory": str(directory)}


def test_transformers_loads_what_it_saved(tmp_path: Path) -> None:
    cases = [(dtype, size) for dtype in ("float32", "bfloat16") for size in ("20KB", "1GB")]
    jobs = []
    for dtype, size in cases:
        model = tmp_path / f"{dtype}-{size}"
        jobs += [save(model, dtype, size), load(model), load(model)]
    answers = oracles.done(oracles.transformers(jobs))
    for number, (dtype, size) in enumerate(cases):
        first, second = answers[3 * number + 1 : 3 * number + 3]
        assert (first["missing"], first["unknown"], first["dtypes"]) == ([], [], [f"torch.{dtype}"])
        assert first["logits"] == second["logits"]
        files = list((tmp_path / f"{dtype}-{size}").glob("model*.safetensors"))
        assert (len(files) == 1) == (size == "1GB")


def test_other_weights_are_seen(tmp_path: Path) -> None:
    """An oracle that finds everything equal is none."""
    one, other = tmp_path / "one", tmp_path / "other"
    jobs = [save(one), save(other, seed=8), load(one), load(other)]
    _, _, first, second = oracles.done(oracles.transformers(jobs))
    assert first["logits"]["shape"] == second["logits"]["shape"]
    assert first["logits"] != second["logits"]
