"""reshard.open: every tensor, slice and rank equals the naive reference."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reshard
from reshard.errors import IncompleteSourceError, RetryableError, UsageError
from reshard.opened import LazyTensor, OpenedCheckpoint
from tests.asking import open_checkpoint
from tests.corpus import FIXTURES
from tests.layouts import examples, strategies, tensors
from tests.object_store import Objects
from tests.reference import Array, rank_count
from tests.running import Argument, done
from tests.small import COPIED, World
from tests.small import tensors as small_tensors
from tests.trees import (
    Value,
    cut_ranks,
    layout,
    read_tree,
    scalar,
    single,
    text,
    value,
    write_checkpoint,
    write_strategy,
    write_tree,
)


def same(actual: Any, expected: Array) -> bool:
    """Whether an array has the bytes and the shape of another."""
    array: Array = np.asarray(actual)
    return array.shape == expected.shape and array.tobytes() == np.ascontiguousarray(expected).tobytes()


@st.composite
def indices(draw: st.DrawFn, shape: tuple[int, ...]) -> Any:
    """A basic index into an array of this shape."""
    parts: list[Any] = []
    for size in shape[: draw(st.integers(0, len(shape)))]:
        if size and draw(st.booleans()):
            parts.append(draw(st.integers(-size, size - 1)))
        else:
            ends = st.one_of(st.none(), st.integers(-size - 2, size + 2))
            parts.append(slice(draw(ends), draw(ends), draw(st.sampled_from([None, 1, 2, 3, -1, -2, 7, -5]))))
    if draw(st.booleans()):
        parts.insert(draw(st.integers(0, len(parts))), ...)
        # The following indexes count from the last dimension, and may be out of range.
        parts = [part if part is ... or isinstance(part, slice) else slice(None) for part in parts]
    for _ in range(draw(st.integers(0, 2))):
        parts.insert(draw(st.integers(0, len(parts))), None)
    return tuple(parts)


@pytest.mark.deep
@examples(60)
@given(st.data())
def test_every_rank_of_every_strategy_equals_the_reference(data: st.DataObject) -> None:
    full = data.draw(tensors())
    source, target = data.draw(strategies(full), label="source"), data.draw(strategies(full), label="target")
    ending = data.draw(st.sampled_from(["ckpt", "safetensors"]))
    options = {"record_bytes": data.draw(st.sampled_from([None, 7, 64]))} if ending == "ckpt" else {}
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        write_tree(root / "src", cut_ranks(source, full, COPIED), f"rank_{{rank}}/net-1_1.{ending}", **options)
        old, new = write_strategy(root / "old", source), write_strategy(root / "new", target)
        rank = data.draw(st.integers(0, rank_count(target) - 1), label="rank")
        with open_checkpoint(root / "src", src_strategy=old, dst_strategy=new, rank=rank) as opened:
            expected = cut_ranks(target, full, COPIED)[rank]
            assert list(opened) == sorted(expected)
            check_all(opened, expected)
        with open_checkpoint(root / "src", src_strategy=old) as opened:
            check_all(opened, {**full, **COPIED})
            name = data.draw(st.sampled_from(sorted(full)))
            index = data.draw(indices(full[name].array.shape), label="index")
            check_index(opened[name], full[name].array, index)


def check_all(opened: Any, expected: dict[str, Value]) -> None:
    assert set(opened) == set(expected)
    for name, (dtype, array) in expected.items():
        tensor = opened[name]
        assert tensor.shape == array.shape and tensor.dtype_name == dtype and tensor.nbytes == array.nbytes
        assert same(tensor[...], array) and tensor[...].dtype == tensor.dtype
    actual = dict(opened.read_all())
    assert all(same(actual[name], tensor.array) for name, tensor in expected.items()) and set(actual) == set(expected)


def check_index(tensor: Any, array: Array, index: Any) -> None:
    """Reading, reading into an array and reading in blocks equal NumPy."""
    expected = array[index]
    assert same(tensor[index], expected), index
    assert type(tensor[index]).__name__ == "ndarray" or np.ndim(expected) == 0
    assert isinstance(tensor[index], np.ndarray) == isinstance(expected, np.ndarray)
    plain = np.zeros(np.shape(expected), tensor.dtype)
    tensor.read_into(plain, index)
    assert same(plain, expected)
    if plain.ndim:
        # One that is not in C order, with a border that has to stay.
        border = np.full([2 * size + 1 for size in plain.shape], 1, tensor.dtype)
        inner = border[tuple(slice(1, None, 2) for _ in plain.shape)]
        before = border.copy()
        tensor.read_into(inner, index)
        assert same(inner, expected)
        before[tuple(slice(1, None, 2) for _ in plain.shape)] = inner
        assert same(border, before)
    for most in (1, 24, 1 << 20):
        blocks = [block.view(f"u{block.itemsize}") for block in tensor.blocks(index, most)]
        assert all(block.nbytes <= max(most, block.itemsize) for block in blocks)
        assert b"".join(block.tobytes() for block in blocks) == np.ascontiguousarray(expected).tobytes()


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Array]:
    """A tensor of 64 rows of 256 KiB, cut into four parts along either dimension."""
    root = tmp_path_factory.mktemp("wide")
    array = np.arange(64 * 65536, dtype="<u4").reshape(64, 65536)
    strategy = single({"w": layout([2, 2], [1, 0])})
    write_tree(root / "src", cut_ranks(strategy, {"w": Value("Float32", array)}), "rank_{rank}/net.ckpt")
    return root / "src", write_strategy(root / "s", strategy), array


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every read of this process from now on."""
    actual: list[int] = []
    pread, preadv = os.pread, os.preadv

    def counting(fd: int, count: int, offset: int) -> bytes:
        data = pread(fd, count, offset)
        actual.append(len(data))
        return data

    def counting_into(fd: int, buffers: Any, offset: int) -> int:
        count = preadv(fd, buffers, offset)
        actual.append(count)
        return count

    monkeypatch.setattr(os, "pread", counting)
    monkeypatch.setattr(os, "preadv", counting_into)
    return actual


# Surplus bytes that are cheaper than a request: see reshard/storage/store.py.
GRANULE = 16 << 10


@pytest.mark.parametrize(
    "index, runs",
    [
        ((slice(0, 4),), 8),
        ((slice(30, 34), slice(32000, 33000)), 8),
        ((slice(None), slice(0, 8)), 64),
        ((slice(None), slice(100, 30000)), 64),
        ((slice(None, None, 16),), 8),
        ((slice(None, None, -32), slice(None, None, 32768)), 4),
        ((5, 7), 1),
        ((slice(None), 65535), 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("stored", ["local", "remote"])
def test_an_index_reads_its_bytes_and_small_gaps_only(
    index: Any,
    runs: int,
    stored: str,
    wide: tuple[Path, Path, Array],
    counted: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if stored == "remote":
        monkeypatch.setattr("reshard.storage.local.file_system_of", lambda path: "nfs4")
    source, strategy, array = wide
    with open_checkpoint(source, src_strategy=strategy) as opened:
        tensor = opened["w"]
        assert tensor.shape == array.shape
        counted.clear()
        actual = tensor[index]
        granule = GRANULE if stored == "local" else 256 << 10
        assert sum(counted) <= actual.nbytes + runs * granule
        assert sum(counted) >= actual.nbytes
        assert same(actual, array[index])


def test_reading_everything_reads_each_byte_once(wide: tuple[Path, Path, Array], counted: list[int]) -> None:
    source, strategy, array = wide
    with open_checkpoint(source, src_strategy=strategy) as opened:
        len(opened)
        counted.clear()
        ((name, actual),) = opened.read_all()
        assert name == "w" and same(actual, array)
        assert sum(counted) == array.nbytes


def test_opening_reads_no_contents(plain: World, monkeypatch: pytest.MonkeyPatch) -> None:
    plain.save(small_tensors(names=["w", "v"]))
    looked_into: list[str] = []
    open_file = os.open

    def noting(path: Any, *arguments: Any, **options: Any) -> int:
        looked_into.append(str(path))
        return open_file(path, *arguments, **options)

    monkeypatch.setattr(os, "open", noting)
    with open_checkpoint(plain.src, src_strategy=plain.old, dst_strategy=plain.new, rank=0) as opened:
        assert looked_into and not any(path.endswith("net-1_10.ckpt") for path in looked_into)
        assert len(opened) == 3
        assert any(path.endswith("net-1_10.ckpt") for path in looked_into)


def test_a_path_and_both_strategies_are_enough(plain: World) -> None:
    full = small_tensors(names=["w"])
    plain.save(full)
    with reshard.open(plain.src, src_strategy=plain.old) as opened:
        assert same(opened["w"][...], full["w"].array)
    asked = open_checkpoint(plain.src, src_strategy=plain.old, dst_strategy=plain.new, rank=0)
    with asked, reshard.open(plain.src, src_strategy=plain.old, dst_strategy=plain.new, rank=0) as opened:
        assert same(opened["w"][...], asked["w"][...])
    with pytest.raises(UsageError, match="src_strategy"):
        reshard.open(reshard.Source(str(plain.src)), src_strategy=plain.old)


def test_replicas_replace_lost_ranks_and_a_missing_slice_is_an_error(plain: World) -> None:
    full = small_tensors(names=["w", "v"])
    plain.save(full, ranks=[1, 2])
    with open_checkpoint(plain.src, src_strategy=plain.old) as opened:
        assert same(opened["w"][...], full["w"].array)
    plain.save(full, ranks=[1])
    (plain.src / "rank_2" / "net-1_10.ckpt").unlink()
    opened = open_checkpoint(plain.src, src_strategy=plain.old)
    with opened, pytest.raises(IncompleteSourceError, match="'w'"):
        opened["w"]


def test_tensors_are_in_the_order_of_the_files(tmp_path: Path) -> None:
    names = ["b", "z", "a", "c"]
    write_checkpoint(tmp_path / "all.ckpt", {name: value(name, (5, 3)) for name in names})
    with open_checkpoint(tmp_path / "all.ckpt", src_strategy="none") as opened:
        assert [name for name, _ in opened.read_all()] == names
        assert [name for name, _ in opened.read_all(["a", "z"])] == ["z", "a"]
        assert list(opened.keys()) == sorted(names)


def test_reading_ahead_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {f"t{number:02}": value(f"t{number}", (1 << 18,)) for number in range(24)}
    write_checkpoint(tmp_path / "all.safetensors", full)
    created: list[int] = []
    empty = LazyTensor.empty

    def counting(tensor: Any, shape: tuple[int, ...]) -> Any:
        created.append(tensor.nbytes)
        return empty(tensor, shape)

    monkeypatch.setattr("reshard.opened.tensor.LazyTensor.empty", counting)
    with open_checkpoint(tmp_path / "all.safetensors", src_strategy="none", max_memory=8 << 20, jobs=2) as opened:
        selected = 0
        for name, array in opened.read_all():
            selected += array.nbytes
            # Half of the memory is for reading ahead.
            assert sum(created) <= selected + (4 << 20)
            assert same(array, full[name].array)
        assert selected == sum(created) == 24 << 20


def test_a_tensor_larger_than_the_budget_is_read_by_itself(tmp_path: Path) -> None:
    array = np.random.default_rng(1).integers(0, 1 << 32, 5 << 20, "<u4")
    full = {"big": Value("Float32", array), "small": value("small", (3,)), "big2": Value("Float32", array[::-1])}
    write_checkpoint(tmp_path / "all.ckpt", full, record_bytes=3 << 20)
    with open_checkpoint(tmp_path / "all.ckpt", src_strategy="none", max_memory=1 << 20, jobs=3) as opened:
        assert all(same(actual, full[name].array) for name, actual in opened.read_all())


def test_many_threads_read_at_once(wide: tuple[Path, Path, Array]) -> None:
    source, strategy, array = wide
    wrong: list[Any] = []

    def read(opened: Any, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(12):
            row, column = int(rng.integers(0, 60)), int(rng.integers(0, 60000))
            index = slice(row, row + 3), slice(column, column + 4000, int(rng.integers(1, 3)))
            if not same(opened["w"][index], array[index]):
                wrong.append(index)

    with open_checkpoint(source, src_strategy=strategy, jobs=2, max_memory=1 << 20) as opened:
        threads = [threading.Thread(target=read, args=(opened, seed)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


@pytest.mark.parametrize("form", ["unified", "huggingface", "checkpoint2"])
def test_every_form_opens_with_the_same_tensors(form: str, world: World) -> None:
    full = small_tensors()
    world.save(full)
    target = world.root / form
    options: list[Argument] = ["--dst-strategy", world.new] if form == "checkpoint2" else []
    done("convert", world.src, target, "--src-strategy", world.old, "--to", form, *options)
    with open_checkpoint(target) as opened:
        assert opened.form == form
        assert all(same(opened[name][1:], tensor.array[1:]) for name, tensor in full.items())
    cut = cut_ranks(world.target, full)
    with open_checkpoint(target, dst_strategy=world.new, rank=1) as opened:
        assert all(same(opened[name][...], cut[1][name].array) for name in full)
    if form == "checkpoint2":
        with open_checkpoint(target, dst_strategy="same", rank=1) as opened:
            assert all(opened[name].shape == cut[1][name].array.shape for name in full)


TYPES = {
    "bf": Value("BFloat16", np.array([0x3F80, 0xC000, 0x7F80], "<u2")),
    "f8": Value("F8_E4M3", np.array([0x38, 0xB8, 0x7F], "u1")),
    "e5": Value("F8_E5M2", np.array([0x3C, 0xBC, 0x7E], "u1")),
    "i4": Value("Int4", np.array([0x12, 0xF0, 0x77], "u1")),
    "flag": Value("Bool", np.array([1, 0, 1], "u1")),
    "c": Value("Complex64", np.array([1.0, 2.0], "<f4").view("<u8")),
}


def test_dtypes_without_a_numpy_type_are_those_of_ml_dtypes(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "all.safetensors", TYPES)
    with open_checkpoint(tmp_path / "all.safetensors", src_strategy="none") as opened:
        assert opened["bf"].dtype == ml_dtypes.bfloat16 and opened["bf"][...].tolist() == [1.0, -2.0, math.inf]
        assert opened["f8"].dtype == ml_dtypes.float8_e4m3fn and opened["f8"].dtype_name == "Float8E4M3FN"
        assert opened["f8"][:2].astype(np.float32).tolist() == [1.0, -1.0]
        assert opened["i4"].dtype == np.int8 and opened["i4"].dtype_name == "Int4"
        assert opened["flag"][...].tolist() == [True, False, True]
        assert opened["c"][0] == 1 + 2j
        for name in ("bf", "f8", "e5"):
            array = np.zeros(3, opened[name].dtype)
            opened[name].read_into(array)
            assert array.tobytes() == TYPES[name].array.tobytes()
            with pytest.raises(TypeError):
                opened[name].read_into(np.zeros(3, TYPES[name].array.dtype))


def test_text_and_scalars_are_read(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "all.ckpt", {"texts": text("größer ⊃"), "step": scalar(7), "w": value("w", (2, 2))})
    with open_checkpoint(tmp_path / "all.ckpt", src_strategy="none") as opened:
        assert opened["texts"][()] == "größer ⊃" and opened["texts"].shape == ()
        assert opened["step"][()] == 7 and opened["step"][...].shape == ()
        assert dict(opened.read_all())["texts"] == "größer ⊃"


def test_the_interface_of_safetensors_works(tmp_path: Path) -> None:
    array = value("w", (4, 6))
    write_checkpoint(tmp_path / "model.safetensors", {"w": array, "v": value("v", (3,))})
    with open_checkpoint(tmp_path) as opened:
        assert opened.keys() == {"w", "v"} and "w" in opened and len(opened) == 2 and "x" not in opened
        part = opened.get_slice("w")
        assert part.get_shape() == [4, 6] and part.get_dtype() == "Float32"
        assert same(part[1:3, ::2], array.array[1:3, ::2]) and same(opened.get_tensor("w"), array.array)
        assert len(part) == 4 and part.ndim == 2 and part.size == 24
        assert same(np.asarray(part), array.array) and np.asarray(part, "f8").dtype == np.float64
        with pytest.raises(KeyError, match="did you mean 'w'"):
            opened["W"]
        assert opened.get("nothing") is None


@pytest.mark.parametrize(
    "index, error", [((0, 0, 0), "too many"), ((9,), "out of bounds"), (([0, 1],), "valid indices"),
                     ((True,), "valid indices"), ((1.5,), "valid indices"), ((..., ...), "single ellipsis")]
)  # fmt: skip
def test_advanced_indexes_are_refused(index: Any, error: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"w": value("w", (4, 6))})
    with open_checkpoint(tmp_path) as opened, pytest.raises(IndexError, match=error):
        opened["w"][index]


def test_arrays_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "model.safetensors", {"w": value("w", (4, 6))})
    frozen = np.zeros((4, 6), "f4")
    frozen.flags.writeable = False
    with open_checkpoint(tmp_path) as opened:
        with pytest.raises(IndexError, match=r"shape \(4, 6\) is needed, not \(6, 4\)"):
            opened["w"].read_into(np.zeros((6, 4), "f4"))
        with pytest.raises(TypeError, match="float32 is needed, not float64"):
            opened["w"].read_into(np.zeros((4, 6)))
        with pytest.raises(TypeError, match="is read-only"):
            opened["w"].read_into(frozen)


def test_a_closed_checkpoint_is_an_error(plain: World) -> None:
    plain.save(small_tensors(names=["w", "v"]))
    with open_checkpoint(plain.src, src_strategy=plain.old) as opened:
        tensor = opened["w"]
    with pytest.raises(ValueError, match="closed"):
        tensor[...]
    with pytest.raises(ValueError, match="closed"):
        len(opened)


def test_a_file_modified_while_reading_is_an_error(tmp_path: Path) -> None:
    full = {name: value(name, (4096,)) for name in "abc"}
    path = write_checkpoint(tmp_path / "model.safetensors", full)
    with open_checkpoint(tmp_path) as opened:
        reading = opened.read_all()
        next(reading)
        os.utime(path)
        with pytest.raises(RetryableError, match="changed while it was read"):
            list(reading)


@pytest.mark.parametrize(
    "options, texts",
    [
        ({}, r"(?s)do not record how they are cut\n.*Source.strategy "),
        ({"src_strategy": "OLD", "rank": 1}, "the strategy of rank"),
        ({"src_strategy": "OLD", "dst_strategy": "NEW"}, "2 ranks"),
        ({"src_strategy": "OLD", "dst_strategy": "NEW", "rank": 2}, "out of range"),
        ({"src_strategy": "OLD", "io": "fast"}, "'mmap'"),
    ],
)
def test_contradictory_options_of_open_are_wrong_usage(options: dict[str, Any], texts: str, plain: World) -> None:
    plain.save(small_tensors(names=["w", "v"]))
    paths = {"OLD": plain.old, "NEW": plain.new}
    with pytest.raises(UsageError, match=texts):
        open_checkpoint(plain.src, **{key: paths.get(message, message) for key, message in options.items()})


def test_open_accepts_filters_and_a_step(plain: World) -> None:
    old, new = small_tensors("old", ["w", "v"]), small_tensors("new", ["w", "v"])
    plain.save(old, "rank_{rank}/net-1_9.ckpt")
    plain.save(new, "rank_{rank}/net-1_10.ckpt")
    with open_checkpoint(plain.src, src_strategy=plain.old, include=["w"]) as opened:
        assert list(opened) == ["w"] and opened.step == "1_10" and same(opened["w"][...], new["w"].array)
    with open_checkpoint(plain.src, src_strategy=plain.old, step="1_9", exclude=["w"]) as opened:
        assert "w" not in opened and same(opened["v"][...], old["v"].array)


@pytest.mark.parametrize(
    "options", [{"include": "w*"}, {"exclude": "v*"}, {"rename": "w*=x*"}, {"cast": "w=BFloat16"}, {"cast": "Float16"}]
)
def test_a_single_pattern_equals_a_list_of_one(options: dict[str, str], plain: World) -> None:
    plain.save(small_tensors(names=["w", "v"]))

    def types(**message: Any) -> dict[str, str]:
        with open_checkpoint(plain.src, src_strategy=plain.old, **message) as tensors:
            return {name: tensor.dtype_name for name, tensor in tensors.items()}

    assert types(**options) == types(**{name: [message] for name, message in options.items()}) != types()


@pytest.mark.parametrize("form", ["ranks", "checkpoint2"])
def test_renamed_slices_equal_those_of_a_conversion(form: str, world: World) -> None:
    world.save(small_tensors())
    source = world.src
    source_strategy: dict[str, Any] = {"src_strategy": world.old}
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", "same"]
    if form == "checkpoint2":
        done("convert", world.src, world.root / "iterations", "--to", form, *strategies)
        source, source_strategy, strategies = world.root / "iterations", {}, ["--dst-strategy", "same"]
    renames = ["w=n.w", "v=w"]
    done("convert", source, world.dst, *strategies, *(word for each in renames for word in ("--rename", each)))
    for rank, written in read_tree(world.dst).items():
        with open_checkpoint(source, dst_strategy="same", rank=rank, rename=renames, **source_strategy) as opened:
            assert {name: tensor.shape for name, tensor in opened.items()} == {
                name: each.array.shape for name, each in written.items()
            }
            assert all(same(tensor[...], written[name].array) for name, tensor in opened.items())


def test_casts_equal_those_of_a_conversion(plain: World, caplog: pytest.LogCaptureFixture) -> None:
    array = np.array([[1.0, 1e6], [-2.5, 3.14159]] * 12, "f4").reshape(8, 6)
    plain.save({"w": Value("Float32", array.view("u4")), "v": value("v", (4,))})
    with open_checkpoint(plain.src, src_strategy=plain.old, cast=["w=Float16"]) as opened:
        assert opened["w"].dtype == np.float16 and opened["v"].dtype == np.float32
        with np.errstate(over="ignore"):
            expected = array.astype(np.float16)
        assert np.array_equal(opened["w"][...], expected)
        assert np.array_equal(opened["w"][2:7:2, ::-1], expected[2:7:2, ::-1])
        assert np.array_equal(dict(opened.read_all())["w"], expected)
    assert "'w': elements too large for the new type" in caplog.text


MEGATRON = FIXTURES / "megatron" / "td_dense_plain" / "checkpoint"
ENDS: dict[str, list[Argument]] = {
    "ranks": ["--dst-strategy", "none"],
    "dcp": ["--shards", 1],
    "hyper-parallel": ["--shards", 1],
    "hf-sharded": ["--shards", 1],
    "checkpoint2": ["--dst-strategy", "none"],
    "unified": [],
    "huggingface": [],
    "megatron": [],
}


def held(opened: OpenedCheckpoint) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {name: (each.dtype_name, each.shape, np.asarray(each).tobytes()) for name, each in opened.items()}


@pytest.mark.parametrize("form", ENDS)
@pytest.mark.parametrize("optimizer", [None, "keep"])
def test_edited_tensors_are_those_of_a_conversion_to_the_form(form: str, optimizer: str | None, tmp_path: Path) -> None:
    words: list[Argument] = ["--to", form, "--names", "llama", *(["--optimizer", "keep"] if optimizer else [])]
    done("convert", MEGATRON, tmp_path / "out", *words, *ENDS[form])
    edits = {"names": "llama", "optimizer": optimizer}
    strategy = {"src_strategy": "none"} if form == "ranks" else {}
    expected = held(open_checkpoint(tmp_path / "out", **strategy))
    actual = held(open_checkpoint(MEGATRON, form=form, **edits))
    if form == "megatron":
        # Megatron's common state has it, and it is read as a value beside optimizer state only.
        for each in (actual, expected):
            each.pop("global_step", None)
    assert actual == expected


def test_names_of_a_trainers_checkpoint_need_a_form(tmp_path: Path) -> None:
    done("convert", MEGATRON, tmp_path / "dcp", "--to", "dcp", "--names", "llama", "--shards", 2, "--optimizer", "keep")
    edits = {"names": "llama", "optimizer": "keep"}
    for source in (MEGATRON, tmp_path / "dcp"):
        with pytest.raises(UsageError, match="form="):
            open_checkpoint(source, **edits)
    one, other = (open_checkpoint(source, form="ranks", **edits) for source in (MEGATRON, tmp_path / "dcp"))
    assert held(one) == held(other)


def test_slices_of_a_rank_have_the_names_that_its_strategy_lists(tmp_path: Path) -> None:
    edits = {"names": "llama", "optimizer": "keep"}
    with open_checkpoint(MEGATRON, form="ranks", **edits) as opened:
        rows = {name: [-1] * (len(each.shape) - 1) for name, each in opened.items() if each.shape[0] % 2 == 0}
    strategy = write_strategy(
        tmp_path / "two.ckpt", single({name: layout([2], [0, *row]) for name, row in rows.items()})
    )
    words: list[Argument] = ["--names", "llama", "--optimizer", "keep", "--dst-strategy", strategy]
    done("convert", MEGATRON, tmp_path / "out", *words)
    for rank, written in read_tree(tmp_path / "out").items():
        with open_checkpoint(MEGATRON, dst_strategy=strategy, rank=rank, **edits) as opened:
            assert opened.keys() == written.keys()
            assert all(same(each[...], written[name].array) for name, each in opened.items())


def test_files_are_closed_with_the_checkpoint_object(plain: World) -> None:
    plain.save(small_tensors(names=["w", "v"]))

    def open_files() -> Iterator[str]:
        for name in os.listdir("/proc/self/fd"):
            try:
                yield os.readlink(f"/proc/self/fd/{name}")
            except OSError:
                continue

    opened = open_checkpoint(plain.src, src_strategy=plain.old)
    opened["w"][...]
    assert any(str(plain.src) in path for path in open_files())
    del opened
    assert not any(str(plain.src) in path for path in open_files())


@pytest.mark.parametrize("form", ["ranks", "dcp"])
def test_rows_are_cut_over_shards_as_fsdp_cuts_them(form: str, plain: World) -> None:
    plain.save(small_tensors(names=["w", "v"]))
    src, options = plain.src, dict[str, Any](src_strategy=plain.old)
    if form == "dcp":
        src, options = plain.dst, {}
        done(*plain.words("--to", "dcp", "--rename", "*=*"))
    full = small_tensors()["w"].array
    for rank, rows in enumerate([full[:3], full[3:6], full[6:]]):
        with open_checkpoint(src, shards=3, rank=rank, **options) as opened:
            assert opened["w"][...].tobytes() == rows.tobytes()
    with pytest.raises(UsageError, match="both lay out"):
        open_checkpoint(src, shards=3, rank=0, dst_strategy=plain.new, **options)
    with pytest.raises(UsageError, match="3 ranks"):
        open_checkpoint(src, shards=3, **options)


def test_objects_of_a_trainer_are_python_values() -> None:
    with open_checkpoint(FIXTURES / "dcp" / "hyper_w2_later" / "checkpoint") as opened:
        assert opened.objects == ["extra", "optimizer.lr", "optimizer.step"]
        assert opened.get_object("extra") == {"names": ["a", "b"], "epoch": 2}
        with pytest.raises(KeyError):
            opened.get_object("model.norm.weight")


_FORKED = """
import os, sys
import numpy as np
import reshard
src, strategy, jobs, rounds = *sys.argv[1:4], int(sys.argv[4])
effort = reshard.Effort(jobs=1 if jobs == "1" else None)
opened = reshard.open(reshard.Source(src, strategy=strategy), effort=effort)
names = list(opened)
expected = {name: np.asarray(opened[name]) for name in names}
children = []
for number in range(4):
    child = os.fork()
    if not child:
        order = names[number:] + names[:number]
        equal = all(np.array_equal(opened[name][:, 100:900], expected[name][:, 100:900]) for name in order * rounds)
        os._exit(0 if equal else 1)
    children.append(child)
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


@pytest.mark.deep
@pytest.mark.parametrize("jobs", ["1", "default"])
def test_forked_children_read_for_themselves(tmp_path: Path, jobs: str) -> None:
    """Their buffers are their own, and they wait for no thread of their parent."""
    full = {f"w{number}": value(f"w{number}", (1000, 1024)) for number in range(4)}
    columns = single({name: layout([2], [-1, 0]) for name in full})
    write_tree(tmp_path / "src", cut_ranks(columns, full))
    strategy = write_strategy(tmp_path / "strategy", columns)
    words = [sys.executable, "-c", _FORKED, str(tmp_path / "src"), str(strategy), jobs, "10"]
    subprocess.run(words, check=True, timeout=100)


_FORKED_WHILE_READING = """
import os, sys, threading, time
import numpy as np
import reshard

src, strategy = sys.argv[1:]
for _ in range(2):
    begun = time.perf_counter()
    with reshard.open(reshard.Source(src, strategy=strategy)) as opened:
        expected = dict(opened.read_all())
    seconds = time.perf_counter() - begun
children = []
for number in range(16):
    opened = reshard.open(reshard.Source(src, strategy=strategy))
    reading = threading.Thread(target=lambda: list(opened.read_all()))
    reading.start()
    time.sleep(seconds * number / 16)
    child = os.fork()
    if not child:
        equal = all(np.array_equal(opened[name], array) for name, array in expected.items())
        os._exit(0 if equal else 1)
    children.append(child)
    reading.join()
sys.exit(max(os.waitpid(child, 0)[1] for child in children) != 0)
"""


@pytest.mark.deep
def test_children_forked_while_a_thread_reads_headers_or_tensors_do_not_wait_for_it(tmp_path: Path) -> None:
    full = {f"w{number}": value(f"w{number}", (64, 64)) for number in range(64)}
    rows = single({name: layout([16], [0, -1]) for name in full})
    write_tree(tmp_path / "src", cut_ranks(rows, full))
    strategy = write_strategy(tmp_path / "strategy", rows)
    words = [sys.executable, "-c", _FORKED_WHILE_READING, str(tmp_path / "src"), str(strategy)]
    subprocess.run(words, check=True, timeout=60)


@pytest.mark.deep
def test_forked_children_do_not_share_connections_to_a_store(objects: Objects, tmp_path: Path) -> None:
    """Two readers of one connection would each get a part of the other's bytes."""
    full = {f"w{number}": value(f"w{number}", (1024, 1024)) for number in range(4)}
    rows = single({name: layout([2], [0, -1]) for name in full})
    write_tree(tmp_path / "src", cut_ranks(rows, full))
    strategy = write_strategy(tmp_path / "strategy", rows)
    words = [sys.executable, "-c", _FORKED, objects.upload(tmp_path / "src", "src"), str(strategy), "default", "1"]
    subprocess.run(words, check=True, timeout=100)
