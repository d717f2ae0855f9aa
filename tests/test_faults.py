"""Every call to the system in turn fails once: success, or an error that names a file, and a rerun that succeeds."""

from __future__ import annotations

import builtins
import errno
import fcntl
import mmap
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from tests.conftest import LONG
from tests.running import reshard
from tests.small import World, tensors
from tests.trees import read_checkpoint, same_checkpoints, same_ranks

FULL = tensors()

CALLS: dict[str, list[tuple[Any, str]]] = {
    "open": [(os, "open"), (builtins, "open")],
    "read": [(os, "pread"), (os, "preadv"), (mmap, "mmap")],
    "write": [(os, "pwrite"), (os, "fsync"), (os, "ftruncate")],
    "names": [(os, "rename"), (os, "mkdir"), (os, "unlink"), (os, "rmdir"), (os, "link")],
    "status": [(os, "stat"), (os, "lstat"), (os, "fstat"), (os, "statvfs")],
    "lists": [(os, "listdir"), (os, "scandir")],
    "locks": [(fcntl, "flock")],
}
ERRORS = {
    "open": [errno.EIO, errno.EMFILE, errno.EACCES, errno.ENOENT],
    "read": [errno.EIO, errno.ESTALE],
    "write": [errno.EIO, errno.ENOSPC],
    "names": [errno.EIO, errno.ENOSPC, errno.EROFS],
    "status": [errno.EIO, errno.ENOENT],
    "lists": [errno.EIO, errno.EACCES],
    "locks": [errno.ENOLCK, errno.EIO],
}


class Faults:
    """Counts calls on files below a directory and lets one of them fail."""

    def __init__(self, root: Path, fails_at: Optional[int], fault: Callable[[], None]) -> None:
        self.root, self.fails_at, self.fault = str(root), fails_at, fault
        self.calls = 0
        self._lock = threading.Lock()

    def concerns(self, first: object) -> bool:
        """Whether a call's first argument is a file below the directory, or an open one."""
        if isinstance(first, int):
            return first > 2
        return isinstance(first, (str, os.PathLike)) and os.fspath(first).startswith(self.root)

    def wrap(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            # Only what the program does counts, not pytest's or click's own.
            if args and self.concerns(args[0]):
                with self._lock:
                    self.calls += 1
                    now = self.calls == self.fails_at
                if now:
                    self.fault()
            return plain(*args, **options)

        return call


@contextmanager
def failing(kind: str, root: Path, at: Optional[int], number: int) -> Iterator[Faults]:
    """While this runs, the ``at``-th call of a kind fails with an error of this number."""

    def fault() -> None:
        raise OSError(number, os.strerror(number))

    faults = Faults(root, at, fault)
    with pytest.MonkeyPatch.context() as patch:
        for module, name in CALLS[kind]:
            patch.setattr(module, name, faults.wrap(getattr(module, name)))
        yield faults


def survivors_are_whole(world: World) -> None:
    expected = world.expected(FULL)
    for path in world.dst.glob("rank_*/checkpoint_*"):
        rank = int(path.parent.name.split("_")[1])
        same_checkpoints(read_checkpoint(path), expected[rank], f"rank {rank}")


@pytest.mark.parametrize("options", [("--io", "mmap", "--jobs", "1"), ("--io", "pread", "--jobs", "2")])
@pytest.mark.parametrize(("kind", "number"), [(kind, number) for kind in CALLS for number in ERRORS[kind]])
def test_a_call_that_fails_once(kind: str, number: int, options: tuple[str, ...], world: World) -> None:
    world.save(FULL)
    with failing(kind, world.root, None, number) as faults:
        world.convert(*options)
    step = 1 if LONG else max(1, faults.calls // 6)
    for at in range(1, faults.calls + 1, step):
        shutil.rmtree(world.dst, ignore_errors=True)
        with failing(kind, world.root, at, number):
            result = reshard(*world.words(*options, "--checksum", "crc32"))
        said = result.err.replace("\n", "")
        where = f"{kind} {at} of {faults.calls}: {errno.errorcode[number]}: {result.status}: {result.err}"
        assert result.status in (0, 1, 3), where
        assert "Traceback" not in said and "internal error" not in said, where
        if result.status:
            assert str(world.root) in said, where
        survivors_are_whole(world)
        if result.status == 0:
            same_ranks(world.found(), world.expected(FULL))
        world.convert()
        same_ranks(world.found(), world.expected(FULL))
        assert not list(world.dst.rglob(".reshard-tmp-*")), where


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_reads_and_writes_that_do_a_part_are_continued(io: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.save(FULL)
    read, write = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: read(fd, [buffers[0][:3]], offset))
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:5], offset))
    world.convert("--io", io)
    same_ranks(world.found(), world.expected(FULL))


def test_a_worker_that_dies_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert result.status == 0 or len(threads) > 1
    monkeypatch.undo()
    world.convert()
    same_ranks(world.found(), world.expected(FULL))
