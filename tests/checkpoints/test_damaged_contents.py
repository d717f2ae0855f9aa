"""Source files with a wrong CRC count as absent, like truncated ones."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from reshard import transform_checkpoint_by_rank
from reshard.checkpoints import CheckpointIndex, FileHandles, read_index
from reshard.checkpoints.formats import crc
from tests.reference import Strategy
from tests.running import Argument, Result, done, fails, reshard, warns
from tests.small import PLAIN, PLAIN_TARGET, World, tensors, without
from tests.trees import layout, read_checkpoint, same_checkpoints, same_ranks, single, tree_bytes, version

OLD, NEW = tensors("old", ["w", "v"]), tensors("new", ["w", "v"])
W = tensors("new", ["w"])
WHOLE = single({"w": layout([1], [-1, -1]), "v": layout([1], [-1])})
TWICE = single({"w": layout([2], [-1, -1]), "v": layout([2], [-1])})
# Rank 0 needs everything, rank 1 one parameter.
STAGES: Strategy = [
    {"devices": 1, "layouts": {"w": layout([1], [-1, -1]), "v": layout([1], [-1])}},
    {"devices": 1, "layouts": {"w": layout([1], [-1, -1])}},
]


@pytest.fixture
def joined(tmp_path: Path) -> World:
    """Four ranks to one, which reads one of ranks 0 and 2 whole, and one of ranks 1 and 3."""
    return World(tmp_path, without(PLAIN, "v"), without(WHOLE, "v"))


@pytest.fixture
def fallen(tmp_path: Path) -> World:
    """The newest step is damaged on all ranks that hold one half; the step before is sound."""
    world = World(tmp_path, PLAIN, single({"w": layout([2], [0, -1]), "v": layout([2], [-1])}))
    world.save(OLD, "rank_{rank}/net-1_9.ckpt", crc=True)
    world.save(NEW, "rank_{rank}/net-1_10.ckpt", crc=True)
    for path in saved(world, 1, 3):
        damage(path)
    return world


def saved(world: World, *ranks: int) -> list[Path]:
    """Files of the newest step."""
    return [world.src / f"rank_{rank}" / "net-1_10.ckpt" for rank in ranks]


def damage(path: Path) -> None:
    """Change a bit of ``w`` and nothing else, not even the time; another time mends it."""
    with FileHandles() as handles:
        ((offset, _),) = read_index(handles, str(path)).tensors["w"].extents
    data, status = bytearray(path.read_bytes()), path.stat()
    data[offset] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def sources_of(world: World, rank: int) -> set[int]:
    """Source ranks that a target rank reads when all are converted."""
    targets = done(*world.words("--json", command="plan")).json["targets"]
    return {source["rank"] for target in targets if target["rank"] == rank for source in target["sources"]}


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each file was checked against its CRC."""
    times: Counter[Path] = Counter()
    plain = crc.check_crc

    def counting(handles: FileHandles, index: CheckpointIndex, *arguments: Any) -> Any:
        times[Path(index.path)] += 1
        return plain(handles, index, *arguments)

    monkeypatch.setattr(crc, "check_crc", counting)
    return times


@pytest.mark.parametrize("command", ["transform-dir", "by-rank", "--ranks", "--shard"])
def test_a_replica_replaces_a_damaged_file_and_each_file_is_checked_once(
    joined: World, checked: Counter[Path], command: str
) -> None:
    joined.save(W, crc=True)
    rank = min(sources_of(joined, 0))
    (path,) = saved(joined, rank)
    damage(path)
    words: dict[str, list[Argument]] = {
        "transform-dir": joined.words(),
        "by-rank": joined.words(0, command="by-rank"),
        "--ranks": joined.words("--ranks", "0"),
        "--shard": joined.words("--shard", "0/1"),
    }
    warns(done(*words[command]), f"warning: {path}: is damaged: its CRC is", f"rank {rank} counts as absent at step")
    same_ranks(joined.found(), joined.expected(W))
    # All damaged files of a step count as lost together, so one damaged file has all of them checked.
    assert len(checked) == 4 and set(checked.values()) == {1}


def test_without_an_intact_replica_the_error_names_the_damaged_files(joined: World) -> None:
    joined.save(W, crc=True)
    for path in saved(joined, 1, 3):
        damage(path)
    for step in ("latest", "1_10"):
        texts: list[Argument] = [*saved(joined, 1, 3), "its CRC is", "restore one of ranks 1,3", "--crc never"]
        joined.refuses(3, *texts, options=("--step", step))
    assert not joined.dst.exists()
    joined.convert("--crc", "never", "--check-replicas", "never")


def test_when_all_files_are_damaged_the_error_names_the_needed_ones(joined: World) -> None:
    joined.save(W, crc=True)
    paths = saved(joined, 0, 1, 2, 3)
    for path in paths:
        damage(path)
    result = joined.refuses(3, "its CRC is", "is not complete")
    assert sum(str(path) in result.err for path in paths) >= 2
    for path in paths[:2]:
        path.write_bytes(path.read_bytes()[:-3])
    joined.refuses(3, *paths, "no rank of pipeline stage 0 (ranks 0-3) has a readable file")


def test_without_an_intact_replica_a_truncated_file_is_named_once(joined: World) -> None:
    joined.save(W)
    paths = saved(joined, 1, 3)
    for path in paths:
        path.write_bytes(path.read_bytes()[:-3])
    result = joined.refuses(3, *paths, "restore one of ranks 1,3")
    assert [result.err.count(str(path)) for path in paths] == [1, 1]


def test_a_single_target_file_is_made_from_intact_files(joined: World) -> None:
    joined.save(W, crc=True)
    first = min(sources_of(joined, 0))
    damage(*saved(joined, first))
    files = {rank: str(path) for rank, path in enumerate(saved(joined, 0, 1, 2, 3))}
    target = joined.root / "whole.ckpt"
    transform_checkpoint_by_rank(0, files, str(target), str(joined.old), str(joined.new))
    same_checkpoints(read_checkpoint(target), joined.expected(W)[0])


def test_latest_falls_back_to_an_older_step_with_warnings(fallen: World) -> None:
    result = fallen.convert("--json")
    assert result.json["step"] == "1_9"
    warns(result, *saved(fallen, 1, 3), "counts as absent at step 1_10", "step 1_10 is not complete")
    same_ranks(fallen.found(), fallen.expected(OLD))


@pytest.mark.parametrize("part", ["by-rank", "--ranks"])
def test_some_ranks_do_not_fall_back_to_an_older_step(part: str, fallen: World) -> None:
    """Rank 0 is made of files that are sound: it would be of another step."""
    words: dict[str, list[Argument]] = {
        "by-rank": fallen.words(1, command="by-rank"),
        "--ranks": fallen.words("--ranks", "1"),
    }
    result = fails(3, *words[part], texts=["step 1_10 is damaged", "rank 1", "give every rank --step 1_9"])
    assert not fallen.dst.exists()
    assert "may use step 1_10" in result.err
    for rank in (0, 1):
        fallen.by_rank(rank, "--step", "1_9")
    same_ranks(fallen.found(), fallen.expected(OLD))


def test_the_same_command_resumes_with_the_older_step(fallen: World, checked: Counter[Path]) -> None:
    fallen.convert()
    whole = tree_bytes(fallen.dst)
    assert "nothing to write" in fallen.convert().err
    shutil.rmtree(fallen.dst / "rank_1")
    checked.clear()
    plan = done(*fallen.words("--json", command="plan")).json
    assert (plan["step"], plan["ranks"], plan["done_before"]) == ("1_9", [1], [0])
    # Only files recorded as damaged are checked again.
    assert checked == Counter(saved(fallen, 1, 3))
    assert fallen.by_rank(1, "--json").json["step"] == "1_9"
    assert {name: data for name, data in tree_bytes(fallen.dst).items() if name in whole} == whole


def test_a_run_with_overwrite_resumes_with_the_older_step(fallen: World, monkeypatch: pytest.MonkeyPatch) -> None:
    fallen.convert()
    before = version(fallen.dst / "rank_0" / "checkpoint_0.ckpt")
    fallen.convert("--overwrite")
    assert version(fallen.dst / "rank_0" / "checkpoint_0.ckpt") != before
    same_ranks(fallen.found(), fallen.expected(OLD))


def test_a_repaired_newer_step_is_another_conversion(fallen: World) -> None:
    fallen.convert()
    for path in saved(fallen, 1, 3):
        damage(path)
    fails(3, *fallen.words(), texts=["holds another conversion", "the step (1_9 there, 1_10 here)"])
    assert fallen.convert("--overwrite", "--json").json["step"] == "1_10"
    same_ranks(fallen.found(), fallen.expected(NEW))


@pytest.fixture
def staged(tmp_path: Path) -> World:
    """Two replicas of everything, of which target rank 0 reads one whole, and rank 1 a part of the same."""
    world = World(tmp_path, TWICE, STAGES)
    world.save(NEW, crc=True)
    return world


def test_partial_reads_skip_files_that_an_earlier_run_recorded_as_damaged(
    staged: World, checked: Counter[Path]
) -> None:
    (first,) = sources_of(staged, 0)
    assert sources_of(staged, 1) == {first}
    (path,) = saved(staged, first)
    damage(path)
    warns(staged.by_rank(0), path, "counts as absent")
    result = staged.by_rank(1)
    warns(result, f"{path}: is damaged: its CRC is", f"rank {first} counts as absent")
    staged.convert()
    same_ranks(staged.found(), staged.expected(NEW))
    # An intact file is no longer recorded as damaged.
    shutil.rmtree(staged.dst / "rank_1")
    damage(path)
    assert "damaged" not in staged.by_rank(1).err


def test_a_partial_read_is_not_checked_and_is_reported(staged: World) -> None:
    (first,) = sources_of(staged, 1)
    damage(*saved(staged, first))
    result = staged.by_rank(1, "--check-replicas", "never")
    warns(result, "was not checked, because only a part of the file is read", *saved(staged, first))


def test_a_partially_read_file_that_differs_from_its_replica_is_checked(staged: World) -> None:
    (first,) = sources_of(staged, 1)
    (path,) = saved(staged, first)
    damage(path)
    plan = done(*staged.words("--json", "--ranks", "1", command="plan"))
    assert first in plan.json["absent_ranks"]
    warns(staged.by_rank(1), f"warning: {path}: is damaged: its CRC is", f"rank {first} counts as absent")
    assert staged.found()[1].keys() == {"w", "global_step"}
    same_checkpoints(staged.found()[1], staged.expected(NEW)[1])
    # Where contents are as they were saved, it is the strategy or the run.
    staged.save({**NEW, "w": OLD["w"]}, ranks=[first], crc=True)
    fails(3, *staged.words("--overwrite"), texts=["does not fit this checkpoint, or replicas have diverged"])


def test_records_of_damage_are_removed_without_a_target(joined: World, monkeypatch: pytest.MonkeyPatch) -> None:
    joined.save(W, crc=True)
    damage(*saved(joined, min(sources_of(joined, 0))))
    monkeypatch.setattr(os, "fsync", _refused)
    assert reshard(*joined.words()).status == 1
    assert not joined.dst.exists()


def _refused(*_: object, **__: object) -> None:
    raise OSError("not today")


def test_recover_checks_every_file_once(tmp_path: Path, checked: Counter[Path]) -> None:
    world = World(tmp_path, PLAIN, PLAIN_TARGET)
    world.save(NEW, crc=True)
    damage(*saved(world, 2))
    words: list[Argument] = ["recover", world.src, world.dst, "--strategy", world.old, "--lost-only"]
    result = done(*words, "--json")
    assert result.json["recovered"] == [2] and result.json["ranks"] == [2]
    warns(result, *saved(world, 2), "rank 2 counts as absent at step 1_10")
    assert checked == Counter(saved(world, 0, 1, 2, 3))
    done(*words, "--checksum", "crc32", "--overwrite")


@pytest.fixture
def repaired(joined: World) -> World:
    """A conversion for which replicas stood in: of every slice the copy of the lowest rank is damaged."""
    joined.save(W, crc=True)
    for path in saved(joined, 0, 1):
        damage(path)
    joined.convert("--verify", "--checksum", "crc32")
    return joined


def compared(world: World, *options: Argument) -> Result:
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", world.new]
    return reshard("verify", world.dst, "--src", world.src, *strategies, *options)


def test_verify_compares_with_intact_files(repaired: World, checked: Counter[Path]) -> None:
    result = compared(repaired)
    assert result.status == 0
    for rank, path in enumerate(saved(repaired, 0, 1)):
        warns(result, f"warning: {path}: is damaged: its CRC is", f"rank {rank} counts as absent at step 1_10")
    assert checked == Counter(saved(repaired, 0, 1, 2, 3))
    assert compared(repaired, "--crc", "never").status == 4


def test_verify_finds_targets_made_from_damaged_files(joined: World) -> None:
    joined.save(W, crc=True)
    damage(*saved(joined, min(sources_of(joined, 0))))
    joined.convert("--crc", "never", "--check-replicas", "never", "--verify")
    assert compared(joined).status == 4
    assert compared(joined, "--crc", "never").status == 0
    for path in saved(joined, 0, 1, 2, 3):
        damage(path)
    assert compared(joined).status == 3


def test_fingerprint_reads_intact_files(repaired: World, checked: Counter[Path]) -> None:
    words: list[Argument] = ["fingerprint", repaired.src, "--strategy", repaired.old]
    output = done("fingerprint", repaired.dst, "--strategy", repaired.new).out
    result = done(*words)
    warns(result, *saved(repaired, 0, 1), "rank 0 counts as absent")
    assert result.out == output != done(*words, "--crc", "never").out
    assert checked == Counter(saved(repaired, 0, 1, 2, 3))


def test_verify_replicas_names_files_with_damaged_contents(repaired: World) -> None:
    words: list[Argument] = ["verify", repaired.src, "--replicas", "--strategy", repaired.old]
    differences = fails(4, *words, "--json").json["differences"]
    assert [(difference["kind"], difference["ranks"]) for difference in differences] == [("file", [0]), ("file", [1])]
    assert all("its CRC is" in difference["detail"] for difference in differences)
    differences = fails(4, *words, "--json", "--crc", "never").json["differences"]
    assert [(difference["kind"], difference["parameter"]) for difference in differences] == [("replicas", "w")] * 2
