"""Directories in every store: local, in the toy store, in an object store, and behind a failing network."""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from reshard.storage import STORES
from reshard.storage.s3 import service
from tests.object_store import Objects
from tests.storage.toy import SCHEME, ToyStore


class Place(Protocol):
    """A directory in a store, into which tests put files."""

    path: str

    def put(self, name: str, data: bytes) -> str:
        """Write a file; its path."""

    def remove(self, name: str) -> None:
        """Remove it."""

    def content(self) -> dict[str, bytes]:
        """All files of any purpose, by name."""

    def uploads(self) -> list[str]:
        """Names of unfinished uploads."""


class LocalPlace:
    def __init__(self, place: Path) -> None:
        self.path = str(place)

    def put(self, name: str, data: bytes) -> str:
        path = Path(self.path) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return str(path)

    def remove(self, name: str) -> None:
        os.unlink(os.path.join(self.path, name))

    def content(self) -> dict[str, bytes]:
        place = Path(self.path)
        actual = {}
        for path in place.rglob("*"):
            # A file renamed meanwhile is listed under its new name.
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    actual[str(path.relative_to(place))] = path.read_bytes()
        return actual

    def uploads(self) -> list[str]:
        return []


class ObjectPlace:
    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._key = f"place-{uuid.uuid4().hex[:8]}"
        self.path = objects.path(self._key)

    def put(self, name: str, data: bytes) -> str:
        return self._objects.put(f"{self._key}/{name}", data)

    def remove(self, name: str) -> None:
        self._objects.client.delete_object(Bucket=self._objects.bucket, Key=f"{self._key}/{name}")

    def content(self) -> dict[str, bytes]:
        return self._objects.content(f"{self._key}/")

    def uploads(self) -> list[str]:
        return [key for key, _ in self._objects.uploads()]


class ToyPlace:
    def __init__(self, store: ToyStore) -> None:
        self._store = store
        self.path = f"{SCHEME}place-{uuid.uuid4().hex[:8]}"
        self._prefix = f"{self.path[len(SCHEME) :]}/"

    def put(self, name: str, data: bytes) -> str:
        self._store.write_whole(f"{self.path}/{name}", data)
        return f"{self.path}/{name}"

    def remove(self, name: str) -> None:
        self._store.remove(f"{self.path}/{name}")

    def content(self) -> dict[str, bytes]:
        keys = [key for key in self._store.keys(self._prefix) if not key.endswith("/")]
        return {key[len(self._prefix) :]: self._store.file(key).read_bytes() for key in keys}

    def uploads(self) -> list[str]:
        return []


def failing(number: int, method: str, path: str) -> str | None:
    """Every other request goes wrong, each in its own way; with several threads, see `try_often`."""
    fault = ("unavailable", None, "drop", None, "cut", None, "lost", None)[number % 8]
    # If this answer is lost, the upload ID stays unknown: it is left to a rule of the bucket.
    return "drop" if fault in ("cut", "lost") and path.endswith("?uploads") else fault


def try_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Allow enough retries: where other threads' requests succeed in between, all tries of one request may fail."""
    monkeypatch.setattr(service, "_TRIES", 60)
    service._service.cache_clear()


def content(size: int) -> bytes:
    """Bytes of which every range is another."""
    return b"".join((n * 2654435761 % 2**32).to_bytes(4, "little") for n in range(size // 4 + 1))[:size]


@pytest.fixture
def toy(tmp_path: Path) -> Iterator[ToyStore]:
    """The toy store, registered."""
    store = ToyStore(tmp_path / "toy")
    STORES["toy"] = lambda path: store
    try:
        yield store
    finally:
        del STORES["toy"]


@pytest.fixture(params=["local", "toy", "objects", "failing"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    if request.param == "local":
        yield LocalPlace(tmp_path / "place")
        shutil.rmtree(tmp_path / "place", ignore_errors=True)
        return
    if request.param == "toy":
        yield ToyPlace(request.getfixturevalue("toy"))
        return
    objects: Objects = request.getfixturevalue("objects")
    if request.param == "failing":
        objects.faults.choose = failing
        try_often(request.getfixturevalue("monkeypatch"))
    yield ObjectPlace(objects)
