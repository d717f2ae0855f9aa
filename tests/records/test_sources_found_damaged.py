"""Runs of one conversion that find a source file damaged after others have read a part of it, without its CRC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reshard.checkpoints import FileHandles, read_index
from reshard.convert.target_directory import TargetDirectory
from tests.reference import Strategy
from tests.running import Argument, done, fails, reshard
from tests.small import World
from tests.trees import layout, read_checkpoint, same_ranks, single, value

FULL = {"w": value("w", (64, 32)), "v": value("v", (4,))}
LAYOUT = layout([1], [-1, -1])
TWICE = single({"w": layout([2], [-1, -1]), "v": layout([2], [-1])})
# Rank 0 reads a file whole, rank 1 a part of the same.
STAGES: Strategy = [
    {"devices": 1, "layouts": {"w": LAYOUT, "v": layout([1], [-1])}},
    {"devices": 1, "layouts": {"w": LAYOUT}},
]
PART = ("1", "--check-replicas", "never")


@pytest.fixture
def damaged(tmp_path: Path) -> World:
    """Two copies of everything; the one that is read is damaged where no run takes samples."""
    world = World(tmp_path, TWICE, STAGES)
    world.save(FULL, crc=True)
    flip(world)
    return world


def flip(world: World, rank: int = 0) -> None:
    path = world.src / f"rank_{rank}" / "net-1_10.ckpt"
    with FileHandles() as handles:
        ((offset, _),) = read_index(handles, str(path)).tensors["w"].extents
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_targets_made_from_a_file_that_is_found_damaged_later_do_not_stay(damaged: World) -> None:
    damaged.by_rank(1, "--check-replicas", "never")
    for options in ((), ("--dry-run",), ("--shard", "0/1")):
        fails(3, *damaged.words(*options), texts=["source files of rank 0", "damaged", "--overwrite"])
    fails(3, *damaged.words(0, command="by-rank"), texts=["source files of rank 0", "damaged", "for all ranks"])
    damaged.convert("--overwrite")
    same_ranks(damaged.found(), damaged.expected(FULL))
    assert done(*damaged.words("--json")).json["ranks"] == []


def test_they_do_not_stay_when_the_file_is_repaired_before_the_next_run(damaged: World) -> None:
    damaged.by_rank(1, "--check-replicas", "never")
    fails(3, *damaged.words(), texts=["damaged"])
    flip(damaged)
    fails(3, *damaged.words(), texts=["damaged", "--overwrite"])
    damaged.convert("--overwrite")
    same_ranks(damaged.found(), damaged.expected(FULL))


def test_a_rank_made_from_a_damaged_file_is_replaced_by_its_own_command(damaged: World) -> None:
    damaged.by_rank(1, "--check-replicas", "never")
    fails(3, *damaged.words(0, command="by-rank"), texts=["damaged"])
    damaged.by_rank(1, "--overwrite")
    damaged.by_rank(0)
    same_ranks(damaged.found(), damaged.expected(FULL))


def test_targets_of_runs_that_knew_of_the_damage_stay_after_a_repair(damaged: World) -> None:
    damaged.by_rank(0)
    flip(damaged)
    damaged.by_rank(1)
    assert done(*damaged.words("--json")).json["ranks"] == []
    same_ranks(damaged.found(), damaged.expected(FULL))


def test_a_run_gives_no_target_its_name_after_another_found_its_source_damaged(
    damaged: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = TargetDirectory.missing

    def missing(self: TargetDirectory, groups: Any) -> Any:
        done(*damaged.words(0, command="by-rank"), subprocess_=True)
        return plain(self, groups)

    monkeypatch.setattr(TargetDirectory, "missing", missing)
    result = reshard(*damaged.words(*PART, command="by-rank"))
    assert result.status == 1 and "found the source files of rank 0 damaged" in result.err
    monkeypatch.undo()
    damaged.by_rank(1)
    same_ranks(damaged.found(), damaged.expected(FULL))


def test_a_copy_of_a_rank_that_is_found_damaged_later_does_not_stay(damaged: World) -> None:
    words: list[Argument] = ["recover", damaged.src, damaged.dst, "--strategy", damaged.old]
    done(*words, "--ranks", "0", "--crc", "never", "--check-replicas", "never")
    fails(3, *words, texts=["source files of rank 0", "damaged"])
    done(*words, "--overwrite")
    (copy,) = damaged.dst.glob("rank_0/net*")
    assert read_checkpoint(copy)["w"].same(FULL["w"])


def test_files_damaged_one_after_the_other_are_all_replaced(tmp_path: Path) -> None:
    thrice = single({"w": layout([3], [-1, -1]), "v": layout([3], [-1])})
    world = World(tmp_path, thrice, STAGES)
    world.save(FULL, crc=True)
    flip(world)
    world.by_rank(0)
    flip(world, 1)
    world.by_rank(0, "--overwrite")
    world.by_rank(1)
    same_ranks(world.found(), world.expected(FULL))


def test_runs_of_a_loop_that_read_other_files_whole_go_on_past_a_damaged_one(tmp_path: Path) -> None:
    twice: Strategy = single({"w": layout([2, 2], [0, -1]), "v": layout([4], [-1])})
    world = World(tmp_path, twice, twice)
    world.save(FULL, crc=True)
    flip(world, 2)
    for rank in range(4):
        world.by_rank(rank, "--check-replicas", "never")
    same_ranks(world.found(), world.expected(FULL))
    assert done(*world.words("--json")).json["ranks"] == []
