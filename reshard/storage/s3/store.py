"""Object stores as a store: a directory is a common beginning of keys before a slash.

There are no locks: a directory's plan is created only if it is absent, and objects appear whole.
"""

from __future__ import annotations

import errno
import functools
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from reshard.errors import InputError
from reshard.storage.s3.listings import Listings
from reshard.storage.s3.objects import HELD, NewObject, ObjectFile, ObjectReader, Version, metadata_of, part_bytes
from reshard.storage.s3.service import Address, Service, number_of, service
from reshard.storage.store import Costs, DirectoryEntry, FileStatus, Notify, Sending, Store


class ObjectEntry(NamedTuple):
    """A name below a key: of an object, or of a directory, the common beginning of several keys."""

    name: str
    directory: bool

    def is_dir(self) -> bool:
        return self.directory

    def is_file(self) -> bool:
        return not self.directory


class S3Store(Store):
    """The objects of one service."""

    at_a_time = 32

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader = ObjectReader(service)
        self._listings = Listings(self._request_status, self._request_entries)

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """The status of a path; an object takes precedence over a directory of the same name."""
        return self._listings.status(path)

    def entries(self, directory: str) -> list[DirectoryEntry]:
        return self._listings.entries(directory)

    def listed(self, path: str) -> DirectoryEntry | None:
        return self._listings.listed(path)

    def lock(self, path: str, notify: Notify) -> AbstractContextManager[None]:
        """No lock; what other runs have written is listed again."""
        self._listings.forget()
        return nullcontext()

    def _request_status(self, path: str) -> FileStatus:
        address = Address.parse(path)
        try:
            if address.key:
                head = self._service.request(path, "head_object")
                return Version.of(head, head["ContentLength"], path).status(self._service.name)
        except FileNotFoundError:
            pass
        except OSError:
            # Error answers to HEAD requests have no text; the one to this request has.
            self._any_below(address, path)
            raise
        if self._any_below(address, path) or not address.key:
            name = self._service.name
            device, inode = number_of(name, address.bucket), number_of(name, address.bucket, address.prefix)
            return FileStatus(regular=False, directory=True, size=0, modified=0, changed=0, device=device, inode=inode)
        raise FileNotFoundError(errno.ENOENT, "no object has this name", path)

    def _request_entries(self, directory: str) -> list[DirectoryEntry]:
        address = Address.parse(directory)
        prefix = address.prefix
        entries: dict[str, DirectoryEntry] = {}
        # Some programs write an object with an empty name for a directory.
        exists = not address.key
        for page in self._service.pages(directory, prefix, Delimiter="/"):
            for entry in page.get("Contents", ()):
                name = entry["Key"][len(prefix) :]
                exists = True
                if name:
                    entries[name] = ObjectEntry(name, directory=False)
            for common in page.get("CommonPrefixes", ()):
                name = common["Prefix"][len(prefix) : -1]
                exists = True
                if name:
                    entries.setdefault(name, ObjectEntry(name, directory=True))
        if not exists:
            raise FileNotFoundError(errno.ENOENT, "no object has this name", directory)
        return list(entries.values())

    def open(self, path: str, through_links: bool = True) -> ObjectFile:
        address = Address.parse(path)
        try:
            if not address.key:
                raise FileNotFoundError(errno.ENOENT, "no object has this name", path)
            return ObjectFile(self._reader, path)
        except FileNotFoundError:
            if self.listed(path) is not None:
                # It was removed since.
                self._listings.forget()
            if self._any_below(address, path):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
            raise

    def costs(self, path: str) -> Costs:
        return self._reader.round_trips.costs(HELD)

    def new_file(self, path: str, size: int, sending: Sending | None = None) -> NewObject:
        Address.parse(path)
        self._listings.end()
        return NewObject(self._service, path, size, sending)

    def part_bytes(self, size: int) -> int:
        return min(size, part_bytes(size))

    def write_whole(self, path: str, data: bytes) -> None:
        self._put(path, data)

    def create(self, path: str, data: bytes) -> bool:
        """Put an object unless it exists.

        A service that refuses or ignores the condition is an `InputError`; nothing is written.
        """
        created = self._put_new(path, data)
        if created and self._put_new(path, data):
            # It ignores the condition, else the second request would have failed.
            self.remove(path)
            raise self._unconditional(path)
        return created

    def _put_new(self, path: str, data: bytes) -> bool:
        try:
            self._put(path, data, IfNoneMatch="*")
        except OSError as error:
            if error.errno == errno.ENOTSUP:
                raise self._unconditional(path) from None
            if error.errno != errno.ESTALE:
                raise
            return False
        return True

    def _unconditional(self, path: str) -> InputError:
        return InputError(
            f"{path}: this object store has no conditional writes (If-None-Match), by which runs detect each other",
            file=path,
            hint="convert into a file system, and copy the result",
        )

    def _put(self, path: str, data: bytes, **condition: Any) -> None:
        self._listings.end()
        self._service.request(path, "put_object", Body=data, Metadata=metadata_of(time.time_ns()), **condition)

    def remove(self, path: str) -> None:
        self._listings.end()
        self._service.request(path, "delete_object")

    def _any_below(self, address: Address, path: str) -> bool:
        page: dict[str, Any] = next(
            self._service.pages(path, address.prefix, PaginationConfig={"MaxItems": 1, "PageSize": 1}), {}
        )
        return bool(page.get("Contents"))


_store = functools.cache(S3Store)


def s3_store(path: str) -> S3Store:
    Address.parse(path)
    return _store(service(path))
