"""Hugging Face's own library saves and loads the directories, in its own environment.

`make conformance-transformers` runs these tests.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.conformance import oracles
from tests.reference import Strategy
from tests.running import Argument, done
from tests.trees import Checkpoint, cut_ranks, layout, read_checkpoint, read_tree, same_ranks, single, write_strategy

pytestmark = pytest.mark.filterwarnings("default")


def save(directory: Path, dtype: str = "float32", size: str = "20KB", seed: int = 7) -> dict[str, Any]:
    job = {"do": "save", "directory": str(directory), "dtype": dtype, "max_shard_size": size, "seed": seed}
    return {**job, "family": "llama", "config": {}}


def load(directory: Path) -> dict[str, Any]:
    return {"do": "load", "directory": str(directory)}


def test_transformers_loads_its_own_models(tmp_path: Path) -> None:
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


def test_the_oracle_detects_other_weights(tmp_path: Path) -> None:
    """An oracle that finds everything equal is none."""
    one, other = tmp_path / "one", tmp_path / "other"
    jobs = [save(one), save(other, seed=8), load(one), load(other)]
    _, _, first, second = oracles.done(oracles.transformers(jobs))
    assert first["logits"]["shape"] == second["logits"]["shape"]
    assert first["logits"] != second["logits"]


def test_a_model_survives_every_form(tmp_path: Path) -> None:
    """Hugging Face to ranks, to Checkpoint 2.0, to unified weights, and back: equal logits, nothing missing."""
    model = tmp_path / "model"
    oracles.done(oracles.transformers([save(model, "bfloat16")]))
    tensors = {name: tensor for path in model.glob("*.safetensors") for name, tensor in read_checkpoint(path).items()}
    strategy = columns(tensors, 4)
    written = write_strategy(
        tmp_path / "strategy", strategy, {name: value.array.shape for name, value in tensors.items()}
    )
    steps: list[tuple[str, str, tuple[Argument, ...]]] = [
        ("ranks", "ranks", ("--dst-strategy", written)),
        ("checkpoint2", "checkpoint2", ("--src-strategy", written, "--dst-strategy", written)),
        ("unified", "unified", ("--max-shard-size", "10KB")),
        ("one", "huggingface", ()),
        ("several", "huggingface", ("--max-shard-size", "20KB")),
    ]
    source = model
    for name, form, options in steps:
        done("convert", source, tmp_path / name, "--to", form, *options, "--quiet")
        source = tmp_path / name
    same_ranks(read_tree(tmp_path / "ranks"), cut_ranks(strategy, tensors))
    # Only between directories of Hugging Face are its other files copied.
    shutil.copy(model / "config.json", tmp_path / "one")
    done("convert", tmp_path / "one", tmp_path / "again", "--to", "huggingface", "--max-shard-size", "20KB", "--quiet")
    shutil.copy(model / "config.json", tmp_path / "several")
    places = [model, tmp_path / "one", tmp_path / "several", tmp_path / "again"]
    first, *others = oracles.done(oracles.transformers([load(place) for place in places]))
    assert (first["missing"], first["unknown"], first["dtypes"]) == ([], [], ["torch.bfloat16"])
    assert others == [first] * 3


def columns(tensors: Checkpoint, ranks: int) -> Strategy:
    """Every matrix cut along its columns, the rest whole on every rank."""

    def axes(shape: tuple[int, ...]) -> list[int]:
        return [0 if axis == 1 and size % ranks == 0 else -1 for axis, size in enumerate(shape)]

    return single({name: layout([ranks], axes(value.array.shape)) for name, value in tensors.items()})
