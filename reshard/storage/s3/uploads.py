"""Uploads in progress, and the removal of those of dead processes.

A mark, an object in the same directory, shows that an object is being written, like temporary files on disks.
Its process rewrites it while it lives. The mark exists before the upload: a killed process's upload is found.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, Optional

from reshard.errors import UsageError
from reshard.named_tuple import NamedTuple
from reshard.storage.s3.address import Address
from reshard.storage.s3.failures import StrangeAnswer
from reshard.storage.s3.leases import Lease, holder, is_alive, is_holder
from reshard.storage.s3.service import Service, field

_MARK = ".reshard-tmp-"
# Maximum size of a mark: an object's path has at most some KiB in any encoding.
_MAX_MARK = 16 << 10


def claim(service: Service, path: str) -> Lease:
    """Mark an object as being written, until the mark is released.

    Raises:
        OSError: the mark cannot be written.
    """
    return Lease(service, f"{_directory(path)}/{_MARK}{holder()}", json.dumps({"writes": path}).encode())


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


class _Mark(NamedTuple):
    """The mark of an object that is being written.

    Attributes:
        path: path of the mark.
        alive: whether its process lives.
        writes: path of the object that is being written; None if not read, or in another directory.
    """

    path: str
    alive: bool
    writes: Optional[str] = None


def _marks(service: Service, directory: str, all_of_them: bool = False) -> list[_Mark]:
    """The marks in a directory; their contents are read only if one is a dead process's.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    marks = []
    for name, listed in service.named(directory, _MARK):
        owner = name[len(_MARK) :]
        if is_holder(owner) and listed.size <= _MAX_MARK:
            marks.append(_Mark(f"{directory.rstrip('/')}/{name}", is_alive(owner, listed.age)))
    if not all_of_them and all(mark.alive for mark in marks):
        return marks
    paths = service.each(lambda mark: _writes(service, directory.rstrip("/"), mark.path), marks)
    return [mark._replace(writes=path) for mark, path in zip(marks, paths)]


def _writes(service: Service, directory: str, path: str) -> Optional[str]:
    """The object that a mark of this directory is about; None if it is missing or not ours.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    try:
        target = str(json.loads(service.read(path).content)["writes"])
        # Another program's mark may contain any name.
        target.encode()
        Address.parse(target)
    except (FileNotFoundError, ValueError, LookupError, TypeError, RecursionError, UsageError):
        return None
    # Objects elsewhere are not touched.
    return target if _directory(target) == directory and not target.endswith("/") else None


def remove_dead(service: Service, directory: str) -> None:
    """Abort uploads of dead processes to a directory, and remove their marks.

    Args:
        service: the service.
        directory: the directory.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    dead = [mark for mark in _marks(service, directory) if not mark.alive]
    if not dead:
        return
    paths = list({mark.writes for mark in dead if mark.writes is not None})
    uploads = dict(zip(paths, service.each(lambda path: _uploads_that_may_be_seen(service, path), paths)))
    # The owner of an upload is unknown. A process that began one of these uploads has its mark by now:
    # marks come first, and processes with later marks own none of these uploads.
    living = {mark.writes for mark in _marks(service, directory, all_of_them=True) if mark.alive}
    for mark in dead:
        if mark.writes is None or mark.writes not in living:
            with contextlib.suppress(PermissionError):
                _abort(service, mark.writes or "", uploads.get(mark.writes or "", []))
            service.delete(mark.path)


def _uploads_that_may_be_seen(service: Service, path: str) -> list[str]:
    """The uploads of an object; none if listing is forbidden: then no run of ours can abort them."""
    try:
        return _uploads(service, path)
    except PermissionError:
        return []


def _uploads(service: Service, path: str) -> list[str]:
    """The numbers of all uploads of an object.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    bucket, key = Address.parse(path)
    arguments: dict[str, Any] = {"Bucket": bucket, "Prefix": key}
    numbers = []
    while True:
        page = service.bucket_request(path, "list_multipart_uploads", **arguments)
        uploads = [(field(one, "Key", str, path), field(one, "UploadId", str, path)) for one in page.get("Uploads", ())]
        numbers += [upload for name, upload in uploads if name == key]
        if not page.get("IsTruncated"):
            return numbers
        before = dict(arguments)
        arguments["KeyMarker"] = field(page, "NextKeyMarker", str, path)
        arguments["UploadIdMarker"] = field(page, "NextUploadIdMarker", str, path)
        if arguments == before:
            raise StrangeAnswer(path, "a list whose pages repeat")


def _abort(service: Service, path: str, uploads: list[str]) -> None:
    for upload in uploads:
        with contextlib.suppress(FileNotFoundError):
            service.request(path, "abort_multipart_upload", UploadId=upload)


def abort_all(service: Service, path: str, own_mark: str) -> bool:
    """Abort all uploads of an object, unless another process writes it, too.

    Args:
        service: the service.
        path: path of the object.
        own_mark: path of this process's mark.

    Returns:
        Whether no upload remains.

    Raises:
        OSError: the service returned an unexpected answer.
    """
    uploads = _uploads(service, path)
    # The marks are read after the uploads, as in `remove_dead`.
    marks = _marks(service, _directory(path), all_of_them=True) if uploads else []
    if any(mark.alive and mark.writes == path and mark.path != own_mark for mark in marks):
        return False
    _abort(service, path, uploads)
    return True
