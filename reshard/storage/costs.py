"""What kind of storage files lie on, and which requests suit it.

On a local file system a request costs microseconds. On a network file system it costs a round trip,
so there requests are larger, read more of what is not needed, and many are under way at a time. The
numbers come from `benchmarks/slow_storage.py`.
"""

from __future__ import annotations

import os
from typing import NamedTuple

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
    """

    remote: bool
    in_flight: int
    worth_skipping: int
    window: int
    small: int


LOCAL = Storage(remote=False, in_flight=1, worth_skipping=16 << 10, window=64 << 10, small=16 << 10)
REMOTE = Storage(remote=True, in_flight=4, worth_skipping=256 << 10, window=256 << 10, small=64 << 10)


def storage_of(path: str) -> Storage:
    """The storage that a path lies on; one of unknown kind counts as remote."""
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
