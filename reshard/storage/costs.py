"""What kind of storage files lie on, and which requests suit it.

On a local file system a request costs microseconds. On a network file system it costs a round trip,
so there requests are larger, read more of what is not needed, and many are under way at a time: as large
and as many as suits the round trip that those took which were made so far. The numbers come from
`benchmarks/slow_storage.py` and `benchmarks/object_store.py`.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Optional

# Where a page fault is a memory access or a disk read and never a round trip.
_LOCAL_FILE_SYSTEMS = frozenset(
    ["ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "ramfs", "zfs", "f2fs", "overlay", "bcachefs", "jfs", "reiserfs"]
)


class Storage(NamedTuple):
    """Storage, by what requests to it cost.

    Attributes:
        remote: whether a request takes a round trip.
        in_flight: requests worth having under way, per CPU.
        worth_skipping: a request costs about as much as reading this many bytes that are not needed.
        window: bytes read at once where small requests lie close together.
        small: requests up to this size are answered from such windows.
        held: bytes that are held while a request is answered, beside the buffer that it fills.
        round_trip: seconds that a request takes before its first byte comes, as measured; None where it was not.
        mappable: whether what lies there can be mapped into memory.
        large: bytes that each request should have room for before more than a few per CPU are under way.
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
"""A network file system: what suits it at the least, and where no round trip could be measured."""
OBJECTS = Storage(remote=True, in_flight=4, worth_skipping=64 << 10, window=256 << 10, small=64 << 10, mappable=False)
"""An object store, likewise, but that a round trip takes long there before one was measured."""


# What is taken for a round trip to an object store before one was measured.
_USUAL_ROUND_TRIP = 0.05
# Bytes a second that one of many requests under way gets; so many bytes pass while another makes its round trip.
_SHARE = 16 << 20
# While a request is waited for, a CPU moves as much as some requests bring, each in this time.
_SECONDS_PER_REQUEST = 1.5e-3
_REMEMBERED = 64
# What is answered sooner was answered by a cache of this machine, or might as well have been.
_LEAST_WAIT = 5e-4
# One of so many requests has to have been waited for: on a busy machine some are that knew no network.
_ONE_OF = 4


def storage_with(round_trip: float, held: int = 0, least: Storage = OBJECTS) -> Storage:
    """Storage of which a request takes a round trip of so many seconds, whatever lies between.

    Args:
        round_trip: seconds until the first byte comes.
        held: bytes that are held while a request is answered, beside the buffer that it fills.
        least: what suits storage of this kind however short its round trips are.
    """
    passed = int(_SHARE * round_trip)
    return least._replace(
        in_flight=_within(least.in_flight, round(round_trip / _SECONDS_PER_REQUEST), 32),
        worth_skipping=_within(least.worth_skipping, passed, 4 << 20),
        window=_within(least.window, passed, 1 << 20),
        small=_within(least.small, passed // 4, 256 << 10),
        held=held,
        round_trip=round_trip,
    )


def _within(least: int, wanted: int, most: int) -> int:
    return max(least, min(wanted, most))


def round_trip_of(seconds: Sequence[float]) -> Optional[float]:
    """The round trip that requests tell of which took so many seconds; None if they tell of none.

    That is what the middle one took of those that were waited for. What a cache of this machine answers tells
    nothing of the network: it is left out, and where nearly everything was answered so there is nothing to tell.
    """
    # Loaded where requests were measured: it takes some of the time that a command needs to start.
    from statistics import median_low

    waited = [one for one in seconds if one >= _LEAST_WAIT]
    return median_low(waited) if waited and _ONE_OF * len(waited) >= len(seconds) else None


class Measured:
    """How long requests took until their first byte came, of late; for any number of threads.

    Args:
        least: what suits storage of this kind however short its round trips are.
        usual: seconds that are taken for a round trip where none was measured.
    """

    def __init__(self, least: Storage = OBJECTS, usual: float = _USUAL_ROUND_TRIP) -> None:
        self._least = least
        self._usual = usual
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._lock = threading.Lock()

    def request(self, seconds: float) -> None:
        """A request took so long."""
        with self._lock:
            self._seconds.append(seconds)

    def storage(self, held: int = 0) -> Storage:
        """What follows from that."""
        with self._lock:
            round_trip = round_trip_of(self._seconds)
        if round_trip is None:
            return storage_with(self._usual, held, self._least)._replace(round_trip=None)
        return storage_with(round_trip, held, self._least)


def storage_on(path: str) -> Storage:
    """The storage that a local path lies on; one of unknown kind counts as remote."""
    return LOCAL if file_system_of(path) in _LOCAL_FILE_SYSTEMS else REMOTE


def file_system_of(path: str) -> str:
    """The type of the file system that a path lies on, as the kernel names it; empty if unknown."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            lines = mounts.read().splitlines()
    except OSError:
        return ""
    real = os.path.realpath(path)
    best, kind = "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        point = before.split(" ")[4].replace("\\040", " ")
        inside = point == "/" or real == point or real.startswith(point + "/")
        if inside and len(point) >= len(best):
            best, kind = point, after.split(" ")[0]
    return kind


class FileSystems:
    """The file systems that files were opened on, by the device that they say they lie on."""

    def __init__(self) -> None:
        self._measured: dict[int, Optional[Measured]] = {}

    def measured(self, device: int, path: str) -> Optional[Measured]:
        """Whom to tell how long requests take; None on a local file system.

        Args:
            device: what a file lies on.
            path: the file.
        """
        try:
            return self._measured[device]
        except KeyError:
            found = Measured(REMOTE, usual=0.0) if storage_on(path).remote else None
            return self._measured.setdefault(device, found)

    def costs(self, path: str) -> Storage:
        """What requests cost where a path lies, as far as that is known by now."""
        storage = storage_on(path)
        if not storage.remote:
            return storage
        try:
            measured = self._measured.get(os.stat(path).st_dev)
        except OSError:
            # What is not there was not asked for anything.
            measured = None
        return storage if measured is None else measured.storage()
