"""Object stores as a store: directories are what keys have in common before a slash."""

from __future__ import annotations

import errno
import functools
from typing import NamedTuple, Optional

from reshard.storage.costs import Storage
from reshard.storage.s3.address import Address, number_of
from reshard.storage.s3.objects import HELD, ObjectFile, ObjectReader, version_of_head
from reshard.storage.s3.service import Service, service
from reshard.storage.status import FileStatus
from reshard.storage.store import Entry


class ObjectEntry(NamedTuple):
    """A name below a key: of an object, or what several keys have in common.

    Attributes:
        name: the name.
        directory: whether it is of several.
    """

    name: str
    directory: bool

    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.directory

    def is_file(self) -> bool:
        """Whether it is an object."""
        return not self.directory


class S3Store:
    """The objects of one service.

    Args:
        asked: the service.
    """

    def __init__(self, asked: Service) -> None:
        self._service = asked
        self._reader = ObjectReader(asked)

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """What is at a path; an object comes before a directory of the same name."""
        address = Address.parse(path)
        if not address.key:
            # Of a bucket that is not there, a list is an error.
            self._any_below(address, path)
            return self._directory(address)
        found, below = self._service.at_once(
            lambda: self._object(address, path), lambda: self._any_below(address, path) or None
        )
        if isinstance(found, FileStatus):
            return found
        if below:
            return self._directory(address)
        raise FileNotFoundError(errno.ENOENT, "there is no such object", path)

    def entries(self, directory: str) -> list[Entry]:
        """What is in a directory."""
        address = Address.parse(directory)
        prefix = address.prefix
        found: dict[str, Entry] = {}
        # An object of no name stands for a directory, in some programs.
        marked = False
        for page in self._service.pages(directory, address.bucket, prefix, "/"):
            for content in page.get("Contents", ()):
                name = content["Key"][len(prefix) :]
                marked = marked or not name
                if name:
                    found[name] = ObjectEntry(name, directory=False)
            for common in page.get("CommonPrefixes", ()):
                name = common["Prefix"][len(prefix) : -1]
                if name:
                    found.setdefault(name, ObjectEntry(name, directory=True))
        if not found and address.key and not marked:
            if self._object(address, directory) is not None:
                raise NotADirectoryError(errno.ENOTDIR, "is no directory", directory)
            raise FileNotFoundError(errno.ENOENT, "there is no such object", directory)
        return list(found.values())

    def open(self, path: str, through_links: bool = True) -> ObjectFile:
        """Open an object for reading."""
        address = Address.parse(path)
        try:
            if not address.key:
                raise FileNotFoundError(errno.ENOENT, "there is no such object", path)
            return ObjectFile(self._reader, self._reader.first(address, path))
        except FileNotFoundError:
            if self._any_below(address, path):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
            raise

    def costs(self, path: str) -> Storage:
        """What requests cost, by those that were made."""
        return self._reader.measured.storage(HELD)

    def _object(self, address: Address, path: str) -> Optional[FileStatus]:
        try:
            head = self._service.ask(path, "head_object", Bucket=address.bucket, Key=address.key)
        except FileNotFoundError:
            return None
        return version_of_head(head, address, path).status(self._service.name)

    def _any_below(self, address: Address, path: str) -> bool:
        wanted = {"Bucket": address.bucket, "Prefix": address.prefix, "MaxKeys": 1}
        return bool(self._service.ask(path, "list_objects_v2", **wanted).get("KeyCount"))

    def _directory(self, address: Address) -> FileStatus:
        name = self._service.name
        device, inode = number_of(name, address.bucket), number_of(name, address.bucket, address.prefix)
        return FileStatus(regular=False, directory=True, size=0, modified=0, changed=0, device=device, inode=inode)


def s3_store(path: str) -> S3Store:
    """The store that a path lies in.

    Raises:
        UsageError: the path is none.
        InputError: a package is missing, or the settings are wrong.
    """
    Address.parse(path)
    return _store(service(path))


@functools.cache
def _store(asked: Service) -> S3Store:
    return S3Store(asked)
