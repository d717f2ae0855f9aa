"""Files and directories of records, with errors that name them.

Stores reach them without following links below ``DST/.reshard``: other users with write access to a target
directory could replace a directory of records with a link, and have files elsewhere listed, made and removed.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from typing import Callable, Optional

from reshard.storage import for_each, status_error, store_of, writing_error
from reshard.storage.directories import not_ours

IN_ORDER = ("plan.json", "replaced")
"""Records to remove last, in this order: the identity, and the mark of its replacement."""


def names_in(path: str) -> list[str]:
    """The names in a directory of records, sorted; empty if it is missing.

    Raises:
        TargetError: a part of the path is a link or not a directory.
        ReshardError: it cannot be listed.
    """
    try:
        return sorted(store_of(path).own_names(path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise status_error(path, error) from error


@contextlib.contextmanager
def try_lock(path: str) -> Iterator[Optional[bool]]:
    """As `Store.try_lock`.

    Raises:
        ReshardError: the state of the lock cannot be read.
    """
    with contextlib.ExitStack() as stack:
        try:
            alone = stack.enter_context(store_of(path).try_lock(path))
        except OSError as error:
            raise status_error(path, error) from error
        yield alone


def make_empty(path: str) -> None:
    """Make an empty file if it is missing.

    Raises:
        ReshardError: it cannot be made.
    """
    try:
        store_of(path).make_empty(path)
    except OSError as error:
        raise not_ours(path) if error.errno == errno.ELOOP else writing_error(path, error) from error


def remove(path: str) -> None:
    """Remove a file if it exists.

    Raises:
        ReshardError: it cannot be removed.
    """
    try:
        store_of(path).remove(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise writing_error(path, error) from error


def remove_directory(path: str, ours: Callable[[str], bool]) -> None:
    """Remove our files from a directory, and the directory if it is empty then.

    Files that cannot be removed stay.

    Raises:
        TargetError: a part of the path is a link or not a directory.
    """

    def remove_if_possible(file: str) -> None:
        with contextlib.suppress(OSError):
            store_of(file).remove(file)

    with contextlib.suppress(OSError):
        store = store_of(path)
        names = list(filter(ours, store.own_names(path)))
        for_each(remove_if_possible, [f"{path}/{name}" for name in names if name not in IN_ORDER])
        for name in IN_ORDER:
            if name in names:
                remove_if_possible(f"{path}/{name}")
        store.remove_empty_directory(path)
