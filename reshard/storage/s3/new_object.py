"""Objects while they are written: in parts, in any order; the object is invisible until all parts are stored.

An object of one part is written with one request. A larger one is a multipart upload; see `s3/uploads.py`.
"""

from __future__ import annotations

import errno
import mmap
import threading
import time
from concurrent.futures import Future, wait
from typing import Any, Optional, Union

import numpy as np

from reshard.storage.s3.address import RUN, WRITE, Address, metadata_of
from reshard.storage.s3.leases import Lease, knows_conditions
from reshard.storage.s3.objects import Version, version_of
from reshard.storage.s3.service import SentBytes, Service, field
from reshard.storage.s3.uploads import abort_all, claim
from reshard.storage.store import Expected, FileStatus, NewFile, Sending

# Services accept no smaller parts, except the last, and no more parts.
MIN_PART_BYTES = 5 << 20
_MAX_PARTS = 10_000
_MAPPED_BYTES = 1 << 20


def part_bytes(size: int) -> int:
    """Bytes of each part of an object of a size, except the last."""
    needed = -(-size // _MAX_PARTS)
    return max(MIN_PART_BYTES, -(-needed // (1 << 20)) << 20)


class _Part:
    """A part while it is filled; it is sent only when every byte was written."""

    def __init__(self, size: int, sending: Optional[Sending]) -> None:
        # Mapped memory is released once the part is sent; the heap would keep the memory of many threads.
        self.data: Union[bytearray, mmap.mmap]
        if size < _MAPPED_BYTES:
            self.data = bytearray(size)
        elif sending is not None:
            self.data = sending.buffer(size)
        else:
            self.data = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.left = size


class NewObject(NewFile):
    """An object that is being written; see `reshard.storage.store.NewFile`. Creating one makes no request.

    Args:
        service: the service.
        path: path of the object.
        size: its final size in bytes.
        expected: the version that it may replace; None for any.
        sending: sends full parts; None to send each in the thread that filled it.
    """

    def __init__(
        self,
        service: Service,
        path: str,
        size: int,
        expected: Optional[Expected] = None,
        sending: Optional[Sending] = None,
    ) -> None:
        self._service = service
        self._path = path
        self._size = size
        self._expected = expected
        self._sending = sending
        self._part_bytes = part_bytes(size)
        self._modified = time.time_ns()
        self._metadata = metadata_of(self._modified, "" if expected is None else expected.run)
        self._lock = threading.Lock()
        self._filling: dict[int, _Part] = {}
        self._sent: list[Future[None]] = []
        # ETags of the stored parts, by number from 1 on.
        self._etags: dict[int, str] = {}
        self._uploaded = 0
        self._upload: Optional[str] = None
        self._lease: Optional[Lease] = None
        self._begin_lock = threading.Lock()
        # Requests to begin the upload without an answer; some may have succeeded.
        self._unanswered = 0
        # The error of beginning the upload.
        self._cause: Optional[OSError] = None
        self._putting = 0
        self._gone = False
        if size <= self._part_bytes:
            self._filling[0] = _Part(size, None)

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
            count = min(len(data) - written_bytes, len(part.data) - start)
            # NumPy copies without holding the GIL.
            np.frombuffer(part.data, np.uint8)[start : start + count] = np.frombuffer(
                data[written_bytes : written_bytes + count], np.uint8
            )
            written_bytes += count
            with self._lock:
                part.left -= count
                full = part.left == 0
                if full and self._size > self._part_bytes:
                    del self._filling[number]
            if full and self._size > self._part_bytes:
                self._send(number, part)

    def _send(self, number: int, part: _Part) -> None:
        if self._sending is None:
            return self._put_part(number, part)
        sent = self._sending.submit(lambda: self._put_part(number, part))
        with self._lock:
            # Each future is tested once: a part that fails meanwhile must not be dropped as completed.
            completed = {future for future in self._sent if future.done()}
            failed = next((future for future in completed if future.exception() is not None), None)
            self._sent = [future for future in self._sent if future not in completed]
            self._sent += [sent] if failed is None else [failed, sent]
        if failed is not None:
            failed.result()

    def _put_part(self, number: int, part: _Part) -> None:
        upload = self._begun()
        with self._lock:
            # Either `discard` sees this request in flight, or this sees that the upload was given up.
            if self._gone:
                raise self._given_up()
            self._putting += 1
        try:
            body = SentBytes(memoryview(part.data))
            answer = self._request("upload_part", UploadId=upload, PartNumber=number + 1, Body=body)
            etag = field(answer, "ETag", str, self._path)
        finally:
            with self._lock:
                self._putting -= 1
        with self._lock:
            self._etags[number + 1] = etag
            self._uploaded += len(part.data)
        if self._sending is not None and isinstance(part.data, mmap.mmap):
            self._sending.give_back(part.data)

    def _begun(self) -> str:
        """The upload's number; the first call begins the upload."""
        with self._begin_lock:
            if self._gone:
                raise self._given_up()
            if self._cause is not None:
                # Waiting threads do not repeat the failed attempts.
                raise self._cause
            if self._lease is None:
                # Claimed first: an upload whose number is lost in transit is found, too.
                self._lease = claim(self._service, self._path)
            if self._upload is None:
                try:
                    self._upload = self._service.again(self._path, self._begin)
                except OSError as error:
                    self._cause = error
                    raise
            return self._upload

    def _begin(self) -> str:
        bucket, key = Address.parse(self._path)
        self._unanswered += 1
        answer = self._service.client.create_multipart_upload(Bucket=bucket, Key=key, Metadata=self._metadata)
        upload = field(answer, "UploadId", str, self._path)
        self._unanswered -= 1
        return upload

    def _given_up(self) -> OSError:
        return OSError(errno.ECANCELED, "was given up", self._path)

    def _request(self, operation: str, **arguments: Any) -> Any:
        return self._service.request(self._path, operation, **arguments)

    def finish(self) -> FileStatus:
        """Wait until every part is stored, except for an object of one part."""
        for sent in self._sent:
            sent.result()
        # Missing bytes show in the size, which the caller compares.
        size = self._uploaded
        if self._size <= self._part_bytes:
            size = self._size - self._filling[0].left
        version = Version(Address.parse(self._path), self._path, size, "", self._modified)
        return version.status(self._service.name)

    def publish(self) -> Optional[FileStatus]:
        """Write it, or complete its upload, if the current object is as expected."""
        if self._gone:
            raise self._given_up()
        if self._expected is None:
            self._publish()
        else:
            another = self._publish_expecting(self._expected)
            if another is not None:
                return another
        self._upload = None
        self._release(clean=True)
        return None

    def _publish_expecting(self, expected: Expected) -> Optional[FileStatus]:
        """Publish it under a condition; the status of an equal object that another run published first, or None."""
        conditional = knows_conditions(self._service, self._path)
        if conditional:
            try:
                self._publish(**({"IfMatch": expected.version} if expected.version else {"IfNoneMatch": "*"}))
                return None
            except OSError as error:
                if error.errno not in (errno.ESTALE, errno.ENOENT, errno.ENOTSUP):
                    raise
                conditional = error.errno != errno.ENOTSUP
        current = self._service.head(self._path)
        if current is not None and self._is_ours(current):
            return None
        if not conditional and (current or {}).get("ETag", "") == expected.version:
            self._publish()
            return None
        if current is not None and current.get("Metadata", {}).get(RUN) == expected.run:
            version = version_of(current, current.get("ContentLength"), Address.parse(self._path), self._path)
            return version.status(self._service.name)
        change = "removed" if current is None else "written"
        raise OSError(errno.ESTALE, f"another program has {change} this object since the run began", self._path)

    def _publish(self, **condition: str) -> None:
        if self._size <= self._part_bytes:
            body = SentBytes(memoryview(self._filling[0].data))
            self._request("put_object", Body=body, Metadata=self._metadata, **condition)
            return
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]}
        try:
            self._request("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts, **condition)
        except FileNotFoundError:
            # It succeeded and the answer was lost, or another program aborted it, or removed the object to replace.
            current = self._service.head(self._path)
            if current is not None and self._is_ours(current):
                return
            if condition and (current or {}).get("ETag") != condition.get("IfMatch"):
                raise
            raise OSError(errno.ECANCELED, "another program aborted its upload", self._path) from None

    def _is_ours(self, head: Any) -> bool:
        """Whether an object was written by this upload."""
        upload_number = head.get("Metadata", {}).get(WRITE)
        return bool(head.get("ContentLength") == self._size and upload_number == self._metadata[WRITE])

    def discard(self) -> None:
        """Abort its upload, unless it is complete."""
        with self._begin_lock, self._lock:
            self._gone = True
            # Requests in flight may arrive after the upload is aborted; `close` removes their parts.
            late = self._putting > 0
        clean = self._upload is None or self._aborted(self._upload)
        if not late:
            self._upload = None
            self._release(clean)

    def _aborted(self, upload: str) -> bool:
        """Abort an upload; whether it is gone, or this program may never abort it."""
        try:
            self._request("abort_multipart_upload", UploadId=upload)
        except (FileNotFoundError, PermissionError):
            return True
        except OSError:
            return False
        return True

    def _release(self, clean: bool) -> None:
        """Remove the mark of the upload.

        Args:
            clean: no upload can remain. Otherwise the mark stays, so that another run finds the upload.
        """
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if clean and (not self._unanswered or self._aborted_unanswered(lease.path)):
            lease.release()
        else:
            lease.abandon()

    def _aborted_unanswered(self, mark: str) -> bool:
        """Abort uploads whose numbers were lost in transit; whether none can remain."""
        try:
            return abort_all(self._service, self._path, mark)
        except PermissionError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Release the memory and everything that was not published."""
        wait(self._sent)
        self.discard()
        self._filling.clear()
