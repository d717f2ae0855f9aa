"""A target never replaces its source under another name: links, hard links, bind mounts."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import reshard
from reshard.errors import TargetError, UsageError
from tests.running import LAUNCHER, done, fails
from tests.sampling import some_of
from tests.small import World, tensors
from tests.trees import read_tree, same_ranks, tree_bytes

FULL = tensors()
OPTIONS: tuple[tuple[str, ...], ...] = ((), ("--overwrite",), ("--dry-run",))
MOUNTS = (
    ("src", "dst"),
    ("src", "dst/inner"),
    ("src/rank_0", "dst/rank_0"),
    ("src/rank_1", "dst/rank_0"),
    ("src/rank_0", "dst"),
)
CAN_MOUNT = (
    shutil.which("unshare") is not None
    and not subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode
)


@pytest.mark.deep
@pytest.mark.skipif(not CAN_MOUNT, reason="mounts need a mount namespace of one's own")
@pytest.mark.parametrize(("options", "mount"), some_of(itertools.product(OPTIONS, MOUNTS), 4))
def test_a_bind_mount_of_the_source_is_refused_as_target(
    options: tuple[str, ...], mount: tuple[str, str], world: World
) -> None:
    world.save(FULL, "rank_{rank}/checkpoint_{rank}.ckpt")
    before = tree_bytes(world.src)
    dst = world.dst
    lines = ["set -e"]
    source, target = mount
    (world.root / target).mkdir(parents=True)
    lines.append(f"mount --bind '{world.root / source}' '{world.root / target}'")
    if target == "dst/inner":
        dst = world.root / target / "new"
    world.dst = dst
    words = " ".join(f"'{word}'" for word in world.words(*options))
    lines.append(f"exec '{sys.executable}' -c '{LAUNCHER}' {words}")
    result = subprocess.run(
        ["unshare", "--mount", "sh", "-c", "\n".join(lines)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2, result.stderr
    assert tree_bytes(world.src) == before


def hard_linked(source: Path, target: Path) -> None:
    os.link(source, target)


def linked(source: Path, target: Path) -> None:
    target.symlink_to(source)


@pytest.mark.parametrize("link", [hard_linked, linked])
def test_a_target_that_is_a_source_file_by_another_name_is_not_replaced(
    link: Callable[[Path, Path], None], world: World
) -> None:
    world.save(FULL)
    (world.dst / "rank_1").mkdir(parents=True)
    link(world.src / "rank_1" / "net-1_10.ckpt", world.dst / "rank_1" / "checkpoint_1.ckpt")
    before = tree_bytes(world.src)
    fails(2, *world.words("--overwrite"), texts=["rank_1"])
    assert tree_bytes(world.src) == before


@pytest.mark.parametrize("link", [None, hard_linked, linked])
def test_by_rank_does_not_overwrite_its_inputs(link: Callable[[Path, Path], None], world: World) -> None:
    world.save(FULL)
    files = {rank: str(world.src / f"rank_{rank}" / "net-1_10.ckpt") for rank in range(4)}
    target = Path(files[2])
    if link is not None:
        target = world.root / "made.ckpt"
        link(Path(files[2]), target)
    before = tree_bytes(world.src)
    with pytest.raises(UsageError):
        reshard.transform_checkpoint_by_rank(0, files, str(target), str(world.old), str(world.new))
    assert tree_bytes(world.src) == before
    for strategy in (world.old, world.new):
        content = strategy.read_bytes()
        with pytest.raises(UsageError):
            reshard.transform_checkpoint_by_rank(0, files, str(strategy), str(world.old), str(world.new))
        assert strategy.read_bytes() == content
    directory = world.root / "stages"
    directory.mkdir()
    shutil.copy(world.old, directory / "stage.ckpt")
    with pytest.raises(UsageError, match="lies in it"):
        reshard.transform_checkpoint_by_rank(0, files, str(directory / "stage.ckpt"), str(directory), str(world.new))
    beside = world.src / "rank_2" / "made.ckpt"
    reshard.transform_checkpoint_by_rank(0, files, str(beside), str(world.old), str(world.new))
    assert beside.exists()


def test_by_rank_does_not_replace_a_special_file(world: World) -> None:
    """A rename would replace a device such as /dev/null."""
    world.save(FULL)
    files = {rank: str(world.src / f"rank_{rank}" / "net-1_10.ckpt") for rank in range(4)}
    target = world.root / "made.ckpt"
    os.mkfifo(target)
    with pytest.raises(TargetError):
        reshard.transform_checkpoint_by_rank(0, files, str(target), str(world.old), str(world.new))
    assert target.is_fifo()


def test_dst_may_be_a_link_and_so_may_a_directory_above_it(world: World) -> None:
    world.save(FULL)
    (world.root / "disk").mkdir()
    world.dst.symlink_to("disk")
    world.convert()
    world.convert("--overwrite")
    done(*world.words()[:2], world.dst / "below" / "it", *world.words()[3:])
    same_ranks(world.found(), world.expected(FULL))
    same_ranks(read_tree(world.root / "disk" / "below" / "it"), world.expected(FULL))
    assert world.dst.is_symlink()
