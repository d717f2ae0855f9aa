"""Special files in place of regular ones."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def fifo(path: Path) -> Iterator[None]:
    os.mkfifo(path)
    yield


@contextlib.contextmanager
def listening(path: Path) -> Iterator[None]:
    # The path of a socket may have some hundred bytes only.
    place = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{place}/{path.name}")
            yield
    finally:
        os.close(place)


@contextlib.contextmanager
def linked(target: str, path: Path) -> Iterator[None]:
    path.symlink_to(target)
    yield


@contextlib.contextmanager
def directory(path: Path) -> Iterator[None]:
    path.mkdir()
    yield


SPECIAL: dict[str, Callable[[Path], contextlib.AbstractContextManager[None]]] = {
    "fifo": fifo,
    "socket": listening,
    "endless device": lambda path: linked("/dev/zero", path),
    "loop of links": lambda path: linked(path.name, path),
    "directory": directory,
    "missing": lambda path: linked("nowhere", path),
}
