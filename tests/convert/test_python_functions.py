"""MindSpore's own functions under their own names."""

from __future__ import annotations

from pathlib import Path

import pytest

import reshard
from reshard.errors import ReshardError
from tests import cases
from tests.small import COPIED, World, tensors
from tests.trees import (
    Value,
    cut_ranks,
    read_checkpoint,
    safetensors_metadata,
    same_checkpoints,
    same_ranks,
    write_checkpoint,
    write_tree,
)

FULL = tensors()


def test_transform_checkpoints_converts_a_tree(world: World) -> None:
    world.save(FULL)
    reshard.transform_checkpoints(str(world.src), str(world.dst), "checkpoint_", str(world.old), str(world.new))
    same_ranks(world.found(), world.expected(FULL))


def test_convert_checkpoints_equals_transform_checkpoints(world: World) -> None:
    world.save(FULL)
    strategies = (str(world.old), str(world.new))
    reshard.convert_checkpoints(str(world.src), str(world.dst), "checkpoint_", *strategies)
    same_ranks(world.found(), world.expected(FULL))
    ranks = reshard.rank_list_for_convert(1, *strategies)
    assert ranks == reshard.rank_list_for_transform(1, *strategies)
    (world.root / "one").mkdir()
    target = world.root / "one" / "rank1.ckpt"
    files = {rank: str(next((world.src / f"rank_{rank}").iterdir())) for rank in ranks}
    reshard.convert_checkpoint_by_rank(1, files, str(target), *strategies)
    same_checkpoints(read_checkpoint(target), world.expected(FULL)[1])


def test_prefix_workers_and_format_have_mindspores_meaning(world: World) -> None:
    world.save(FULL, "rank_{rank}/net-1_10.safetensors")
    reshard.transform_checkpoints(
        src_checkpoints_dir=str(world.src), dst_checkpoints_dir=str(world.dst), ckpt_prefix="new",
        src_strategy_file=str(world.old), dst_strategy_file=str(world.new), process_num=2,
        output_format="safetensors",
    )  # fmt: skip
    same_ranks(world.found("new"), world.expected(FULL))
    assert not list(world.dst.rglob("*.ckpt"))


def test_a_missing_strategy_argument_means_one_device(world: World) -> None:
    world.save(FULL)
    reshard.transform_checkpoints(str(world.src), str(world.dst), "full", str(world.old))
    same_ranks(world.found("full"), {0: {**FULL, **COPIED}})


def test_one_rank_is_written_to_exactly_the_given_file(world: World) -> None:
    ranks = cut_ranks(world.source, FULL, COPIED)
    needed = reshard.rank_list_for_transform(1, str(world.old), str(world.new))
    files = {rank: str(write_checkpoint(world.root / f"f{rank}.ckpt", ranks[rank])) for rank in needed}
    target = world.root / "made" / "here.ckpt"
    target.parent.mkdir()
    reshard.transform_checkpoint_by_rank(1, files, str(target), str(world.old), str(world.new))
    same_checkpoints(read_checkpoint(target), world.expected(FULL)[1])
    assert [path.name for path in target.parent.iterdir()] == ["here.ckpt"]


def test_the_format_of_every_file_of_rank_directories_changes_and_names_stay(world: World) -> None:
    """As MindSpore's functions: all steps, directories and names as they are, each file cut as it was."""
    ranks = cut_ranks(world.source, FULL, COPIED)
    for step in ("1_9", "1_10"):
        write_tree(world.src, ranks, f"rank{{rank}}/net-{step}.ckpt")
    reshard.ckpt_to_safetensors(str(world.src), str(world.dst))
    reshard.safetensors_to_ckpt(file_path=str(world.dst), file_name_regex="1_9$|1_9[.]", processes_num=2)
    names = {str(path.relative_to(world.dst)) for path in world.dst.rglob("*") if path.is_file()}
    files = {rank: f"rank{rank}/net-1" for rank in ranks}
    assert names == {
        f"{file}_{step}" for file in files.values() for step in ("9.ckpt", "9.safetensors", "10.safetensors")
    }
    for rank, file in files.items():
        for name in (f"{file}_10.safetensors", f"{file}_9.ckpt"):
            same_checkpoints(read_checkpoint(world.dst / name), ranks[rank])


def test_the_format_of_one_file_changes_and_its_tensors_get_new_names(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "net.safetensors", {**FULL, **COPIED}, metadata={"remove_redundancy": "True"})
    for _ in range(2):
        # A second run replaces the file.
        reshard.safetensors_to_ckpt(str(path), str(tmp_path / "new"), {"w": "net.w", "absent": "x"})
    renamed = {**{"net.w" if name == "w" else name: tensor for name, tensor in FULL.items()}, **COPIED}
    same_checkpoints(read_checkpoint(tmp_path / "new/net.ckpt"), renamed)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["net.ckpt", "net.safetensors"]
    # Whether a save was de-duplicated is unknown after .ckpt, so no mark claims that it was not.
    reshard.ckpt_to_safetensors(str(tmp_path / "new/net.ckpt"), name_map={"net.w": "w"})
    same_checkpoints(read_checkpoint(tmp_path / "new/net.safetensors"), {**FULL, **COPIED})
    assert safetensors_metadata(tmp_path / "new/net.safetensors") == {"format": "ms"}


def test_format_functions_refuse_what_they_would_get_wrong(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "net.ckpt", {**FULL, **COPIED})
    for source, names in (
        (tmp_path, None),
        (tmp_path / "absent", None),
        (path, {"w": "v"}),
        (path, {"global_step": "s"}),
    ):
        with pytest.raises(ReshardError):
            reshard.ckpt_to_safetensors(str(source), str(tmp_path / "out"), names)
    with pytest.raises(ReshardError):
        reshard.safetensors_to_ckpt(str(path), str(tmp_path / "out"))
    assert not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.parametrize("ending", ["ckpt", "json"])
def test_pipeline_strategies_are_merged(tmp_path: Path, ending: str) -> None:
    case = cases.load("10_dp2mp2pp2")
    merged = tmp_path / f"merged.{ending}"
    reshard.merge_pipeline_strategys(str(case.directory), str(merged))
    full: dict[str, Value] = case.full()
    write_checkpoint(tmp_path / "full.ckpt", full)
    reshard.transform_checkpoints(str(tmp_path / "full.ckpt"), str(tmp_path / "dst"), "checkpoint_", None, str(merged))
    from tests.trees import read_tree

    same_ranks(read_tree(tmp_path / "dst"), cut_ranks(case.strategy, full))


def test_restore_lists_equal_those_of_group_info_files() -> None:
    for rank in (0, 5):
        path = cases.case_directory("01_dp2mp4_adam") / "group_info" / f"group_info_rank_{rank}.pb"
        assert list(reshard.restore_group_info_list(str(path))) == [rank % 4, rank % 4 + 4]
