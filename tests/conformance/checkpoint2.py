"""Requests to MindFormers about Checkpoint 2.0 directories, and the expected results.

Layouts are as metadata.json has them: ``{"device_matrix", "tensor_map", "rank_list"}``. Which layouts a checkpoint is
loaded into has nothing to do with those it was saved in.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.conformance.workers.protocol import described
from tests.reference import boxes, cut
from tests.trees import SAFETENSORS_NAMES, Checkpoint

Layouts = Mapping[str, Mapping[str, Any]]


def stated(iteration: Path) -> dict[str, dict[str, Any]]:
    """The layouts of metadata.json; a parameter without one is whole on every rank."""
    entries = json.loads((iteration / "metadata.json").read_text())["state_dict_metadata"]
    layouts = {name: entry["layout"] for name, entry in entries.items()}
    world = 1 + max(rank for layout in layouts.values() if layout for rank in layout["rank_list"])
    return {
        name: {key: layout[key] for key in ("device_matrix", "tensor_map", "rank_list")}
        if layout
        else everywhere(len(entries[name]["global_shape"]), world)
        for name, layout in layouts.items()
    }


def everywhere(dimensions: int, world: int) -> dict[str, Any]:
    """A whole tensor on every rank."""
    return {"device_matrix": [world], "tensor_map": [-1] * dimensions, "rank_list": list(range(world))}


def grid(checkpoint: Checkpoint, rows: int, columns: int) -> dict[str, dict[str, Any]]:
    """Every tensor over rows x columns ranks: cut along its first and its last dimension where they divide."""
    result = {}
    for name, tensor in checkpoint.items():
        shape = tensor.array.shape
        tensor_map = [-1] * len(shape)
        if shape and shape[0] % rows == 0 and rows > 1:
            tensor_map[0] = 1
        if len(shape) > 1 and shape[-1] % columns == 0 and columns > 1:
            tensor_map[-1] = 0
        ranks = list(range(rows * columns))
        result[name] = {"device_matrix": [rows, columns], "tensor_map": tensor_map, "rank_list": ranks}
    return result


def world_of(layouts: Layouts) -> int:
    return 1 + max(int(rank) for layout in layouts.values() for rank in layout["rank_list"])


def load_job(checkpoint: Path, full: Checkpoint, layouts: Layouts, states: Iterable[str] = ()) -> dict[str, Any]:
    """What to ask MindFormers, so that `slices_of` is the answer. `states`: parameters of the optimizer."""
    world = world_of(layouts)
    return {
        "do": "load",
        "checkpoint": str(checkpoint),
        "ranks": list(range(world)),
        "world": world,
        "tensors": {
            name: {
                "dtype": SAFETENSORS_NAMES[full[name].dtype],
                "shape": list(full[name].array.shape),
                "layout": {key: layout[key] for key in ("device_matrix", "tensor_map", "rank_list")},
            }
            for name, layout in layouts.items()
        },
        "optimizer": sorted(set(states) & set(layouts)),
    }


def slices_of(full: Checkpoint, layouts: Layouts, step: int = -1) -> dict[str, dict[str, Any]]:
    """What every rank has to hold then; with the optimizer also `step`, unless the checkpoint lists it."""
    result: dict[str, dict[str, Any]] = {str(rank): {} for rank in range(world_of(layouts))}
    for name, layout in layouts.items():
        array = full[name].array
        plain = {
            "dev_matrix": layout["device_matrix"],
            "tensor_map": [entry if isinstance(entry, list) else [entry] for entry in layout["tensor_map"]],
            "shard_step": 0,
            "shard_size": 0,
        }
        for rank, box in zip(layout["rank_list"], boxes(plain, array.shape)):
            result[str(rank)][name] = described(cut(array, box))
    if step >= 0:
        for tensors in result.values():
            tensors.setdefault("global_step", described(np.array([step], np.int32)))
    return result


def differences(actual: Mapping[str, Mapping[str, Any]], expected: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Every rank and parameter that is not as expected."""
    return [
        f"rank {rank}: {name}"
        for rank in sorted(actual.keys() | expected.keys(), key=int)
        for name in sorted(actual.get(rank, {}).keys() | expected.get(rank, {}).keys())
        if actual.get(rank, {}).get(name) != expected.get(rank, {}).get(name)
    ]
