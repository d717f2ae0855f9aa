"""Uploads that are under way, and the removal of those that dead processes left.

So that what a killed process leaves of an upload can be found, an object beside its place says that it is being
written, as temporary files do on disks, and is put again while that process lives. It is there before the upload is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Optional

from reshard.errors import UsageError
from reshard.storage.s3.address import Address
from reshard.storage.s3.leases import Lease, holder, is_alive, is_holder
from reshard.storage.s3.metadata import WRITE, modified_said
from reshard.storage.s3.service import Service, age_of

_MARK = ".reshard-tmp-"
# An object's path is no longer than some KiB, however it is written.
_LARGEST_MARK = 16 << 10


class Writes(NamedTuple):
    """What a process says that it writes.

    Attributes:
        path: of the object.
        size: bytes that it will have.
        part_bytes: bytes of each part but for the last.
        metadata: that it will have.
        upload: number of the upload, once that is begun.
    """

    path: str
    size: int
    part_bytes: int
    metadata: Mapping[str, str]
    upload: Optional[str] = None

    @property
    def content(self) -> bytes:
        """Of the object that says so."""
        said = self._asdict()
        return json.dumps({"writes": said.pop("path"), **said}).encode()

    @classmethod
    def parse(cls, content: bytes) -> Writes:
        """What an object says, which may hold anything.

        Raises:
            ValueError: it says nothing that one of ours says.
        """
        try:
            said = json.loads(content)
            metadata, upload = dict(said.get("metadata", {})), said.get("upload")
            size, part = int(said.get("size", 0)), int(said.get("part_bytes", 0))
            found = cls(str(said["writes"]), size, part, metadata, upload)
            # Names that none of ours can have are no reason to fail.
            found.path.encode()
            Address.parse(found.path)
            texts = [*found.metadata, *found.metadata.values(), "" if upload is None else upload]
            if not all(isinstance(text, str) for text in texts):
                raise ValueError("holds something else than text")
        except (LookupError, TypeError, AttributeError, RecursionError, UsageError) as error:
            raise ValueError(str(error)) from error
        return found


def claim(service: Service, writes: Writes) -> Lease:
    """Say that an object is being written, until that is released.

    Raises:
        OSError: it cannot be said.
    """
    return Lease(service, f"{_directory(writes.path)}/{_MARK}{holder()}", writes.content)


class PartThere(NamedTuple):
    """A part that is uploaded.

    Attributes:
        size: bytes.
        etag: what the service says of its content.
    """

    size: int
    etag: str


class Begun(NamedTuple):
    """An upload that a dead process began.

    Attributes:
        upload: its number.
        metadata: that the object will have.
        parts: what is there of it, by number from 1 on.
    """

    upload: str
    metadata: Mapping[str, str]
    parts: Mapping[int, PartThere]


def begun_by_dead(service: Service, path: str, size: int, part_bytes: int, own: str) -> Optional[Begun]:
    """An upload of an object that a dead process began, and nobody goes on with; if there is one like this.

    Args:
        service: where.
        path: of the object.
        size: bytes that it will have.
        part_bytes: bytes of each part but for the last.
        own: path of what says that it is being written here.

    Raises:
        OSError: the service does not answer as it should.
    """
    marks = [mark for mark in _marks(service, _directory(path)) if mark.path != own]
    dead = [mark for mark in marks if not mark.alive and mark.writes_object(path)]
    # Of several who come at the same time each has said so by now, and none goes on with it.
    if not dead or any(mark.alive and mark.writes_object(path) for mark in marks):
        return None
    for mark in dead:
        said = mark.writes
        if said is None or said.upload is None or (said.size, said.part_bytes) != (size, part_bytes):
            continue
        try:
            modified_said(said.metadata)
            found = Begun(said.upload, said.metadata, _parts(service, path, said.upload))
        except (FileNotFoundError, PermissionError, ValueError):
            continue
        if WRITE in said.metadata:
            service.delete(mark.path)
            return found
    return None


def _parts(service: Service, path: str, upload: str) -> dict[int, PartThere]:
    """The parts of an upload that are there, by number.

    Raises:
        OSError: the service does not answer as it should, or knows no such upload.
    """
    bucket, key = Address.parse(path)
    wanted: dict[str, Any] = {"Bucket": bucket, "Key": key, "UploadId": upload}
    found: dict[int, PartThere] = {}
    while True:
        page = service.ask(path, "list_parts", **wanted)
        found.update({part["PartNumber"]: PartThere(part["Size"], part["ETag"]) for part in page.get("Parts", ())})
        if not page.get("IsTruncated"):
            return found
        wanted["PartNumberMarker"] = page["NextPartNumberMarker"]


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


class _Mark(NamedTuple):
    """An object that says that another is being written.

    Attributes:
        path: of it.
        alive: whether who put it lives.
        writes: what is being written, if that was asked for, and it says so.
    """

    path: str
    alive: bool
    writes: Optional[Writes] = None

    def writes_object(self, path: str) -> bool:
        """Whether it says so of an object."""
        return self.writes is not None and self.writes.path == path


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
            if is_holder(name) and entry["Size"] <= _LARGEST_MARK:
                alive = is_alive(name, age_of(entry["LastModified"], page))
                found.append(_Mark(f"{directory.rstrip('/')}/{_MARK}{name}", alive))
    if not all_of_them and all(mark.alive for mark in found):
        return found
    said = service.each(lambda mark: _writes(service, directory.rstrip("/"), mark.path), found)
    return [mark._replace(writes=writes) for mark, writes in zip(found, said)]


def _writes(service: Service, directory: str, path: str) -> Optional[Writes]:
    """Which object of a directory is being written, by what says so; None where nothing does.

    Raises:
        OSError: the service does not answer as it should.
    """
    try:
        said = Writes.parse(service.read(path).content)
    except (FileNotFoundError, ValueError):
        return None
    # Nothing elsewhere is touched.
    return said if _directory(said.path) == directory and not said.path.endswith("/") else None


def remove_dead(service: Service, directory: str, keep: Collection[str] = ()) -> None:
    """Abort uploads of dead processes to a directory, and remove what says that they are under way.

    Args:
        service: where.
        directory: where there.
        keep: paths of objects of which an upload may be gone on with.

    Raises:
        OSError: the service does not answer as it should.
    """
    dead = [mark for mark in _marks(service, directory) if not mark.alive]
    dead = [mark for mark in dead if mark.writes is None or mark.writes.path not in keep]
    if not dead:
        return
    paths = list({mark.writes.path for mark in dead if mark.writes is not None})
    with contextlib.ExitStack() as claims:
        # Who comes to go on with one of these sees a claim, and begins anew; who came before is seen below.
        own = {claims.enter_context(_claimed(service, path)) for path in paths}
        uploads = dict(zip(paths, service.each(lambda path: _uploads_that_may_be_seen(service, path), paths)))
        # Which of several uploads of an object is whose, nobody can tell. Whoever began one of these says so by now:
        # it does so before it begins, and who does so later has none among them.
        now = [mark for mark in _marks(service, directory, all_of_them=True) if mark.alive and mark.path not in own]
        for mark in dead:
            path = "" if mark.writes is None else mark.writes.path
            if not any(path and other.writes_object(path) for other in now):
                with contextlib.suppress(PermissionError):
                    _abort(service, path, uploads.get(path, []))
                service.delete(mark.path)


@contextlib.contextmanager
def _claimed(service: Service, path: str) -> Iterator[str]:
    """Say that an object is being written while the block runs, with nothing to go on with; where that is said."""
    lease = claim(service, Writes(path, 0, 0, {}))
    try:
        yield lease.path
    finally:
        lease.release()


def _uploads_that_may_be_seen(service: Service, path: str) -> list[str]:
    """The uploads of an object; none where one may not ask for them, because nobody of ours can abort them then."""
    try:
        return _uploads(service, path)
    except PermissionError:
        return []


def _uploads(service: Service, path: str) -> list[str]:
    """The numbers of all uploads of an object.

    Raises:
        OSError: the service does not answer as it should.
    """
    bucket, key = Address.parse(path)
    wanted: dict[str, Any] = {"Bucket": bucket, "Prefix": key}
    found = []
    while True:
        page = service.ask(path, "list_multipart_uploads", **wanted)
        found += [str(upload["UploadId"]) for upload in page.get("Uploads", ()) if upload["Key"] == key]
        if not page.get("IsTruncated"):
            return found
        wanted.update(KeyMarker=page["NextKeyMarker"], UploadIdMarker=page["NextUploadIdMarker"])


def _abort(service: Service, path: str, uploads: list[str]) -> None:
    for upload in uploads:
        bucket, key = Address.parse(path)
        with contextlib.suppress(FileNotFoundError):
            service.ask(path, "abort_multipart_upload", Bucket=bucket, Key=key, UploadId=upload)


def abort_all(service: Service, path: str, own: str) -> bool:
    """Abort all uploads of an object, unless another writes it, too.

    Args:
        service: where.
        path: of the object.
        own: path of what says that it is being written here.

    Returns:
        Whether none is left.

    Raises:
        OSError: the service does not answer as it should.
    """
    uploads = _uploads(service, path)
    # After that, as in `remove_dead`.
    marks = _marks(service, _directory(path), all_of_them=True) if uploads else []
    if any(mark.alive and mark.writes_object(path) and mark.path != own for mark in marks):
        return False
    _abort(service, path, uploads)
    return True
