"""Object stores as a store: a directory is a common beginning of keys before a slash."""

from __future__ import annotations

import contextlib
import errno
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Callable, Optional

from reshard.named_tuple import NamedTuple
from reshard.storage.costs import Storage
from reshard.storage.s3 import leases
from reshard.storage.s3.address import Address, metadata_now, number_of
from reshard.storage.s3.leases import Lease, has_conditional_writes, holder, is_alive, is_holder
from reshard.storage.s3.new_object import NewObject, part_bytes
from reshard.storage.s3.objects import HELD, ObjectFile, ObjectReader, version_of
from reshard.storage.s3.service import Service, service
from reshard.storage.s3.uploads import remove_dead
from reshard.storage.store import DirectoryEntry, Expected, FileStatus, Notify, Sending, Store


class ObjectEntry(NamedTuple):
    """A name below a key: of an object, or of several keys with a common beginning.

    Attributes:
        name: the name.
        directory: whether several keys begin with it.
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
        service: the service.
    """

    conditional = True
    at_a_time = 32

    def __init__(self, service: Service) -> None:
        self._service = service
        self._reader = ObjectReader(service)

    def status(self, path: str, through_links: bool = True) -> FileStatus:
        """The status of a path; an object takes precedence over a directory of the same name."""
        address = Address.parse(path)
        if not address.key:
            # The list of a missing bucket is an error.
            self._any_below(address, path)
            return self._directory(address)
        # The list comes first: error answers to HEAD requests have no text.
        below, status = self._service.at_once(
            lambda: self._any_below(address, path) or None, lambda: self._object(address, path)
        )
        if isinstance(status, FileStatus):
            return status
        if below:
            return self._directory(address)
        raise FileNotFoundError(errno.ENOENT, "no object has this name", path)

    def entries(self, directory: str) -> list[DirectoryEntry]:
        """The entries of a directory."""
        address = Address.parse(directory)
        prefix = address.prefix
        entries: dict[str, DirectoryEntry] = {}
        # Some programs write an object with an empty name for a directory.
        marked = False
        for page in self._service.pages(directory, prefix):
            for object_ in page.objects:
                name = object_.key[len(prefix) :]
                marked = marked or not name
                if name:
                    entries[name] = ObjectEntry(name, directory=False)
            for common in page.prefixes:
                name = common[len(prefix) : -1]
                if name:
                    entries.setdefault(name, ObjectEntry(name, directory=True))
        if not entries and address.key and not marked:
            raise FileNotFoundError(errno.ENOENT, "no object has this name", directory)
        return list(entries.values())

    def open(self, path: str, through_links: bool = True) -> ObjectFile:
        """Open an object for reading."""
        address = Address.parse(path)
        try:
            if not address.key:
                raise FileNotFoundError(errno.ENOENT, "no object has this name", path)
            return ObjectFile(self._reader, self._reader.first(address, path))
        except FileNotFoundError:
            if self._any_below(address, path):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path) from None
            raise

    def costs(self, path: str) -> Storage:
        """Costs of requests, from the measurements so far."""
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
        """Raise if the bucket is missing."""
        self._any_below(Address(Address.parse(path).bucket, ""), path)

    def remove(self, path: str, if_same: Optional[Callable[[FileStatus], bool]] = None) -> None:
        """Delete an object; with a condition, only the version that meets it, where the service supports that."""
        if if_same is None:
            self._service.delete(path)
            return
        status = self.status(path)
        if if_same(status):
            leases.delete_version(self._service, path, status.version)

    def make_empty_directory(self, path: str) -> None:
        """Write a marker object for an empty directory."""
        key = Address.parse(path).key
        # A bucket needs no marker.
        if key:
            self._service.request(path, "put_object", Key=f"{key}/", Body=b"")

    def remove_empty_directory(self, path: str) -> None:
        """Delete the marker object of an empty directory."""
        key = Address.parse(path).key
        if key:
            self._service.request(path, "delete_object", Key=f"{key}/")

    def remove_dead(self, directory: str, complete: bool) -> None:
        """Abort uploads of dead processes."""
        with contextlib.suppress(OSError):
            remove_dead(self._service, directory)

    def lock(self, path: str, again: Callable[[], None], notify: Notify) -> AbstractContextManager[Callable[[], None]]:
        """Hold a lock's object exclusively."""
        return leases.held_alone(self._service, path, leases.waiting(self._service, path, notify).pause, notify)

    def share(self, path: str, notify: Notify) -> Lease:
        """An object whose name begins with a path, which shows that this process lives."""
        return Lease(self._service, f"{path}.{holder()}", guarded=has_conditional_writes(self._service, path))

    @contextlib.contextmanager
    def try_lock(self, path: str) -> Iterator[Optional[bool]]:
        """Check whether a living process holds a shared lock."""
        directory, _, lock = path.rpartition("/")
        signs = list(self._service.named(directory, f"{lock}."))
        yield not any(is_alive(name[len(lock) + 1 :], listed.age) for name, listed in signs)

    def sign_in(self, directory: str) -> Lease:
        """An object that shows that this process lives."""
        return self.share(f"{directory}/sign", lambda text: None)

    def remove_dead_signs(self, directory: str) -> None:
        """Remove the objects in a directory, without subdirectories, of dead processes."""
        with contextlib.suppress(OSError):
            for name, listed in self._service.named(directory):
                owner = name.rpartition(".")[2]
                if is_holder(owner) and not is_alive(owner, listed.age):
                    leases.remove_dead(self._service, f"{directory}/{name}", listed.etag)

    def _object(self, address: Address, path: str) -> Optional[FileStatus]:
        head = self._service.head(path)
        if head is None:
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
    """The store of a path.

    Raises:
        UsageError: the path is invalid.
        InputError: a package is missing, or the settings are wrong.
    """
    Address.parse(path)
    return _store(service(path))


@functools.cache
def _store(service: Service) -> S3Store:
    return S3Store(service)
