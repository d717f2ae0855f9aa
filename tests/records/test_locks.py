"""Locks held by other processes: waiting is announced and limited."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reshard.storage import local
from tests.running import fails, warns
from tests.small import World, tensors
from tests.trees import same_ranks

FULL = tensors()


@contextlib.contextmanager
def held(path: Path, kind: int, seconds: float = 0) -> Iterator[None]:
    """A reader locks the file while this block runs, or for some seconds of it."""
    fd = os.open(path, os.O_RDONLY)
    fcntl.flock(fd, kind)
    timer = threading.Timer(seconds, fcntl.flock, (fd, fcntl.LOCK_UN)) if seconds else None
    if timer is not None:
        timer.start()
    try:
        yield
    finally:
        if timer is not None:
            timer.join()
        os.close(fd)


@pytest.fixture
def started(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A world with one converted rank and a short lock timeout."""
    world.save(FULL)
    world.by_rank(0)
    monkeypatch.setattr(local, "MESSAGE_AFTER", 0.05)
    monkeypatch.setattr(local, "GIVEN_UP_AFTER", 0.4)
    return world


def lock_of(world: World) -> Path:
    return world.dst / ".reshard" / "lock"


@pytest.mark.deep
@pytest.mark.parametrize("kind", [fcntl.LOCK_EX, fcntl.LOCK_SH])
def test_a_lock_that_is_never_released_is_an_error_that_names_it(started: World, kind: int) -> None:
    path = lock_of(started)
    with held(path, kind):
        result = fails(1, *started.words(), texts=[path, "has held this lock", "fuser"])
        warns(result, f"waiting for {path}")
    started.convert()
    same_ranks(started.found(), started.expected(FULL))


@pytest.mark.deep
@pytest.mark.parametrize("kind", [fcntl.LOCK_SH, fcntl.LOCK_EX])
def test_a_lock_is_acquired_after_its_release(started: World, kind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = lock_of(started)
    monkeypatch.setattr(local, "GIVEN_UP_AFTER", 30)
    # Long enough for a busy machine to come to the lock.
    with held(path, kind, seconds=1):
        warns(started.convert(), f"waiting for {path}")
    same_ranks(started.found(), started.expected(FULL))


def test_a_lock_of_another_user_is_named(started: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path, plain = lock_of(started), os.open

    def forbidden(name: Any, flags: int, *more: Any) -> int:
        if str(name).endswith("/lock") and flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return plain(name, flags, *more)

    monkeypatch.setattr(os, "open", forbidden)
    words = started.words(1, command="by-rank")
    fails(3, *words, texts=[f"{path}: may not be written", f"ls -ld {path.parent} {path}"])


def test_a_new_file_locked_by_a_backup_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = fcntl.flock
    others: list[int] = []

    def lock_with_a_reader(fd: int, kind: int) -> None:
        if len(others) < 2:
            others.append(os.open(f"/proc/self/fd/{fd}", os.O_RDONLY))
            lock(others[-1], fcntl.LOCK_SH)
        lock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", lock_with_a_reader)
    fd, path = local.create_temporary(str(tmp_path))
    assert len(others) == 2 and os.listdir(tmp_path) == [os.path.basename(path)]
    for number in (fd, *others):
        os.close(number)
    local.remove_temporary(path)
