"""Files on network file systems: what is asked of them first tells how long a round trip takes.

Only opening them and their first read are timed. Later reads tell less: a file system reads ahead, so that many
are answered by this machine, and large ones take the time of their bytes.
"""

from __future__ import annotations

import os
import time
from typing import Optional

from reshard.storage.costs import REMOTE, Measured, Storage, storage_on
from reshard.storage.status import FileStatus

# Larger reads take the time of their bytes.
_SMALL = 64 << 10


class NetworkFile:
    """A file that is read through a descriptor, of which the first read is timed.

    Args:
        descriptor: open for reading; its position is not used.
        path: its name, for messages.
        measured: told how long it took.
    """

    cipher: Optional[str] = None
    pinned = False

    def __init__(self, descriptor: int, path: str, measured: Measured) -> None:
        self.descriptor = descriptor
        self.path = path
        self._measured: Optional[Measured] = measured

    def size(self) -> int:
        """Bytes that it has at this moment."""
        return os.fstat(self.descriptor).st_size

    def status(self) -> FileStatus:
        """What the file system says of it."""
        return FileStatus.of(os.fstat(self.descriptor))

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on: as many as a read gives, none at the end."""
        measured, self._measured = self._measured, None
        begun = time.perf_counter()
        data = os.pread(self.descriptor, count, offset)
        if measured is not None and 0 < len(data) <= _SMALL:
            measured.request(time.perf_counter() - begun)
        return data

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``, from its beginning; how many."""
        self._measured = None
        return os.preadv(self.descriptor, [out], offset)

    def close(self) -> None:
        """Close the descriptor."""
        os.close(self.descriptor)


class FileSystems:
    """The file systems that files were opened on, by the device that they say they lie on."""

    def __init__(self) -> None:
        self._measured: dict[int, Optional[Measured]] = {}

    def measured(self, device: int, path: str) -> Optional[Measured]:
        """Whom to tell how long requests take; None on a local file system.

        Args:
            device: what a file lies on.
            path: the file.
        """
        try:
            return self._measured[device]
        except KeyError:
            found = Measured(REMOTE, usual=0.0) if storage_on(path).remote else None
            return self._measured.setdefault(device, found)

    def costs(self, path: str) -> Storage:
        """What requests cost where a path lies, as far as that is known by now."""
        storage = storage_on(path)
        if not storage.remote:
            return storage
        try:
            measured = self._measured.get(os.stat(path).st_dev)
        except OSError:
            # What is not there was not asked for anything.
            measured = None
        return storage if measured is None else measured.storage()
