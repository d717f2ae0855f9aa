"""Checkpoints written and read by a real MindSpore, as plain NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

mindspore = pytest.importorskip("mindspore", reason="needs MindSpore: run `make conformance`")

Arrays = Mapping[str, Any]


def save(arrays: Arrays, path: Path, append_dict: Mapping[str, Any] | None = None, **options: Any) -> None:
    """`mindspore.save_checkpoint` of arrays or MindSpore tensors; `options` are its own."""
    parameters = [
        {"name": name, "data": array if isinstance(array, mindspore.Tensor) else tensor(array)}
        for name, array in arrays.items()
    ]
    mindspore.save_checkpoint(parameters, str(path), append_dict=dict(append_dict) if append_dict else None, **options)


def tensor(array: Any) -> Any:
    """A MindSpore tensor of an array of any shape, scalars included."""
    return mindspore.Tensor(np.array(array))


def save_tree(root: Path, ranks: Mapping[int, Arrays], **options: Any) -> Path:
    """One checkpoint per rank, under names that MindSpore's own conversion finds too."""
    ending = options.get("format", "ckpt")
    for rank, arrays in ranks.items():
        (root / f"rank_{rank}").mkdir(parents=True)
        save(arrays, root / f"rank_{rank}" / f"net-1_10.{ending}", **options)
    return root


def load(path: Path, **options: Any) -> dict[str, Any]:
    """`mindspore.load_checkpoint`: tensors as NumPy arrays, bfloat16 as its bits (uint16), text as it is."""
    loaded = mindspore.load_checkpoint(str(path), format=path.suffix[1:], **options)
    return {name: plain(value) for name, value in loaded.items()}


def load_tree(root: Path, prefix: str = "checkpoint_") -> dict[int, dict[str, Any]]:
    """Every rank of a converted tree, whatever the format."""
    result = {}
    for directory in root.glob("rank_*"):
        rank = int(directory.name[len("rank_") :])
        (path,) = directory.glob(f"{prefix}{rank}.*")
        result[rank] = load(path)
    return result


def plain(value: Any) -> Any:
    """One loaded value without MindSpore's types around it."""
    if not isinstance(value, mindspore.Tensor):
        return value
    if value.dtype == mindspore.bfloat16:
        # Exact: the upper half of a float32 is the bfloat16.
        return (np.asarray(value.float().asnumpy()).view(np.uint32) >> 16).astype(np.uint16)
    return np.asarray(value.asnumpy())


def assert_same(tensors: Arrays, expected: Arrays, where: str = "") -> None:
    """The same names, and of each the same type, shape and bytes."""
    assert sorted(tensors) == sorted(expected), where
    for name, value in expected.items():
        other = tensors[name]
        if isinstance(value, str):
            assert other == value, f"{where} {name}"
        else:
            assert (other.dtype, other.shape) == (value.dtype, value.shape), f"{where} {name}"
            assert other.tobytes() == value.tobytes(), f"{where} {name}"


def assert_same_ranks(ranks: Mapping[int, Arrays], expected: Mapping[int, Arrays]) -> None:
    assert sorted(ranks) == sorted(expected)
    for rank, arrays in expected.items():
        assert_same(ranks[rank], arrays, f"rank {rank}")
