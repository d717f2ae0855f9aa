"""Merging stages into one file: the content of MindSpore's merge, and nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from reshard.errors import RetryableError, StrategyError, TargetError, UsageError
from reshard.strategies import RecordedLayout, read_strategy, read_strategy_file
from reshard.strategies.written import merge_pipeline
from tests.cases import EVERYWHERE, case_directory
from tests.strategy_writing import layout, write_merged, write_strategy

FIRST = {"embedding": layout([2, 2], [1, -1], step=1, size=-1), "a-b": layout([2, 2], [0, -1])}
SECOND = {"head": layout([4], [0, -1])}
MERGED = [name for name in EVERYWHERE if (case_directory(name) / "merged").is_dir()]


def merge(directory: Path, target: Path) -> list[str]:
    return merge_pipeline(str(directory), str(target))


def two_stages(directory: Path, ending: str = "ckpt") -> Path:
    write_strategy(directory / f"rank_0.{ending}", 0, FIRST)
    write_strategy(directory / f"rank_4.{ending}", 1, SECOND)
    return directory


def content(path: Path) -> dict[str, Any]:
    """The content of a file, without the order of merged stages."""
    file = read_strategy_file(str(path))
    return {"items": sorted(map(repr, file.items)), "layouts": dict(file.layouts), "stage": file.current_stage}


@pytest.mark.parametrize("name", MERGED)
def test_protobuf_is_merged_as_mindspore_merges_it(tmp_path: Path, name: str) -> None:
    target = tmp_path / "out" / "merged.ckpt"
    assert merge(case_directory(name) / "strategy", target) == []
    assert content(target) == content(case_directory(name) / "merged" / "merged_strategy.ckpt")


@pytest.mark.parametrize("name", [n for n in MERGED if (case_directory(n) / "merged/merged_strategy.json").exists()])
def test_json_is_merged_as_mindspore_merges_it(tmp_path: Path, name: str) -> None:
    merge(case_directory(name) / "strategy_json", tmp_path / "merged.json")
    expected = (case_directory(name) / "merged" / "merged_strategy.json").read_text()
    assert json.loads((tmp_path / "merged.json").read_text()) == json.loads(expected)


@pytest.mark.parametrize("source", ["ckpt", "json"])
@pytest.mark.parametrize("target", ["ckpt", "json"])
def test_the_merged_file_equals_its_directory(tmp_path: Path, source: str, target: str) -> None:
    directory = two_stages(tmp_path / "strategy", source)
    path = tmp_path / "new" / "directory" / f"merged.{target}"
    merge(directory, path)
    assert list(read_strategy_file(str(path)).layouts) == ["0-embedding", "0-a-b", "1-head"]
    merged = read_strategy(str(path))
    assert [stage.layouts for stage in merged.stages] == [
        stage.layouts for stage in read_strategy(str(directory)).stages
    ]


def test_stages_are_written_in_order_for_any_file_names(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s" / "a.ckpt", 1, SECOND)
    write_strategy(tmp_path / "s" / "b.ckpt", 0, FIRST)
    merge(tmp_path / "s", tmp_path / "m.ckpt")
    file = read_strategy_file(str(tmp_path / "m.ckpt"))
    assert list(file.layouts) == ["0-embedding", "0-a-b", "1-head"]
    assert [item.stage for item in file.items] == [0, 1]


# Records that only one format can express.


def recorded(path: Path, name: str) -> RecordedLayout:
    return read_strategy_file(str(path)).layouts[name]


def test_json_merged_from_protobuf_contains_no_shapes(tmp_path: Path) -> None:
    merge(two_stages(tmp_path / "s"), tmp_path / "m.json")
    assert "tensor_shape" not in (tmp_path / "m.json").read_text()


def test_flat_nested_maps_become_flat_json(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s" / "a.ckpt", 0, {"w": layout([2, 2], [[0], [-1]])})
    assert merge(tmp_path / "s", tmp_path / "m.json") == []
    assert recorded(tmp_path / "m.json", "0-w") == RecordedLayout((2, 2), ((0, -1),))


def test_nested_maps_stay_nested_in_json_with_a_note(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s" / "a.ckpt", 0, {"w": layout([2, 2], [[1, 0], []])})
    (note,) = merge(tmp_path / "s", tmp_path / "m.json")
    assert "MindSpore cannot read" in note
    assert "'0-w'" in note
    before, after = read_strategy(str(tmp_path / "s")), read_strategy(str(tmp_path / "m.json"))
    assert before.stages[0].layouts == after.stages[0].layouts


def test_a_map_that_may_be_expanded_is_not_written_to_protobuf(tmp_path: Path) -> None:
    layouts = {"w": layout([2, 2, 2], [2, 0, -1], shape=[2, 32, 32])}
    write_strategy(tmp_path / "s" / "a.json", 0, layouts)
    with pytest.raises(StrategyError, match="'w': tensor map") as caught:
        merge(tmp_path / "s", tmp_path / "m.ckpt")
    assert "a.json" in str(caught.value)
    assert not (tmp_path / "m.ckpt").exists()
    merge(tmp_path / "s", tmp_path / "m.json")
    assert recorded(tmp_path / "m.json", "0-w").tensor_shape == (2, 32, 32)


def test_each_file_format_is_merged_from_its_own_copies(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s" / "a.json", 0, {"w": layout([2, 2, 2], [2, 0, -1], shape=[2, 32, 32])})
    write_strategy(tmp_path / "s" / "b.ckpt", 0, {"w": layout([2, 2, 2], [[2, 0], [-1]])})
    merge(tmp_path / "s", tmp_path / "m.ckpt")
    merge(tmp_path / "s", tmp_path / "m.json")
    assert recorded(tmp_path / "m.ckpt", "0-w").tensor_maps == ((2, 0), (-1,))
    assert recorded(tmp_path / "m.json", "0-w").tensor_maps == ((2, 0, -1),)


def test_a_table_split_by_hand_keeps_its_slices(tmp_path: Path) -> None:
    layouts = layout([2], [0, -1], sizes=[3, 5], offsets=[0, 3], shape=[6, 4])
    write_strategy(tmp_path / "s" / "a.json", 0, {"w": layouts})
    for ending in ("ckpt", "json"):
        merge(tmp_path / "s", tmp_path / f"m.{ending}")
        assert read_strategy(str(tmp_path / f"m.{ending}")).stages[0].layouts["w"].uneven == (3, 5)


# The file that is written.


def test_merge_pipeline_replaces_its_output_and_never_reads_it(tmp_path: Path) -> None:
    target = write_merged(two_stages(tmp_path) / "merged.ckpt", {0: {"old": layout([8], [0])}})
    for _ in range(2):
        assert merge(tmp_path, target) == []
        assert read_strategy(str(target)).parameters == ("embedding", "a-b", "head")
    assert sorted(os.listdir(tmp_path)) == ["merged.ckpt", "rank_0.ckpt", "rank_4.ckpt"]


@pytest.mark.parametrize("name", ["merged", "merged.pb", "merged.JSON", "merged.safetensors", ""])
def test_other_endings_are_wrong_usage(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"\.ckpt or \.json"):
        merge_pipeline(str(two_stages(tmp_path)), name)


@pytest.mark.parametrize("data", [b'{"total_size": 1}', b"\x0a\x02\x0a\x00", b"PK\x03\x04"])
def test_a_file_that_is_no_strategy_is_not_replaced(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "m.ckpt").write_bytes(data)
    with pytest.raises(TargetError, match="not replaced"):
        merge(two_stages(tmp_path / "s"), tmp_path / "m.ckpt")
    assert (tmp_path / "m.ckpt").read_bytes() == data


def test_a_stage_is_not_replaced_by_the_merged_file(tmp_path: Path) -> None:
    two_stages(tmp_path)
    with pytest.raises(TargetError, match="one stage"):
        merge(tmp_path, tmp_path / "rank_0.ckpt")
    (tmp_path / "directory.ckpt").mkdir()
    with pytest.raises(TargetError, match="a directory"):
        merge(tmp_path, tmp_path / "directory.ckpt")


def test_a_failed_write_keeps_the_existing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = two_stages(tmp_path / "s")
    target = write_merged(tmp_path / "out" / "m.ckpt", {0: {"old": layout([8], [0])}})
    before = target.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RetryableError, match="No space left") as caught:
        merge(directory, target)
    assert caught.value.status == 1
    assert target.read_bytes() == before
    assert os.listdir(tmp_path / "out") == ["m.ckpt"]


def test_only_directories_are_merged(tmp_path: Path) -> None:
    path = write_strategy(tmp_path / "a.ckpt", 0, FIRST)
    for wrong in (path, tmp_path / "nothing"):
        with pytest.raises(StrategyError, match="not a directory"):
            merge(wrong, tmp_path / "m.ckpt")


def test_missing_stages_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    write_strategy(tmp_path / "s" / "a.ckpt", 1, SECOND)
    with pytest.raises(StrategyError, match="stage 0 is missing"):
        merge(tmp_path / "s", tmp_path / "out" / "m.ckpt")
    assert not (tmp_path / "out").exists()
