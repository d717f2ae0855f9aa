"""A source that is written to while it is read never gets into a target that is recorded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Callable

import pytest

from reshard.execute import writing
from tests.conftest import LONG
from tests.running import LAUNCHER, fails
from tests.small import World, tensors
from tests.trees import Value, layout, read_tree, single, value

NEW, OTHER = tensors("new "), tensors("other ")
# Each target rank takes what the source rank of its number holds.
TWO = single({"w": layout([2], [0, -1])})
BIG = {label: {"w": value(label, (2048, 1024))} for label in ("one", "two")}


def in_place(path: Path, content: bytes) -> None:
    with open(path, "r+b") as file:
        file.write(content)


def by_rename(path: Path, content: bytes) -> None:
    beside = path.with_name("beside")
    beside.write_bytes(content)
    os.rename(beside, path)


def with_the_same_time(path: Path, content: bytes) -> None:
    status = path.stat()
    in_place(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def renamed_with_the_same_time(path: Path, content: bytes) -> None:
    status = path.stat()
    by_rename(path, content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def removed(path: Path, content: bytes) -> None:
    path.unlink()


WAYS = [in_place, by_rename, with_the_same_time, renamed_with_the_same_time, removed]


@pytest.fixture
def at_first_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What is put in here is called once, when the first bytes of a target are on their way to disk."""
    todo: list[Callable[[], None]] = []
    original = writing.TargetWriter.write

    def write(self: writing.TargetWriter, offset: int, data: memoryview) -> None:
        while todo:
            todo.pop()()
        original(self, offset, data)

    monkeypatch.setattr(writing.TargetWriter, "write", write)
    yield todo


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("crc", [False, True])
@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_a_source_that_changes_while_it_is_read_is_an_error_and_nothing_of_it_is_kept(
    way: Callable[[Path, bytes], None], crc: bool, io: str, world: World, at_first_write: list[Callable[[], None]]
) -> None:
    world.save(OTHER, crc=crc)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(NEW, crc=crc)
    at_first_write.append(lambda: way(path, other))
    fails(1, *world.words("--jobs", "1", "--io", io), says=[path])
    assert not (world.dst / "reshard-manifest.json").exists()
    assert not list(world.dst.glob("rank_*/*"))


def test_targets_that_need_no_changed_source_are_finished(
    tmp_path: Path, at_first_write: list[Callable[[], None]]
) -> None:
    world = World(tmp_path, TWO, TWO)
    world.save(NEW)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    at_first_write.append(lambda: in_place(path, b"\xff"))
    fails(1, *world.words("--jobs", "1"), says=["rank_1", "replaced or changed"])
    assert list(world.found()) == [0]


def test_sources_that_change_after_their_targets_are_written_end_in_no_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another checkpoint is copied over the source: rank 0's target is of the one, rank 1's would be of the other."""
    world = World(tmp_path, TWO, TWO)
    world.save(NEW)
    original = writing.TargetWriter.commit

    def commit(self: writing.TargetWriter) -> None:
        original(self)
        in_place(world.src / f"rank_{self.target.rank}" / "net-1_10.ckpt", b"\xff")

    monkeypatch.setattr(writing.TargetWriter, "commit", commit)
    fails(1, *world.words("--jobs", "1"), says=["rank_0", "replaced or changed"])
    assert not (world.dst / "reshard-manifest.json").exists()


def test_a_changed_source_is_noticed_with_fewer_handles_than_files(
    world: World, at_first_write: list[Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reshard.checkpoints.files._default_limit", lambda: 1)
    world.save(OTHER)
    path = world.src / "rank_1" / "net-1_10.ckpt"
    other = path.read_bytes()
    world.save(NEW)
    at_first_write.append(lambda: renamed_with_the_same_time(path, other))
    fails(1, *world.words("--jobs", "1"), says=[path])
    assert not list(world.dst.glob("rank_*/*"))


@pytest.mark.long
def test_a_source_that_is_rewritten_at_random_moments_is_never_mixed(tmp_path: Path) -> None:
    """Real processes: one converts, one writes another checkpoint of equal size over the source."""
    world = World(tmp_path, TWO, TWO)
    mixed = ended = 0
    trees: dict[str, dict[int, dict[str, Value]]] = {}
    for label in ("one", "two"):
        world.src = tmp_path / label
        world.save(BIG[label])
        trees[label] = world.expected(BIG[label])
    for number in range(40 if LONG else 4):
        shutil.rmtree(world.dst, ignore_errors=True)
        world.src = tmp_path / "src"
        shutil.copytree(tmp_path / "one", world.src, dirs_exist_ok=True)
        words = [str(word) for word in world.words("--quiet", "--overwrite")]
        with subprocess.Popen([sys.executable, "-c", LAUNCHER, *words], stderr=subprocess.PIPE) as process:
            time.sleep(0.1 + number * 0.01)
            for path in (tmp_path / "two").rglob("*.ckpt"):
                in_place(world.src / path.relative_to(tmp_path / "two"), path.read_bytes())
            process.communicate()
        if (world.dst / "reshard-manifest.json").exists():
            ended += 1
            found = read_tree(world.dst)
            whole = [all(found[r][n].same(v) for r in tree for n, v in tree[r].items()) for tree in trees.values()]
            mixed += not any(whole)
    assert not mixed and ended
