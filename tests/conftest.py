"""Which tests run: those marked `long` only with RESHARD_LONG=1, as `make test-all` sets it.

In modules that are marked so, a test marked `short` runs always.
"""

from __future__ import annotations

import os
import signal

import hypothesis
import pytest

from tests.object_store import object_proxy, object_server, objects
from tests.small import plain, world

__all__ = ["object_proxy", "object_server", "objects", "plain", "world"]

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Of tests in the background of a script, whose commands would ignore it as well.
    signal.signal(signal.SIGINT, signal.default_int_handler)

LONG = os.environ.get("RESHARD_LONG") == "1"

hypothesis.settings.register_profile(
    "tests",
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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if LONG:
        return
    skip = pytest.mark.skip(reason="long: runs with make test-all (RESHARD_LONG=1)")
    for item in items:
        if item.get_closest_marker("long") and not item.get_closest_marker("short"):
            item.add_marker(skip)
