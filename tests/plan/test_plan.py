"""`reshard plan` equals the conversion."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reshard.asked import Task
from reshard.convert import run
from reshard.convert.transfers import transfers_of
from reshard.execute.destination import space_for
from tests.asking import request_between
from tests.convert.test_costs import ALONE, FULL, KINDS, Costs, convert, costs, no_windows
from tests.layouts import examples, strategies, tensors
from tests.running import Argument, done, warns
from tests.small import World, world_of
from tests.small import tensors as small_tensors
from tests.trees import write_strategy

__all__ = ["costs", "no_windows"]

SMALL = small_tensors()


def planned(world: World, *options: Argument) -> dict[str, Any]:
    return plan_of(world.words(*options, "--json", command="plan"))


def plan_of(words: Sequence[Argument]) -> dict[str, Any]:
    document = json.loads(done(*words).out)
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("options", [(), ("--format", "safetensors"), ("--ranks", "1"), ("--shard", "0/2")])
def test_planned_files_equal_written_files(world: World, options: tuple[Argument, ...]) -> None:
    world.save(SMALL)
    plan = planned(world, *options)
    assert not world.dst.exists()
    world.convert(*options)
    written = {str(path): path.stat().st_size for path in world.dst.glob("rank_*/*")}
    assert {target["file"]: target["bytes"] for target in plan["targets"]} == written
    assert plan["bytes_written"] == sum(written.values())


@pytest.mark.deep
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("jobs", [1, 3])
def test_read_bytes_equal_the_plan(name: str, jobs: int, tmp_path: Path, costs: Costs, no_windows: None) -> None:
    options: list[Argument] = ["--io", "pread", "--jobs", jobs, *ALONE]
    convert(tmp_path, KINDS[name], *options)
    words: list[Argument] = [tmp_path / "src", tmp_path / "other"]
    old, new = write_strategy(tmp_path / "old", KINDS[name].old), write_strategy(tmp_path / "new", KINDS[name].new)
    strategies: list[Argument] = ["--src-strategy", old, "--dst-strategy", new]
    plan = plan_of(["plan", *words, *strategies, "--format", KINDS[name].format, *options, "--json"])
    by_file: Counter[str] = Counter()
    for path, count in costs.reads:
        by_file[path] += count
    assert {source["file"]: source["bytes_read"] for source in plan["sources"]} == by_file
    selected = sum(source["bytes"] for target in plan["targets"] for source in target["sources"])
    assert selected == sum(array.array.nbytes for array in FULL.values()) * KINDS[name].copies
    assert plan["over_read"] == pytest.approx(costs.bytes_read / selected - 1, abs=1e-4)


@examples(40)
@given(st.data())
def test_any_plan_writes_every_target_byte_once(data: st.DataObject) -> None:
    """Counted tensor by tensor, from the plan of every target file, in full."""
    full = data.draw(tensors())
    source, target = data.draw(strategies(full), label="source"), data.draw(strategies(full), label="target")
    with world_of(source, target) as world:
        world.save(full)
        request = request_between(world)._replace(task=Task(dry_run=True))
        result = run(request)
        expected: Counter[tuple[int, int]] = Counter()
        sizes = {}
        plan, work = result.plan, [*result.sizes]
        for group in plan.groups(work):
            for file in group:
                sizes[file.rank] = file.layout.size
                for tensor in file.tensors:
                    for piece in tensor.pieces:
                        count = tensor.item_size
                        for start, stop in piece.box:
                            count *= stop - start
                        expected[piece.source.rank, file.rank] += count
        moved = transfers_of(plan, work, result.budget)
        assert +moved.taken == +expected
        assert plan.file_bytes(work) == sizes == result.sizes
        assert sum(plan.data_bytes(work).values()) == sum(expected.values())


def test_finished_targets_are_not_planned_again(world: World) -> None:
    world.save(SMALL)
    world.convert("--ranks", "0")
    plan = planned(world)
    assert plan["done_before"] == [0] and [target["rank"] for target in plan["targets"]] == [1]
    assert "1 rank (0)" in done(*world.words(command="plan")).out


def test_a_plan_without_remaining_work_is_reported(world: World) -> None:
    world.save(SMALL)
    world.convert()
    assert "nothing" in done(*world.words(command="plan")).out
    assert planned(world)["targets"] == []


def test_plan_uses_replicas_for_lost_ranks(plain: World) -> None:
    plain.save(SMALL, ranks=[1, 2])
    plan = planned(plain)
    assert plan["absent_ranks"] == [0, 3]
    assert {source["rank"] for source in plan["sources"]} == {1, 2}
    assert "replicas replace source ranks 0,3" in done(*plain.words(command="plan")).out


def test_a_dry_run_prints_the_plan(world: World) -> None:
    world.save(SMALL)
    plan_words = world.words(command="plan")
    # The memory that a process has by now is never quite the same, nor is the space that is free.
    varying = r"about [\d.]+ MiB|[\d.]+ \w+ free"
    message = [re.sub(varying, "", done(*words).out) for words in (world.words("--dry-run"), plan_words)]
    assert message[0] == message[1]
    assert planned(world).keys() == json.loads(done(*world.words("--dry-run", "--json")).out).keys()


def with_free_space(monkeypatch: pytest.MonkeyPatch, free: int, blocks: int = 100) -> None:
    """Every file system reports this many free bytes."""
    space = os.statvfs_result([1, 1, blocks, free, free, 0, 0, 0, 0, 255])
    monkeypatch.setattr(os, "statvfs", lambda path: space)


@pytest.mark.parametrize("command", ["plan", "--dry-run"])
def test_a_plan_prints_required_space_and_warns_of_a_full_disk(
    world: World, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    world.save(SMALL)
    words = world.words(command="plan") if command == "plan" else world.words("--dry-run")
    needed = planned(world)["bytes_written"]
    with_free_space(monkeypatch, needed)
    enough = done(*words)
    assert f"{needed} B needed, {needed} B free" in enough.out and "free" not in enough.err
    with_free_space(monkeypatch, needed - 1)
    assert f"{needed} B needed, {needed - 1} B free" in done(*words).out
    short = done(*words, "--quiet")
    assert bool(short.out) == (command == "plan")
    warns(short, "warning: ", f"{needed:,} bytes are needed, but its file system has {needed - 1:,} free")
    report = done(*words, "--json").json
    assert report["space"] == [{"directory": str(world.root), "bytes_needed": needed, "bytes_free": needed - 1}]
    assert any("would be refused" in warning for warning in report["warnings"])
    world.refuses(1, f"{needed:,} bytes are needed")


def test_an_unknown_free_space_gives_no_warning(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(SMALL)
    with_free_space(monkeypatch, 0, blocks=0)
    assert "free space unknown" in done(*world.words(command="plan")).out
    report = planned(world)
    assert report["space"][0]["bytes_free"] is None and report["warnings"] == []
    world.convert()
    assert planned(world)["space"] == []


def test_space_is_counted_per_file_system(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("only one file system here")
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "rank_1").symlink_to(memory)
    directories = [str(tmp_path / "dst" / f"rank_{rank}") for rank in range(3)]
    actual = [(space.place, space.needed) for space in space_for(zip(directories, (1, 10, 100)))]
    assert actual == [(str(tmp_path / "dst"), 101), (directories[1], 10)]


def test_space_is_counted_on_the_file_system_of_a_resolved_path(tmp_path: Path) -> None:
    (tmp_path / "disk" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "inner")
    [space] = space_for([(f"{tmp_path}/link/../out/rank_0", 10)])
    assert (space.place, space.needed) == (str(tmp_path / "disk"), 10)
