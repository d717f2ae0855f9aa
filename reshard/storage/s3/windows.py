"""What was read around small requests, and where the next ones will probably be."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Optional, TypeVar

K = TypeVar("K")

# Bytes of the windows of all objects together, and how many of each.
_MOST_BYTES = 16 << 20
_MOST_WINDOWS = 128
# Jumps that differ by no more are alike: what lies between is of equal size, and names are longer or shorter.
_ALIKE = 1 << 10
# A jump is one that leads past so many bytes.
_LEAST_JUMP = 64 << 10
_MOST_AHEAD = 64
_MOST_REMEMBERED = 512


class Windows(Generic[K]):
    """The last windows read of each of some objects; for any number of threads.

    Args:
        most: bytes that all of them may have.
    """

    def __init__(self, most: int = _MOST_BYTES) -> None:
        self._most = most
        # Where each begins and what is in it, the last one last.
        self._held: OrderedDict[K, list[tuple[int, bytes]]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def find(self, of: K, offset: int, count: int) -> Optional[bytes]:
        """Bytes of an object that lie in one of its windows; else None."""
        with self._lock:
            for start, data in reversed(self._held.get(of, ())):
                if start <= offset and offset + count <= start + len(data):
                    self._held.move_to_end(of)
                    return data[offset - start : offset - start + count]
        return None

    def last(self, of: K) -> tuple[int, int, int]:
        """Where the last window of an object begins and ends, and its length; zeros where there is none."""
        with self._lock:
            windows = self._held.get(of)
            if not windows:
                return 0, 0, 0
            start, data = windows[-1]
            return start, start + len(data), len(data)

    def keep(self, of: K, start: int, data: bytes) -> None:
        """Keep a window, and drop those that were not asked for longest."""
        with self._lock:
            windows = self._held.setdefault(of, [])
            self._held.move_to_end(of)
            windows.append((start, data))
            self._bytes += len(data)
            if len(windows) > _MOST_WINDOWS:
                self._bytes -= len(windows.pop(0)[1])
            while self._bytes > self._most and len(self._held) > 1:
                _, dropped = self._held.popitem(last=False)
                self._bytes -= sum(len(data) for _, data in dropped)


class Jumps:
    """Learns from where requests were where the next ones will be.

    Records of a file tell one by one where the next begins, but layers of a model are alike: the distances
    between records come again. A wrong guess costs some KiB. For any number of threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: Optional[int] = None
        self._lengths: list[int] = []
        self._expected: list[int] = []
        self._ahead = 4

    def to(self, offset: int) -> list[int]:
        """A request is at an offset: where others will probably follow, which were not told before."""
        with self._lock:
            return self._to(offset)

    def _to(self, offset: int) -> list[int]:
        if self._last is None or offset < self._last:
            self._last = offset
            return []
        length = offset - self._last
        self._last = offset
        if length < _LEAST_JUMP:
            return []
        self._lengths = [*self._lengths[-_MOST_REMEMBERED:], length]
        while self._expected and self._expected[0] < offset - _ALIKE:
            self._expected.pop(0)
        if self._expected and abs(self._expected[0] - offset) <= _ALIKE:
            self._expected.pop(0)
            self._ahead = min(_MOST_AHEAD, 2 * self._ahead)
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
            # Where there was a jump before that one, it has to be alike as well.
            if alike and (before == 0 or abs(lengths[before - 1] - lengths[now - 1]) <= _ALIKE):
                period = lengths[before + 1 : now + 1]
                found = []
                for number in range(self._ahead):
                    offset += period[number % len(period)]
                    found.append(offset)
                return found
        return []
