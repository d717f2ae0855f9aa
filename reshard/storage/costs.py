"""Kinds of storage, and the requests that suit them.

On a local file system a request costs microseconds. On a network file system it costs a round trip.
So requests there are larger, read more bytes that are not needed, and many are in flight at a time.
Their size and number follow from the measured round trips. The constants were measured with
`benchmarks/slow_storage.py` and `benchmarks/object_store.py`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reshard.defaults import usable_cpus
from reshard.threads import ThreadLock

# Where a page fault is a memory access or a disk read and never a round trip.
_LOCAL_FILE_SYSTEMS = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "zfs", "f2fs", "overlay", "bcachefs", "jfs", "reiserfs"]
)


class Storage(NamedTuple):
    """Storage, by the cost of requests to it.

    Attributes:
        remote: whether a request takes a round trip.
        in_flight: requests worth having in flight, per CPU.
        worth_skipping: a request costs about as much as reading this many unneeded bytes.
        window: bytes read at once where small requests are close together.
        small: requests up to this size are answered from such windows.
        held: bytes held during a request, in addition to the buffer that it fills.
        round_trip: measured seconds until the first byte of a request; None if not measured.
        mappable: whether files can be mapped into memory.
        large: bytes of buffer per request, required before more than a few per CPU are in flight.
    """

    remote: bool
    in_flight: int
    worth_skipping: int
    window: int
    small: int
    held: int = 0
    round_trip: Optional[float] = None
    mappable: bool = True
    large: int = 0


LOCAL = Storage(remote=False, in_flight=1, worth_skipping=16 << 10, window=64 << 10, small=16 << 10)
REMOTE = Storage(remote=True, in_flight=4, worth_skipping=256 << 10, window=256 << 10, small=64 << 10, large=2 << 20)
"""A network file system: minimum values, used when no round trip was measured."""
OBJECTS = Storage(remote=True, in_flight=4, worth_skipping=64 << 10, window=256 << 10, small=64 << 10, mappable=False)
"""An object store: likewise, but an unmeasured round trip counts as long."""


def busy_cpus(jobs: int, *storages: Storage) -> int:
    """How many of ``jobs`` CPUs to keep busy: between local files at most those there are; more would only take turns.

    Requests to other storage wait for it, and more of them can be in flight.
    """
    return jobs if any(storage.remote for storage in storages) else min(jobs, usable_cpus())


# Assumed round trip to an object store before one is measured.
_USUAL_ROUND_TRIP = 0.05
# Bytes per second of one of many requests in flight; so many bytes arrive during the round trip of another.
_SHARE = 16 << 20
# While one request is in flight, a CPU processes the bytes of some others, each in this time.
_SECONDS_PER_REQUEST = 1.5e-3
_REMEMBERED = 64
# Shorter requests were answered by a cache of this machine.
_MIN_WAIT = 5e-4
# At least this share of requests must be slow: on a busy machine, some local ones are slow, too.
_ONE_OF = 4


def storage_with(round_trip: float, buffered: int = 0, least: Storage = OBJECTS) -> Storage:
    """Storage with a round trip of seconds until the first byte; see `Storage.held` for ``buffered``."""
    passed = int(_SHARE * round_trip)
    return least._replace(
        in_flight=_within(least.in_flight, round(round_trip / _SECONDS_PER_REQUEST), 32),
        worth_skipping=_within(least.worth_skipping, passed, 4 << 20),
        window=_within(least.window, passed, 1 << 20),
        small=_within(least.small, passed // 4, 256 << 10),
        held=buffered,
        round_trip=round_trip,
    )


def _within(least: int, suitable: int, most: int) -> int:
    return max(least, min(suitable, most))


def round_trip_of(seconds: Sequence[float]) -> Optional[float]:
    """The round trip that the durations of requests show; None if they show none.

    It is the median of the slow requests. Fast ones were answered by a cache of this machine and are left out.
    """
    # Imported on demand: it slows the start of a command.
    from statistics import median_low

    slow = [duration for duration in seconds if duration >= _MIN_WAIT]
    return median_low(slow) if slow and _ONE_OF * len(slow) >= len(seconds) else None


class Measured:
    """The latest times of requests until their first byte; for any number of threads.

    Args:
        least: minimum values for this kind of storage.
        usual: seconds assumed for a round trip before one is measured.
    """

    def __init__(self, least: Storage = OBJECTS, usual: float = _USUAL_ROUND_TRIP) -> None:
        self._least = least
        self._usual = usual
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = ThreadLock()

    def request(self, seconds: float) -> None:
        with self._lock:
            self._seconds.append(seconds)

    def storage(self, buffered: int = 0) -> Storage:
        with self._lock:
            round_trip = round_trip_of(self._seconds)
        if round_trip is None:
            return storage_with(self._usual, buffered, self._least)._replace(round_trip=None)
        return storage_with(round_trip, buffered, self._least)


def storage_on(path: str) -> Storage:
    """The storage of a local path; an unknown file system counts as remote."""
    return LOCAL if file_system_of(path) in _LOCAL_FILE_SYSTEMS else REMOTE


def file_system_of(path: str) -> str:
    """The type of a path's file system, as the kernel names it; empty if unknown."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    mount_point, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(mount_point):
            mount_point, kind = point, after.split(" ")[0]
    return kind
