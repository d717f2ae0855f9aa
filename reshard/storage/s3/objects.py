"""Objects that are read: by ranges of the opened version; failed requests are repeated."""

from __future__ import annotations

import errno
import re
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, Callable, Optional

from reshard.named_tuple import NamedTuple
from reshard.storage.costs import Measured
from reshard.storage.s3 import failures
from reshard.storage.s3.address import Address, modified_at, number_of
from reshard.storage.s3.failures import StrangeAnswer
from reshard.storage.s3.service import Service, field
from reshard.storage.s3.windows import Jumps, Windows
from reshard.storage.store import FileStatus

# Bytes read when an object is opened, in the request that returns its size: most files' headers fit.
HEAD = 64 << 10
# Requests up to this size are answered from windows, which grow with sequential reading.
_SMALL = 256 << 10
_MIN_WINDOW = 64 << 10
_MAX_WINDOW = 1 << 20
_NEAR = 1 << 20
# Bytes on both sides of an expected request.
_MARGIN = 4 << 10
# Block size of the client.
_CHUNK = 256 << 10
HELD = 2 * _CHUNK
"""Bytes held during a request, in addition to the buffer that it fills."""

_EMPTY = 416
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
            version=self.etag,
        )


class ObjectReader:
    """Reads ranges of objects, and measures the cost of requests; for any number of threads.

    Attributes:
        service: the service.
        measured: cost of requests.
        windows: bytes around small requests.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.measured = Measured()
        self.windows: Windows[Version] = Windows()

    def first(self, address: Address, path: str) -> Version:
        """The object at an address; its window then holds its first bytes.

        Raises:
            OSError: it is missing, may not be read, or the service does not answer.
        """
        data = bytearray(HEAD)

        def get() -> Version:
            try:
                version, count = self._get(address, path, 0, memoryview(data))
            except Exception as error:
                if failures.status_of(error) != _EMPTY:
                    raise
                # An empty object has no range.
                head = self.service.client.head_object(Bucket=address.bucket, Key=address.key)
                return version_of(head, head.get("ContentLength"), address, path)
            if count != min(HEAD, version.size):
                raise StrangeAnswer(path, f"{count} bytes of {min(HEAD, version.size)}")
            self.windows.keep(version, 0, bytes(data[:count]))
            return version

        return self.service.outside(lambda: self.service.again(path, get))

    def read_into(self, version: Version, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of an object from an offset on; all of them must exist.

        Raises:
            OSError: it was replaced, or the service does not answer.
        """
        received = 0

        def advance(count: int) -> None:
            nonlocal received
            received += count

        def get() -> None:
            while received < len(out):
                before = received
                self._get(version.address, version.path, offset + received, out[received:], version, advance)
                if received == before:
                    raise StrangeAnswer(version.path, "a range without a byte")

        self.service.outside(lambda: self.service.again(version.path, get, lambda: received))

    def _get(
        self,
        address: Address,
        path: str,
        offset: int,
        out: memoryview,
        version: Optional[Version] = None,
        advance: Callable[[int], None] = lambda count: None,
    ) -> tuple[Version, int]:
        """Read a range with one request: the object's version, and the number of bytes read.

        Args:
            address: address of the object.
            path: its name, for messages.
            offset: beginning of the range.
            out: buffer; it may be filled in part if the object ends.
            version: the required version; None for any.
            advance: called with the number of bytes of each block.

        Raises:
            OSError: the object has another version, or the answer is impossible.
        """
        begun = time.perf_counter()
        condition = {"IfMatch": version.etag} if version is not None and version.etag else {}
        answer = self.service.client.get_object(
            Bucket=address.bucket, Key=address.key, Range=f"bytes={offset}-{offset + len(out) - 1}", **condition
        )
        body = answer["Body"]
        try:
            start, stop, size = _range_of(answer, path)
            current = version_of(answer, size, address, path)
            # Some services ignore the condition.
            if version is not None and current != version:
                raise OSError(errno.ESTALE, failures.CHANGED, path)
            if start != offset or stop != min(offset + len(out), size):
                raise StrangeAnswer(
                    path, f"bytes {start} to {stop} where {offset} to {offset + len(out)} were requested"
                )
            self.measured.request(time.perf_counter() - begun)
            received = 0
            while received < stop - start:
                data = body.read(min(_CHUNK, stop - start - received))
                if not data:
                    break
                out[received : received + len(data)] = data
                received += len(data)
                advance(len(data))
            return current, received
        except BaseException:
            # The rest of the answer is not read: the connection cannot be used again.
            body.close()
            raise


def _range_of(answer: Any, path: str) -> tuple[int, int, int]:
    """Beginning and end of an answer's bytes in their object, and the object's size.

    Raises:
        StrangeAnswer: the answer lacks them.
    """
    text = answer.get("ContentRange")
    if text is None:
        # Answers with whole objects have no range.
        size = field(answer, "ContentLength", int, path)
        return 0, size, size
    match = _RANGE.fullmatch(text)
    if match is None:
        raise StrangeAnswer(path, f"ContentRange is {text[:80]!r}")
    start, last, size = map(int, match.groups())
    if last + 1 - start != answer.get("ContentLength") or last >= size:
        raise StrangeAnswer(path, f"{answer.get('ContentLength')} bytes of the range {text!r}")
    return start, last + 1, size


def version_of(answer: Any, size: Optional[int], address: Address, path: str) -> Version:
    """The object's version in an answer.

    Raises:
        StrangeAnswer: it has no size or time.
    """
    if size is None or size < 0:
        raise StrangeAnswer(path, f"a size of {size}")
    modified = modified_at(field(answer, "LastModified", datetime, path), answer.get("Metadata", {}))
    return Version(address, path, size, answer.get("ETag") or "", modified)


class ObjectFile:
    """An object that is open for reading.

    Args:
        reader: reads its ranges.
        version: its version.
    """

    descriptor: Optional[int] = None
    cipher: Optional[str] = None
    pinned = True

    def __init__(self, reader: ObjectReader, version: Version) -> None:
        self._reader = reader
        self._version = version
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
        if count <= _MIN_WINDOW:
            out[:count] = self._small(offset, count)
        else:
            self._reader.read_into(self._version, offset, out[:count])
        return count

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of several (offset, bytes) ranges inside the object, in order, read concurrently."""
        return self._reader.service.each(self._exactly, ranges)

    def _exactly(self, place: tuple[int, int]) -> bytes:
        offset, count = place
        data = self._reader.windows.find(self._version, offset, count)
        if data is not None:
            return data
        out = bytearray(count)
        self._reader.read_into(self._version, offset, memoryview(out))
        return bytes(out)

    def being_written(self) -> bool:
        """Objects are replaced, never modified."""
        return False

    def close(self) -> None:
        """Nothing to close."""

    def _small(self, offset: int, count: int) -> bytes:
        """A few bytes, from their window or a new one."""
        if not count:
            return b""
        windows = self._reader.windows
        ahead = self._jumps.to(offset)
        cached = windows.find(self._version, offset, count)
        if cached is not None and not ahead:
            return cached
        _, stop, length = windows.last(self._version)
        grown = min(_MAX_WINDOW, 2 * length) if 0 <= offset - stop <= _NEAR else 0
        places = [(offset, max(count, grown, _MIN_WINDOW))] if cached is None else []
        # Probable next requests: reading them in parallel takes no longer.
        places += [(max(0, place - _MARGIN), 4 * _MARGIN) for place in ahead if place < self._version.size]
        ranges = [(start, min(size, self._version.size - start)) for start, size in places]
        data = b""
        for (start, _), window in reversed(list(zip(ranges, self._reader.service.each(self._exactly, ranges)))):
            windows.keep(self._version, start, window)
            data = window
        return data[:count] if cached is None else cached
