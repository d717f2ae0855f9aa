"""Objects that are read: by ranges, each of the version that was opened, again where a request fails."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from typing import Any, Callable, NamedTuple, Optional

from reshard.storage.costs import Measured
from reshard.storage.s3 import failures
from reshard.storage.s3.address import Address, number_of
from reshard.storage.s3.metadata import modified_at
from reshard.storage.s3.service import Service
from reshard.storage.s3.windows import Jumps, Windows
from reshard.storage.status import FileStatus

# Read when an object is opened, in the request that tells its size: the header of most files.
HEAD = 64 << 10
# Requests up to this size are answered from windows, which grow while reading goes on nearby.
_SMALL = 256 << 10
_LEAST_WINDOW = 64 << 10
_MOST_WINDOW = 1 << 20
_NEAR = 1 << 20
# Around where something is expected.
_MARGIN = 4 << 10
# Bytes that obstore hands over at a time.
_CHUNK = 256 << 10
HELD = 2 * _CHUNK
"""Bytes that are held while a request is answered, beside the buffer that it fills."""


class Version(NamedTuple):
    """An object as it was when it was opened.

    Attributes:
        address: where it lies.
        path: its name, for messages.
        size: bytes.
        etag: what the service tells its versions by.
        modified: time that it says it was written, or else of its upload, in nanoseconds.
    """

    address: Address
    path: str
    size: int
    etag: str
    modified: int

    def status(self, service_name: str) -> FileStatus:
        """As a store says it of any file."""
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
    """Asks a service for ranges of objects, and learns what a request costs; for any number of threads.

    Attributes:
        service: who is asked.
        measured: what requests cost.
        windows: what was read of objects around small requests.
    """

    def __init__(self, service: Service) -> None:
        self.service = service
        self.measured = Measured()
        self.windows: Windows[Version] = Windows()

    def first(self, address: Address, path: str) -> Version:
        """The object at an address; its first bytes are in its window then.

        Raises:
            OSError: there is none, it may not be read, or the service does not answer.
        """

        def get() -> Version:
            import obstore

            begun = time.perf_counter()
            found = obstore.get(self._of(address, path), address.key, options={"range": (0, HEAD)})
            version = _version(found, address, path)
            data = bytes(found.bytes())
            if len(data) != min(HEAD, version.size):
                raise OSError(errno.EIO, f"{len(data)} bytes came of {min(HEAD, version.size)}", path)
            self.measured.request(time.perf_counter() - begun)
            self.windows.keep(version, 0, data)
            return version

        version: Version = self._again(get, path, instead=lambda: self._empty(address, path))
        return version

    def _empty(self, address: Address, path: str) -> Optional[Version]:
        """An object of no bytes, of which no range can be read; None where it has some."""
        head = self.service.ask(path, "head_object", Bucket=address.bucket, Key=address.key)
        return None if head["ContentLength"] else version_of_head(head, address, path)

    def read_into(self, version: Version, offset: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes of an object from an offset on, all of which it has.

        Raises:
            OSError: it was replaced, or the service does not answer.
        """
        if not out:
            return
        done = 0

        def get() -> None:
            nonlocal done
            import obstore

            begun = time.perf_counter()
            options = {"range": (offset + done, offset + len(out)), "if_match": version.etag or None}
            found = obstore.get(self._of(version.address, version.path), version.address.key, options=options)
            # Not every service heeds the condition.
            if _version(found, version.address, version.path) != version:
                raise OSError(errno.ESTALE, failures.CHANGED, version.path)
            self.measured.request(time.perf_counter() - begun)
            for chunk in found.stream(min_chunk_size=_CHUNK):
                count = len(chunk)
                out[done : done + count] = chunk
                done += count
            if done < len(out):
                raise OSError(errno.EIO, f"{done} bytes came of {len(out)}", version.path)

        self._again(get, version.path, lambda: done)

    def _of(self, address: Address, path: str) -> Any:
        return self.service.reading(address.bucket, path)

    def _again(
        self,
        get: Callable[[], Any],
        path: str,
        progress: Callable[[], int] = int,
        instead: Callable[[], Any] = lambda: None,
    ) -> Any:
        """What a request gives, made again where it fails in a way that may pass.

        Args:
            get: makes it.
            path: what it is about, for messages.
            progress: how much came so far.
            instead: asked when it failed first, for what there is in place of it.
        """
        from obstore.exceptions import BaseError

        times = before = 0
        while True:
            try:
                return self.service.outside(get)
            except (BaseError, OSError, ValueError) as error:
                refused = failures.lasting(error, path)
                if refused is not None:
                    raise refused from error
                times = 1 if progress() > before else times + 1
                before = progress()
                if times == failures.TIMES:
                    raise failures.passing(error, path) from error
                found = instead() if times == 1 else None
                if found is not None:
                    return found
            time.sleep(failures.pause(times))


def version_of_head(head: Any, address: Address, path: str) -> Version:
    """An object by what boto3 gives for a look at it."""
    modified = modified_at(head["LastModified"], head.get("Metadata", {}))
    return Version(address, path, head["ContentLength"], head.get("ETag", ""), modified)


def _version(found: Any, address: Address, path: str) -> Version:
    meta = found.meta
    modified = modified_at(meta["last_modified"], found.attributes)
    return Version(address, path, meta["size"], meta["e_tag"] or "", modified)


class ObjectFile:
    """An object that is open for reading.

    Args:
        reader: who asks for its ranges.
        version: which.
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
        """Bytes that it had when it was opened: an object never changes, it is replaced."""
        return self._version.size

    def status(self) -> FileStatus:
        """What the service says of it."""
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
        """Likewise into ``out``, from its beginning; how many."""
        count = max(0, min(len(out), self._version.size - offset))
        if count <= _LEAST_WINDOW:
            out[:count] = self._small(offset, count)
        else:
            self._reader.read_into(self._version, offset, out[:count])
        return count

    def read_each(self, ranges: Sequence[tuple[int, int]]) -> Iterator[bytes]:
        """The bytes of several (offset, bytes) ranges, all of which it has, in their order, read at the same time."""
        return self._reader.service.each(self._exactly, ranges)

    def _exactly(self, place: tuple[int, int]) -> bytes:
        offset, count = place
        found = self._reader.windows.find(self._version, offset, count)
        if found is not None:
            return found
        out = bytearray(count)
        self._reader.read_into(self._version, offset, memoryview(out))
        return bytes(out)

    def close(self) -> None:
        """Nothing is held open."""

    def _small(self, offset: int, count: int) -> bytes:
        """A few bytes, from the window that they lie in or a new one."""
        if not count:
            return b""
        windows = self._reader.windows
        ahead = self._jumps.to(offset)
        found = windows.find(self._version, offset, count)
        if found is not None and not ahead:
            return found
        _, stop, length = windows.last(self._version)
        grown = min(_MOST_WINDOW, 2 * length) if 0 <= offset - stop <= _NEAR else 0
        wanted = [(offset, max(count, grown, _LEAST_WINDOW))] if found is None else []
        # What will be asked for next, if the file goes on as it did, takes no longer when it is asked for now.
        wanted += [(max(0, place - _MARGIN), 4 * _MARGIN) for place in ahead if place < self._version.size]
        ranges = [(start, min(size, self._version.size - start)) for start, size in wanted]
        data = b""
        for (start, _), window in reversed(list(zip(ranges, self._reader.service.each(self._exactly, ranges)))):
            windows.keep(self._version, start, window)
            data = window
        return data[:count] if found is None else found
