"""Each system call fails once: the run succeeds, or its error names a file and the next run succeeds."""

from __future__ import annotations

import errno
import itertools
import os
import re
import shutil
import sys
import threading
from typing import Any

import pytest

from tests.conftest import LONG
from tests.faults import CALLS, ERRORS, failing
from tests.running import Argument, done, fails, reshard
from tests.sampling import some_of
from tests.small import World, tensors
from tests.strategy_writing import group_info
from tests.trees import read_checkpoint, same_checkpoints, same_ranks

FULL = tensors()

# What the next call may not meet any more: never told as something that is not there, or is damaged.
PASSING = (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENOSPC, errno.ENOLCK)


def survivors_are_whole(world: World) -> None:
    expected = world.expected(FULL)
    for path in world.dst.glob("rank_*/checkpoint_*"):
        rank = int(path.parent.name.split("_")[1])
        same_checkpoints(read_checkpoint(path), expected[rank], f"rank {rank}")


@pytest.mark.deep
@pytest.mark.parametrize(
    "options", some_of([(("--io", "pread", "--jobs", "2"),), (("--io", "mmap", "--jobs", "1"),)], 2)
)
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in CALLS for number in ERRORS[kind]])
def test_a_failing_system_call_leaves_a_resumable_target(
    kind: str, number: int, options: tuple[str, ...], world: World
) -> None:
    world.save(FULL)
    with failing(kind, world.root, None, number) as faults:
        world.convert(*options)
    step = 1 if LONG else max(1, faults.calls // 4)
    for at in range(1, faults.calls + 1, step):
        shutil.rmtree(world.dst, ignore_errors=True)
        with failing(kind, world.root, at, number):
            result = reshard(*world.words(*options, "--checksum", "crc32"))
        message = result.err.replace("\n", "")
        where = f"{kind} {at} of {faults.calls}: {errno.errorcode[number]}: {result.status}: {result.err}"
        assert result.status in ((0, 1) if number in PASSING else (0, 1, 3)), where
        assert "Traceback" not in message and "internal error" not in message, where
        if result.status:
            assert str(world.root) in message, where
        survivors_are_whole(world)
        if result.status == 0:
            same_ranks(world.found(), world.expected(FULL))
        world.convert()
        same_ranks(world.found(), world.expected(FULL))
        assert not list(world.dst.rglob(".reshard-tmp-*")), where


@pytest.mark.deep
def test_temporarily_missing_records_are_not_removed(world: World) -> None:
    """File servers report this for files that were just created."""
    world.save(FULL)
    with failing("open", world.root, None, errno.ENOENT) as faults:
        world.convert()
    for at in range(faults.calls - 20, faults.calls + 1):
        shutil.rmtree(world.dst)
        with failing("open", world.root, at, errno.ENOENT):
            world.run()
        world.convert()
        same_ranks(world.found(), world.expected(FULL))


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_partial_reads_and_writes_are_continued(io: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:3]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:5], offset))
    world.convert("--io", io)
    same_ranks(world.found(), world.expected(FULL))


def test_a_dead_worker_is_an_error(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    write = os.pwrite
    threads: set[int] = set()

    def dying(fd: int, data: memoryview, offset: int) -> int:
        threads.add(threading.get_ident())
        if len(threads) > 1:
            sys.exit(3)
        return write(fd, data, offset)

    monkeypatch.setattr(os, "pwrite", dying)
    result = reshard(*world.words("--jobs", "1"))
    assert len(threads) > 1 and result.status == 3
    assert "ranks written" not in result.err
    monkeypatch.undo()
    world.convert()
    same_ranks(world.found(), world.expected(FULL))


def commands(world: World) -> dict[str, list[Argument]]:
    """Commands that look at things, of a conversion that is complete."""
    strategies: list[Argument] = ["--src-strategy", world.old, "--dst-strategy", world.new]
    return {
        "by-rank": world.words(0, command="by-rank"),
        "plan": ["plan", world.src, world.root / "other", *strategies],
        "inspect": ["inspect", world.src],
        "inspect a file": ["inspect", world.src / "rank_0" / "net-1_10.ckpt"],
        "status": ["status", world.dst],
        "verify": ["verify", world.dst],
        "verify with the source": ["verify", world.dst, "--src", world.src, *strategies],
        "fingerprint": ["fingerprint", world.src, "--strategy", world.old],
        "recover": ["recover", world.src, world.root / "recovered", "--strategy", world.old],
        "strategy show": ["strategy", "show", world.old],
        "directory of strategies": ["strategy", "show", world.old.parent / "stages"],
        "merge-pipeline": ["merge-pipeline", world.old.parent / "stages", world.root / "merged.ckpt"],
        "group-info": ["group-info", "inspect", world.root / "group_info.pb"],
    }


COMMANDS = [
    "by-rank", "plan", "inspect", "inspect a file", "status", "verify", "verify with the source", "fingerprint",
    "recover", "strategy show", "directory of strategies", "merge-pipeline", "group-info",
]  # fmt: skip


@pytest.fixture
def converted(world: World) -> World:
    world.save(FULL)
    world.convert("--checksum", "crc32")
    stages = world.old.parent / "stages"
    stages.mkdir()
    shutil.copy(world.old, stages / "stage_0.ckpt")
    (world.root / "group_info.pb").write_bytes(group_info([0, 1], [("g", [0, 1])]))
    return world


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "command"), some_of(itertools.product(["status", "lists", "open"], COMMANDS), 2))
def test_a_failed_look_is_not_reported_as_a_missing_file(kind: str, command: str, converted: World) -> None:
    words = commands(converted)[command]
    with failing(kind, converted.root, None, errno.EIO) as faults:
        done(*words)
    for at in range(1, faults.calls + 1, 1 if LONG else max(1, faults.calls // 4)):
        for place in ("other", "recovered", "merged.ckpt"):
            shutil.rmtree(converted.root / place, ignore_errors=True)
            (converted.root / place).unlink(missing_ok=True)
        with failing(kind, converted.root, at, errno.EIO):
            result = reshard(*words)
        where = f"{kind} {at} of {faults.calls}: {result.status}: {result.err}"
        assert result.status in (0, 1), where
        assert "internal error" not in result.err, where
        if result.status:
            assert str(converted.root) in result.err.replace("\n", ""), where


@pytest.mark.deep
@pytest.mark.parametrize(("arguments", "command"), some_of(itertools.product([0, 1, 9], COMMANDS), 3))
def test_a_short_read_is_continued(arguments: int, command: str, converted: World) -> None:
    """Nothing of a file is called damaged, or different, because a network file system gave a part of it."""
    words = commands(converted)[command]
    expected = done(*words)
    calls = 0
    read, of_thread = os.pread, threading.local()

    def short(fd: int, count: int, offset: int) -> bytes:
        nonlocal calls
        calls += 1
        of_thread.calls = getattr(of_thread, "calls", 0) + 1
        # Of each thread, every read but the one that follows gives a part.
        return read(fd, min(count, arguments), offset) if of_thread.calls % 2 else read(fd, count, offset)

    for place in ("other", "recovered", "merged.ckpt"):
        shutil.rmtree(converted.root / place, ignore_errors=True)
        (converted.root / place).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", short)
        result = reshard(*words)
    # Free disk space and the memory of this process do not depend on the source.
    figures = r"[0-9.]+ [KMGT]iB free|memory +about [0-9.]+ [KMGT]iB"
    message, required = (re.sub(figures, "", out) for out in (result.out, expected.out))
    assert (result.status, message) == (0, required), result.err
    assert calls or command in ("status", "plan")


@pytest.mark.parametrize("ending", ["ckpt", "safetensors"])
@pytest.mark.parametrize("kind", ["conversion", "inspection"])
def test_an_unreadable_header_is_a_retryable_error(kind: str, ending: str, world: World) -> None:
    world.save(FULL, f"rank_{{rank}}/net-1_10.{ending}")
    words = world.words() if kind == "conversion" else ["inspect", world.src / "rank_0" / f"net-1_10.{ending}"]
    read = os.pread

    def nothing(fd: int, count: int, offset: int) -> bytes:
        return b"" if "net-1_10" in os.readlink(f"/proc/self/fd/{fd}") else read(fd, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", nothing)
        result = reshard(*words)
    assert result.status == 1, result.err
    assert "damaged" not in result.err and str(world.src) in result.err
    done(*words)


def test_a_file_that_shrinks_while_its_header_is_read_is_not_damaged(world: World) -> None:
    world.save(FULL)
    path = world.src / "rank_0" / "net-1_10.ckpt"
    read = os.pread

    def shrinking(fd: int, count: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == path.stat().st_ino:
            os.truncate(path, 1)
        return read(fd, count, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pread", shrinking)
        result = reshard("inspect", path)
    assert result.status == 1 and "became shorter" in result.err, result.err
    fails(3, "inspect", path, texts=["damaged"])


def test_status_works_on_a_read_only_directory(converted: World) -> None:
    open_file = os.open

    def read_only(path: Any, flags: int, *more: Any, **options: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)
        return open_file(path, flags, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", read_only)
        assert done("status", converted.dst, "--json").json["complete"]
        done("verify", converted.dst)
