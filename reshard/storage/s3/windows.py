"""Bytes around small requests, and predictions of the next requests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, Optional, TypeVar

from reshard.threads import ThreadLock

K = TypeVar("K")

# Maximum bytes of the windows of all objects, and number of windows of each.
_MAX_BYTES = 16 << 20
_MAX_WINDOWS = 128
# Jumps with a smaller difference are alike: contents of equal size between names of different length.
_ALIKE = 1 << 10
# Minimum bytes of a jump.
_MIN_JUMP = 64 << 10
_MAX_AHEAD = 64
_MAX_REMEMBERED = 512


class Windows(Generic[K]):
    """The last windows of each object; for any number of threads.

    Args:
        most: maximum bytes of all windows.
    """

    def __init__(self, most: int = _MAX_BYTES) -> None:
        self._most = most
        # Offset and bytes of each, the last one last.
        self._held: OrderedDict[K, list[tuple[int, bytes]]] = OrderedDict()
        self._bytes = 0
        self._lock = ThreadLock()

    def find(self, of: K, offset: int, count: int) -> Optional[bytes]:
        """Bytes of an object from one of its windows; None if no window holds them."""
        with self._lock:
            for start, data in reversed(self._held.get(of, ())):
                if start <= offset and offset + count <= start + len(data):
                    self._held.move_to_end(of)
                    return data[offset - start : offset - start + count]
        return None

    def last(self, of: K) -> tuple[int, int, int]:
        """Beginning and end of an object's last window, and its length; zeros if it has none."""
        with self._lock:
            windows = self._held.get(of)
            if not windows:
                return 0, 0, 0
            start, data = windows[-1]
            return start, start + len(data), len(data)

    def keep(self, of: K, start: int, data: bytes) -> None:
        """Keep a window, and drop the least recently used ones."""
        with self._lock:
            windows = self._held.setdefault(of, [])
            self._held.move_to_end(of)
            windows.append((start, data))
            self._bytes += len(data)
            if len(windows) > _MAX_WINDOWS:
                self._bytes -= len(windows.pop(0)[1])
            while self._bytes > self._most and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= sum(len(data) for _, data in dropped)


class Jumps:
    """Predicts offsets of requests from earlier ones.

    Each record of a file points to the next, but layers of a model are alike: the distances
    between records repeat. A wrong guess costs some KiB. For any number of threads.
    """

    def __init__(self) -> None:
        self._lock = ThreadLock()
        self._last: Optional[int] = None
        self._lengths: list[int] = []
        self._expected: list[int] = []
        self._ahead = 4

    def to(self, offset: int) -> list[int]:
        """Predicted offsets of the requests after this one, without earlier predictions."""
        with self._lock:
            return self._to(offset)

    def _to(self, offset: int) -> list[int]:
        if self._last is None or offset < self._last:
            self._last = offset
            return []
        length = offset - self._last
        self._last = offset
        if length < _MIN_JUMP:
            return []
        self._lengths = [*self._lengths[-_MAX_REMEMBERED:], length]
        while self._expected and self._expected[0] < offset - _ALIKE:
            self._expected.pop(0)
        if self._expected and abs(self._expected[0] - offset) <= _ALIKE:
            self._expected.pop(0)
            self._ahead = min(_MAX_AHEAD, 2 * self._ahead)
            if self._expected:
                return []
        else:
            self._expected = []
            self._ahead = 4
        self._expected = self._guess(offset)
        return list(self._expected)

    def _guess(self, offset: int) -> list[int]:
        lengths = self._lengths
        now = len(lengths) - 1
        for before in range(now - 1, -1, -1):
            alike = abs(lengths[before] - lengths[now]) <= _ALIKE
            # The jump before that one, if any, must be alike, too.
            if alike and (before == 0 or abs(lengths[before - 1] - lengths[now - 1]) <= _ALIKE):
                period = lengths[before + 1 : now + 1]
                offsets = []
                for number in range(self._ahead):
                    offset += period[number % len(period)]
                    offsets.append(offset)
                return offsets
        return []
