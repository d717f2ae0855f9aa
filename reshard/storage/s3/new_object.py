"""Objects while they are written: in parts, in any order; the object is invisible until all parts are stored.

An object of one part is written with one request, a larger one by a multipart upload. A process that is killed leaves
its upload in the service, which a rule of the bucket ends (docs/stores.md).
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from concurrent.futures import Future, wait
from typing import Any, Optional

import numpy as np

from reshard.storage.s3.address import Address, metadata_of
from reshard.storage.s3.objects import Version
from reshard.storage.s3.service import Service, field
from reshard.storage.store import FileStatus, NewFile, Sending
from reshard.threads import thread_pool

# Services accept no smaller parts, except the last, and no more parts.
MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000


def part_bytes(size: int) -> int:
    """Bytes of each part of an object of a size, except the last."""
    needed = -(-size // _MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // (1 << 20)) << 20)


class _Part:
    """A part while it is filled; it is sent only when every byte was written."""

    def __init__(self, size: int, sending: Optional[Sending]) -> None:
        # Mapped memory is released once the part is sent; the heap would keep the memory of many threads.
        self.data = mmap.mmap(-1, max(1, size)) if sending is None else sending.buffer(size)
        self.size = self.left = size


class NewObject(NewFile):
    """An object that is being written; see `reshard.storage.store.NewFile`. Creating one makes no request.

    Args:
        service: the service.
        path: path of the object.
        size: its final size in bytes.
        sending: sends full parts; None to send each in the thread that filled it.
    """

    def __init__(self, service: Service, path: str, size: int, sending: Optional[Sending] = None) -> None:
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
        self._upload: Optional[str] = None
        self._gone = False

    def write(self, offset: int, data: memoryview) -> None:
        """Add bytes; a part that becomes full is uploaded."""
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
        body = memoryview(part.data)[: part.size]
        answer = self._request(
            "upload_part", UploadId=self._upload, PartNumber=number + 1, Body=_Body(body), ContentLength=part.size
        )
        with self._lock:
            self._stored[number + 1] = field(answer, "ETag", str, self._path), part.size
        if self._sending is not None:
            self._sending.give_back(part.data)

    def _begin(self) -> None:
        answer = self._request("create_multipart_upload", Metadata=metadata_of(self._modified))
        self._upload = field(answer, "UploadId", str, self._path)

    def _check_kept(self) -> None:
        if self._gone:
            raise OSError(errno.ECANCELED, "was given up", self._path)

    def _request(self, operation: str, **arguments: Any) -> Any:
        return self._service.request(self._path, operation, **arguments)

    def finish(self) -> FileStatus:
        """Wait until every part is stored, except for an object of one part."""
        for sent in self._sent:
            sent.result()
        # Missing bytes show in the size, which the caller compares.
        size = sum(size for _, size in self._stored.values()) if self._in_parts else self._size - self._filling[0].left
        version = Version(Address.parse(self._path), self._path, size, "", self._modified)
        return version.status(self._service.name)

    def publish(self) -> None:
        """Write it, or complete its upload."""
        self._check_kept()
        if not self._in_parts:
            body = bytes(memoryview(self._filling[0].data)[: self._size])
            self._request("put_object", Body=body, Metadata=metadata_of(self._modified))
            return
        parts = [{"PartNumber": number, "ETag": etag} for number, (etag, _) in sorted(self._stored.items())]
        self._request("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        self._upload = None

    def discard(self) -> None:
        """Abort its upload, unless it is complete."""
        with self._begin_lock:
            self._gone = True
        if self._upload is not None:
            with contextlib.suppress(OSError):
                self._request("abort_multipart_upload", UploadId=self._upload)

    def close(self) -> None:
        """Release the memory and everything that was not published."""
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
        """Go to an offset."""
        self._position = offset + (0, self._position, len(self._data))[whence]
        return self._position

    def tell(self) -> int:
        """The offset of the next byte."""
        return self._position
