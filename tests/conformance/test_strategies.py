"""Strategy files, group files and rank lists have the same meaning here and in MindSpore."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import reshard
from tests import cases, made_cases
from tests.conformance.mindspore_files import mindspore
from tests.corpus import FIXTURES
from tests.reference import ONE_DEVICE, rank_count, uncovered
from tests.running import Argument, done
from tests.trees import write_checkpoint

pytestmark = pytest.mark.filterwarnings("default")

SEVERAL_STAGES = [name for name in cases.EVERYWHERE if (cases.case_directory(name) / "merged").is_dir()]
SEVERAL_JSON = [name for name in SEVERAL_STAGES if (cases.case_directory(name) / "strategy_json").is_dir()]


def content(path: Path) -> tuple[list[Any], list[Any]]:
    """Strategy items and layouts of a protobuf file as MindSpore parses it, in an order of no meaning."""
    parsed = mindspore.train.node_strategy_pb2.ParallelStrategyMap()
    parsed.ParseFromString(path.read_bytes())
    assert parsed.IsInitialized()
    return tuple(
        sorted(item.SerializeToString(deterministic=True) for item in items)
        for items in (parsed.parallel_strategy_item, parsed.parallel_layout_item)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("name", SEVERAL_STAGES)
def test_merge_pipeline_equals_mindspores_merge(name: str, tmp_path: Path) -> None:
    stages = cases.load(name).directory
    mindspore.merge_pipeline_strategys(str(stages), str(tmp_path / "theirs" / "merged.ckpt"))
    done("merge-pipeline", stages, tmp_path / "ours" / "merged.ckpt")
    reshard.merge_pipeline_strategys(str(stages), str(tmp_path / "api" / "merged.ckpt"))
    assert content(tmp_path / "ours" / "merged.ckpt") == content(tmp_path / "theirs" / "merged.ckpt")
    assert content(tmp_path / "api" / "merged.ckpt") == content(tmp_path / "theirs" / "merged.ckpt")


@pytest.mark.parametrize("name", ["01_dp2mp4_adam", "07_layout8_opt"])
def test_merging_a_single_stage_equals_mindspores_merge(name: str, tmp_path: Path) -> None:
    test_merge_pipeline_equals_mindspores_merge(name, tmp_path)


@pytest.mark.parametrize("name", SEVERAL_JSON)
def test_merging_json_gives_the_layouts_of_mindspores_merge(name: str, tmp_path: Path) -> None:
    stages = cases.case_directory(name) / "strategy_json"
    mindspore.merge_pipeline_strategys(str(stages), str(tmp_path / "theirs" / "merged.json"))
    done("merge-pipeline", stages, tmp_path / "ours" / "merged.json")
    theirs = json.loads((tmp_path / "theirs" / "merged.json").read_text())
    ours = json.loads((tmp_path / "ours" / "merged.json").read_text())
    assert ours["parallel_layout_item"] == theirs["parallel_layout_item"]
    assert ours["parallel_strategy_item"].keys() == theirs["parallel_strategy_item"].keys()


GROUP_FILES = [
    pytest.param(path, id=f"{path.parent.parent.name}-{path.stem}")
    for name in cases.EVERYWHERE
    for path in sorted((cases.case_directory(name) / "group_info").glob("*.pb"))
]


@pytest.mark.parametrize("path", GROUP_FILES)
def test_restore_lists_equal_mindspores(path: Path) -> None:
    expected = mindspore.restore_group_info_list(str(path))
    assert reshard.restore_group_info_list(str(path)) == expected
    (shown,) = done("group-info", "inspect", path, "--json").json
    assert shown["restore_ranks"] == list(expected)


RANK_LISTS: dict[str, dict[str, Any]] = json.loads((FIXTURES / "rank_lists.json").read_text())["pairs"]
PAIRS = list(RANK_LISTS)


def strategy_file(name: str, merged_by_us: Path | None = None) -> str | None:
    """The one file that MindSpore reads for a case: None, the stage's own, or the merged one."""
    if name == "None":
        return None
    case = cases.load(name)
    if len(case.strategy) == 1:
        return str(sorted(case.directory.iterdir())[0])
    if merged_by_us is None:
        return str(case.path / "merged" / "merged_strategy.ckpt")
    merged = merged_by_us / f"{name}.ckpt"
    if not merged.exists():
        done("merge-pipeline", case.directory, merged)
    return str(merged)


@pytest.mark.parametrize("pair", PAIRS)
def test_rank_lists_are_sufficient_and_at_most_as_long_as_mindspores(pair: str, tmp_path: Path) -> None:
    """Enough, and no longer than MindSpore's; which of several replicas is each library's own choice."""
    source, target = pair.split(" -> ")
    files = strategy_file(source), strategy_file(target)
    # MindSpore reads our merged files like its own.
    merged_here = strategy_file(source, tmp_path), strategy_file(target, tmp_path)
    devices = 1 if target == "None" else rank_count(cases.load(target).strategy)
    refused = any(isinstance(answer, str) for answer in RANK_LISTS[pair].values())
    for rank in {0, 1, devices // 2, devices - 1} & set(range(devices)):
        ours = reshard.rank_list_for_transform(rank, *files)
        assert sorted(set(ours)) == list(ours)
        assert enough(source, target, rank, ours)
        if refused:
            with pytest.raises(ValueError, match="Cannot transform device_num"):
                mindspore.rank_list_for_transform(rank, *files)
            continue
        # In no order.
        theirs = sorted(mindspore.rank_list_for_transform(rank, *files))
        assert theirs == RANK_LISTS[pair].get(str(rank), theirs)
        assert sorted(mindspore.rank_list_for_transform(rank, *merged_here)) == theirs
        assert len(ours) <= len(theirs)


def enough(source: str, target: str, rank: int, available: list[int]) -> bool:
    """Whether these ranks hold all that the target rank needs, whichever way `accu_grads` are stored."""
    if source == "None":
        return available == [0]
    case = cases.load(source)
    new = ONE_DEVICE if target == "None" else cases.load(target).strategy
    expected = None if target == "None" else rank
    return not any(
        uncovered(case.strategy, new, case.shapes, expected, available, unsharded) for unsharded in ([], case.unsharded)
    )


def test_merge_pipeline_ignores_a_merged_file_beside_its_stages(tmp_path: Path) -> None:
    stages = tmp_path / "strategy"
    shutil.copytree(cases.load("08_pp2dp2mp2").directory, stages)
    done("merge-pipeline", stages, tmp_path / "first.ckpt")
    mindspore.merge_pipeline_strategys(str(stages), str(stages / "merged_ckpt_strategy.ckpt"))
    done("merge-pipeline", stages, tmp_path / "second.ckpt")
    assert (tmp_path / "first.ckpt").read_bytes() == (tmp_path / "second.ckpt").read_bytes()


@pytest.mark.parametrize(
    ("source", "target"), [("10_dp2mp4pp1", "10_dp2mp2pp2"), ("10_dp2mp2pp2", "10o_dp2mp4pp1_optm1")]
)
def test_mindspore_reads_made_strategies_as_compiled_ones(source: str, target: str, tmp_path: Path) -> None:
    before, after = cases.load(source), made_cases.load(target)
    rules = tmp_path / "rules.toml"
    rules.write_text(after.rules)
    shapes = write_checkpoint(tmp_path / "full.safetensors", before.full())
    for out in (f"{tmp_path / 'stages'}/", tmp_path / "made.ckpt"):
        arguments: tuple[Argument, ...] = ("--shapes", shapes, "--sizes", after.sizes_text, *after.options())
        done("strategy", "make", rules, out, *arguments)
    for name, stages in (("compiled", after.strategy), ("merged", tmp_path / "stages"), ("src", before.directory)):
        mindspore.merge_pipeline_strategys(str(stages), str(tmp_path / f"{name}.ckpt"))
    src = str(tmp_path / "src.ckpt")
    for rank in range(8):
        expected = mindspore.rank_list_for_transform(rank, src, str(tmp_path / "compiled.ckpt"))
        for created in ("made", "merged"):
            assert mindspore.rank_list_for_transform(rank, src, str(tmp_path / f"{created}.ckpt")) == expected
