"""Conversions into an object store with failing requests: the same objects, and no others."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.object_store import Objects
from tests.running import Argument, done
from tests.storage.test_killed_store_runs import FORMS, check_nothing_is_left, job

pytestmark = pytest.mark.long


def faulty(seed: int, form: str, objects: Objects, root: Path, *more: Argument) -> None:
    """Convert while one request of five fails somehow, and compare."""
    expected = job(form, root)
    chance = random.Random(seed)
    kinds: list[str | None] = ["drop", "cut", "unavailable", "lost", *[None] * 16]
    objects.faults.choose = lambda *_: chance.choice(kinds)
    done(*expected.into(objects.path("out"), "--verify", "--jobs", chance.choice([1, 2, 4]), *more))
    objects.faults.choose = lambda *_: None
    check_nothing_is_left(objects, expected)


@pytest.mark.deep
@pytest.mark.short
@pytest.mark.parametrize("seed, form", [(1, "parts")])
def test_failing_requests_do_not_change_the_output(seed: int, form: str, objects: Objects, tmp_path: Path) -> None:
    faulty(seed, form, objects, tmp_path)


@pytest.mark.parametrize("seed", range(2, 42))
def test_any_failing_requests_do_not_change_the_output(seed: int, objects: Objects, tmp_path: Path) -> None:
    form = [*FORMS][seed % len(FORMS)]
    faulty(seed, form, objects, tmp_path)


@pytest.mark.parametrize("kind", ["lost", "drop", "cut", "unavailable"])
def test_each_request_is_retried_once(kind: str, objects: Objects, tmp_path: Path) -> None:
    expected = job("parts", tmp_path)
    visited: set[tuple[str, str]] = set()

    def choose(number: int, method: str, path: str) -> str | None:
        if (method, path) in visited:
            return None
        visited.add((method, path))
        return kind

    objects.faults.choose = choose
    done(*expected.into(objects.path("out")))
    objects.faults.choose = lambda *_: None
    check_nothing_is_left(objects, expected)
