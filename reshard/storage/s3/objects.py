"""Objects that are read: by ranges of the opened version."""

from __future__ import annotations

import contextlib
import errno
import itertools
import re
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, NamedTuple, Optional

from reshard.storage.costs import Measured
from reshard.storage.s3.address import Address, modified_at, number_of
from reshard.storage.s3.service import CHANGED, Service, StrangeAnswer, field
from reshard.storage.store import FileStatus
from reshard.threads import ThreadLock, thread_pool

# Bytes read when an object is opened, in the request that returns its size: most files' headers fit.
_HEAD = 64 << 10
# Requests up to this size are answered from windows, which grow with sequential reading.
_SMALL = 256 << 10
_MAX_WINDOW = 1 << 20
# Maximum bytes of the windows of all objects.
_MAX_WINDOWS = 16 << 20
# Requests after a shorter jump are answered from the same window. Jumps that differ by less are alike: contents of
# equal size between names of other length.
_MIN_JUMP = 64 << 10
_ALIKE = 1 << 10
# Bytes on both sides of a predicted request.
_MARGIN = 4 << 10
_MAX_REMEMBERED = 256
_MAX_COMPARED = 32
_AT_A_TIME = 64
_CHUNK = 256 << 10
HELD = 2 * _CHUNK
"""Bytes held during a request, in addition to the buffer that it fills."""

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")


class Version(NamedTuple):
    """An object at the time of its opening.

    Attributes:
        address: its address.
        path: its name, for messages.
        size: bytes.
        etag: the service's identifier of its version.
        modified: time of writing from its metadata, or else of its upload, in nanoseconds.
    """

    address: Address
    path: str
    size: int
    etag: str
    modified: int

    @classmethod
    def of(cls, answer: Any, size: Optional[int], path: str) -> Version:
        """The version in an answer.

        Raises:
            StrangeAnswer: it has no size or time.
        """
        if size is None or size < 0:
            raise StrangeAnswer(path, f"a size of {size}")
        modified = modified_at(field(answer, "LastModified", datetime, path), answer.get("Metadata", {}))
        return cls(Address.parse(path), path, size, answer.get("ETag") or "", modified)

    def status(self, service_name: str) -> FileStatus:
        """Its status as of any file."""
        bucket, key = self.address
        return FileStatus(
            regular=True,
            directory=False,
            size=self.size,
            modified=self.modified,
            changed=number_of(self.etag),
            device=number_of(service_name, bucket),
            inode=number_of(service_name, bucket, key),
        )


class ObjectReader:
    """Reads ranges of objects, and measures the cost of requests; for any number of threads.

    Attributes:
        service: the service.
        measured: cost of requests.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.measured = Measured()
        # Bytes around small requests, by version and offset; the last one used is the last.
        self._windows: OrderedDict[tuple[Version, int], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = ThreadLock()

    def first(self, path: str) -> Version:
        """The object at a path; its first bytes are in a window then.

        Raises:
            OSError: it is missing, may not be read, or the service does not answer.
        """
        data = bytearray(_HEAD)
        try:
            version, count = self._get(path, 0, memoryview(data))
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            # An empty object has no range.
            head = self.service.request(path, "head_object")
            return Version.of(head, head.get("ContentLength"), path)
        self.keep(version, 0, bytes(data[:count]))
        return version

    def read_into(self, version: Version, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of an object from an offset on; all of them must exist.

        Raises:
            OSError: it was replaced, or the service does not answer.
        """
        self._get(version.path, offset, out, version)

    def _get(self, path: str, offset: int, out: memoryview, version: Optional[Version] = None) -> tuple[Version, int]:
        """Read a range, again if its content is cut off: the object's version, and the number of bytes read.

        Args:
            path: path of the object.
            offset: beginning of the range.
            out: buffer; it may be filled in part if the object ends.
            version: the required version; None for any.

        Raises:
            OSError: the object has another version, or the answer is not what was asked for.
        """
        wanted = f"bytes={offset}-{offset + len(out) - 1}"
        condition = {"IfMatch": version.etag} if version is not None and version.etag else {}
        for tries in range(self.service.tries, 0, -1):
            begun = time.perf_counter()
            answer = self.service.request(path, "get_object", Range=wanted, **condition)
            # Of an error, the rest of the content is not read: the connection cannot be used again.
            with contextlib.closing(answer["Body"]) as body:
                match = _RANGE.fullmatch(answer.get("ContentRange") or "")
                if match is None:
                    raise StrangeAnswer(path, f"the range {answer.get('ContentRange')!r}")
                start, last, size = map(int, match.groups())
                current = Version.of(answer, size, path)
                # Some services ignore the condition.
                if version is not None and current != version:
                    raise OSError(errno.ESTALE, CHANGED, path)
                count = min(offset + len(out), size) - offset
                if start != offset or last + 1 != offset + count:
                    raise StrangeAnswer(path, f"bytes {start} to {last} where {wanted} of {size} were requested")
                self.measured.request(time.perf_counter() - begun)
                try:
                    with self.service.errors_as_of_files(path):
                        _fill(out[:count], body)
                except OSError:
                    if tries == 1:
                        raise
                else:
                    return current, count
        raise AssertionError("unreachable")

    def find(self, version: Version, offset: int, count: int) -> Optional[bytes]:
        """Bytes of an object from one of its windows; None if no window holds them."""
        with self._lock:
            for window in reversed(self._windows):
                start, data = window[1], self._windows[window]
                if window[0] == version and start <= offset and offset + count <= start + len(data):
                    self._windows.move_to_end(window)
                    return data[offset - start : offset - start + count]
        return None

    def keep(self, version: Version, start: int, data: bytes) -> None:
        """Keep a window, and drop the least recently used ones."""
        with self._lock:
            self._bytes += len(data) - len(self._windows.pop((version, start), b""))
            self._windows[version, start] = data
            while self._bytes > _MAX_WINDOWS:
                _, dropped = self._windows.popitem(last=False)
                self._bytes -= len(dropped)


class Jumps:
    """Predicts offsets of small requests to an object.

    A record of a ``.ckpt`` points to the next one only, so each takes a round trip. But layers of a model are alike:
    the distances between records repeat. A wrong prediction costs some KiB.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        # The request after the last jump, and the last request of all.
        self._last = self._near = 0
        # How many were predicted last, and the last one of them.
        self._ahead, self._predicted = 4, 0

    def to(self, offset: int) -> None:
        """Note a request."""
        if abs(offset - self._near) >= _MIN_JUMP:
            self._lengths = [*self._lengths[-_MAX_REMEMBERED:], offset - self._last]
            self._last = offset
        self._near = offset

    def next(self) -> list[int]:
        """Probable offsets of the next requests: a few at first, and many if those were right."""
        lengths = self._lengths
        # The earlier jump that resembles the last one in most of the jumps before it, too.
        alike, before = max(((self._alike(index), index) for index in range(len(lengths) - 1)), default=(0, 1))
        # At the beginning of a file, one jump must do.
        if alike < min(2, before + 1):
            return []
        right = abs(self._last - lengths[-1] - self._predicted) <= _ALIKE
        self._ahead = _AT_A_TIME if right else 4
        jumps = itertools.islice(itertools.cycle(lengths[before + 1 :]), self._ahead)
        offsets = [self._last + total for total in itertools.accumulate(jumps)]
        self._predicted = offsets[-1]
        return offsets

    def _alike(self, index: int) -> int:
        """The number of jumps up to an earlier one that are like the last ones."""
        pairs = itertools.islice(zip(self._lengths[index::-1], reversed(self._lengths)), _MAX_COMPARED)
        return sum(1 for _ in itertools.takewhile(lambda pair: abs(pair[0] - pair[1]) <= _ALIKE, pairs))


def _fill(out: memoryview, body: Any) -> None:
    """Read the whole content of an answer, which has this size.

    Raises:
        ValueError: it has another size.
    """
    received = 0
    for data in body.iter_chunks(_CHUNK):
        out[received : received + len(data)] = data
        received += len(data)
    if received != len(out):
        raise ValueError(f"{received} of {len(out)} bytes arrived")


class ObjectFile:
    """An object that is open for reading.

    Args:
        reader: reads its ranges.
        version: its version.
    """

    descriptor: Optional[int] = None
    pinned = True

    def __init__(self, reader: ObjectReader, version: Version) -> None:
        self._reader = reader
        self._version = version
        # Where the last window ended, and its size.
        self._end = self._size = 0
        self._jumps = Jumps()

    @property
    def path(self) -> str:
        """Its name, for messages."""
        return self._version.path

    def size(self) -> int:
        """Its size when it was opened: objects never change, they are replaced."""
        return self._version.size

    def status(self) -> FileStatus:
        """Its status in the store."""
        return self._version.status(self._reader.service.name)

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on; fewer at the end."""
        count = max(0, min(count, self._version.size - offset))
        if count <= _SMALL:
            return self._small(offset, count)
        out = bytearray(count)
        self._reader.read_into(self._version, offset, memoryview(out))
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; the number of bytes read."""
        count = max(0, min(len(out), self._version.size - offset))
        if count <= _HEAD:
            out[:count] = self._small(offset, count)
        else:
            self._reader.read_into(self._version, offset, out[:count])
        return count

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of several (offset, bytes) ranges inside the object, in order, read concurrently."""
        with thread_pool(min(_AT_A_TIME, max(1, len(ranges)))) as pool:
            yield from pool.map(lambda place: self._exactly(*place), ranges)

    def _exactly(self, offset: int, count: int) -> bytes:
        data = self._reader.find(self._version, offset, count)
        if data is not None or not count:
            return data or b""
        out = bytearray(count)
        self._reader.read_into(self._version, offset, memoryview(out))
        return bytes(out)

    def _small(self, offset: int, count: int) -> bytes:
        """A few bytes, from their window or a new one, which grows while reading goes on near the last one."""
        if not count:
            return b""
        self._jumps.to(offset)
        cached = self._reader.find(self._version, offset, count)
        if cached is not None:
            return cached
        near = 0 <= offset - self._end <= _MAX_WINDOW
        self._size = min(_MAX_WINDOW, 2 * self._size) if near and self._size else _HEAD
        predicted = [(place - _MARGIN, 4 * _MARGIN) for place in self._jumps.next()]
        # Of concurrent requests, many take no longer than one.
        ranges = [
            (start, min(size, self._version.size - start))
            for start, size in [(offset, max(count, self._size)), *predicted]
            if 0 <= start < self._version.size
        ]
        windows = list(self.read_each(ranges))
        for (start, _), data in reversed(list(zip(ranges, windows))):
            self._reader.keep(self._version, start, data)
        self._end = offset + len(windows[0])
        return windows[0][:count]

    def close(self) -> None:
        """Nothing to close."""
