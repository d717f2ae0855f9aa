"""The cache of object listings, until the first write."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard.errors import RetryableError
from reshard.storage import exists, is_directory, is_regular_file, names_in, status_at, store_of
from tests.object_store import Objects

pytestmark = pytest.mark.deep

KEYS = ["run/rank_0/net.ckpt", "run/rank_1/net.ckpt", "run/rank_1/more/x", "run/notes", "run/step.10/a", "run/empty/"]
PATHS = [
    "run", "run/", "run/rank_0", "run/rank_1", "run/rank_0/net.ckpt", "run/rank_0/nothing", "run/notes", "run/notes/x",
    "run/step.10", "run/step.10/a", "run/empty", "run/empty/x", "nothing", "nothing/x", "",
]  # fmt: skip
QUESTIONS: list[Callable[[str], Any]] = [exists, is_directory, is_regular_file, names_in, status_at]


@pytest.fixture
def run(objects: Objects) -> Objects:
    for key in KEYS:
        objects.put(key, key.encode())
    return objects


def test_a_listing_is_requested_once(run: Objects) -> None:
    run.faults.asked.clear()
    for _ in range(3):
        assert exists(run.path("run")) and is_directory(run.path("run"))
        assert names_in(run.path("run")) == ["empty", "notes", "rank_0", "rank_1", "step.10"]
        # The listing shows it.
        assert is_directory(run.path("run/rank_0")) and is_regular_file(run.path("run/notes"))
        assert not exists(run.path("run/nothing"))
    counts = Counter(run.faults.asked)
    assert set(counts.values()) == {1} and len(counts) == 3


def under_a_lock(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of(path).lock(path, print):
        pass


def after_a_while(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("reshard.storage.s3.listings._SECONDS", -1)


def after_a_failed_open(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        store_of(path).open(os.path.join(os.path.dirname(path), "notes"))


@pytest.mark.parametrize("anew", [under_a_lock, after_a_while, after_a_failed_open])
def test_a_listing_is_requested_again(
    anew: Callable[[str, pytest.MonkeyPatch], None], run: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run.path("run/new")
    assert "notes" in names_in(run.path("run")) and not exists(path)
    run.put("run/new", b"1")
    run.client.delete_object(Bucket=run.bucket, Key="run/notes")
    # The state of one moment, for requested paths.
    assert not exists(path) and is_regular_file(run.path("run/notes"))
    assert store_of(path).open(path).read(0, 1) == b"1"
    anew(path, monkeypatch)
    assert exists(path) and "new" in names_in(run.path("run")) and not exists(run.path("run/notes"))


def test_a_write_ends_the_cache(run: Objects) -> None:
    path = run.path("run/new")
    assert not exists(path) and "new" not in names_in(run.path("run"))
    store_of(path).write_whole(path, b"1")
    assert is_regular_file(path) and "new" in names_in(run.path("run"))
    store_of(path).remove(path)
    assert not exists(path)
    run.put("run/new", b"1")
    assert exists(path)


def test_failed_requests_are_not_cached(run: Objects) -> None:
    run.faults.choose = lambda *_: "unavailable"
    for ask in (is_directory, names_in):
        with pytest.raises(RetryableError):
            ask(run.path("run"))
    run.faults.choose = lambda *_: None
    assert is_directory(run.path("run")) and "notes" in names_in(run.path("run"))


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture],
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)  # fmt: skip
@given(st.lists(st.tuples(st.sampled_from(QUESTIONS), st.sampled_from(PATHS)), max_size=12))
def test_cached_listings_equal_the_stores(run: Objects, asked: list[tuple[Callable[[str], Any], str]]) -> None:
    expected = [answers(run)[ask, path] for ask, path in asked]
    forget(run)
    assert [ask(run.path(path)) for ask, path in asked] == expected


def forget(run: Objects) -> None:
    under_a_lock(run.path("run"), pytest.MonkeyPatch())


_ANSWERS: dict[str, dict[tuple[Callable[[str], Any], str], Any]] = {}


def answers(run: Objects) -> dict[tuple[Callable[[str], Any], str], Any]:
    """The store's answers without a cache."""
    if run.bucket not in _ANSWERS:
        _ANSWERS[run.bucket] = {}
        for ask, path in itertools.product(QUESTIONS, PATHS):
            forget(run)
            _ANSWERS[run.bucket][ask, path] = ask(run.path(path))
    return _ANSWERS[run.bucket]
