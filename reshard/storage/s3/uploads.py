"""Uploads that are under way, and the removal of those that dead processes left.

So that what a killed process leaves of an upload can be found, an object beside its place says that it is being
written, as temporary files do on disks, and is put again while that process lives. It is there before the upload is.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple, Optional

from reshard.errors import UsageError
from reshard.storage.s3.address import Address
from reshard.storage.s3.failures import StrangeAnswer
from reshard.storage.s3.leases import Lease, holder, is_alive, is_holder
from reshard.storage.s3.service import Service, field

_MARK = ".reshard-tmp-"
# An object's path is no longer than some KiB, however it is written.
_LARGEST_MARK = 16 << 10


def claim(service: Service, path: str) -> Lease:
    """Say that an object is being written, until that is released.

    Raises:
        OSError: it cannot be said.
    """
    return Lease(service, f"{_directory(path)}/{_MARK}{holder()}", json.dumps({"writes": path}).encode())


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


class _Mark(NamedTuple):
    """An object that says that another is being written.

    Attributes:
        path: of it.
        alive: whether the process that put it lives.
        writes: path of the object that is being written, if that was asked for and is in the same directory.
    """

    path: str
    alive: bool
    writes: Optional[str] = None


def _marks(service: Service, directory: str, all_of_them: bool = False) -> list[_Mark]:
    """What says that objects of a directory are being written; what they say only where one is a dead process's.

    Raises:
        OSError: the service does not answer as it should.
    """
    prefix = Address.parse(directory).prefix
    found = []
    for page in service.pages(directory, prefix + _MARK):
        for listed in page.objects:
            name = listed.key[len(prefix) + len(_MARK) :]
            if is_holder(name) and listed.size <= _LARGEST_MARK:
                found.append(_Mark(f"{directory.rstrip('/')}/{_MARK}{name}", is_alive(name, listed.age)))
    if not all_of_them and all(mark.alive for mark in found):
        return found
    written = service.each(lambda mark: _writes(service, directory.rstrip("/"), mark.path), found)
    return [mark._replace(writes=path) for mark, path in zip(found, written)]


def _writes(service: Service, directory: str, path: str) -> Optional[str]:
    """Which object of a directory is being written, by what says so; None where nothing does, or nothing of ours.

    Raises:
        OSError: the service does not answer as it should.
    """
    try:
        found = str(json.loads(service.read(path).content)["writes"])
        # Names that none of ours can have are no reason to fail.
        found.encode()
        Address.parse(found)
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError, UsageError):
        return None
    # Nothing elsewhere is touched.
    return found if _directory(found) == directory and not found.endswith("/") else None


def remove_dead(service: Service, directory: str) -> None:
    """Abort uploads of dead processes to a directory, and remove what says that they are under way.

    Args:
        service: where.
        directory: where there.

    Raises:
        OSError: the service does not answer as it should.
    """
    dead = [mark for mark in _marks(service, directory) if not mark.alive]
    if not dead:
        return
    paths = list({mark.writes for mark in dead if mark.writes is not None})
    uploads = dict(zip(paths, service.each(lambda path: _uploads_that_may_be_seen(service, path), paths)))
    # Which of several uploads of an object is whose, nobody can tell. Whoever began one of these says so by now:
    # it does so before it begins, and who does so later has none among them.
    living = {mark.writes for mark in _marks(service, directory, all_of_them=True) if mark.alive}
    for mark in dead:
        if mark.writes is None or mark.writes not in living:
            with contextlib.suppress(PermissionError):
                _abort(service, mark.writes or "", uploads.get(mark.writes or "", []))
            service.delete(mark.path)


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
        uploads = [(field(one, "Key", str, path), field(one, "UploadId", str, path)) for one in page.get("Uploads", ())]
        found += [upload for name, upload in uploads if name == key]
        if not page.get("IsTruncated"):
            return found
        before = dict(wanted)
        wanted["KeyMarker"] = field(page, "NextKeyMarker", str, path)
        wanted["UploadIdMarker"] = field(page, "NextUploadIdMarker", str, path)
        if wanted == before:
            raise StrangeAnswer(path, "a list whose pages repeat")


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
    if any(mark.alive and mark.writes == path and mark.path != own for mark in marks):
        return False
    _abort(service, path, uploads)
    return True
