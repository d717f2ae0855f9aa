"""Rows of which several targets take columns are read once; counted, not timed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from reshard.execute import parts, reader, writing
from reshard.forms.target import Cut, Section
from reshard.layout import Layout, Overlap
from reshard.plan.pieces import GroupLimits, linked_files
from reshard.storage import ReadableFile, fill
from tests.reference import Strategy
from tests.running import Argument, done
from tests.trees import cut_ranks, layout, read_tree, same_ranks, single, text, value, write_strategy, write_tree

ROWS, COLUMNS = 48, 2400
FULL = {name: value(name, (ROWS, COLUMNS)) for name in ("a", "b")}
SIZE = 2 * ROWS * COLUMNS * 4


def columns(data: int, model: int) -> Strategy:
    cut = layout([data, model], [-1, 0])
    return single({"a": cut, "b": cut})


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every request for tensor contents."""
    counted: list[int] = []

    def counting(file: ReadableFile, offset: int, out: memoryview, *rank: int | None) -> None:
        counted.append(len(out))
        fill(file, offset, out, *rank)

    monkeypatch.setattr(reader, "fill", counting)
    return counted


def convert(place: Path, old: object, new: Strategy, *options: Argument) -> None:
    path = write_strategy(place / "new", new)
    words: list[Argument] = ["--src-strategy", str(old), "--dst-strategy", path, "--io", "pread"]
    done("transform-dir", place / "src", place / "dst", *words, *options)
    same_ranks(read_tree(place / "dst"), cut_ranks(new, FULL))


@pytest.mark.deep
@pytest.mark.parametrize("part_bytes", [64 << 20, 1000])
@pytest.mark.parametrize(("data", "model"), [(1, 8), (3, 8), (2, 3)])
def test_a_full_tensor_is_read_once_for_all_its_column_slices(
    data: int, model: int, part_bytes: int, tmp_path: Path, bytes_read: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "MAX_PART_BYTES", part_bytes)
    monkeypatch.setattr(parts, "MIN_PART_BYTES", part_bytes)
    write_tree(tmp_path / "src", {0: FULL}, "rank_{rank}/net-1_1.ckpt")
    convert(tmp_path, "none", columns(data, model))
    # A group has at most 16 members, so the rows are read once per group.
    assert sum(bytes_read) <= SIZE * -(-data * model // 16)


def test_sixteen_ranks_to_twenty_four_read_each_row_once_for_a_group(tmp_path: Path, bytes_read: list[int]) -> None:
    old = columns(4, 4)
    write_tree(tmp_path / "src", cut_ranks(old, FULL), "rank_{rank}/net-1_1.ckpt")
    # What is compared before it is counted elsewhere.
    convert(tmp_path, write_strategy(tmp_path / "old", old), columns(3, 8), "--check-replicas", "never")
    assert sum(bytes_read) <= SIZE


@pytest.mark.parametrize("limit", ["1K", "16K", "100K"])
def test_rows_over_the_buffer_are_written_one_member_at_a_time(limit: str, tmp_path: Path) -> None:
    write_tree(tmp_path / "src", {0: FULL}, "rank_{rank}/net-1_1.safetensors")
    convert(tmp_path, "none", columns(1, 8), "--max-memory", limit)


def linked(source: Layout, target: Layout, shape: tuple[int, ...], ranks: Sequence[int]) -> list[list[int]]:
    section = Section(0, range(target.device_count), {"w": target})
    cut = Cut(0, Overlap([source.grid(shape)], target.grid(shape)), target, ())
    return linked_files(ranks, section, [cut])


def test_only_column_slices_of_the_same_rows_are_grouped() -> None:
    whole, by_columns, by_rows = Layout((), ((), ())), Layout((4,), ((), (0,))), Layout((4,), ((0,), ()))
    assert linked(whole, by_columns, (8, 8), range(4)) == [[0, 1, 2, 3]]
    assert linked(whole, by_rows, (8, 8), range(4)) == [[0], [1], [2], [3]]
    assert linked(by_columns, by_columns, (8, 8), range(4)) == [[0], [1], [2], [3]]
    both = Layout((2, 2), ((1,), (0,)))
    assert linked(whole, both, (8, 8), range(4)) == [[0, 1], [2, 3]]
    assert linked(whole, by_columns, (8, 8), [1, 3]) == [[1, 3]]


@pytest.mark.parametrize(
    ("files", "shared", "together"),
    [(40, 100, 16), (4, 100, 4), (4, 30, 2), (8, 30, 4), (8, 10, 2), (8, 1, 2), (8, 0, 2)],
)
def test_groups_are_small_unless_rows_would_be_read_again_too_often(files: int, shared: int, together: int) -> None:
    """Of 100 bytes that are written; as many are read."""
    assert GroupLimits(16, 2).together(files, shared, 100) == together


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_kill_loses_few_files_of_a_model_with_rows_and_columns(
    jobs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a Hugging Face file to tensor parallel ranks: some weights are cut by columns, most by rows."""
    full = {name: value(name, (64, 64)) for name in ("down", "gate", "k", "o", "q", "up", "v")}
    new = single({name: layout([8], [-1, 0] if name == "down" else [0, -1]) for name in full})
    write_tree(tmp_path / "src", {0: full}, "rank_{rank}/net-1_1.ckpt")
    at_commit: list[int] = []
    commit = writing.TargetWriter.commit

    def counting(writer: writing.TargetWriter) -> None:
        at_commit.append(len(list((tmp_path / "dst").rglob(".reshard-tmp-*"))))
        commit(writer)

    monkeypatch.setattr(writing.TargetWriter, "commit", counting)
    path = write_strategy(tmp_path / "new", new)
    words: list[Argument] = ["--src-strategy", "none", "--dst-strategy", path, "--jobs", jobs]
    done("transform-dir", tmp_path / "src", tmp_path / "dst", *words)
    same_ranks(read_tree(tmp_path / "dst"), cut_ranks(new, full))
    # Three are written together. While one thread finishes its three, the other may have begun all of the next.
    assert len(at_commit) == 8 and max(at_commit) <= 3 * jobs


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("empty", ["0", "m", "z"])
def test_an_empty_tensor_anywhere_in_a_group_stays_in_its_place(empty: str, ending: str, tmp_path: Path) -> None:
    """The header of an empty tensor at the end of a .ckpt file once landed before the last tensor's data."""
    full = {"b": value("b", (4, 8)), "w": value("w", (4, 8)), empty: value("e", (0, 8))}
    new = single({name: layout([4], [-1, 0]) for name in full})
    write_tree(tmp_path / "src", {0: full}, f"rank_{{rank}}/net-1_1.{ending}")
    path = write_strategy(tmp_path / "new", new)
    for output in ("ckpt", "safetensors"):
        words: list[Argument] = [tmp_path / "src", tmp_path / output, "--src-strategy", "none", "--dst-strategy", path]
        done("transform-dir", *words, "--format", output)
        same_ranks(read_tree(tmp_path / output), cut_ranks(new, full))


def test_copied_empty_text_at_the_end_of_a_group_stays_in_its_place(tmp_path: Path) -> None:
    full = {"w": value("w", (4, 8))}
    new = single({"w": layout([4], [-1, 0])})
    write_tree(tmp_path / "src", {0: {**full, "z": text("")}}, "rank_{rank}/net-1_1.ckpt")
    path = write_strategy(tmp_path / "new", new)
    done("transform-dir", tmp_path / "src", tmp_path / "dst", "--src-strategy", "none", "--dst-strategy", path)
    same_ranks(read_tree(tmp_path / "dst"), cut_ranks(new, full, {"z": text("")}))
