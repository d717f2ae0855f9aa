"""Directories of strategy files: stages found, copies compared, other files skipped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import StrategyError
from reshard.layout import Layout
from reshard.strategies import Strategy, files, read_strategy
from tests.running import done, fails
from tests.strategy_writing import group_info, layout, protobuf, write_merged, write_strategy
from tests.trees import value, write_checkpoint
from tests.wire import field

FIRST = {"embedding": layout([2, 2], [1, -1], step=1, size=-1), "shared": layout([2, 2], [0, -1])}
SECOND = {"head": layout([4], [0, -1]), "shared": layout([4], [-1, -1])}


def two_stages(directory: Path, ending: str = "ckpt") -> Path:
    write_strategy(directory / f"ckpt_strategy_rank_0.{ending}", 0, FIRST)
    write_strategy(directory / f"ckpt_strategy_rank_4.{ending}", 1, SECOND)
    return directory


def read(directory: Path) -> Strategy:
    return read_strategy(str(directory))


def refused(directory: Path, *texts: str) -> StrategyError:
    with pytest.raises(StrategyError) as caught:
        read(directory)
    for part in texts:
        assert part in str(caught.value)
    return caught.value


def test_the_files_of_the_stages_are_one_strategy(tmp_path: Path) -> None:
    strategy = read(two_stages(tmp_path))
    merged = read_strategy(str(write_merged(tmp_path / "m.ckpt", {1: SECOND, 0: FIRST})))
    assert [(stage.number, stage.first_rank, stage.device_count) for stage in strategy.stages] == [
        (0, 0, 4),
        (1, 4, 4),
    ]
    assert [stage.layouts for stage in strategy.stages] == [stage.layouts for stage in merged.stages]
    assert strategy.notes == ()
    assert strategy.path == str(tmp_path)
    assert not strategy.is_none


def test_identical_copies_are_parsed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(100):
        write_strategy(tmp_path / f"rank_{rank}.ckpt", rank // 50, (FIRST, SECOND)[rank // 50])
    parsed = []
    parse = files.parse_protobuf

    def counting(data: bytes, path: str) -> Any:
        parsed.append(path)
        return parse(data, path)

    monkeypatch.setattr(files, "parse_protobuf", counting)
    strategy = read(tmp_path)
    assert len(parsed) == 2
    # In the order of ranks, not of characters.
    assert strategy.stages[0].files == tuple(str(tmp_path / f"rank_{rank}.ckpt") for rank in range(50))


# Copies.


def test_copies_in_another_order_agree(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, FIRST)
    write_strategy(tmp_path / "b.ckpt", 0, dict(reversed(FIRST.items())), item_stages=[0, 0])
    assert len(read(tmp_path).stages[0].files) == 2


def test_a_json_copy_agrees_with_a_protobuf_copy_and_adds_the_shape(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, {"w": layout([2, 2], [1, 0])})
    write_strategy(tmp_path / "b.json", 0, {"w": layout([2, 2], [1, 0], shape=[64, 32])})
    assert read(tmp_path).stages[0].layouts["w"] == Layout((2, 2), ((1,), (0,)), recorded_shape=(64, 32))


@pytest.mark.parametrize("first", ["a.ckpt", "a.json"])
def test_an_expanded_map_agrees_with_the_nested_one_which_groups_it(tmp_path: Path, first: str) -> None:
    second = "b.json" if first == "a.ckpt" else "b.ckpt"
    layouts = {
        ".ckpt": layout([2, 2, 2], [[2, 0], [-1]], step=2, size=-1),
        ".json": layout([2, 2, 2], [2, 0, -1], step=2, size=-1, shape=[2, 32, 32]),
    }
    for name in (first, second):
        write_strategy(tmp_path / name, 0, {"w": layouts[name[1:]]})
    assert read(tmp_path).stages[0].layouts["w"] == Layout(
        (2, 2, 2), ((2, 0), ()), shard_size=-1, shard_step=2, recorded_shape=(64, 32)
    )


def test_a_protobuf_copy_settles_an_ambiguous_expanded_map(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.json", 0, {"w": layout([2, 2], [1, 0], shape=[2, 32])})
    assert read(tmp_path).stages[0].layouts["w"].expandable
    write_strategy(tmp_path / "b.ckpt", 0, {"w": layout([2, 2], [1, 0])})
    assert read(tmp_path).stages[0].layouts["w"] == Layout((2, 2), ((1,), (0,)), recorded_shape=(2, 32))


@pytest.mark.parametrize(
    "other",
    [
        layout([4, 1], [1, -1], shape=[8, 8]),
        layout([2, 2], [0, -1], shape=[8, 8]),
        layout([2, 2], [-1, 1], shape=[8, 8]),
        layout([2, 2], [1, -1], step=1, size=-1, shape=[8, 8]),
        layout([2, 2], [1, 0, -1], shape=[2, 4, 8]),
    ],
)
@pytest.mark.parametrize("name", ["b.ckpt", "b.json"])
def test_copies_that_disagree_are_refused(tmp_path: Path, other: dict[str, Any], name: str) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, {"v": layout([2, 2], [0]), "w": layout([2, 2], [1, -1])})
    write_strategy(tmp_path / name, 0, {"v": layout([2, 2], [0]), "w": other})
    error = refused(tmp_path, "stage 0", "a.ckpt", name, "disagree", "of 'w'")
    assert error.parameter == "w"


def test_copies_that_record_different_shapes_are_refused(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, {"w": layout([2], [0])})
    write_strategy(tmp_path / "b.json", 0, {"w": layout([2], [0], shape=[8])})
    write_strategy(tmp_path / "c.json", 0, {"w": layout([2], [0], shape=[16])})
    refused(tmp_path, "b.json", "c.json", "of 'w'")


def test_copies_that_list_different_parameters_are_refused(tmp_path: Path) -> None:
    for more, name in (({}, "a.ckpt"), ({"extra": layout([2], [0])}, "b.ckpt")):
        write_strategy(tmp_path / name, 0, {"w": layout([2], [0]), **more})
    refused(tmp_path, "stage 0", "a.ckpt", "b.ckpt", "extra")


# Stages that are missing.


def test_a_gap_between_stages_is_refused(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, FIRST)
    write_strategy(tmp_path / "d.ckpt", 3, SECOND)
    refused(tmp_path, "stages 1 and 2 are missing", "a.ckpt, d.ckpt")


# Merged files.


@pytest.mark.parametrize("name", ["a_merged.ckpt", "merged_ckpt_strategy.json"])
def test_a_merged_file_agrees_with_its_stages(tmp_path: Path, name: str) -> None:
    write_merged(two_stages(tmp_path) / name, {0: FIRST, 1: SECOND})
    strategy = read(tmp_path)
    assert strategy.notes == ()
    assert [path.rpartition("/")[2] for path in strategy.stages[0].files] == ["ckpt_strategy_rank_0.ckpt", name]


def test_a_merged_file_of_another_run_is_refused(tmp_path: Path) -> None:
    write_merged(two_stages(tmp_path) / "merged.ckpt", {0: {"w": layout([8], [0])}})
    refused(tmp_path, "rank_0.ckpt", "merged.ckpt", "other stages")
    write_merged(tmp_path / "merged.ckpt", {0: {"w": layout([4], [0])}, 1: SECOND})
    refused(tmp_path, "rank_0.ckpt", "merged.ckpt", "disagree", "'w'")


def test_a_merged_file_in_both_formats_is_used_where_they_agree(tmp_path: Path) -> None:
    write_merged(tmp_path / "merged.ckpt", {0: FIRST, 1: SECOND})
    write_merged(tmp_path / "merged.json", {1: SECOND, 0: FIRST})
    assert read(tmp_path).device_count == 8
    write_merged(tmp_path / "merged.json", {0: FIRST})
    refused(tmp_path, "merged.ckpt", "merged.json", "other stages")
    write_merged(tmp_path / "merged.json", {0: FIRST, 1: {**SECOND, "head": layout([4], [-1, 0])}})
    refused(tmp_path, "merged.ckpt", "merged.json", "stage 1", "head")


@pytest.mark.parametrize("stage", [0, 1])
def test_a_merged_file_does_not_replace_a_missing_stage(tmp_path: Path, stage: int) -> None:
    write_strategy(tmp_path / "rank_0.ckpt", stage, (FIRST, SECOND)[stage])
    write_merged(tmp_path / "merged.ckpt", {0: FIRST, 1: SECOND})
    refused(tmp_path, "rank_0.ckpt", "merged.ckpt", "other stages")


# Files without strategy items.


def test_a_file_without_items_is_stage_0_when_alone(tmp_path: Path) -> None:
    for rank in range(3):
        write_strategy(tmp_path / f"rank_{rank}.ckpt", 0, FIRST, item_stages=[])
    (stage,) = read(tmp_path).stages
    assert (stage.number, len(stage.files)) == (0, 3)


@pytest.mark.parametrize("merged", [False, True])
def test_a_file_without_items_among_others_is_refused(tmp_path: Path, merged: bool) -> None:
    write_strategy(tmp_path / "plain.ckpt", 0, FIRST, item_stages=[])
    if merged:
        write_merged(tmp_path / "other.ckpt", {0: FIRST})
    else:
        write_strategy(tmp_path / "other.ckpt", 0, FIRST)
    refused(tmp_path, "plain.ckpt", "no strategy items", "other.ckpt")


def test_files_without_items_that_differ_are_refused(tmp_path: Path) -> None:
    write_strategy(tmp_path / "a.ckpt", 0, FIRST, item_stages=[])
    write_strategy(tmp_path / "b.ckpt", 0, SECOND, item_stages=[])
    refused(tmp_path, "a.ckpt", "b.ckpt")


# All other files in such directories.


def test_files_that_are_not_strategies_are_listed_and_skipped(tmp_path: Path) -> None:
    two_stages(tmp_path)
    (tmp_path / "subdirectory").mkdir()
    os.mkfifo(tmp_path / "pipe.ckpt")
    (tmp_path / "meta.json").write_text('{"last_epoch": 1}')
    (tmp_path / "README.md").write_text("# Strategies\n")
    (tmp_path / "weights.ckpt").write_bytes(field(1, field(1, "w") + field(2, b"")))
    (tmp_path / "group_info.pb").write_bytes(group_info([0]))
    (tmp_path / "done").touch()
    (tmp_path / "zip.ckpt").write_bytes(b"PK\x03\x04" + bytes(40))
    (tmp_path / ".s.ckpt.swp").write_bytes(protobuf(SECOND, [0]))
    with (tmp_path / "huge.bin").open("wb") as file:
        file.truncate(2**31)
    strategy = read(tmp_path)
    text = "\n".join(strategy.notes)
    assert strategy.device_count == 8
    for name in sorted(os.listdir(tmp_path)):
        assert (name in text) == ("rank_" not in name)


def test_a_directory_without_strategies_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no strategy files")
    (tmp_path / "weights.ckpt").write_bytes(field(1, field(1, "w") + field(2, b"")))
    refused(tmp_path, "no strategy files", "this is the checkpoint")


@pytest.mark.parametrize("data", [b"", protobuf(SECOND, [1])[:-3], b"\x00" * 100])
def test_a_damaged_strategy_is_not_skipped(tmp_path: Path, data: bytes) -> None:
    (two_stages(tmp_path) / "ckpt_strategy_rank_5.ckpt").write_bytes(data)
    refused(tmp_path, "ckpt_strategy_rank_5.ckpt")


def test_a_dangling_link_is_refused(tmp_path: Path) -> None:
    (two_stages(tmp_path) / "ckpt_strategy_rank_1.ckpt").symlink_to(tmp_path / "gone")
    refused(tmp_path, "ckpt_strategy_rank_1.ckpt")


def test_files_of_stages_without_items_get_a_hint(tmp_path: Path) -> None:
    for number in (0, 1):
        layouts = {f"p{number}.w": {
            "dev_matrix": [2], "tensor_map": [0, -1], "tensor_shape": [4, 4], "field": 0,
            "opt_weight_shard_step": 0, "opt_weight_shard_size": 0,
        }}  # fmt: skip
        (tmp_path / f"stage{number}.json").write_text(json.dumps({"parallel_layout_item": layouts}))
    fails(3, "strategy", "show", tmp_path, texts=["disagree", "p0.w", "parallel_strategy_item, which these lack"])


def of_ranks(directory: Path) -> Path:
    """Every rank's copy in a directory of its own."""
    for rank in range(8):
        layouts, stage = (FIRST, 0) if rank < 4 else (SECOND, 1)
        write_strategy(directory / f"rank_{rank}" / "ckpt_strategy.ckpt", stage, layouts)
    return directory


def test_strategies_in_rank_directories_are_found(tmp_path: Path) -> None:
    strategy = read(of_ranks(tmp_path / "apart"))
    assert strategy.stages[0].layouts == read(two_stages(tmp_path / "together")).stages[0].layouts
    assert (strategy.device_count, len(strategy.stages), strategy.notes) == (8, 2, ())


def test_rank_directories_are_skipped_beside_strategies(tmp_path: Path) -> None:
    of_ranks(tmp_path)
    (tmp_path / "rank_0" / "ckpt_strategy.ckpt").write_bytes(b"\x08")
    strategy = read(two_stages(tmp_path))
    assert strategy.device_count == 8
    assert "rank_0, rank_1" in strategy.notes[0]


def test_rank_directories_that_disagree_are_named(tmp_path: Path) -> None:
    of_ranks(tmp_path)
    write_strategy(tmp_path / "rank_3" / "ckpt_strategy.ckpt", 0, {**FIRST, "shared": layout([2, 2], [1, -1])})
    refused(tmp_path, "rank_3/ckpt_strategy.ckpt disagree on the layout of 'shared'")
    for rank in range(4, 8):
        (tmp_path / f"rank_{rank}" / "ckpt_strategy.ckpt").unlink()
    write_strategy(tmp_path / "rank_3" / "ckpt_strategy.ckpt", 2, SECOND)
    refused(tmp_path, "stage 1 is missing", "rank_0/ckpt_strategy.ckpt")


def test_a_checkpoint_tree_is_not_a_strategy_directory(tmp_path: Path) -> None:
    for rank in range(2):
        write_checkpoint(tmp_path / f"rank_{rank}" / "net-1_1.ckpt", {"w": value("w", (4, 4))})
    refused(tmp_path, "holds no strategy files", "this is the checkpoint")


def test_merge_pipeline_merges_strategies_of_rank_directories(tmp_path: Path) -> None:
    done("merge-pipeline", of_ranks(tmp_path / "strategy"), tmp_path / "merged.ckpt")
    assert read_strategy(str(tmp_path / "merged.ckpt")).device_count == 8
