"""Comparing checkpoints: correct ones verify, differences are named by rank and parameter."""

from __future__ import annotations

import tempfile
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from reshard.checkpoints import FileHandles, read_index
from reshard.checkpoints.formats import headers
from reshard.errors import CheckpointError, IncompleteSourceError, InputError
from reshard.numbers import fingerprint as summing
from reshard.numbers.fingerprint import fingerprints
from reshard.strategies import read_strategy
from reshard.text.messages import Report
from reshard.verification import reading
from reshard.verification.boxes import LayoutValues, device_boxes
from reshard.verification.reading import Difference, Reading
from tests.conftest import LONG
from tests.layouts import examples, strategies, tensors
from tests.reference import ONE_DEVICE, Strategy, names_of
from tests.running import done
from tests.small import COPIED, SOURCE, TARGET
from tests.small import tensors as small_tensors
from tests.trees import (
    Checkpoint,
    Value,
    cut_ranks,
    layout,
    read_tree,
    safetensors_bytes,
    scalar,
    single,
    text,
    value,
    write_strategy,
    write_tree,
)
from tests.verification.pairs import Quiet, compare_replicas, compare_trees, files_of, read_source

Ranks = dict[int, dict[str, Value]]


class Pair:
    """A source and a target tree with their strategies, on disk."""

    def __init__(self, root: Path, old: Strategy, new: Strategy) -> None:
        self.root, self.old, self.new = root, old, new
        self.old_path, self.new_path = write_strategy(root / "old", old), write_strategy(root / "new", new)
        self.progress = Quiet()

    def write(self, source: Mapping[int, Checkpoint], target: Mapping[int, Checkpoint], ending: str = "ckpt") -> None:
        write_tree(self.root / "src", source, "rank_{rank}/net-1_10." + ending)
        write_tree(self.root / "dst", target, "rank_{rank}/checkpoint_{rank}." + ending)

    def compare(self, **options: Any) -> list[Difference]:
        with FileHandles() as handles:
            means = Reading(handles, Report(), 2, 64 << 20, self.progress)
            return compare_trees(
                files_of(self.root / "src"), read_strategy(str(self.old_path)),
                files_of(self.root / "dst"), read_strategy(str(self.new_path)), means, **options,
            )  # fmt: skip

    def replicas(self, tree: str = "src") -> list[Difference]:
        with FileHandles() as handles:
            means = Reading(handles, Report(), 2, 64 << 20, self.progress)
            strategy = self.old_path if tree == "src" else self.new_path
            return compare_replicas(files_of(self.root / tree), read_strategy(str(strategy)), means)


def brief(differences: list[Difference]) -> list[tuple[str, str | None, tuple[int, ...]]]:
    for difference in differences:
        assert difference.detail and str(difference)
    return [(difference.kind, difference.parameter, difference.ranks) for difference in differences]


def flipped(tensor: Value, at: int = 0, bit: int = 0) -> Value:
    content = bytearray(tensor.array.tobytes())
    content[at] ^= 1 << bit
    return Value(tensor.dtype, np.frombuffer(bytes(content), tensor.array.dtype).reshape(tensor.array.shape))


FULL = small_tensors()


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path, SOURCE, TARGET)


def held(strategy: Strategy, full: Checkpoint = FULL) -> Ranks:
    return cut_ranks(strategy, full, COPIED)


# Against the source.


@examples(40)
@given(st.data())
def test_every_conversion_verifies_and_every_byte_is_read(data: st.DataObject) -> None:
    full = data.draw(tensors())
    old, new = data.draw(strategies(full)), data.draw(st.one_of(strategies(full), st.just(ONE_DEVICE)))
    format_ = data.draw(st.sampled_from(["ckpt", "safetensors"]))
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory), old, new)
        write_tree(Path(directory) / "src", held(old, full), "rank_{rank}/net-1_10.ckpt")
        new_path: Any = pair.new_path if new is not ONE_DEVICE else "none"
        pair.new_path = new_path
        done(
            "transform-dir", pair.root / "src", pair.root / "dst", "--src-strategy", pair.old_path,
            "--dst-strategy", new_path, "--format", format_,
        )  # fmt: skip
        assert pair.compare() == []
        assert pair.progress.read == pair.progress.total
        written = read_tree(pair.root / "dst").values()
        assert pair.progress.total >= sum(tensor.array.nbytes for held_ in written for tensor in held_.values())


@pytest.mark.deep
@examples(80)
@given(st.data())
def test_damage_is_found_at_its_rank_and_parameter(data: st.DataObject) -> None:
    full = data.draw(tensors())
    old, new = data.draw(strategies(full)), data.draw(strategies(full))
    target = held(new, full)
    places = [(rank, name) for rank, checkpoint in target.items() for name in checkpoint]
    wrong = data.draw(st.sets(st.sampled_from(places), min_size=1, max_size=3))
    for rank, name in wrong:
        size = target[rank][name].array.nbytes
        at, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
        target[rank][name] = flipped(target[rank][name], at, bit)
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory), old, new)
        pair.write(held(old, full), target)
        differences = pair.compare()
        assert {(rank, found_.parameter) for found_ in differences for rank in found_.ranks} == wrong
        assert {difference.kind for difference in differences} == {"content"}


@pytest.mark.deep
@examples(80)
@given(st.data())
def test_slices_of_another_layout_are_found(data: st.DataObject) -> None:
    full = data.draw(tensors(fewest=4))
    old, new, other = (data.draw(strategies(full, fewest_stages=1)) for _ in range(3))
    right, wrong = held(new, full), held(other, full)
    assume(sorted(right) == sorted(wrong) and names_of(new) == names_of(other))
    differing = {
        (rank, name)
        for rank, checkpoint in right.items()
        for name, tensor in checkpoint.items()
        if name not in wrong[rank] or not tensor.same(wrong[rank][name])
    }
    extra = {(rank, name) for rank, checkpoint in wrong.items() for name in checkpoint if name not in right[rank]}
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory), old, new)
        pair.write(held(old, full), wrong)
        differences = pair.compare()
        assert {(rank, found_.parameter) for found_ in differences for rank in found_.ranks} == differing | extra


def test_entries_of_a_map_are_one_dimension_only_if_all_but_the_last_are_completely_cut() -> None:
    def rows(first: int, shape: tuple[int, int]) -> list[tuple[int, int]] | None:
        layout = LayoutValues((first, 2), ((1,), (0,)), shape=shape, expandable=True)
        boxes = device_boxes(layout, (128,))
        return None if boxes is None else [box[0] for box in boxes]

    assert rows(2, (2, 64)) == [(0, 32), (32, 64), (64, 96), (96, 128)]
    # A device would hold two separate pieces of the dimension.
    assert rows(2, (4, 32)) is None
    # Other products of sizes.
    assert rows(2, (2, 32)) is None


@pytest.mark.parametrize("cut_at", [1, 40, -1])
def test_a_truncated_file_is_a_difference(pair: Pair, cut_at: int) -> None:
    pair.write(held(SOURCE), held(TARGET))
    path = pair.root / "dst" / "rank_1" / "checkpoint_1.ckpt"
    path.write_bytes(path.read_bytes()[:cut_at])
    assert ("file", None, (1,)) in brief(pair.compare())


def test_a_wrong_dtype_or_shape_is_reported_with_its_rank(pair: Pair) -> None:
    target = held(TARGET)
    target[0]["w"] = Value("Int32", target[0]["w"].array)
    target[1]["m.w"] = Value("Float32", target[1]["m.w"].array.reshape(6, 4))
    target[1]["global_step"] = scalar(41)
    pair.write(held(SOURCE), target)
    assert brief(pair.compare()) == [("shape", "global_step", (1,)), ("shape", "m.w", (1,)), ("type", "w", (0,))]


def test_text_is_not_expected_in_safetensors(pair: Pair) -> None:
    source = {rank: {**checkpoint, "note": text("some")} for rank, checkpoint in held(SOURCE).items()}
    write_tree(pair.root / "src", source)
    write_tree(pair.root / "dst", held(TARGET), "rank_{rank}/checkpoint_{rank}.safetensors")
    assert pair.compare() == []


def test_an_incomplete_or_contradictory_source_is_an_error(pair: Pair) -> None:
    source = held(SOURCE)
    del source[3]
    pair.write(source, held(TARGET))
    with pytest.raises(IncompleteSourceError, match=r"rank 3 should hold: 'm\.w'"):
        pair.compare()
    source = held(SOURCE)
    source[1]["w"] = value("w", (5, 6))
    pair.write(source, held(TARGET))
    with pytest.raises(InputError, match="'w': the source strategy does not fit"):
        pair.compare()


@pytest.mark.deep
@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
def test_a_flipped_bit_outside_contents_is_found(pair: Pair, ending: str) -> None:
    text_ = {"note": text("some")} if ending == "ckpt" else {}
    int4 = {"q": Value("Int4", np.arange(6, dtype=np.int8))} if ending != "ckpt" else {}
    more = {"empty": value("e", (0, 3)), "step": scalar(3), **text_, **int4}
    source, target = held(SOURCE), held(TARGET)
    for checkpoint in (*source.values(), *target.values()):
        checkpoint.update(more)
    pair.write(source, target, ending)
    path = pair.root / "dst" / "rank_1" / f"checkpoint_1.{ending}"
    if ending == "safetensors":
        path.write_bytes(safetensors_bytes(target[1], {"remove_redundancy": "False"}))
    assert pair.compare() == []
    with FileHandles() as handles:
        tensors_ = read_index(handles, str(path)).tensors
    extents = [extent for tensor in tensors_.values() for extent in tensor.extents]
    content = {at for start, size in extents for at in range(start, start + size)}
    data = path.read_bytes()
    # The key of an empty content: optional.
    content.add(data.find(b"\x1a\x00") if ending == "ckpt" else -1)
    for at in sorted(set(range(len(data))) - content)[:: 1 if LONG else 3]:
        changed = bytearray(data)
        changed[at] ^= 1 << at % 8
        path.write_bytes(bytes(changed))
        try:
            assert pair.compare(), f"byte {at} of {path}"
        except CheckpointError as error:
            assert str(path) in error.message


@pytest.mark.parametrize("wrong", [{"remove_redundancy": "True"}, {"format": "np"}, {"m.w": "Int4x"}])
def test_false_metadata_is_a_difference(pair: Pair, wrong: Mapping[str, str]) -> None:
    pair.write(held(SOURCE), held(TARGET), "safetensors")
    for tree, rank in (("src", 3), ("dst", 1)):
        path = Path(files_of(pair.root / tree)[rank])
        path.write_bytes(safetensors_bytes(held(SOURCE if tree == "src" else TARGET)[rank], wrong))
        if tree == "src" and "remove_redundancy" in wrong:
            assert pair.compare() == []
    differences = pair.compare()
    if "remove_redundancy" in wrong:
        assert brief(differences) == [("file", None, (1,))]
    else:
        # Metadata of the source may be in the target.
        assert differences == []
    pair.write(held(SOURCE), held(TARGET), "safetensors")
    path.write_bytes(safetensors_bytes(held(TARGET)[1], wrong))
    assert brief(pair.compare()) == [("file", None, (1,))]


# At scale.


def many(root: Path, ranks: int, parameters: int) -> Pair:
    """Small parameters on many ranks, half of them cut."""
    names = [f"layer{number}.weight" for number in range(parameters)]
    maps = {name: [0, -1] if number % 2 else [-1, 0] for number, name in enumerate(names)}
    old = single({name: layout([ranks // 4, 4], cut) for name, cut in maps.items()})
    new = single({name: layout([ranks // 4, 4], cut[::-1]) for name, cut in maps.items()})
    pair = Pair(root, old, new)
    full = {name: value(name, (8, 8)) for name in names}
    pair.write(held(old, full), held(new, full))
    return pair


@pytest.mark.deep
@pytest.mark.parametrize("most", [1, 7, 100])
def test_differences_do_not_depend_on_batches_and_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(summing, "MAX_SLICES", most)
    monkeypatch.setattr(reading, "_MIN_BLOCK", most)
    monkeypatch.setattr(reading, "_MAX_BLOCK", most)
    pair = many(tmp_path, 8, 6)
    assert pair.compare() == [] and pair.replicas() == []
    assert pair.progress.read == pair.progress.total
    ranks = held(pair.new, {name: value(name, (8, 8)) for name in names_of(pair.new)})
    ranks[5]["layer0.weight"] = flipped(ranks[5]["layer0.weight"], 9)
    ranks[2]["layer4.weight"] = flipped(ranks[2]["layer4.weight"], 0, 7)
    ranks[7]["global_step"] = scalar(1, shape=(1,))
    write_tree(pair.root / "dst", ranks, "rank_{rank}/checkpoint_{rank}.ckpt")
    wrong = [("global_step", (7,)), ("layer0.weight", (5,)), ("layer4.weight", (2,))]
    assert brief(pair.compare()) == [("content", name, where) for name, where in wrong]
    assert [actual.parameter for actual in pair.replicas("dst")] == [name for name, _ in wrong]


def test_headers_are_read_once_with_any_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "MAX_SLICES", 1)
    pair = many(tmp_path, 8, 6)
    read: list[str] = []

    def counted(handles: FileHandles, path: str, reference: Any) -> Any:
        read.append(path)
        return read_index(handles, path, reference)

    monkeypatch.setattr(headers, "read_index", counted)
    pair.compare()
    assert len(read) == len(set(read)) == 16
    read.clear()
    pair.replicas()
    assert len(read) == 8


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["compare", "replicas", "fingerprints"])
def test_memory_of_verify_does_not_grow_with_parameters_times_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(summing, "MAX_SLICES", 128)
    ranks, few, more = 64, 4, 24
    peaks: list[int] = []
    # The first run loads what all need; two threads meet differently in each, so that the least of two counts.
    for parameters in (few, few, few, more, more):
        pair = many(tmp_path / f"{len(peaks)}", ranks, parameters)
        tracemalloc.start()
        try:
            if kind == "fingerprints":
                with FileHandles() as handles:
                    strategy = read_strategy(str(pair.old_path))
                    means = Reading(handles, Report(), 2, 8 << 20, Quiet())
                    fingerprints(read_source(files_of(pair.root / "src"), strategy, means), means)
            else:
                assert getattr(pair, kind)() == []
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
    # Its name, type, place in the files and the like, but nothing per rank: a pointer each would be more.
    before, after = min(peaks[1:3]), min(peaks[3:])
    assert (after - before) / (more - few) < 8 * ranks * 12


# Within one checkpoint.


@pytest.mark.deep
@examples(60)
@given(st.data())
def test_copies_of_a_checkpoint_agree_until_one_is_damaged(data: st.DataObject) -> None:
    full = data.draw(tensors())
    strategy = data.draw(strategies(full))
    ranks = held(strategy, full)
    with tempfile.TemporaryDirectory() as directory:
        pair = Pair(Path(directory), strategy, strategy)
        pair.write(ranks, {})
        assert pair.replicas() == []
        rank = data.draw(st.sampled_from(sorted(ranks)))
        name = data.draw(st.sampled_from(sorted(ranks[rank])))
        copies = [other for other in ranks if name in ranks[other] and ranks[other][name].same(ranks[rank][name])]
        ranks[rank][name] = flipped(ranks[rank][name])
        pair.write(ranks, {})
        differences = pair.replicas()
        assert {difference.parameter for difference in differences} <= {name}
        kinds = {difference.kind for difference in differences}
        stages = sum(name in stage["layouts"] for stage in strategy)
        if len(copies) > 1 and (stages < 2 or name in COPIED):
            assert differences and rank in differences[0].ranks
            if kinds == {"replica"}:
                assert differences[0].ranks == (rank,)


def test_the_rank_that_differs_from_most_is_named(tmp_path: Path) -> None:
    strategy = single({"w": layout([4, 2], [0, -1])})
    ranks = held(strategy, {"w": FULL["w"]})
    pair = Pair(tmp_path, strategy, strategy)
    ranks[4]["w"] = flipped(ranks[4]["w"], 5, 7)
    ranks[1]["global_step"] = scalar(0, shape=(1,))
    pair.write(ranks, {})
    assert brief(pair.replicas()) == [("replica", "global_step", (1,)), ("replica", "w", (4,))]


def test_two_copies_that_differ_are_both_suspects(pair: Pair) -> None:
    source = held(SOURCE)
    source[2]["w"] = flipped(source[2]["w"])
    pair.write(source, {})
    assert brief(pair.replicas()) == [("replicas", "w", (0, 2))]


def test_a_tree_that_does_not_fit_its_strategy_is_reported(tmp_path: Path) -> None:
    pair = Pair(tmp_path, SOURCE, TARGET)
    source = held(SOURCE)
    source[1]["w"] = value("w", (3, 6))
    pair.write(source, {})
    differences = pair.replicas()
    assert [(difference.kind, difference.parameter) for difference in differences] == [("strategy", "w")]
