"""The cache of object listings of one command."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from reshard.errors import RetryableError
from reshard.storage import exists, is_directory, is_regular_file, listings_cached, names_in, status_at, store_of
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
    with listings_cached():
        for _ in range(3):
            assert exists(run.path("run")) and is_directory(run.path("run"))
            assert names_in(run.path("run")) == ["empty", "notes", "rank_0", "rank_1", "step.10"]
            # The listing shows it.
            assert is_directory(run.path("run/rank_0")) and is_regular_file(run.path("run/notes"))
            assert not exists(run.path("run/nothing"))
    counts = Counter(run.faults.asked)
    assert set(counts.values()) == {1} and len(counts) == 3


def test_a_listing_is_requested_again_after_the_block(run: Objects) -> None:
    path = run.path("run/new")
    with listings_cached():
        assert names_in(run.path("run")) and not exists(path)
        run.put("run/new", b"1")
        # The state of one moment, for requested paths.
        assert not exists(path)
        assert store_of(path).open(path).read(0, 1) == b"1"
        with listings_cached():
            assert not exists(path)
        assert not exists(path)
    assert exists(path) and "new" in names_in(run.path("run"))


def test_a_write_invalidates_listings(run: Objects) -> None:
    path = run.path("run/new")
    with listings_cached():
        assert not exists(path) and "new" not in names_in(run.path("run"))
        store_of(path).write_whole(path, b"1")
        assert is_regular_file(path) and "new" in names_in(run.path("run"))
        store_of(path).remove(path)
        assert not exists(path)


def test_other_threads_have_their_own_listings(run: Objects) -> None:
    with listings_cached(), ThreadPoolExecutor(1) as pool:
        assert not exists(run.path("run/new"))
        run.put("run/new", b"1")
        assert pool.submit(exists, run.path("run/new")).result()


def test_failed_requests_are_not_cached(run: Objects) -> None:
    with listings_cached():
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
    with listings_cached():
        actual = [ask(run.path(path)) for ask, path in asked]
    assert actual == [answers(run)[ask, path] for ask, path in asked]


_ANSWERS: dict[str, dict[tuple[Callable[[str], Any], str], Any]] = {}


def answers(run: Objects) -> dict[tuple[Callable[[str], Any], str], Any]:
    """The store's answers without a cache."""
    if run.bucket not in _ANSWERS:
        _ANSWERS[run.bucket] = {(ask, path): ask(run.path(path)) for ask, path in itertools.product(QUESTIONS, PATHS)}
    return _ANSWERS[run.bucket]
