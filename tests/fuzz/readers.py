"""The fuzzed readers: their valid inputs, and the properties of every accepted input."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from reshard.asked import Source
from reshard.checkpoints import CheckpointIndex, FileHandles, read_index
from reshard.decryption import decrypt
from reshard.forms.full.contents import read_huggingface, read_unified
from reshard.forms.full.form import HUGGINGFACE_INDEX, UNIFIED_MAP
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import form_named
from reshard.forms.request import Means, Request
from reshard.storage import read_range
from reshard.strategies import read_group_info, read_strategy
from reshard.strategies.replicas import replicas_of_group_infos, replicas_of_strategy
from reshard.strategies.written import merge_pipeline
from reshard.text.messages import Report
from tests.asking import open_checkpoint
from tests.checkpoint2_writing import saving
from tests.checkpoint_writing import ckpt_bytes, map_record, random_arrays, safetensors_bytes, text, write_safetensors
from tests.corpus import FIXTURES
from tests.encryption import KEY, MODES, encrypted
from tests.forms.test_hostile_checkpoint2 import SAVED, see_that_it_is_right
from tests.strategy_writing import group_info, json_content, layout, protobuf


class Reader(NamedTuple):
    """Reads the content of one file, and checks what came of it.

    Attributes:
        name: of the file to write; also the directory of `fixtures/hostile` for what was found.
        seeds: valid contents.
        read: reads the file, which lies in a directory of its own.
        inputs: how many damaged ones the short test tries.
    """

    name: str
    seeds: list[bytes]
    read: Callable[[Path], None]
    inputs: int = 800


def read_checkpoint(path: Path) -> None:
    with FileHandles() as handles:
        see_that_it_adds_up(read_index(handles, str(path)), path.stat().st_size)


def read_encrypted(path: Path) -> None:
    plain = path.parent / "plain"
    plain.mkdir(exist_ok=True)
    (plain / path.name).unlink(missing_ok=True)
    try:
        decrypt(str(path), str(plain), KEY, Report())
    finally:
        # All or nothing.
        assert [name.name for name in plain.iterdir()] in ([], [path.name])
    read_checkpoint(plain / path.name)


def see_that_it_adds_up(index: CheckpointIndex, size: int) -> None:
    selected: list[tuple[int, int]] = []
    for name, tensor in index.tensors.items():
        name.encode()
        assert name == tensor.name
        assert tensor.nbytes == sum(length for _, length in tensor.extents)
        assert all(dim >= 0 for dim in tensor.shape)
        assert len(tensor.shape) <= 64
        selected += tensor.extents
    selected.sort()
    assert all(start + length <= next_start for (start, length), (next_start, _) in itertools.pairwise(selected))
    assert all(start >= 0 and length > 0 and start + length <= size for start, length in selected)


def read_a_strategy(path: Path) -> None:
    strategy = read_strategy(str(path))
    for stage in strategy.stages:
        assert 0 < stage.device_count <= 2**20
        for name, layout_record in stage.layouts.items():
            name.encode()
            assert layout_record.device_count == stage.device_count
            assert len(layout_record.slice_of_rank) == stage.device_count
            assert 0 <= min(layout_record.slice_of_rank) <= max(layout_record.slice_of_rank) < layout_record.slice_count
            layout_record.regroupings()
    assert sum(len(group.ranks) for group in replicas_of_strategy(strategy).groups) == strategy.device_count


def merge_strategies(path: Path) -> None:
    target = path.parent / "target" / "merged.json"
    try:
        merge_pipeline(str(path.parent), str(target))
        again = read_strategy(str(target))
    finally:
        with contextlib.suppress(FileNotFoundError):
            target.unlink()
    assert again.device_count == read_strategy(str(path.parent)).device_count


def read_groups(path: Path) -> None:
    info = read_group_info(str(path))
    replicas_of_group_infos([info])
    assert all(0 <= rank < 2**32 for rank in info.restore_ranks)


def read_names(path: Path) -> None:
    """The lines name a source, a suffix, and existing files."""
    lines = [line.decode(errors="surrogateescape") for line in path.read_bytes().split(b"\n")]
    src, suffix, *files = [*lines, "", ""]
    root = path.parent / "tree"
    created = [root / name for name in files[:12] if inside(name)]
    for file in created:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()
    try:
        if not inside(src):
            src = ""
        tree = find_checkpoints(Source(os.path.join(str(root), src), file_suffix=suffix or None))
        for step in tree.candidates():
            for rank, tensors in step.files.items():
                assert rank in tree.ranks
                assert os.path.isfile(tensors)
    finally:
        for directory, directories, names in os.walk(root, topdown=False):
            for name in names:
                os.unlink(os.path.join(directory, name))
            for name in directories:
                os.rmdir(os.path.join(directory, name))


def read_metadata(path: Path) -> None:
    """The file lists the layouts of tensors beside it; they must be read correctly."""
    iteration = path.parent
    if not any(iteration.glob("*.safetensors")):
        for name, contents in _SAVED.files().items():
            write_safetensors(iteration / name, contents)
    see_that_it_is_right(iteration, _SAVED.tensors)


def read_distributed(path: Path) -> None:
    """The metadata of files beside it, or one of these files; it must be read correctly or refused."""
    form = next(form for form, files in _DISTRIBUTED.items() if path.name in files)
    for name, content in _DISTRIBUTED[form].items():
        if not (path.parent / name).exists():
            (path.parent / name).write_bytes(content)
    read_chunks(form, path.parent)
    if path.name.endswith("metadata"):
        valid = _elements(str(FIXTURES / "dcp" / _CASES[form] / "checkpoint"))
        for name, (shape, elements) in _elements(str(path.parent)).items():
            # Chunks of one shape may change places unnoticed; none may appear twice.
            assert name not in valid or valid[name][0] != shape or valid[name][1] == elements, name


def _elements(directory: str) -> dict[str, tuple[object, bytes]]:
    """Per tensor of a checkpoint its shape and type, and its elements in ascending order."""
    with open_checkpoint(directory) as tensors:
        return {
            name: ((tensor.shape, str(tensor.dtype)), np.sort(tensor[...], axis=None).tobytes())
            for name, tensor in tensors.items()
        }


def read_megatron(path: Path) -> None:
    """A file of a directory of Megatron, beside the others; what is read of it must be right."""
    for name, content in _MEGATRON.items():
        if not (path.parent / name).exists():
            (path.parent / name).write_bytes(content)
    read_chunks("megatron", path.parent)
    valid = _elements(str(_MEGATRON_CASE))
    for name, (shape, elements) in _elements(str(path.parent)).items():
        assert name == "global_step" or name not in valid or valid[name][0] != shape or valid[name][1] == elements, name


def read_shard(path: Path) -> None:
    """A shard of Hugging Face's sharded files, beside another one; its tensors must be read correctly or refused."""
    data = path.read_bytes()
    (path.parent / _SHARD_NAME.format(2)).write_bytes(_SHARDS[2])
    with open_checkpoint(str(path.parent)) as tensors:
        arrays = {name: tensor[...] for name, tensor in tensors.items()}
    if data[_begin(data) :] == _SHARDS[1][_begin(_SHARDS[1]) :]:
        for name, array in arrays.items():
            full = _CUT.get(name)
            assert full is None or full.shape != array.shape or full.dtype != array.dtype or (full == array).all(), name


def _begin(shard: bytes) -> int:
    """The offset of the first tensor's bytes."""
    return 8 + int.from_bytes(shard[:8], "little")


def read_rank_pickle(path: Path) -> None:
    """The pickle in the file of a rank, whose archive has no checksums that would show the damage at once."""
    directory = path.parent / "ranks"
    directory.mkdir(exist_ok=True)
    for name, content in _DISTRIBUTED["verl"].items():
        if name != _RANK_FILE:
            (directory / name).write_bytes(content)
    with zipfile.ZipFile(directory / _RANK_FILE, "w") as archive:
        for name, content in _RANK_ENTRIES.items():
            archive.writestr(name, path.read_bytes() if name.endswith("/data.pkl") else content)
    read_chunks("verl", directory)


def read_chunks(form: str, directory: Path) -> None:
    with FileHandles() as handles:
        request = Request.of_source(Source(str(directory)), form_named(form))
        checkpoint = request.form.read(request, Means(handles, Report()))
        for index in checkpoint.indexes.values():
            for tensor in index.tensors.values():
                for start, size in tensor.extents:
                    with handles.borrow(index.path) as file:
                        assert len(read_range(file, start, min(size, 4096))) == min(size, 4096)


def read_map(path: Path) -> None:
    """The file lists the files of tensors beside it; they must be read correctly."""
    for file, tensors in _WEIGHTS.items():
        if not (path.parent / file).exists():
            write_safetensors(path.parent / file, tensors)
    form, read = ("unified", read_unified) if path.name == UNIFIED_MAP else ("huggingface", read_huggingface)
    with FileHandles() as handles:
        checkpoint = read(Request.of_source(Source(str(path)), form_named(form)), Means(handles, Report()))
    assert checkpoint.tensors.keys() <= {name for tensors in _WEIGHTS.values() for name in tensors}
    for name, tensor in checkpoint.tensors.items():
        (number,) = checkpoint.holders(name)
        array = _WEIGHTS[os.path.basename(checkpoint.files[number])][name]
        ((start, size),) = checkpoint.indexes[number].tensors[name].extents
        content = Path(checkpoint.files[number]).read_bytes()[start : start + size]
        assert (content, tensor.shape) == (array.tobytes(), array.shape)


def inside(name: str) -> bool:
    """Whether a name is a valid path below its directory."""
    if any(len(os.fsencode(part)) > 255 for part in name.split("/")):
        return False
    return not name.startswith("/") and "\0" not in name and ".." not in name.split("/") and bool(name.strip("/."))


def seeds_of_layouts() -> Iterator[dict[str, Any]]:
    yield {"w": layout([2, 2], [0, -1], shape=[8, 6])}
    yield {
        "w": layout([2, 2, 2], [0, -1], step=2, size=-1, shape=[64, 6]),
        "v-1": layout([2, 2, 2], [[1, 0], [-1]], shape=[8, 2]),
        "t": layout([8], [0, -1], sizes=[10, 20, 30, 4, 1, 1, 1, 1], offsets=[0, 10, 30, 60, 64, 65, 66, 67]),
        "accu_grads.w": layout([2, 2, 2], [-1, -1], step=1, size=8),
        "s": layout([2, 2, 2], []),
    }
    yield {"0-w": layout([2], [0]), "1-v": layout([4], [-1, 0])}
    yield {"x": layout([2, 2, 2], [-1, 1, 0], shape=[32, 2, 32])}


def checkpoints() -> list[dict[str, Any]]:
    arrays = random_arrays()
    few = {name: arrays[name] for name in list(arrays)[:4]}
    return [few, {"note": text("hello"), "w": np.arange(6, dtype="f4").reshape(2, 3)}]


_CASES = {"dcp": "w2_old_metadata", "hyper-parallel": "hyper_w4_2026_03_by_rank"}
_DISTRIBUTED = {
    form: {path.name: path.read_bytes() for path in (FIXTURES / "dcp" / case / "checkpoint").iterdir()}
    for form, case in _CASES.items()
}
_MEGATRON_CASE = FIXTURES / "megatron" / "td_moe_fully" / "checkpoint" / "iter_0000100"
_MEGATRON = {path.name: path.read_bytes() for path in _MEGATRON_CASE.iterdir()}
_SHARD_NAME = "shard-{:05d}-model-00001-of-00001.safetensors"
_CUT = {"a": np.arange(15, dtype="f4").reshape(5, 3), "b": np.arange(24, dtype="f2").reshape(2, 3, 4) + 1}


def _shard(boxes: dict[str, tuple[slice, ...]], shapes: bool) -> bytes:
    """A file of chunks as torch writes it, with or without full shapes."""
    info: dict[str, dict[str, list[int]]] = {
        name: {"saved_offsets": [each.start for each in box]} for name, box in boxes.items()
    }
    for name in boxes if shapes else ():
        info[name]["global_shape"] = list(_CUT[name].shape)
    metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
    return safetensors_bytes({name: _CUT[name][box] for name, box in boxes.items()}, metadata)


_FIRST = {"a": (slice(0, 3), slice(0, 3)), "b": (slice(0, 2), slice(0, 1), slice(0, 4))}
_SHARDS = {
    number: _shard(boxes, shapes)
    for number, (boxes, shapes) in enumerate(
        [
            (_FIRST, False),
            (_FIRST, True),
            ({"a": (slice(3, 5), slice(0, 3)), "b": (slice(0, 2), slice(1, 3), slice(0, 4))}, False),
        ]
    )
}
_RANK_FILE = "model_world_size_4_rank_1.pt"
_DISTRIBUTED["verl"] = {
    path.name: path.read_bytes() for path in (FIXTURES / "verl" / "w4_mesh" / "checkpoint").iterdir()
}
with zipfile.ZipFile(io.BytesIO(_DISTRIBUTED["verl"][_RANK_FILE])) as _archive:
    _RANK_ENTRIES = {name: _archive.read(name) for name in _archive.namelist()}
_CKPT = [ckpt_bytes(tensors, limit, crc) for tensors in checkpoints() for limit, crc in ((None, False), (8, True))]
_SAFETENSORS = [
    safetensors_bytes({name: tensor for name, tensor in tensors.items() if name != "note"}, metadata)
    for tensors in checkpoints()
    for metadata in (None, {"format": "ms", "crc_num": "123", "remove_redundancy": "False"})
]
_PROTOBUF = [protobuf(created, [0, 1] if "0-w" in created else [0]) for created in seeds_of_layouts()]
_GROUPS = [group_info([0, 4], [("world", range(8)), ("pp", [0, 4]), ("pp", [1, 5])]), group_info([])]
_NAMES = [
    b"\n\nrank_0/net-1_10.ckpt\nrank_1/net-1_10.ckpt\nrank_0/net-1_9.ckpt\nrank_1/net-1_9.ckpt",
    b"run/{rank}/*_rank_{rank}-[0-9]*.ckpt\n_10\nrun/0/a_rank_0-1_10.ckpt\nrun/1/a_rank_1-1_10.ckpt",
    b"\n\n0/a_0.ckpt\n1/a_1.ckpt\n2/a_2.ckpt\nrank_3_tmp/x-1_2.ckpt\n1/.hidden.ckpt",
    b"rank_{rank}/net*\n\nrank_0/net-1_2_breakpoint.ckpt\nrank_1/net-1_2_breakpoint.ckpt\nrank_1/net-1_1.ckpt",
]


def json_seeds() -> list[bytes]:
    return [
        json.dumps(json_content(created, [0, 1] if "0-w" in created else [0])).encode()
        for created in seeds_of_layouts()
    ]


_SAVED = saving(tensors=SAVED, world=4)
_METADATA = [
    json.dumps(saved.metadata(), indent=indent).encode()
    for saved in (_SAVED, replace(_SAVED, groups=False), replace(_SAVED, tensors={"whole": SAVED["whole"]}))
    for indent in (None, 4)
]

_WEIGHTS = {
    f"part{number}.safetensors": {
        f"layers.{number}.w": np.arange(6, dtype="f4") + number,
        f"layers.{number}.b": np.full((1, 2), number, "f2"),
    }
    for number in (0, 1, 10)
}
_LISTED = {name: file for file, tensors in _WEIGHTS.items() for name in tensors}
_MAPS = [
    json.dumps({"metadata": {"total_size": size}, "weight_map": listing}, indent=indent).encode()
    for listing in (_LISTED, dict(list(_LISTED.items())[:3]))
    for size, indent in ((286, 4), (None, None))
]

READERS = {
    "ckpt": Reader("x.ckpt", [*_CKPT, map_record("m", [np.arange(3)])], read_checkpoint),
    "safetensors": Reader("x.safetensors", _SAFETENSORS, read_checkpoint),
    "strategy": Reader("s.ckpt", _PROTOBUF, read_a_strategy),
    "strategy-json": Reader("s.json", json_seeds(), read_a_strategy),
    "merge": Reader("s.ckpt", [*_PROTOBUF, *json_seeds()], merge_strategies),
    "group-info": Reader("group_info.pb", _GROUPS, read_groups),
    "names": Reader("names.txt", _NAMES, read_names),
    "metadata": Reader("metadata.json", _METADATA, read_metadata),
    "weight-map": Reader(UNIFIED_MAP, [*_MAPS, json.dumps(_LISTED).encode()], read_map),
    "weight-index": Reader(HUGGINGFACE_INDEX, _MAPS, read_map),
    "dcp-metadata": Reader(".metadata", [_DISTRIBUTED["dcp"][".metadata"]], read_distributed, 250),
    "dcp-records": Reader("__0_0.distcp", [_DISTRIBUTED["dcp"]["__0_0.distcp"]], read_distributed, 250),
    **{
        f"hyper-{kind}": Reader(name, [_DISTRIBUTED["hyper-parallel"][name]], read_distributed, 250)
        for kind, name in (("metadata", ".rank1_metadata"), ("records", "_rank1_.safetensors"))
    },
    "megatron-metadata": Reader(".metadata", [_MEGATRON[".metadata"]], read_megatron, 100),
    "megatron-common": Reader("common.pt", [_MEGATRON["common.pt"]], read_megatron, 100),
    "hf-shard": Reader(_SHARD_NAME.format(1), [_SHARDS[0], _SHARDS[1]], read_shard, 250),
    "verl": Reader(_RANK_FILE, [_DISTRIBUTED["verl"][_RANK_FILE]], read_distributed, 250),
    "verl-pickle": Reader("data.pkl", [next(iter(_RANK_ENTRIES.values()))], read_rank_pickle, 400),
}
if importlib.util.find_spec("cryptography") is not None:
    _ENCRYPTED = [encrypted(data, mode, block=block) for data in _CKPT[:2] for mode in MODES for block in (64, 1 << 20)]
    READERS["encrypted"] = Reader("x.ckpt", [*_ENCRYPTED, _ENCRYPTED[0] + b"crc_num" + bytes(10)], read_encrypted)
