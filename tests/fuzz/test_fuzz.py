"""Damaged files give an index or an error for users, in bounded time and memory.

The short test is the same every time. The long one looks for inputs that reach new lines of the
readers and goes on from those; what fails is kept under `fixtures/hostile` and tried ever after.
RESHARD_FUZZ_SECONDS sets how long it takes per reader.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import pytest

from reshard.errors import ReshardError
from tests.bounds import within
from tests.conftest import LONG
from tests.corpus import FIXTURES
from tests.fuzz.mutate import mutated
from tests.fuzz.readers import READERS, Reader

KEPT = FIXTURES / "hostile"
SECONDS = float(os.environ.get("RESHARD_FUZZ_SECONDS", "40"))
MEGABYTES = 300
ROOMS = tuple(f"{os.sep}reshard{os.sep}{room}{os.sep}" for room in ("checkpoints", "forms", "strategies", "layout"))


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """Refuse more memory: Python's unpickler asks for as many references as a damaged number claims."""
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (MEGABYTES << 19), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def attempt(reader: Reader, data: bytes, directory: Path) -> bool:
    """Read one input; True where it was accepted. Anything but an error for the user fails the test."""
    path = directory / reader.name
    path.write_bytes(data)
    started = time.process_time()
    try:
        with within(), limited_memory():
            reader.read(path)
    except ReshardError as error:
        assert str(error)
        assert error.status in (1, 3)
        return False
    finally:
        assert time.process_time() - started < 2
    return True


def kept() -> list[Any]:
    return [
        pytest.param(name, path, id=f"{name}-{path.name}")
        for name in READERS
        for path in sorted((KEPT / name).glob("*"))
    ]


@pytest.mark.parametrize(("name", "path"), kept())
def test_inputs_of_earlier_defects_stay_harmless(name: str, path: Path, tmp_path: Path) -> None:
    attempt(READERS[name], path.read_bytes(), tmp_path)


@pytest.mark.parametrize("name", READERS)
def test_seeds_are_valid(name: str, tmp_path: Path) -> None:
    assert all(attempt(READERS[name], seed, tmp_path) for seed in READERS[name].seeds)


@pytest.mark.parametrize("name", READERS)
def test_damage_is_an_error_or_harmless(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    random = Random(name)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    inputs = reader.inputs if LONG else reader.inputs * 3 // 8
    accepted = 0
    for _ in range(inputs):
        data = mutated(random.choice(reader.seeds), reader.seeds, random)
        try:
            accepted += attempt(reader, data, tmp_path)
        except BaseException:
            print(f"input: {data!r}")
            raise
    # Damage that is never, or always, noticed would be a sign of a useless test.
    assert 0 < accepted < inputs
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MEGABYTES << 10


@pytest.mark.long
@pytest.mark.parametrize("name", READERS)
def test_inputs_that_reach_new_lines_are_errors_or_harmless(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    random = Random()
    corpus = list(reader.seeds)
    visited: set[tuple[str, int, int]] = set()
    end = time.monotonic() + SECONDS
    tried = 0
    while time.monotonic() < end:
        # Late finds are the deepest.
        seed = random.choice(corpus[-40:] if random.random() < 0.5 else corpus)
        data = mutated(seed, corpus, random) if tried else seed
        tried += 1
        try:
            reached = covered(lambda data=data: attempt(reader, data, tmp_path))  # type: ignore[misc]
        except BaseException:
            keep(name, data)
            raise
        if not reached <= visited:
            visited |= reached
            corpus.append(data)
    print(f"{name}: {tried} inputs, {len(corpus)} kept in memory, {len(visited)} steps from line to line")


def covered(run: Callable[[], object]) -> set[tuple[str, int, int]]:
    """The line transitions of a call in the rooms that read files."""
    actual: set[tuple[str, int, int]] = set()

    def enter(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        file = frame.f_code.co_filename
        if not any(room in file for room in ROOMS):
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
            nonlocal last
            if event == "line":
                actual.add((file, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        run()
    finally:
        sys.settrace(before)
    return actual


def keep(name: str, data: bytes) -> None:
    """Save an input that failed, to be tried by `test_inputs_of_earlier_defects_stay_harmless`."""
    (KEPT / name).mkdir(parents=True, exist_ok=True)
    (KEPT / name / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
