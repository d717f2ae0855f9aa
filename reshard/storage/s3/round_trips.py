"""The cost of requests to an object store, from the round trips of the latest ones.

The constants were measured with `benchmarks/object_store.py`.
"""

from __future__ import annotations

from collections import deque

from reshard.storage.store import OBJECTS, Costs
from reshard.threads import ThreadLock

# Assumed before a round trip is measured.
_USUAL_ROUND_TRIP = 0.05
# Bytes per second of one of many requests in flight: the bytes of one round trip cost as much as another request.
_SHARE = 16 << 20
# While one request is in flight, a CPU processes the bytes of some others, each in this time.
_SECONDS_PER_REQUEST = 1.5e-3
_REMEMBERED = 64


def costs_with(round_trip: float, buffered: int = 0) -> Costs:
    """The costs with a round trip of seconds until the first byte; see `Costs.held` for ``buffered``."""
    passed = int(_SHARE * round_trip)
    return OBJECTS._replace(
        in_flight=_within(OBJECTS.in_flight, round(round_trip / _SECONDS_PER_REQUEST), 32),
        worth_skipping=_within(OBJECTS.worth_skipping, passed, 4 << 20),
        window=_within(OBJECTS.window, passed, 1 << 20),
        small=_within(OBJECTS.small, passed // 4, 256 << 10),
        held=buffered,
        round_trip=round_trip,
    )


def _within(least: int, suitable: int, most: int) -> int:
    return max(least, min(suitable, most))


class RoundTrips:
    """The latest times of requests until their first byte; for any number of threads."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = ThreadLock()

    def add(self, seconds: float) -> None:
        with self._lock:
            self._seconds.append(seconds)

    def costs(self, buffered: int = 0) -> Costs:
        """The costs with their median."""
        with self._lock:
            ordered = sorted(self._seconds)
        if not ordered:
            return costs_with(_USUAL_ROUND_TRIP, buffered)._replace(round_trip=None)
        return costs_with(ordered[(len(ordered) - 1) // 2], buffered)
