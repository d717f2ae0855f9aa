"""Objects that are read, by ranges of the opened version, or written, in parts and in any order.

A new object is invisible until all parts are stored: one part is written with one request, more of them by a multipart
upload. A process that is killed leaves its upload in the service, which a rule of the bucket ends (docs/stores.md).
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any, NamedTuple

import numpy as np

from reshard.storage.files import CHANGED
from reshard.storage.s3.round_trips import RoundTrips
from reshard.storage.s3.service import Address, Service, number_of, unexpected
from reshard.storage.store import FileStatus, NewFile, Sending
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

# Services accept no smaller parts, except the last, and no more parts.
MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000

_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})")
# Metadata with the time of writing in seconds; other programs use this key, too.
_MODIFIED = "mtime"
_SECONDS = re.compile(r"([0-9]{1,10})(?:\.([0-9]{1,18}))?")
_SECOND = 1_000_000_000


def metadata_of(modified: int) -> dict[str, str]:
    """Metadata for an object that is written at a time in nanoseconds."""
    return {_MODIFIED: f"{modified // _SECOND}.{modified % _SECOND:09d}"}


class Version(NamedTuple):
    """An object at the time of its opening.

    Attributes:
        path: its name.
        size: bytes.
        etag: the service's identifier of its version.
        modified: time of writing from its metadata, or else the rounded time of its upload, in nanoseconds.
    """

    path: str
    size: int
    etag: str
    modified: int

    @classmethod
    def of(cls, answer: Any, size: int, path: str) -> Version:
        """The version in an answer."""
        seconds = _SECONDS.fullmatch(answer.get("Metadata", {}).get(_MODIFIED, ""))
        if seconds is None:
            modified = round(answer["LastModified"].timestamp()) * _SECOND
        else:
            modified = int(seconds[1]) * _SECOND + int((seconds[2] or "")[:9].ljust(9, "0"))
        return cls(path, size, answer.get("ETag") or "", modified)

    def status(self, service_name: str) -> FileStatus:
        """Its status as of any file."""
        bucket, key = Address.parse(self.path)
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
    """Reads ranges of objects, and measures the cost of requests; for any number of threads."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.round_trips = RoundTrips()
        # Bytes around small requests, by version and offset; the last one used is the last.
        self._windows: OrderedDict[tuple[Version, int], bytes] = OrderedDict()
        self._bytes = 0
        self._lock = ThreadLock()

    def first(self, path: str) -> Version:
        """The object at a path; its first bytes are in a window then."""
        data = bytearray(_HEAD)
        try:
            version, count = self.read_into(path, 0, memoryview(data))
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            # An empty object has no range.
            head = self.service.request(path, "head_object")
            return Version.of(head, head["ContentLength"], path)
        self.keep(version, 0, bytes(data[:count]))
        return version

    def read_into(self, path: str, offset: int, out: memoryview, version: Version | None = None) -> tuple[Version, int]:
        """Read a range, again if its content is cut off: the object's version, and the number of bytes read.

        The buffer is filled in part if the object ends. Another version than the required one, if any, is an `OSError`.
        """
        wanted = f"bytes={offset}-{offset + len(out) - 1}"
        condition = {"IfMatch": version.etag} if version is not None and version.etag else {}
        for tries in range(self.service.tries, 0, -1):
            begun = time.perf_counter()
            answer = self.service.request(path, "get_object", Range=wanted, **condition)
            # After an error, the rest of the content is not read: the connection cannot be used again.
            with contextlib.closing(answer["Body"]) as body:
                match = _RANGE.fullmatch(answer.get("ContentRange") or "")
                if match is None:
                    raise unexpected(path, f"the range {answer.get('ContentRange')!r}")
                start, last, size = map(int, match.groups())
                current = Version.of(answer, size, path)
                # Some services ignore the condition.
                if version is not None and current != version:
                    raise OSError(errno.ESTALE, CHANGED, path)
                count = min(offset + len(out), size) - offset
                if start != offset or last + 1 != offset + count:
                    raise unexpected(path, f"bytes {start} to {last} where {wanted} of {size} were requested")
                self.round_trips.add(time.perf_counter() - begun)
                try:
                    with self.service.errors_as_of_files(path):
                        _fill(out[:count], body)
                except OSError:
                    if tries == 1:
                        raise
                else:
                    return current, count
        raise AssertionError("unreachable")

    def find(self, version: Version, offset: int, count: int) -> bytes | None:
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


def _fill(out: memoryview, body: Any) -> None:
    """Read the whole content of an answer; a `ValueError` if it has another size."""
    received = 0
    for data in body.iter_chunks(_CHUNK):
        out[received : received + len(data)] = data
        received += len(data)
    if received != len(out):
        raise ValueError(f"{received} of {len(out)} bytes arrived")


class _Jumps:
    """Predicts offsets of small requests to an object.

    A record of a ``.ckpt`` points to the next one only, so each takes a round trip. But layers of a model are alike:
    the distances between records repeat. A wrong prediction costs some KiB.
    """

    def __init__(self) -> None:
        self._lengths: list[int] = []
        # The request after the last jump, and the last request of all.
        self._last = self._near = 0
        # The number of offsets in the last prediction, and the last offset.
        self._ahead, self._predicted = 4, 0

    def to(self, offset: int) -> None:
        """Note a request."""
        if abs(offset - self._near) >= _MIN_JUMP:
            self._lengths = [*self._lengths[-_MAX_REMEMBERED:], offset - self._last]
            self._last = offset
        self._near = offset

    def next(self) -> list[int]:
        """Probable offsets of the next requests: a few at first, and many after a correct prediction."""
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


class ObjectFile:
    """An object that is open for reading. It never changes: it can only be replaced."""

    descriptor: int | None = None
    pinned = True

    def __init__(self, reader: ObjectReader, path: str) -> None:
        self.path = path
        self._reader = reader
        self._version = reader.first(path)
        # Where the last window ended, and its size.
        self._end = self._size = 0
        self._jumps = _Jumps()

    def size(self) -> int:
        return self._version.size

    def status(self) -> FileStatus:
        return self._version.status(self._reader.service.name)

    def read(self, offset: int, count: int) -> bytes:
        count = max(0, min(count, self._version.size - offset))
        return self._small(offset, count) if count <= _SMALL else self._requested(offset, count)

    def read_into(self, offset: int, out: memoryview) -> int:
        count = max(0, min(len(out), self._version.size - offset))
        if count <= _HEAD:
            out[:count] = self._small(offset, count)
        else:
            self._reader.read_into(self.path, offset, out[:count], self._version)
        return count

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of several (offset, bytes) ranges inside the object, in order, read concurrently."""

        def read(place: tuple[int, int]) -> bytes:
            cached = self._reader.find(self._version, *place)
            return self._requested(*place) if cached is None else cached

        with thread_pool(min(_AT_A_TIME, max(1, len(ranges)))) as pool:
            yield from pool.map(read, ranges)

    def _requested(self, offset: int, count: int) -> bytes:
        out = bytearray(count)
        if count:
            self._reader.read_into(self.path, offset, memoryview(out), self._version)
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


def part_bytes(size: int) -> int:
    """Bytes of each part of an object of a size, except the last."""
    needed = -(-size // _MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // (1 << 20)) << 20)


class _Part:
    """A part while it is filled; it is sent only when every byte was written."""

    def __init__(self, size: int, sending: Sending | None) -> None:
        # Mapped memory is released once the part is sent; the heap would keep the memory of many threads.
        self.data = mmap.mmap(-1, max(1, size)) if sending is None else sending.buffer(size)
        self.size = self.left = size


class NewObject(NewFile):
    """An object that is being written. Creating one makes no request.

    Full parts are sent by ``sending``, or by the thread that filled them.
    """

    def __init__(self, service: Service, path: str, size: int, sending: Sending | None = None) -> None:
        self._service = service
        self._path = path
        self._size = size
        self._sending = sending
        self._part_bytes = part_bytes(size)
        self._in_parts = size > self._part_bytes
        self._modified = time.time_ns()
        self._lock = threading.Lock()
        self._filling: dict[int, _Part] = {} if self._in_parts else {0: _Part(size, None)}
        self._sent: list[Future[None]] = []
        # ETags and sizes of the stored parts, by number from 1 on.
        self._stored: dict[int, tuple[str, int]] = {}
        self._begin_lock = threading.Lock()
        self._upload: str | None = None
        self._discarded = False

    def write(self, offset: int, data: memoryview) -> None:
        if offset + len(data) > self._size:
            raise OSError(errno.EINVAL, f"bytes beyond its size of {self._size}", self._path)
        written_bytes = 0
        while written_bytes < len(data):
            number, start = divmod(offset + written_bytes, self._part_bytes)
            with self._lock:
                part = self._filling.get(number)
                if part is None:
                    size = min(self._part_bytes, self._size - number * self._part_bytes)
                    part = self._filling[number] = _Part(size, self._sending)
            count = min(len(data) - written_bytes, part.size - start)
            # NumPy copies without holding the GIL.
            np.frombuffer(part.data, np.uint8)[start : start + count] = np.frombuffer(
                data[written_bytes : written_bytes + count], np.uint8
            )
            written_bytes += count
            with self._lock:
                part.left -= count
                full = part.left == 0 and self._in_parts
                if full:
                    del self._filling[number]
            if full and self._sending is None:
                self._put_part(number, part)
            elif full and self._sending is not None:
                sent = self._sending.submit(lambda number=number, part=part: self._put_part(number, part))  # type: ignore[misc]
                with self._lock:
                    completed = [future for future in self._sent if future.done()]
                    self._sent = [future for future in self._sent if future not in completed] + [sent]
                for future in completed:
                    future.result()

    def _put_part(self, number: int, part: _Part) -> None:
        with self._begin_lock:
            self._check_kept()
            if self._upload is None:
                # In another thread: a signal, which interrupts the main one, must not lose the upload's number.
                with thread_pool(1) as pool:
                    pool.submit(self._begin).result()
        body = _Body(memoryview(part.data)[: part.size])
        answer = self._request(
            "upload_part", UploadId=self._upload, PartNumber=number + 1, Body=body, ContentLength=part.size
        )
        with self._lock:
            self._stored[number + 1] = answer["ETag"], part.size
        if self._sending is not None:
            self._sending.give_back(part.data)

    def _begin(self) -> None:
        self._upload = self._request("create_multipart_upload", Metadata=metadata_of(self._modified))["UploadId"]

    def _check_kept(self) -> None:
        if self._discarded:
            raise OSError(errno.ECANCELED, "was given up", self._path)

    def _request(self, operation: str, **arguments: Any) -> Any:
        return self._service.request(self._path, operation, **arguments)

    def finish(self) -> FileStatus:
        for sent in self._sent:
            sent.result()
        # Missing bytes show in the size, which the caller compares.
        size = sum(size for _, size in self._stored.values()) if self._in_parts else self._size - self._filling[0].left
        return Version(self._path, size, "", self._modified).status(self._service.name)

    def publish(self) -> None:
        self._check_kept()
        if not self._in_parts:
            body = bytes(memoryview(self._filling[0].data)[: self._size])
            self._request("put_object", Body=body, Metadata=metadata_of(self._modified))
            return
        parts = [{"PartNumber": number, "ETag": etag} for number, (etag, _) in sorted(self._stored.items())]
        self._request("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None

    def discard(self) -> None:
        with self._begin_lock:
            self._discarded = True
        if self._upload is not None:
            with contextlib.suppress(OSError):
                self._request("abort_multipart_upload", UploadId=self._upload)

    def close(self) -> None:
        wait(self._sent)
        # Again: parts that arrived after the upload was aborted would stay.
        self.discard()
        self._filling.clear()


class _Body:
    """Bytes as a file that is sent in blocks, which are not copied; boto3 goes back in it to send them again."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0

    def __len__(self) -> int:
        return len(self._data)

    def read(self, count: int = -1) -> memoryview:
        """The next bytes: more than requested if that is little."""
        end = len(self._data) if count < 0 else self._position + max(count, 128 << 10)
        block = self._data[self._position : end]
        self._position += len(block)
        return block

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        return self._position
