"""Selection of tests.

Tests marked `deep`, and rooms in `_DEEP_ROOMS`, run with RESHARD_DEEP=1, as `make test-deep` sets it: storms, stores in
depth, pages, memory. Those marked `long` run with RESHARD_LONG=1 only, as `make test-all` sets it, which includes the
deep ones. In a module marked `long`, a test marked `short` is not long.

With RESHARD_QUICK=SECONDS, as `make quick` sets it, those marked `quick` run first, then the tests that were fastest
last time; tests that would begin later are skipped.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.object_store import object_proxy, object_server, objects
from tests.small import plain, saved, world

__all__ = ["object_proxy", "object_server", "objects", "plain", "saved", "world"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Of tests in the background of a script, whose commands would ignore it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = os.environ.get("RESHARD_LONG") == "1"
QUICK = float(os.environ.get("RESHARD_QUICK", "0"))
"""Seconds that a quick run may take; 0 in others."""
DEEP = LONG or QUICK > 0 or os.environ.get("RESHARD_DEEP") == "1"
_DEEP_ROOMS = {"cluster", "fuzz", "mutants", "view"}

_MEMORY = Path("/dev/shm")
_MIN_MEMORY = 4 << 30
if not LONG and "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MIN_MEMORY:
    # Thousands of small files are flushed to disk otherwise. The long suite runs on a real disk.
    os.environ["TMPDIR"] = str(_MEMORY)
    tempfile.tempdir = None

_DURATIONS = "reshard/durations"
_UNKNOWN = 0.2
_STARTED = time.monotonic()

hypothesis.settings.register_profile(
    "tests",
    max_examples=100 if LONG else 34 if DEEP and not QUICK else 10,
    deadline=None,
    database=None,
    derandomize=not LONG,
    print_blob=True,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.data_too_large,
        hypothesis.HealthCheck.filter_too_much,
    ],
)
hypothesis.settings.load_profile("tests")


class Durations:
    """Keeps how long each test took, in pytest's cache."""

    def __init__(self, config: pytest.Config) -> None:
        # Absent with `-p no:cacheprovider`.
        self._cache = getattr(config, "cache", None)
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.skipped:
            self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        if self._cache is not None and self._seconds:
            rounded = {name: round(seconds, 2) for name, seconds in self._seconds.items()}
            self._cache.set(_DURATIONS, {**self._cache.get(_DURATIONS, {}), **rounded})


def pytest_configure(config: pytest.Config) -> None:
    # Processes of pytest-xdist report to the one that has no `workerinput`.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config))


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory whose name cannot satisfy a check of a message: pytest's own contains the name of the test."""
    return tmp_path_factory.mktemp("case")


@pytest.fixture(autouse=bool(QUICK))
def _within_time() -> Iterator[None]:
    if time.monotonic() - _STARTED > QUICK:
        pytest.skip("a quick run has no time left for it: see make test")
    yield


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    cache = getattr(config, "cache", None)
    if QUICK and cache is not None:
        seconds = cache.get(_DURATIONS, {})
        items.sort(key=lambda item: (not item.get_closest_marker("quick"), seconds.get(item.nodeid, _UNKNOWN)))
    is_selected = [_is_selected(item) for item in items]
    config.hook.pytest_deselected(items=[item for item, selected in zip(items, is_selected) if not selected])
    items[:] = [item for item, selected in zip(items, is_selected) if selected]


def _is_selected(item: pytest.Item) -> bool:
    if LONG:
        return True
    if item.get_closest_marker("long") and not item.get_closest_marker("short"):
        return False
    return DEEP or not (item.get_closest_marker("deep") or item.path.parent.name in _DEEP_ROOMS)


def pytest_report_header() -> list[str]:
    tests = "all" if LONG else "without the long ones" if DEEP else "without the deep and the long ones"
    return [
        f"tests: {tests}; make test-deep and make test-all run more",
        "conformance: make conformance (RESHARD_CONFORMANCE=1) compares with MindSpore and other libraries",
    ]
