"""Object stores as a store: directories are what keys have in common before a slash."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Callable, NamedTuple, Optional

from reshard.storage.costs import Storage
from reshard.storage.s3 import leases
from reshard.storage.s3.address import Address, metadata_now, number_of
from reshard.storage.s3.leases import Lease, has_conditional_writes, holder, is_alive, is_holder
from reshard.storage.s3.new_object import NewObject, part_bytes
from reshard.storage.s3.objects import HELD, ObjectFile, ObjectReader, version_of
from reshard.storage.s3.service import Service, service
from reshard.storage.s3.uploads import remove_dead
from reshard.storage.store import DirectoryEntry, Expected, FileStatus, Sending, Store, Tell


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


class S3Store(Store):
    """The objects of one service.

    Args:
        asked: the service.
    """

    conditional = True
    at_a_time = 32

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
        # The list comes first: an error answer to a look has no text.
        below, found = self._service.at_once(
            lambda: self._any_below(address, path) or None, lambda: self._object(address, path)
        )
        if isinstance(found, FileStatus):
            return found
        if below:
            return self._directory(address)
        raise FileNotFoundError(errno.ENOENT, "there is no such object", path)

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """What is in a directory."""
        address = Address.parse(directory)
        prefix = address.prefix
        found: dict[str, DirectoryEntry] = {}
        # An object of no name stands for a directory, in some programs.
        marked = False
        for page in self._service.pages(directory, prefix):
            for listed in page.objects:
                name = listed.key[len(prefix) :]
                marked = marked or not name
                if name:
                    found[name] = ObjectEntry(name, directory=False)
            for common in page.prefixes:
                name = common[len(prefix) : -1]
                if name:
                    found.setdefault(name, ObjectEntry(name, directory=True))
        if not found and address.key and not marked:
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

    def new_file(
        self, path: str, size: int, expected: Optional[Expected] = None, sending: Optional[Sending] = None
    ) -> NewObject:
        """Begin to write an object."""
        Address.parse(path)
        return NewObject(self._service, path, size, expected, sending)

    def part_bytes(self, size: int) -> int:
        """Bytes of a part of an upload."""
        return min(size, part_bytes(size))

    def write_whole(self, path: str, data: bytes) -> None:
        """Put an object."""
        self._service.put(path, data, Metadata=metadata_now())

    def check_root(self, path: str) -> None:
        """Insist that there is such a bucket."""
        self._any_below(Address(Address.parse(path).bucket, ""), path)

    def remove(self, path: str, if_same: Optional[Callable[[FileStatus], bool]] = None) -> None:
        """Delete an object; with a condition, the version that meets it, where the service knows such requests."""
        if if_same is None:
            self._service.delete(path)
            return
        found = self.status(path)
        if if_same(found):
            leases.delete_version(self._service, path, found.version)

    def make_empty_directory(self, path: str) -> None:
        """Put what stands for a directory that is empty."""
        bucket, key = Address.parse(path)
        # A bucket is one already.
        if key:
            self._service.ask(path, "put_object", Bucket=bucket, Key=f"{key}/", Body=b"")

    def remove_empty_directory(self, path: str) -> None:
        """Delete what stands for an empty directory."""
        bucket, key = Address.parse(path)
        if key:
            self._service.ask(path, "delete_object", Bucket=bucket, Key=f"{key}/")

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Abort uploads of dead processes."""
        with contextlib.suppress(OSError):
            remove_dead(self._service, directory)

    def leases_in(self, directory: str, start: str) -> list[bool]:
        """Of the objects whose names begin so, each of which says that a process lives, whether it does.

        Args:
            directory: where.
            start: of their names; what follows tells who.

        Raises:
            OSError: the service does not answer as it should.
        """
        key = Address.parse(directory).key
        found: list[bool] = []
        for page in self._service.pages(directory, f"{key}/{start}"):
            found += [is_alive(listed.key[len(key) + 1 + len(start) :], listed.age) for listed in page.objects]
        return found

    def lock(self, path: str, again: Callable[[], None], tell: Tell) -> AbstractContextManager[Callable[[], None]]:
        """Hold a lock's object alone."""
        return leases.held_alone(self._service, path, leases.waiting(self._service, path, tell).pause, tell)

    def share(self, path: str, tell: Tell) -> Lease:
        """An object beside a path that says that this process lives; its name begins so."""
        return Lease(self._service, f"{path}.{holder()}", guarded=has_conditional_writes(self._service, path))

    @contextlib.contextmanager
    def try_lock(self, path: str) -> Iterator[Optional[bool]]:
        """Look whether a process lives that has such an object."""
        directory, _, name = path.rpartition("/")
        yield not any(self.leases_in(directory, f"{name}."))

    def sign_in(self, directory: str) -> Lease:
        """An object that says that this process lives."""
        return self.share(f"{directory}/sign", lambda text: None)

    def remove_dead_signs(self, directory: str) -> None:
        """Remove the objects right in a directory that say that a process lives which is dead."""
        key = Address.parse(directory).key
        with contextlib.suppress(OSError):
            for page in self._service.pages(directory, f"{key}/"):
                for listed in page.objects:
                    name = listed.key.rpartition(".")[2]
                    if is_holder(name) and not is_alive(name, listed.age):
                        path = f"{directory}/{listed.key[len(key) + 1 :]}"
                        leases.remove_dead(self._service, path, listed.etag)

    def _object(self, address: Address, path: str) -> Optional[FileStatus]:
        try:
            head = self._service.ask(path, "head_object", Bucket=address.bucket, Key=address.key)
        except FileNotFoundError:
            return None
        return version_of(head, head.get("ContentLength"), address, path).status(self._service.name)

    def _any_below(self, address: Address, path: str) -> bool:
        page = next(self._service.pages(path, address.prefix, delimiter="", most=1))
        return bool(page.objects)

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
