"""Objects while they are written: in parts, in any order, which nobody sees before all of them are there.

An object of one part is put at once. A larger one is a multipart upload. So that what a killed process leaves of
one can be found, an object beside its place says that it is being written, as temporary files do on disks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import threading
import time
from typing import Any, NamedTuple, Optional

from reshard.storage.s3.address import Address, number_of
from reshard.storage.s3.leases import Lease, holder, is_alive, is_holder
from reshard.storage.s3.metadata import WRITE, metadata_of
from reshard.storage.s3.service import Service, age_of
from reshard.storage.status import FileStatus

# No service takes smaller ones, but for the last, or more of them.
LEAST_PART_BYTES = 5 << 20
_MOST_PARTS = 10_000
_MARK = ".reshard-tmp-"


def part_bytes(size: int) -> int:
    """Bytes of each part of an object of a size, but for the last."""
    needed = -(-size // _MOST_PARTS)
    return max(LEAST_PART_BYTES, -(-needed // (1 << 20)) << 20)


class _Part:
    """A part while it is filled."""

    def __init__(self, size: int) -> None:
        self.data = bytearray(size)
        self.left = size


class NewObject:
    """An object that is being written; see `reshard.storage.store.NewFile`. No request is made by making one.

    Args:
        service: where.
        path: of the object.
        size: bytes that it will have.
    """

    def __init__(self, service: Service, path: str, size: int) -> None:
        self._service = service
        self._path = path
        self._size = size
        self._part_bytes = part_bytes(size)
        self._modified = time.time_ns()
        self._metadata = metadata_of(self._modified)
        self._lock = threading.Lock()
        self._filling: dict[int, _Part] = {}
        # ETags of the parts that are there, by number from 1 on.
        self._etags: dict[int, str] = {}
        self._uploaded = 0
        self._upload: Optional[str] = None
        self._lease: Optional[Lease] = None
        self._begin_lock = threading.Lock()
        # Requests to begin the upload: more than one where answers got lost, perhaps of such as were heeded.
        self._begun_times = 0
        self._putting = 0
        self._gone = False
        if size <= self._part_bytes:
            self._filling[0] = _Part(size)

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes; a part that is full by them is uploaded."""
        done = 0
        while done < len(data):
            number, start = divmod(offset + done, self._part_bytes)
            with self._lock:
                part = self._filling.get(number)
                if part is None:
                    size = min(self._part_bytes, self._size - number * self._part_bytes)
                    part = self._filling[number] = _Part(size)
            count = min(len(data) - done, len(part.data) - start)
            part.data[start : start + count] = data[done : done + count]
            done += count
            with self._lock:
                part.left -= count
                full = part.left == 0
            if full and self._size > self._part_bytes:
                self._put_part(number, part)

    def _put_part(self, number: int, part: _Part) -> None:
        upload = self._begun()
        with self._lock:
            self._putting += 1
        try:
            answer = self._ask("upload_part", UploadId=upload, PartNumber=number + 1, Body=part.data)
        finally:
            with self._lock:
                self._putting -= 1
        with self._lock:
            self._etags[number + 1] = answer["ETag"]
            self._uploaded += len(part.data)
            del self._filling[number]

    def _begun(self) -> str:
        """The number of the upload, begun when it is first asked for."""
        with self._begin_lock:
            if self._gone:
                raise OSError(errno.ECANCELED, "was given up", self._path)
            if self._upload is None:
                # First, so that an upload whose number gets lost on the way is found, too.
                mark = f"{self._path.rpartition('/')[0]}/{_MARK}{holder()}"
                self._lease = Lease(self._service, mark, json.dumps({"writes": self._path}).encode())
                self._upload = str(self._service.again(self._path, self._begin)["UploadId"])
            return self._upload

    def _begin(self) -> Any:
        self._begun_times += 1
        bucket, key = Address.parse(self._path)
        return self._service.client.create_multipart_upload(Bucket=bucket, Key=key, Metadata=self._metadata)

    def _ask(self, operation: str, **wanted: Any) -> Any:
        bucket, key = Address.parse(self._path)
        return self._service.ask(self._path, operation, Bucket=bucket, Key=key, **wanted)

    def finish(self) -> FileStatus:
        """See that every part is there, but for an object of one part."""
        # What was not written is missing in the size, which whoever wrote it compares.
        size = self._uploaded
        if self._size <= self._part_bytes:
            size = self._size - self._filling[0].left
        bucket, key = Address.parse(self._path)
        name = self._service.name
        return FileStatus(True, False, size, self._modified, 0, number_of(name, bucket), number_of(name, bucket, key))

    def publish(self) -> None:
        """Put it, or complete its upload."""
        if self._size <= self._part_bytes:
            data = self._filling[0].data
            self._ask("put_object", Body=data, Metadata=self._metadata)
            return
        parts = [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]
        try:
            self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload={"Parts": parts})
        except FileNotFoundError:
            # Done, and the answer lost; or somebody aborted it.
            if not self._is_there():
                raise OSError(errno.ECANCELED, "its upload was aborted by somebody else", self._path) from None
        self._upload = None
        self._release()

    def _is_there(self) -> bool:
        """Whether the object is what was uploaded here."""
        try:
            head = self._ask("head_object")
        except FileNotFoundError:
            return False
        return bool(head["ContentLength"] == self._size and head["Metadata"].get(WRITE) == self._metadata[WRITE])

    def discard(self) -> None:
        """Abort its upload, if it was not completed."""
        with self._begin_lock:
            self._gone = True
            upload = self._upload
        with self._lock:
            # What is on its way may arrive after the upload is aborted, and has to be removed then.
            late = self._putting > 0
        if upload is not None:
            self._abort(upload)
        if not late:
            self._upload = None
            self._release()

    def _abort(self, upload: str) -> None:
        with contextlib.suppress(OSError):
            self._ask("abort_multipart_upload", UploadId=upload)

    def _release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if self._begun_times > 1:
            with contextlib.suppress(OSError):
                directory = self._path.rpartition("/")[0]
                others = [mark for mark in _marks(self._service, directory, True) if mark.path != lease.path]
                if all(mark.writes != self._path for mark in others):
                    abort_uploads(self._service, self._path)
        lease.release()

    def close(self) -> None:
        """Let the memory go."""
        self._filling.clear()
        upload, self._upload = self._upload, None
        if upload is not None:
            self._abort(upload)
        self._release()


class _Mark(NamedTuple):
    """An object that says that another is being written.

    Attributes:
        path: of it.
        alive: whether who put it lives.
        writes: what is being written; empty where it says nothing.
    """

    path: str
    alive: bool
    writes: str


def _marks(service: Service, directory: str, all_of_them: bool = False) -> list[_Mark]:
    """What says that objects of a directory are being written; what they say only where one is a dead process's.

    Raises:
        OSError: the service does not answer as it should.
    """
    bucket, key = Address.parse(directory)
    prefix = f"{key}/" if key else ""
    found = []
    for page in service.pages(directory, bucket, prefix + _MARK, "/"):
        for entry in page.get("Contents", ()):
            name = entry["Key"][len(prefix) + len(_MARK) :]
            if is_holder(name):
                alive = is_alive(name, age_of(entry["LastModified"], page))
                found.append(_Mark(f"{directory.rstrip('/')}/{_MARK}{name}", alive, ""))
    if not all_of_them and all(mark.alive for mark in found):
        return found
    said = service.each(lambda mark: _writes(service, mark.path), found)
    return [mark._replace(writes=path) for mark, path in zip(found, said)]


def remove_dead(service: Service, directory: str) -> None:
    """Abort uploads of dead processes to a directory, and remove what says that they are under way.

    Raises:
        OSError: the service does not answer as it should.
    """
    marks = _marks(service, directory)
    # Which of several uploads of an object is whose, nobody can tell.
    lively = {mark.writes for mark in marks if mark.alive}
    for mark in marks:
        if mark.alive or mark.writes in lively:
            continue
        if mark.writes.startswith(directory.rstrip("/") + "/"):
            abort_uploads(service, mark.writes)
        service.delete(mark.path)


def _writes(service: Service, path: str) -> str:
    """Which object is being written, by what says so; empty where nothing does."""
    try:
        return str(json.loads(service.read(path).content)["writes"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return ""


def abort_uploads(service: Service, path: str) -> None:
    """Abort all uploads of an object.

    Raises:
        OSError: the service does not answer as it should.
    """
    bucket, key = Address.parse(path)
    wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": key}
    while True:
        page = service.ask(path, "list_multipart_uploads", **wanted)
        for upload in page.get("Uploads", ()):
            if upload["Key"] == key:
                with contextlib.suppress(FileNotFoundError):
                    service.ask(path, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload["UploadId"])
        if not page.get("IsTruncated"):
            return
        wanted.update(KeyMarker=page["NextKeyMarker"], UploadIdMarker=page["NextUploadIdMarker"])
