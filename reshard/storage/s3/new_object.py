"""Objects while they are written: in parts, in any order, which nobody sees before all of them are there.

An object of one part is put at once. A larger one is a multipart upload, see `reshard.storage.s3.uploads` too.
"""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Mapping
from typing import Any, Optional

from reshard.storage.s3.address import Address, number_of
from reshard.storage.s3.leases import Lease
from reshard.storage.s3.metadata import WRITE, metadata_of, modified_said
from reshard.storage.s3.service import Service
from reshard.storage.s3.uploads import PartThere, Writes, abort_all, begun_by_dead, claim
from reshard.storage.status import FileStatus

# No service takes smaller ones, but for the last, or more of them.
LEAST_PART_BYTES = 5 << 20
_MOST_PARTS = 10_000


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
        # Parts that a dead process uploaded.
        self._found: Optional[Mapping[int, PartThere]] = None
        # What ETags of parts are of services that do not encrypt them; only looked at where there may be such parts.
        self._etags_are_digests = True
        self._uploaded = 0
        self._upload: Optional[str] = None
        self._lease: Optional[Lease] = None
        self._begin_lock = threading.Lock()
        # Requests to begin the upload whose answers did not come, perhaps though they were heeded.
        self._unanswered = 0
        self._putting = 0
        self._gone = False
        if size <= self._part_bytes:
            self._filling[0] = _Part(size)

    def write(self, offset: int, data: memoryview) -> None:
        """Take bytes; a part that is full by them is uploaded."""
        if offset + len(data) > self._size:
            raise OSError(errno.EINVAL, f"bytes come beyond the {self._size} that it was to have", self._path)
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
            # Either `discard` sees that it is on its way, or this that it was given up.
            if self._gone:
                raise self._given_up()
            self._putting += 1
        try:
            digest = "" if self._found is None else hashlib.md5(part.data, usedforsecurity=False).hexdigest()
            etag = self._found_alike(number + 1, len(part.data), digest)
            if etag is None:
                answer = self._ask("upload_part", UploadId=upload, PartNumber=number + 1, Body=part.data)
                etag = str(answer["ETag"])
        finally:
            with self._lock:
                self._putting -= 1
        with self._lock:
            self._etags[number + 1] = etag
            self._etags_are_digests &= etag.strip('"') == digest
            self._uploaded += len(part.data)
            del self._filling[number]

    def _found_alike(self, number: int, size: int, digest: str) -> Optional[str]:
        """The ETag of a part that a dead process uploaded, if it tells that the bytes are these."""
        there = None if self._found is None else self._found.get(number)
        # Where it is none of the bytes, as of encrypted objects, it is not alike.
        alike = there is not None and there.size == size and there.etag.strip('"') == digest
        return there.etag if there is not None and alike else None

    def _begun(self) -> str:
        """The number of the upload, begun when it is first asked for."""
        with self._begin_lock:
            if self._gone:
                raise self._given_up()
            if self._lease is None:
                # First, so that an upload whose number gets lost on the way is found, too.
                self._lease = claim(self._service, Writes(self._path, self._size, self._part_bytes, self._metadata))
            if self._upload is None:
                self._upload = self._gone_on_with() or self._service.again(self._path, self._begin)
                writes = Writes(self._path, self._size, self._part_bytes, self._metadata, self._upload)
                self._lease.say(writes.content)
            return self._upload

    def _gone_on_with(self) -> Optional[str]:
        """The upload of a dead process that this goes on with, if there is one."""
        assert self._lease is not None
        begun = begun_by_dead(self._service, self._path, self._size, self._part_bytes, self._lease.path)
        if begun is None:
            return None
        self._metadata = dict(begun.metadata)
        self._modified = modified_said(begun.metadata)
        self._found = begun.parts
        return begun.upload

    def _begin(self) -> str:
        bucket, key = Address.parse(self._path)
        self._unanswered += 1
        answer = self._service.client.create_multipart_upload(Bucket=bucket, Key=key, Metadata=self._metadata)
        self._unanswered -= 1
        return str(answer["UploadId"])

    def _given_up(self) -> OSError:
        return OSError(errno.ECANCELED, "was given up", self._path)

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
        if self._gone:
            raise self._given_up()
        if self._size <= self._part_bytes:
            data = self._filling[0].data
            self._ask("put_object", Body=data, Metadata=self._metadata)
            return
        parts = {"Parts": [{"PartNumber": number, "ETag": etag} for number, etag in sorted(self._etags.items())]}
        try:
            etag = self._ask("complete_multipart_upload", UploadId=self._upload, MultipartUpload=parts)["ETag"]
        except FileNotFoundError:
            # Done, and the answer lost; or somebody aborted it.
            etag = self._etag_there()
            if etag is None:
                raise OSError(errno.ECANCELED, "its upload was aborted by somebody else", self._path) from None
        if self._found is not None and self._etags_are_digests and etag.strip('"') != self._etag_of_parts():
            # Services may answer alike when it is completed once more.
            raise OSError(errno.ECANCELED, "its upload was completed by a run that was taken for dead", self._path)
        self._upload = None
        self._release(clean=True)

    def _etag_there(self) -> Optional[str]:
        """The ETag of the object, if it is of the upload that was written here."""
        try:
            head = self._ask("head_object")
        except FileNotFoundError:
            return None
        is_it = head["ContentLength"] == self._size and head["Metadata"].get(WRITE) == self._metadata[WRITE]
        return str(head["ETag"]) if is_it else None

    def _etag_of_parts(self) -> str:
        """What services give an object of these parts, where ETags are digests."""
        digests = "".join(etag.strip('"') for _, etag in sorted(self._etags.items()))
        return f"{hashlib.md5(bytes.fromhex(digests), usedforsecurity=False).hexdigest()}-{len(self._etags)}"

    def discard(self) -> None:
        """Abort its upload, if it was not completed."""
        with self._begin_lock, self._lock:
            self._gone = True
            # What is on its way may arrive after the upload is aborted, and has to be removed then: by `close`.
            late = self._putting > 0
        clean = self._upload is None or self._aborted(self._upload)
        if not late:
            self._upload = None
            self._release(clean)

    def _aborted(self, upload: str) -> bool:
        """Abort an upload; whether it is gone, or nobody of ours may ever abort it."""
        try:
            self._ask("abort_multipart_upload", UploadId=upload)
        except (FileNotFoundError, PermissionError):
            return True
        except OSError:
            return False
        return True

    def _release(self, clean: bool) -> None:
        """Say no more that it is being written.

        Args:
            clean: no upload is left that is known. If one may be, what says so stays, so that another run finds it.
        """
        lease, self._lease = self._lease, None
        if lease is None:
            return
        if clean and (not self._unanswered or self._aborted_unanswered(lease.path)):
            lease.release()
        else:
            lease.abandon()

    def _aborted_unanswered(self, own: str) -> bool:
        """Abort uploads that were begun, but whose numbers did not come; whether none can be left."""
        try:
            return abort_all(self._service, self._path, own)
        except PermissionError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Let the memory go, and what was not published."""
        self.discard()
        self._filling.clear()
