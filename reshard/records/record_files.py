"""The directory of a conversion's records: empty files whose names are the records, and small files.

Stores reach them without following links below ``DST/.reshard``: other users with write access to a target
directory could replace a directory of records with a link, and have files elsewhere listed, made and removed.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Callable, Optional

from reshard.storage import Lock, Notify, exists, for_each, inspecting, store_of, writing

PLAN = "plan.json"
REPLACED = "replaced"
_LOCK = "lock"
_FILES = (_LOCK, PLAN, REPLACED)
# Records to remove last, in this order: the identity, and the mark of its replacement.
_LAST = (PLAN, REPLACED)
# Age in seconds at which an unchanged run counts as dead where locks do not work.
_LONG_UNTOUCHED = 24 * 3600.0
_SECOND = 10**9


def names_in(path: str) -> list[str]:
    """The names in a directory of records, sorted; empty if it is missing.

    Raises:
        TargetError: a part of the path is a link or not a directory.
        ReshardError: it cannot be listed.
    """
    with inspecting(path), contextlib.suppress(FileNotFoundError, NotADirectoryError):
        return sorted(store_of(path).own_names(path))
    return []


class RecordDirectory:
    """The records of one conversion, in a directory and its subdirectories.

    All methods raise a `ReshardError` that names a file, and a TargetError if a part of its path is a link or another
    kind of file.

    Args:
        path: the directory.
        kinds: the subdirectories, and for each a function that returns whether a name is a record of it.
        ours: whether a name in the directory itself, besides the plan, the lock and the mark of replacement, is a
            record.
    """

    def __init__(self, path: str, kinds: Mapping[str, Callable[[str], bool]], ours: Callable[[str], bool]) -> None:
        self.path = path
        self.lock = os.path.join(path, _LOCK)
        self.plan = os.path.join(path, PLAN)
        self._kinds = kinds
        self._ours = ours

    def _place(self, kind: str) -> str:
        return os.path.join(self.path, kind) if kind else self.path

    def names(self, kind: str = "") -> list[str]:
        """The names in a subdirectory, or in the directory itself, sorted; empty if it is missing."""
        return names_in(self._place(kind))

    def has(self, name: str) -> bool:
        """Whether a file exists in the directory."""
        return exists(os.path.join(self.path, name))

    def add(self, kind: str, names: Iterable[str]) -> None:
        """Make empty files in a subdirectory, or in the directory itself, if they are missing."""

        def make(path: str) -> None:
            with writing(path):
                store_of(path).make_empty(path)

        for_each(make, [os.path.join(self.path, kind, name) for name in names])

    def discard(self, kind: str, names: Iterable[str]) -> None:
        """Remove files if they exist."""

        def remove(path: str) -> None:
            with writing(path), contextlib.suppress(FileNotFoundError):
                store_of(path).remove(path)

        for_each(remove, [os.path.join(self.path, kind, name) for name in names])

    def make(self, *kinds: str) -> None:
        """Make subdirectories, or the directory itself, if they are missing."""
        for_each(store_of(self.path).make_empty_directory, [self._place(kind) for kind in kinds])

    def check(self) -> None:
        """Refuse links and other kinds of files in place of the directory's parts."""
        store = store_of(self.path)
        for kind in self._kinds:
            store.check_own(os.path.join(self.path, kind), directory=True)
        for name in _FILES:
            store.check_own(os.path.join(self.path, name), directory=False)

    def share_lock(self, notify: Notify) -> Lock:
        """Record that a run is writing; see `Store.share`."""
        with writing(self.lock):
            return store_of(self.path).share(self.lock, notify)

    @contextlib.contextmanager
    def try_lock(self) -> Iterator[Optional[bool]]:
        """Whether no run is writing, as `Store.try_lock` returns it."""
        with contextlib.ExitStack() as stack:
            with inspecting(self.lock):
                alone = stack.enter_context(store_of(self.path).try_lock(self.lock))
            yield alone

    @property
    def in_use(self) -> bool:
        """Whether a run is writing, as far as locks show."""
        with self.try_lock() as alone:
            return alone is False

    @property
    def is_idle(self) -> bool:
        """Whether no run is writing; where locks do not show it, whether nothing was recorded for long."""
        with self.try_lock() as alone:
            return self._long_untouched() if alone is None else alone

    def _long_untouched(self) -> bool:
        newest = 0.0
        for place in (self.path, os.path.join(self.path, "done"), os.path.join(self.path, "sources")):
            with contextlib.suppress(OSError):
                newest = max(newest, store_of(place).status(place).modified / _SECOND)
        return time.time() - newest > _LONG_UNTOUCHED

    def remove_dead_signs(self) -> None:
        """Remove files of dead runs, if possible; runs that were taken for dead notice it."""
        store_of(self.path).remove_dead_signs(self.path)

    def remove(self) -> None:
        """Remove the records, and no other files in their directories; files that cannot be removed stay."""
        for kind, ours in self._kinds.items():
            _clear(os.path.join(self.path, kind), ours)
        _clear(self.path, lambda name: name in _FILES or self._ours(name))


def _clear(path: str, ours: Callable[[str], bool]) -> None:
    """Remove our files from a directory as far as possible, and the directory if it is empty then."""

    def remove(file: str) -> None:
        with contextlib.suppress(OSError):
            store_of(file).remove(file)

    store = store_of(path)
    store.remove_dead_signs(path)
    with contextlib.suppress(OSError):
        names = list(filter(ours, store.own_names(path)))
        for_each(remove, [f"{path}/{name}" for name in names if name not in _LAST])
        for name in _LAST:
            if name in names:
                remove(f"{path}/{name}")
        store.remove_empty_directory(path)
