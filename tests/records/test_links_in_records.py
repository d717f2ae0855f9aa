"""Links and foreign files in DST/.reshard: no link is followed, nothing foreign is removed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.running import Argument, done, fails, reshard
from tests.small import World, tensors

FULL, OTHER = tensors(), tensors("other ")
KEPT = {"0.1.2.none.none": b"somebody's", "plan.json": b"{}", "lock": b"", "notes.txt": b"mine"}


def started(world: World, ranks: str) -> Path:
    """A conversion that was started; the directory of its records."""
    world.save(FULL)
    world.convert("--ranks", ranks)
    (own,) = (path for path in (world.dst / ".reshard").iterdir() if path.is_dir())
    return own


def elsewhere(world: World) -> Path:
    place = world.root / "elsewhere"
    place.mkdir()
    for name, content in KEPT.items():
        (place / name).write_bytes(content)
    return place


def content(place: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in place.iterdir()}


@pytest.mark.parametrize("part", ["", "done", "sources", "root"])
@pytest.mark.parametrize("options", [("--ranks", "1"), ("--overwrite",), ("--overwrite", "--format", "safetensors")])
def test_a_link_in_place_of_the_records_directory_is_refused_by_name(
    part: str, options: tuple[str, ...], world: World
) -> None:
    own = started(world, "0")
    place = elsewhere(world)
    linked = world.dst / ".reshard" if part == "root" else own / part
    shutil.rmtree(linked)
    linked.symlink_to(place)
    fails(3, *world.words(*options), texts=[linked, "another kind of file"])
    assert content(place) == KEPT
    assert sorted(world.found()) == [0]


@pytest.mark.parametrize("name", ["lock", "plan.json", "../lock"])
def test_a_link_in_place_of_a_record_is_refused(name: str, world: World) -> None:
    own = started(world, "0")
    place = elsewhere(world)
    path = own / name
    path.unlink(missing_ok=True)
    path.symlink_to(place / "notes.txt")
    assert reshard(*world.words("--ranks", "1")).status == 3
    assert content(place) == KEPT


def test_the_target_of_a_link_in_place_of_the_recorded_command_is_unchanged(world: World) -> None:
    own = started(world, "0")
    (path,) = own.glob("command.*")
    preserved = elsewhere(world) / "notes.txt"
    os.utime(preserved, ns=(0, 0))
    path.unlink()
    path.symlink_to(preserved)
    world.convert("--ranks", "0")
    fails(3, "resume", world.dst, texts=[path])
    world.convert("--ranks", "1")
    assert preserved.stat().st_mtime_ns == 0 and content(preserved.parent) == KEPT


@pytest.mark.parametrize("command", ["status", "resume", "verify"])
def test_commands_that_read_records_do_not_follow_links(command: str, world: World) -> None:
    own = started(world, "0")
    place = elsewhere(world)
    shutil.rmtree(own)
    own.symlink_to(place)
    fails(3, command, world.dst, texts=[own])
    assert content(place) == KEPT


def test_foreign_files_beside_records_are_unchanged(world: World) -> None:
    """Also where the records are removed, because another conversion replaces everything."""
    own = started(world, "0-1")
    foreign = [own / "notes.txt", own / "done" / "notes.txt", own / "sources" / "a.b.c.d", world.dst / ".reshard" / "x"]
    for path in foreign:
        path.write_text("mine")
    words: list[Argument] = world.words("--overwrite", "--format", "safetensors")
    done(*words)
    assert all(path.read_text() == "mine" for path in foreign)
    assert {path.suffix for path in world.dst.glob("rank_*/*")} == {".safetensors"}
