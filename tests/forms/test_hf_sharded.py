"""Sharded safetensors of torch: any boxes are assembled, and incomplete tensors are refused by name."""

from __future__ import annotations

import contextlib
import itertools
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.corpus_dcp import CORPUS_DCP, held_in
from tests.running import done, fails, reshard
from tests.trees import (
    Value,
    layout,
    read_checkpoint,
    safetensors_metadata,
    same_checkpoints,
    single,
    value,
    write_checkpoint,
    write_strategy,
)

Box = tuple[tuple[int, int], ...]


class Chunk(NamedTuple):
    """A box of a tensor, and the shard that holds it."""

    name: str
    box: Box
    shard: int


@contextlib.contextmanager
def small_directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def within(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def write_shards(root: Path, tensors: Mapping[str, Value], chunks: Sequence[Chunk], shapes: bool = False) -> Path:
    """Write files as torch does, or with full shapes as its newer versions do; an entry has the name of its tensor.

    Where a shard has several chunks of one tensor, the others get names of their own.
    """
    ranks: dict[int, dict[str, Value]] = {}
    info: dict[int, dict[str, dict[str, Any]]] = {}
    for name, box, shard in chunks:
        entries, message = ranks.setdefault(shard, {}), info.setdefault(shard, {})
        key = name if name not in entries else f"{name}.{len(entries)}"
        entries[key] = Value(tensors[name].dtype, tensors[name].array[within(box)].copy())
        message[key] = {"saved_offsets": [start for start, _ in box]}
        if shapes:
            message[key]["global_shape"] = list(tensors[name].array.shape)
        if key != name:
            message[key]["fqn"] = name
    for shard, entries in ranks.items():
        metadata = {"DCP_SHARDING_INFO": json.dumps(info[shard]), "DCP_VERSION": "1.0", "format": "pt"}
        write_checkpoint(root / f"shard-{shard:05d}-model-00001-of-00001.safetensors", entries, metadata=metadata)
    return root


def read_shards(root: Path) -> dict[str, Value]:
    """The tensors of files written by reshard, assembled from their headers."""
    tensors: dict[str, Value] = {}
    for path in sorted(root.glob("shard-*.safetensors")):
        metadata = safetensors_metadata(path)
        assert metadata["format"] == "pt" and metadata["DCP_VERSION"] == "1.0"
        info = json.loads(metadata["DCP_SHARDING_INFO"])
        contents = read_checkpoint(path)
        assert contents.keys() == info.keys()
        for name, (dtype, array) in contents.items():
            shape = tuple(info[name]["global_shape"])
            if name not in tensors:
                tensors[name] = Value(dtype, np.zeros(shape, array.dtype))
            box = tuple((start, start + size) for start, size in zip(info[name]["saved_offsets"], array.shape))
            tensors[name].array[within(box)] = array
    return tensors


def rows(name: str, full: Value, shards: int) -> list[Chunk]:
    """Rows as FSDP cuts them."""
    shape = full.array.shape
    part = -(-shape[0] // shards)
    edges = [min(shape[0], part * shard) for shard in range(shards + 1)]
    inner = tuple((0, size) for size in shape[1:])
    return [Chunk(name, (pair, *inner), shard) for shard, pair in enumerate(itertools.pairwise(edges), 1)]


FULL = {"a.weight": value("a", (7, 6)), "b.weight": value("b", (5, 2, 3), "BFloat16"), "norm": value("n", (3,))}
CHUNKS = [chunk for name, full in FULL.items() for chunk in rows(name, full, 4)]


def converted(src: Path, out: Path) -> dict[str, Value]:
    done("convert", src, out, "--to", "huggingface", "--verify")
    return read_checkpoint(out / "model.safetensors")


@st.composite
def cut_tensors(draw: st.DrawFn) -> tuple[dict[str, Value], list[Chunk]]:
    """Tensors cut recursively into boxes, some of them stored several times."""
    tensors, chunks = {}, []
    for name in draw(st.sampled_from([["a"], ["a", "b.c"]])):
        shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
        tensors[name] = value(name + str(shape), shape, draw(st.sampled_from(["Float32", "BFloat16", "Int8"])))
        boxes: list[Box] = [tuple((0, size) for size in shape)]
        for _ in range(draw(st.integers(0, 4)) if shape else 0):
            box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
            at = draw(st.integers(0, len(shape) - 1))
            middle = draw(st.integers(*box[at]))
            boxes += [(*box[:at], part, *box[at + 1 :]) for part in ((box[at][0], middle), (middle, box[at][1]))]
        boxes += draw(st.lists(st.sampled_from(boxes), max_size=2))
        chunks += [Chunk(name, box, draw(st.integers(1, 3))) for box in boxes]
    return tensors, chunks


@pytest.mark.deep
@given(cut_tensors(), st.booleans(), st.integers(1, 5))
def test_any_boxes_are_assembled_and_cut_into_rows_again(
    cut: tuple[dict[str, Value], list[Chunk]], shapes: bool, shards: int
) -> None:
    tensors, chunks = cut
    with small_directory() as root:
        src = write_shards(root / "src", tensors, chunks, shapes)
        same_checkpoints(converted(src, root / "whole"), tensors)
        done("convert", src, root / "shards", "--to", "hf-sharded", "--shards", shards, "--verify")
        same_checkpoints(read_shards(root / "shards"), tensors)
        # Tensors cut by rows have a chunk in every file, be it without rows.
        laid_out = {name for name, full in tensors.items() if full.array.ndim}
        for path in (root / "shards").glob("shard-*.safetensors"):
            assert laid_out - {"a"} <= read_checkpoint(path).keys()
        done("convert", root / "shards", root / "same", "--to", "hf-sharded", "--dst-strategy", "same", "--verify")
        same_checkpoints(read_shards(root / "same"), tensors)


@given(cut_tensors(), st.data())
def test_a_lost_chunk_is_refused_by_name(cut: tuple[dict[str, Value], list[Chunk]], data: st.DataObject) -> None:
    tensors, chunks = cut
    lost = data.draw(st.sampled_from(chunks))
    remaining = [chunk for chunk in chunks if (chunk.name, chunk.box) != (lost.name, lost.box)]
    assume(all(start < stop for start, stop in lost.box) and any(chunk.name == lost.name for chunk in remaining))
    with small_directory() as root:
        src = write_shards(root / "src", tensors, remaining, shapes=True)
        fails(3, "convert", src, root / "out", "--to", "huggingface", texts=[f"'{lost.name}'", "no chunk holds"])
        assert not (root / "out" / "model.safetensors").exists()


def change(path: Path, edit: Any) -> None:
    """Rewrite the entries of a header."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    info = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    actual = edit(info)
    header["__metadata__"]["DCP_SHARDING_INFO"] = actual if isinstance(actual, str) else json.dumps(info)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


@pytest.mark.parametrize(
    ("edit", "texts"),
    [
        (lambda info: info.pop("norm"), "'norm' has no saved_offsets"),
        (lambda info: info["norm"].clear(), "'norm' has no saved_offsets"),
        (lambda info: info.update(more={"saved_offsets": [0]}), "'more' is in DCP_SHARDING_INFO"),
        (lambda info: info["norm"].update(saved_offsets=[0, 0]), "has saved_offsets [0, 0]"),
        (lambda info: info["norm"].update(saved_offsets=[-1]), "has saved_offsets [-1]"),
        (lambda info: info["norm"].update(global_shape=[2]), "does not lie in a tensor of shape [2]"),
        (lambda info: info["norm"].update(global_shape=[9]), "no chunk holds rows 3 to 8"),
        (lambda info: info["norm"].update(stride=[2]), "'stride'"),
        (lambda info: info["norm"].update(fqn="a.weight"), "'a.weight' has different"),
        (lambda info: "[", "DCP_SHARDING_INFO is damaged"),
        (lambda info: "[]", "DCP_SHARDING_INFO is no object"),
    ],
)
def test_headers_without_offsets_are_refused(edit: Any, texts: str, tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    change(src / "shard-00002-model-00001-of-00001.safetensors", edit)
    fails(3, "convert", src, tmp_path / "out", "--to", "huggingface", texts=[texts])


def test_files_of_another_save_are_refused(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS, shapes=True)
    other = {**FULL, "a.weight": value("a", (8, 6))}
    chunks = [chunk for name, full in other.items() for chunk in rows(name, full, 4)]
    write_shards(tmp_path / "other", other, chunks, shapes=True)
    name = "shard-00003-model-00001-of-00001.safetensors"
    shutil.copy(tmp_path / "other" / name, src / name)
    texts = ["'a.weight' has different shapes", "[7, 6] and [8, 6]"]
    fails(3, "convert", src, tmp_path / "out", "--to", "huggingface", texts=texts)
    done("convert", src, tmp_path / "out", "--to", "huggingface", "--exclude", "a.weight", "--verify")


def test_a_tensor_with_a_hole_can_be_excluded(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    (src / "shard-00002-model-00001-of-00001.safetensors").unlink()
    fails(3, "convert", src, tmp_path / "out", "--to", "unified", texts=["bring the files of shard 2", "rows 2 to 3"])
    report = done("inspect", src, "--json").json
    assert not report["complete"]


def test_shards_beside_consolidated_files_are_ignored(tmp_path: Path) -> None:
    write_shards(tmp_path / "src" / "sharded", FULL, CHUNKS)
    same_checkpoints(converted(tmp_path / "src", tmp_path / "one"), FULL)
    write_checkpoint(tmp_path / "src" / "model.safetensors", FULL, metadata={"format": "pt"})
    assert done("inspect", tmp_path / "src", "--json").json["form"] == "huggingface"
    same_checkpoints(converted(tmp_path / "src", tmp_path / "two"), FULL)


def test_shards_named_as_a_full_model_are_refused(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    for place, path in enumerate(sorted(src.iterdir()), 1):
        path.rename(src / f"model-{place:05d}-of-00004.safetensors")
    fails(3, "convert", src, tmp_path / "out", "--to", "unified", texts=["holds parts of tensors"])
    (tmp_path / "one").mkdir()
    shutil.copy(src / "model-00002-of-00004.safetensors", tmp_path / "one" / "model.safetensors")
    fails(3, "convert", tmp_path / "one", tmp_path / "out", "--to", "unified", texts=["holds parts of tensors"])


def test_a_tensor_without_a_name_in_the_model_is_refused(tmp_path: Path) -> None:
    tensors = {name: value(name, (2, 2)) for name in ("_orig_mod.", "b.weight")}
    src = write_shards(tmp_path / "src", tensors, [Chunk(name, ((0, 2), (0, 2)), 1) for name in tensors])
    fails(3, "convert", src, tmp_path / "out", "--to", "huggingface", texts=["'_orig_mod.'", "name"])
    assert not (tmp_path / "out").exists()


def test_a_single_shard_is_refused(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    one = src / "shard-00002-model-00001-of-00001.safetensors"
    fails(3, "convert", one, tmp_path / "out", "--to", "unified", texts=["one file of a sharded checkpoint", src])


@pytest.mark.parametrize("shards", [1, 3, 8])
def test_rows_are_cut_as_fsdp_cuts_them(shards: int, tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    done("convert", src, tmp_path / "out", "--to", "hf-sharded", "--shards", shards)
    expected = [chunk for name, full in FULL.items() for chunk in rows(name, full, shards)]
    for shard in range(1, shards + 1):
        tensors = read_checkpoint(tmp_path / "out" / f"shard-{shard:05d}-model-00001-of-00001.safetensors")
        same_checkpoints(
            tensors,
            {
                chunk.name: Value(FULL[chunk.name].dtype, FULL[chunk.name].array[within(chunk.box)])
                for chunk in expected
                if chunk.shard == shard
            },
        )


def test_shards_and_dst_strategy_exclude_each_other(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    out = tmp_path / "out"
    to: list[Any] = ["--to", "hf-sharded"]
    fails(2, "convert", src, out, *to, texts=["--shards N"])
    fails(2, "convert", src, out, *to, "--shards", 2, "--dst-strategy", "same", texts=["leave out one"])
    fails(2, "convert", src, out, *to, "--shards", 0, texts=["--shards"])
    fails(2, "convert", src, out, *to, "--dst-strategy", "shards:x", texts=["number of shards must be"])
    fails(2, "convert", src, out, "--to", "checkpoint2", "--shards", 2, texts=["--shards goes with", "--dst-strategy"])
    for command in ("convert", "plan"):
        fails(2, command, src, out, "--shards", 2, texts=["--shards goes with", "add --to dcp"])
    fails(2, "convert", src, out, *to, "--shards", 2, "--src-strategy", "none", texts=["leave out --src-strategy"])


def test_an_uneven_cut_resumes_and_is_verified(tmp_path: Path) -> None:
    src = write_shards(tmp_path / "src", FULL, CHUNKS)
    out = tmp_path / "out"
    words: list[Any] = [src, out, "--to", "hf-sharded", "--shards", 3]
    done("by-rank", 1, *words)
    assert not done("status", out, "--json").json["complete"]
    done("resume", out)
    done("verify", out, "--src", src)
    assert "already complete" in done("convert", *words).err
    fails(3, "convert", src, out, "--to", "hf-sharded", "--shards", 2)
    same_checkpoints(read_shards(out), FULL)


CORPUS = sorted(CORPUS_DCP.glob("hf_*")) if CORPUS_DCP.is_dir() else []


def test_a_value_that_rows_leave_to_one_rank_is_no_difference(tmp_path: Path) -> None:
    """The other ranks have empty entries of a tensor of one element."""
    full = {"w": value("w", (4, 2)), "scale": value("s", (1, 1))}
    src = tmp_path / "src" / "rank_0"
    src.mkdir(parents=True)
    write_checkpoint(src / "net-1_1.safetensors", full)
    strategy = write_strategy(tmp_path / "strategy", single({name: layout([1], [-1, -1]) for name in full}))
    out = tmp_path / "out"
    words = ("--src-strategy", strategy, "--to", "hf-sharded", "--shards", 2)
    done("convert", src.parent, out, *words, "--verify")
    assert "differ" not in done("fingerprint", out).err
    result = done("convert", out, tmp_path / "full", "--to", "huggingface", "--verify")
    assert "differ from" not in result.err
    same_checkpoints(read_checkpoint(tmp_path / "full" / "model.safetensors"), full)


@pytest.mark.deep
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_files_of_torch_are_read_correctly_or_refused(case: Path, tmp_path: Path) -> None:
    answer = json.loads((case / "expected.json").read_text())
    result = reshard("convert", case / "checkpoint", tmp_path / "out", "--to", "huggingface", "--verify")
    if answer["expect"] == "refuse":
        assert result.status == 3
        return
    assert result.status == 0, result.err
    expected = {
        name: (tensor["dtype"], tuple(tensor["shape"]), tensor["sha256"]) for name, tensor in answer["tensors"].items()
    }
    assert held_in(tmp_path / "out") == expected
    done("convert", case / "checkpoint", tmp_path / "there", "--to", "hf-sharded", "--shards", 3, "--verify")
    done("convert", tmp_path / "there", tmp_path / "back", "--to", "huggingface", "--verify")
    assert held_in(tmp_path / "back") == expected
