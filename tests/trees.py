"""Checkpoints, rank trees and strategy files, written and read naively.

A checkpoint here is ``{name: Value}``; a `Value` is a MindSpore dtype name and the elements as an
array of unsigned integers of the same width, so that BF16 or FP8 need no NumPy type.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tests import checkpoint_writing
from tests.checkpoint_writing import STORED
from tests.reference import Array, LayoutDict, Strategy, axes_of, slices
from tests.strategy_writing import layout_message
from tests.wire import field, fields, integers, messages

ITEM_SIZES = {
    "Bool": 1,
    "Int4": 1,
    "Int8": 1,
    "UInt8": 1,
    "Int16": 2,
    "UInt16": 2,
    "Float16": 2,
    "BFloat16": 2,
    "Int32": 4,
    "UInt32": 4,
    "Float32": 4,
    "Int64": 8,
    "UInt64": 8,
    "Float64": 8,
    "Complex64": 8,
    "str": 4,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}

SAFETENSORS_NAMES = {name: STORED[name] for name in ITEM_SIZES if name != "str"}


class Value(NamedTuple):
    """A tensor of a checkpoint: dtype name and elements as unsigned integers."""

    dtype: str
    array: Array

    def same(self, other: Value) -> bool:
        return (
            self.dtype == other.dtype
            and self.array.shape == other.array.shape
            and self.array.tobytes() == other.array.tobytes()
        )


Checkpoint = Mapping[str, Value]

#: Endings of checkpoint files.
FORMATS = ["ckpt", "safetensors"]


def value(name: str, shape: Sequence[int], dtype: str = "Float32") -> Value:
    """A tensor whose bytes depend on its name: values differ within a tensor and between tensors."""
    count = math.prod(shape)
    width = ITEM_SIZES[dtype]
    if dtype == "Bool":
        array = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 2, count).astype("u1")
    elif width == 1:
        array = np.random.RandomState(zlib.crc32(name.encode())).randint(0, 256, count).astype("u1")
    else:
        array = (np.arange(count, dtype="<u8") + zlib.crc32(name.encode()) % 50021).astype(f"<u{width}")
    return Value(dtype, array.reshape(tuple(shape)))


def scalar(number: int, dtype: str = "Int32", shape: Sequence[int] = ()) -> Value:
    return Value(dtype, np.full(tuple(shape), number, f"<u{ITEM_SIZES[dtype]}"))


def text(content: str) -> Value:
    return Value("str", np.frombuffer(content.encode("utf-32-le"), "<u4"))


def arrays(checkpoint: Checkpoint) -> dict[str, Array]:
    return {name: tensor.array for name, tensor in checkpoint.items()}


def shapes_of(checkpoint: Checkpoint) -> dict[str, Sequence[int]]:
    return {name: tensor.array.shape for name, tensor in checkpoint.items()}


def subset(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, Value]:
    return {name: tensor for name, tensor in checkpoint.items() if name in names}


# Checkpoint files.


def _parts(checkpoint: Checkpoint) -> dict[str, checkpoint_writing.Parts]:
    return {
        name: (dtype, (0,) if dtype == "str" else array.shape, array.tobytes())
        for name, (dtype, array) in checkpoint.items()
    }


def ckpt_bytes(checkpoint: Checkpoint, record_bytes: int | None = None, crc: bool = False) -> bytes:
    """A `.ckpt` file; with `record_bytes` larger tensors take several records."""
    return checkpoint_writing.ckpt_bytes(_parts(checkpoint), record_bytes, crc)


def safetensors_bytes(checkpoint: Checkpoint, metadata: Mapping[str, str] | None = None) -> bytes:
    """A `.safetensors` file, with Int4 marks where they are due."""
    return checkpoint_writing.safetensors_bytes(_parts(checkpoint), {"format": "ms", **(metadata or {})})


def write_checkpoint(path: str | Path, checkpoint: Checkpoint, **options: Any) -> Path:
    """Write one file, in the format of its ending; makes the directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    data = (
        safetensors_bytes(checkpoint, **options) if path.suffix == ".safetensors" else ckpt_bytes(checkpoint, **options)
    )
    path.write_bytes(data)
    return path


def read_checkpoint(path: str | Path) -> dict[str, Value]:
    """Read one file; records of one name are joined."""
    path = Path(path)
    data = path.read_bytes()
    if path.suffix == ".safetensors":
        return read_safetensors(data)
    actual: dict[str, tuple[str, list[int], list[bytes]]] = {}
    for record in messages(data, 1):
        parts = dict(fields(record))
        name, tensor = parts[1], parts[2]
        assert isinstance(name, bytes) and isinstance(tensor, bytes)
        (dtype,) = messages(tensor, 2)
        (content,) = messages(tensor, 3)
        actual.setdefault(name.decode(), (dtype.decode(), integers(tensor), []))[2].append(content)
    result = {}
    for key, (dtype_name, dims, contents) in actual.items():
        array = np.frombuffer(b"".join(contents), f"<u{ITEM_SIZES[dtype_name]}")
        scalar_marked = dims == [0] and array.size and dtype_name != "str"
        shape = [-1] if dtype_name == "str" else [] if scalar_marked else dims
        result[key] = Value(dtype_name, array.reshape(shape))
    return result


def read_weights(directory: Path) -> dict[str, Value]:
    """Read all safetensors files of a directory."""
    return {name: each for path in directory.glob("*.safetensors") for name, each in read_checkpoint(path).items()}


def read_safetensors(data: bytes) -> dict[str, Value]:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    result = {}
    names = {mark: name for name, mark in SAFETENSORS_NAMES.items() if name != "Int4"}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        dtype = "Int4" if metadata.get(name) == "Int4" else names[entry["dtype"]]
        array = np.frombuffer(body[start:stop], f"<u{ITEM_SIZES[dtype]}").reshape(entry["shape"])
        result[name] = Value(dtype, array)
    return result


def safetensors_metadata(path: str | Path) -> dict[str, str]:
    data = Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    metadata: dict[str, str] = json.loads(data[8 : 8 + length]).get("__metadata__", {})
    return metadata


def flip(path: Path, name: str) -> None:
    """Change a bit of a tensor of a `.safetensors` file, and nothing else."""
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    content[start + json.loads(content[8:start])[name]["data_offsets"][0] + 4] ^= 4
    path.write_bytes(content)


# Rank trees.


def cut_ranks(
    strategy: Strategy,
    checkpoint: Checkpoint,
    copied: Checkpoint | None = None,
    unsharded: Sequence[str] = (),
) -> dict[int, dict[str, Value]]:
    """What every rank saves: its slices of `checkpoint`, and `copied` as it is."""
    parts = slices(strategy, arrays(checkpoint), unsharded)
    return {
        rank: {**{name: Value(checkpoint[name].dtype, part) for name, part in tensors.items()}, **(copied or {})}
        for rank, tensors in parts.items()
    }


def write_tree(
    root: str | Path,
    ranks: Mapping[int, Checkpoint],
    pattern: str = "rank_{rank}/net-1_10.ckpt",
    **options: Any,
) -> Path:
    root = Path(root)
    root.mkdir(parents=True, exist_ok=True)
    for rank, checkpoint in ranks.items():
        write_checkpoint(root / pattern.format(rank=rank), checkpoint, **options)
    return root


def read_tree(root: str | Path, prefix: str = "checkpoint_") -> dict[int, dict[str, Value]]:
    """A converted tree; any file of another name than the contract's is a failure."""
    result: dict[int, dict[str, Value]] = {}
    root = Path(root)
    for entry in sorted(os.listdir(root)):
        if entry.startswith("rank_"):
            rank = int(entry[len("rank_") :])
            (name,) = os.listdir(root / entry)
            assert name in (f"{prefix}{rank}.ckpt", f"{prefix}{rank}.safetensors")
            result[rank] = read_checkpoint(root / entry / name)
    return result


def read_named(root: str | Path, pattern: str) -> dict[int, dict[str, Value]]:
    """A tree whose files are named so, with ``{rank}`` for the rank; any other checkpoint in it is a failure."""
    root = Path(root)
    paths = [path for path in root.rglob("*") if path.suffix in (".ckpt", ".safetensors")]
    ranks = {str(root / pattern.format(rank=rank)): rank for rank in range(64)}
    assert set(map(str, paths)) <= ranks.keys(), f"{sorted(map(str, paths))} are not all {pattern}"
    return {ranks[str(path)]: read_checkpoint(path) for path in paths}


def tree_bytes(root: str | Path) -> dict[str, bytes]:
    """Every rank file below a converted tree, by its path."""
    root = Path(root)
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.glob("rank_*/*"))}


def version(path: Path) -> tuple[int, int]:
    """Inode and time of a file: a rewritten file has another pair, although file systems reuse inodes at once."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def same_ranks(ranks: Mapping[int, Checkpoint], expected: Mapping[int, Checkpoint]) -> None:
    """Fail, naming rank and parameter, unless both hold the same tensors."""
    assert sorted(ranks) == sorted(expected)
    for rank, checkpoint in expected.items():
        same_checkpoints(ranks[rank], checkpoint, f"rank {rank}")


def same_checkpoints(tensors: Checkpoint, expected: Checkpoint, where: str = "") -> None:
    assert sorted(tensors) == sorted(expected), where
    for name, tensor in expected.items():
        other = tensors[name]
        assert other.dtype == tensor.dtype, f"{where} {name}: {other.dtype} is not {tensor.dtype}"
        assert other.array.shape == tensor.array.shape, f"{where} {name}: {other.array.shape}"
        assert other.array.tobytes() == tensor.array.tobytes(), f"{where} {name}: values differ"


# Strategy files.


def strategy_bytes(strategy: Strategy, numbers: Sequence[int], nested: bool = False, merged: bool = False) -> bytes:
    """The protobuf file of one stage, or of several in one (`merged`: names carry the stage)."""
    out = [field(1, 1)]
    for number in numbers:
        for name in strategy[number]["layouts"]:
            parallel = field(1, number) + field(2, field(1, 1))
            out.append(field(2, field(1, f"MatMul-{number}-{name}") + field(2, parallel)))
    for number in numbers:
        for name, layout in strategy[number]["layouts"].items():
            label = f"{number}-{name}" if merged else name
            out.append(field(3, field(1, label) + field(2, layout_bytes(layout, nested))))
    return b"".join(out)


def layout_bytes(layout: LayoutDict, nested: bool = False) -> bytes:
    tensor_map = layout["tensor_map"]
    uneven = layout.get("uneven") or []
    if nested and all(isinstance(entry, int) for entry in tensor_map) and len(tensor_map) > 1:
        tensor_map = [[entry] for entry in tensor_map]
    if len(tensor_map) == 1 and isinstance(tensor_map[0], list):
        # A lone map would read as a flat one: MindSpore adds an empty map then.
        tensor_map = [*tensor_map, []]
    offsets = [sum(uneven[:index]) for index in range(len(uneven))]
    shards = {"step": layout["shard_step"], "size": layout["shard_size"]}
    record = {"dev_matrix": layout["dev_matrix"], "tensor_map": tensor_map, "sizes": uneven, "offsets": offsets}
    return layout_message({**record, **shards})


def strategy_json(
    strategy: Strategy, numbers: Sequence[int], shapes: Mapping[str, Sequence[int]], merged: bool = False
) -> str:
    """The JSON file of one stage or several; dimensions over several axes take one entry per axis."""
    items: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    for number in numbers:
        for name, layout in strategy[number]["layouts"].items():
            items[f"MatMul-{number}-{name}"] = {"stage": number, "parallel_strategy": [[1]]}
            layouts[f"{number}-{name}" if merged else name] = layout_json(layout, shapes[name])
    return json.dumps({"current_stage": 1, "parallel_strategy_item": items, "parallel_layout_item": layouts})


def layout_json(layout: LayoutDict, shape: Sequence[int]) -> dict[str, Any]:
    """The JSON writer's form: the most significant pieces have the size of their axis."""
    tensor_map: list[int] = []
    tensor_shape: list[int] = []
    for size, axes in zip(shape, axes_of(layout["tensor_map"], len(shape))):
        for axis in axes[:-1]:
            tensor_map.append(axis)
            tensor_shape.append(layout["dev_matrix"][-1 - axis])
            size //= tensor_shape[-1]
        tensor_map.append(axes[-1] if axes else -1)
        tensor_shape.append(size)
    uneven = layout.get("uneven")
    split = {}
    if uneven:
        split["param_split_shape"] = list(uneven)
        split["indices_offset"] = [sum(uneven[:index]) for index in range(len(uneven))]
        tensor_shape[0] = uneven[0] * len(uneven)
    return {
        "dev_matrix": list(layout["dev_matrix"]),
        "tensor_map": tensor_map,
        "tensor_shape": tensor_shape,
        "field": 0,
        "opt_weight_shard_step": layout["shard_step"],
        "opt_weight_shard_size": layout["shard_size"],
        **split,
    }


def write_strategy(
    path: str | Path,
    strategy: Strategy,
    shapes: Mapping[str, Sequence[int]] | None = None,
    form: str = "pb",
) -> Path:
    """Write a strategy in one of its forms and give the path to name on the command line.

    Forms: ``pb`` and ``json`` (one file: merged when there are several stages), ``nested``,
    ``merged`` and ``merged-json`` (merged always), ``directory`` (one file per rank) and
    ``directory-json`` (one file per stage). Endings are added to `path`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    every = range(len(strategy))
    several = len(strategy) > 1
    if form.startswith("directory"):
        path.mkdir()
        rank = 0
        for number in every:
            if form == "directory-json":
                (path / f"ckpt_strategy_rank_{rank}.json").write_text(strategy_json(strategy, [number], shapes or {}))
            else:
                for local in range(strategy[number]["devices"]):
                    (path / f"ckpt_strategy_rank_{rank + local}.ckpt").write_bytes(strategy_bytes(strategy, [number]))
            rank += strategy[number]["devices"]
        return path
    if form in ("json", "merged-json"):
        path = path.with_name(path.name + ".json")
        path.write_text(strategy_json(strategy, every, shapes or {}, several or form == "merged-json"))
    else:
        path = path.with_name(path.name + ".ckpt")
        path.write_bytes(strategy_bytes(strategy, every, form == "nested", several or form == "merged"))
    return path


def read_strategy_files(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The strategy of the per-stage protobuf files given; copies of a stage may be among them."""
    stages: dict[int, dict[str, Any]] = {}
    for path in paths:
        data = path.read_bytes()
        numbers = set()
        for item in messages(data, 2):
            for parallel in messages(item, 2):
                numbers.update(integers(parallel, 1))
        layouts: dict[str, Any] = {}
        devices = 1
        for item in messages(data, 3):
            (name,) = messages(item, 1)
            (layout,) = messages(item, 2)
            maps = [integers(entry) for entry in messages(layout, 2)]
            matrix = [entry for part in messages(layout, 1) for entry in integers(part)]
            sizes = [entry for part in messages(layout, 3) for entry in integers(part)]
            offsets = [entry for part in messages(layout, 4) for entry in integers(part)]
            devices = max(devices, math.prod(matrix))
            layouts[name.decode()] = {
                "dev_matrix": matrix,
                "tensor_map": maps[0] if len(maps) == 1 else maps,
                "shard_step": integers(layout, 6)[0],
                "shard_size": integers(layout, 7)[0],
                "uneven": sizes if offsets else None,
            }
        (number,) = numbers
        stages[number] = {"devices": devices, "layouts": layouts}
    assert sorted(stages) == list(range(len(stages)))
    return [stages[number] for number in sorted(stages)]


def single(strategy_layouts: Mapping[str, LayoutDict]) -> Strategy:
    """A strategy of one stage."""
    devices = {math.prod(layout["dev_matrix"]) for layout in strategy_layouts.values()}
    (count,) = devices
    return [{"devices": count, "layouts": dict(strategy_layouts)}]


def layout(
    dev_matrix: Sequence[int],
    tensor_map: Sequence[Any],
    shard_size: int = 0,
    shard_step: int = 0,
    uneven: Sequence[int] | None = None,
) -> dict[str, Any]:
    return {
        "dev_matrix": list(dev_matrix),
        "tensor_map": list(tensor_map),
        "shard_size": shard_size,
        "shard_step": shard_step,
        "uneven": list(uneven) if uneven else None,
    }
