"""Statuses and lists of objects, cached until the first write.

Many rooms inspect a source independently: its form, its ranks, its directories. On file systems that is cheap. In an
object store each request takes a round trip, and results that change in between, because another program writes there,
would fit no checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable
from typing import TypeVar

from reshard.storage.store import DirectoryEntry, FileStatus
from reshard.threads import thread_pool

T = TypeVar("T")
# A program that opens checkpoints for hours finds new steps after this time.
_SECONDS = 30


class Listings:
    """The results of one moment, by path without a trailing slash; for any number of threads.

    Args:
        status: requests the status of a path.
        entries: requests the list of a directory.
    """

    def __init__(self, status: Callable[[str], FileStatus], entries: Callable[[str], list[DirectoryEntry]]) -> None:
        self._request_status = status
        self._request_entries = entries
        self._ended = False
        self._moment = _Moment()

    def forget(self) -> None:
        """Request everything again."""
        self._moment = _Moment()

    def end(self) -> None:
        """Request everything from now on: this process writes, and looks at what others write."""
        self._ended = True

    def status(self, path: str) -> FileStatus:
        if self._ended:
            return self._request_status(path)
        moment, key = self._current(), path.rstrip("/")
        status = moment.statuses.get(key)
        if status is None:
            status = moment.statuses[key] = moment.unlisted(key) or self._new_status(path, moment)
        if isinstance(status, OSError):
            raise status
        return status

    def entries(self, directory: str) -> list[DirectoryEntry]:
        if self._ended:
            return self._request_entries(directory)
        moment, key = self._current(), directory.rstrip("/")
        if key not in moment.entries:
            moment.entries[key] = _or_absent(lambda: self._request_entries(directory))
        entries = moment.entries[key]
        if isinstance(entries, OSError):
            raise entries
        return entries

    def listed(self, path: str) -> DirectoryEntry | None:
        """The entry of a path in the cached list of its directory; None without one."""
        directory, _, name = path.rstrip("/").rpartition("/")
        return None if self._ended else self._current().named(directory).get(name)

    def _current(self) -> _Moment:
        if time.monotonic() - self._moment.began > _SECONDS:
            self.forget()
        return self._moment

    def _new_status(self, path: str, moment: _Moment) -> FileStatus | OSError:
        key = path.rstrip("/")
        # A name without an ending is probably a directory: its listing in parallel takes no longer.
        if key in moment.entries or os.path.splitext(path)[1]:
            return _or_absent(lambda: self._request_status(path))
        with thread_pool(1) as pool:
            listing = pool.submit(self._request_entries, path)
            status = _or_absent(lambda: self._request_status(path))
        with contextlib.suppress(OSError):
            moment.entries[key] = _or_absent(listing.result)
        return status


class _Moment:
    """What was requested since `began`."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.statuses: dict[str, FileStatus | OSError] = {}
        self.entries: dict[str, list[DirectoryEntry] | OSError] = {}
        self._named: dict[str, dict[str, DirectoryEntry]] = {}

    def named(self, directory: str) -> dict[str, DirectoryEntry]:
        entries = self.entries.get(directory)
        if not isinstance(entries, list):
            return {}
        if directory not in self._named:
            self._named[directory] = {entry.name: entry for entry in entries}
        return self._named[directory]

    def unlisted(self, key: str) -> OSError | None:
        """The error for a path that is missing in the list of its directory; None otherwise."""
        directory, _, name = key.rpartition("/")
        if not isinstance(self.entries.get(directory), list) or name in self.named(directory):
            return None
        return FileNotFoundError(errno.ENOENT, "no object has this name", key)


def _or_absent(look: Callable[[], T]) -> T | OSError:
    """The result, or the error for a missing path; other errors are raised: a retry may help."""
    try:
        return look()
    except (FileNotFoundError, NotADirectoryError) as error:
        return error
