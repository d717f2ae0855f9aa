"""Checkpoint 2.0 and Hugging Face directories of any size, and the errors of converted ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.synthetic import Model, Scheme, Writer, write_ranks
from reshard.checkpoints import FileHandles, read_index
from reshard.layout import Layout
from reshard.storage import read_range

ITERATION = 10
INDEX = "model.safetensors.index.json"
UNIFIED_MAP = "param_name_map.json"


def write_checkpoint2(root: Path, model: Model, scheme: Scheme) -> None:
    """Write one iteration as MindFormers does with redundancy: a file a rank, and metadata.json over all of them."""
    iteration = root / f"iteration_{ITERATION:08d}"
    files = [f"net-model-{rank:07d}-{scheme.ranks:07d}.safetensors" for rank in range(scheme.ranks)]
    write_ranks(model, scheme, lambda rank: iteration / files[rank])
    tensor_map: list[Any] = [-1, -1]
    tensor_map[scheme.cut] = 0
    if scheme.sharded:
        # The first axis is the one that counts most: data parallel ranks cut a model parallel rank's rows again.
        tensor_map[0] = [0, 1] if scheme.cut == 0 else 1
    layout = Layout((scheme.data, scheme.model), _axes(tensor_map))
    shape = (model.rows, model.columns)
    tensors, storage = {}, {}
    for stage in range(scheme.stages):
        ranks = list(range(stage * scheme.per_stage, (stage + 1) * scheme.per_stage))
        slices = layout.slice_of_rank
        for name in model.names(scheme, stage):
            tensors[name] = {
                "properties": {
                    "dtype": "float32",
                    "replica_id": 0,
                    "allow_shape_mismatch": False,
                    "allow_to_save": True,
                },
                "global_shape": list(shape),
                "axis_fragmentations": list(layout.cuts),
                "layout": {
                    "device_matrix": [scheme.data, scheme.model],
                    "tensor_map": tensor_map,
                    "interleaved_parallel": False,
                    "alias_name": ["a", "b"],
                    "rank_list": ranks,
                },
                "chunk": [
                    {"global_offset": [number], "local_shape": [size // cut for size, cut in zip(shape, layout.cuts)]}
                    for number in sorted(set(slices))
                ],
            }
            for number in sorted(set(slices)):
                group = [rank for rank, contents in zip(ranks, slices) if contents == number]
                storage[str((name, (number,)))] = [
                    {"file_name": files[rank], "storage_rank": rank, "rank_group": group} for rank in group
                ]
    metadata = {"state_dict_metadata": tensors, "storage_data": storage}
    (iteration / "metadata.json").write_text(json.dumps(metadata))
    common = {"epoch_num": 1, "step_num": ITERATION, "global_step": ITERATION, "loss_scale": None}
    (iteration / "common.json").write_text(json.dumps({**common, "global_batch_size": 16}))
    (root / "latest_checkpointed_iteration.txt").write_text(str(ITERATION))


def _axes(tensor_map: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(entry) if isinstance(entry, list) else () if entry == -1 else (entry,) for entry in tensor_map)


def write_huggingface(directory: Path, model: Model, files: int) -> None:
    """Write whole tensors into so many files of about equal size, with their index."""
    _write_full_weights(
        directory, model, [f"model-{n:05d}-of-{files:05d}.safetensors" for n in range(1, files + 1)], INDEX
    )


def write_unified(directory: Path, model: Model, files: int) -> None:
    """Likewise as MindSpore writes unified weights."""
    _write_full_weights(directory, model, [f"part{n}.safetensors" for n in range(files)], UNIFIED_MAP)


def _write_full_weights(directory: Path, model: Model, files: list[str], index: str) -> None:
    names = model.names(Scheme(), 0)
    share = -(-len(names) // len(files))
    where = {}
    for number, file in enumerate(files):
        part = names[number * share : (number + 1) * share]
        writer = Writer(directory / file, part, (model.rows, model.columns), model.rows * model.columns * 4)
        for name in part:
            writer.write(model.tensor(name))
            where[name] = file
        writer.close()
    listing = {"metadata": {"total_size": model.nbytes}, "weight_map": where}
    (directory / index).write_text(json.dumps(listing, indent=2, sort_keys=True))


def wrong_in_checkpoint2(root: Path, model: Model) -> int:
    """The number of wrong slices and missing parameters of a converted Checkpoint 2.0 directory."""
    (iteration,) = root.glob("iteration_*")
    metadata = json.loads((iteration / "metadata.json").read_text())
    wrong = 0
    visited = set()
    for name, file, box in _stored(metadata):
        visited.add(name)
        wrong += _bytes_of(iteration / file, name) != _part(model, name, box)
    return wrong + len(set(model.names(Scheme(), 0)) ^ visited)


def _stored(metadata: dict[str, Any]) -> Iterator[tuple[str, str, tuple[slice, ...]]]:
    """Name, file and place of every slice that is stored."""
    for name, entry in metadata["state_dict_metadata"].items():
        plain = entry["layout"]
        layout = Layout(tuple(plain["device_matrix"]), _axes(plain["tensor_map"]))
        for chunk in entry["chunk"]:
            for stored in metadata["storage_data"][str((name, tuple(chunk["global_offset"])))]:
                number = int(layout.slice_of_rank[plain["rank_list"].index(stored["storage_rank"])])
                box = layout.slice_box(tuple(entry["global_shape"]), number)
                yield name, stored["file_name"], tuple(slice(*interval) for interval in box)


def wrong_in_full_weights(directory: Path, model: Model, index: str = INDEX) -> int:
    """The number of wrong or missing parameters of converted full weights."""
    where = _files_of(directory, index)
    names = model.names(Scheme(), 0)
    whole = (slice(None), slice(None))
    wrong = sum(
        _bytes_of(directory / where[name], name) != _part(model, name, whole) for name in names if name in where
    )
    return wrong + len(set(names) ^ set(where))


def _files_of(directory: Path, index: str) -> dict[str, str]:
    """Which file holds each parameter; a single file needs no index."""
    path = directory / "model.safetensors"
    if path.exists():
        with FileHandles() as handles:
            return dict.fromkeys(read_index(handles, str(path)).tensors, path.name)
    where: dict[str, str] = json.loads((directory / index).read_text())["weight_map"]
    return where


def _bytes_of(path: Path, name: str) -> bytes:
    with FileHandles() as handles:
        tensor = read_index(handles, str(path)).tensors[name]
        with handles.borrow(str(path)) as file:
            return b"".join(read_range(file, offset, size) for offset, size in tensor.extents)


def _part(model: Model, name: str, box: tuple[slice, ...]) -> bytes:
    return np.ascontiguousarray(model.tensor(name)[box]).tobytes()
