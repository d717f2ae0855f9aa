"""What a target directory may hold before anything is written into it.

Nothing is ever replaced that this conversion would not write itself, and no checkpoint of another
conversion may remain beside the new ones, where a training job would load the two as one.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from typing import Callable, NamedTuple, Optional, Union

from reshard.errors import TargetError, UnwritableError, UsageError
from reshard.forms.target import UNFINISHED
from reshard.storage import (
    FileStatus,
    exists,
    for_each,
    is_directory,
    is_regular_file,
    names_in,
    real,
    same_store,
    status_at,
    status_error,
    status_of_each,
    store_of,
    writing_error,
)

_RANK_DIRECTORY = re.compile(r"rank_?\d+|\d+")
_CHECKPOINT_ENDINGS = (".ckpt", ".safetensors")


class Destination:
    """A target directory.

    Args:
        path: the directory; it need not exist.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def checkpoints(self, directories: Collection[str], others: bool = True) -> list[str]:
        """Checkpoint files in some of its directories, by name relative to it, sorted.

        Args:
            directories: where to look, relative to it; an empty name stands for itself.
            others: look into all rank directories too.

        Raises:
            TargetError: it is something else than a directory.
            RetryableError: it cannot be read.
        """
        there = status_at(self.path)
        if not there.directory if there is not None else exists(self.path):
            raise TargetError(f"{self.path} is not a directory", file=self.path, hint="choose another DST")
        entries = set(directories)
        if others:
            # One listing tells which of many rank directories are there.
            entries = {name for name in entries if not _RANK_DIRECTORY.fullmatch(name)}
            entries.update(filter(_RANK_DIRECTORY.fullmatch, names_in(self.path)))
        # A directory that another run which gave up has removed meanwhile holds nothing.
        ordered = sorted(entries)
        listed = for_each(names_in, [os.path.join(self.path, entry) if entry else self.path for entry in ordered])
        return sorted(
            os.path.join(entry, name)
            for entry, names in zip(ordered, listed)
            for name in names
            if name.endswith(_CHECKPOINT_ENDINGS) and name != UNFINISHED
        )

    def check(self, writing: Iterable[str]) -> dict[str, str]:
        """Refuse to write where something else stands, or through links.

        Args:
            writing: files that will be written, by name.

        Returns:
            The versions of those that are there, by name; empty texts in a store that has none.

        Raises:
            TargetError: there is something that is no file, or a directory is a link that leads elsewhere.
        """
        names = list(writing)
        found: dict[str, str] = {}
        for name, status in zip(names, status_of_each([self._path(name) for name in names], through_links=False)):
            path = self._path(name)
            if not self._inside(name):
                raise TargetError(
                    f"{path}: its directory is a link that leads elsewhere",
                    file=path,
                    hint="remove the link, or choose another DST",
                )
            if status is not None and not status.regular and not is_regular_file(path):
                raise TargetError(f"{path} is not a regular file", file=path, hint="remove it, or choose another DST")
            if status is not None:
                found[name] = status.version
        return found

    def files(self, names: Iterable[str]) -> dict[str, FileStatus]:
        """The status of those of some names, relative to it, that are files there, not through links.

        Raises:
            ReshardError: one cannot be looked at.
        """
        inside = [name for name in names if self._inside(name)]
        found = status_of_each([self._path(name) for name in inside], through_links=False)
        return {name: status for name, status in zip(inside, found) if status is not None and status.regular}

    def remove(self, name: str, same: Callable[[FileStatus], bool]) -> None:
        """Remove a file if its status is as expected, for good, and its directories that hold nothing else.

        What lies behind a link stays.

        Raises:
            ReshardError: it cannot be removed.
        """
        if not self._inside(name):
            return
        path = self._path(name)
        store = store_of(path)
        try:
            store.remove(path, if_same=lambda status: status.regular and same(status))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise writing_error(path, error, "removed") from error
        directory = os.path.dirname(name)
        with contextlib.suppress(OSError):
            while directory:
                store.remove_directory(self._path(directory))
                directory = os.path.dirname(directory)

    def remove_dead_temporaries(self, directories: Iterable[str], complete: bool = False) -> None:
        """Remove what killed runs left, here and in these directories.

        Args:
            directories: relative to it.
            complete: nothing is left to be written, so that what nobody holds is nobody's, of other machines too.
        """
        places = [self.path, *(os.path.join(self.path, name) for name in directories if name)]
        for_each(lambda place: store_of(place).remove_dead(place, complete), places)

    def _path(self, name: str) -> str:
        return os.path.join(self.path, name)

    def _inside(self, name: str) -> bool:
        """Whether the directory of a file is, or will be, where its name says: on the way to it are no links."""
        above = os.path.normpath(os.path.dirname(name) or os.curdir)
        return above == os.curdir or real(self._path(above)) == os.path.join(real(self.path), above)


def check_bucket(dst: str) -> None:
    """Insist that the bucket of a target directory is there, where it lies in an object store.

    Args:
        dst: as typed.

    Raises:
        UsageError: it is no path that its store can have.
        InputError: there is no such bucket.
    """
    # Who may list a part of a bucket alone is told that all of it may not be listed, where there is one.
    with contextlib.suppress(OSError):
        store_of(dst).check_root(dst)


def check_disjoint(
    src: Union[str, Mapping[int, str]],
    sources: Iterable[str],
    dst: str,
    targets: Iterable[str] = (),
) -> None:
    """Refuse a source and a target of which one contains the other, by whatever names, links or mounts.

    Args:
        src: SRC as typed.
        sources: the source files.
        dst: target directory.
        targets: the target files.

    Raises:
        UsageError: they overlap.
        RetryableError: one of them cannot be looked at.
    """
    if isinstance(src, str) and not same_store(src, dst):
        return
    target = real(dst)
    places = _Places()
    if isinstance(src, str) and is_directory(src):
        root = real(src)
        if _contains(root, target) or _contains(target, root) or places.contains(root, target):
            raise UsageError(
                f"SRC {src} and DST {dst} overlap", file=dst, hint="choose a DST outside the source's directories"
            )
    rank_directories = isinstance(src, str) and "{rank}" in os.path.dirname(src)
    held: dict[Hashable, str] = {}
    for path in sources:
        place_of_file = real(path)
        if _contains(target, place_of_file) or places.contains(target, place_of_file):
            raise UsageError(f"source file {path} lies in DST {dst}", file=path, hint="choose another DST")
        if rank_directories and _contains(os.path.dirname(place_of_file), target):
            raise UsageError(f"DST {dst} lies beside source file {path}", file=path, hint="choose another DST")
        for name in (place_of_file, os.path.dirname(place_of_file)):
            place = places.of(name)
            if place is not None:
                held.setdefault(place, path)
    for path in targets:
        place_of_file = real(path)
        source = held.get(places.of(place_of_file), held.get(places.of(os.path.dirname(place_of_file))))
        if source is not None:
            raise UsageError(
                f"{path} is, by another name, where source file {source} lies", file=path, hint="choose another DST"
            )


def check_apart(target: str, sources: Iterable[str], strategies: Iterable[str]) -> None:
    """Refuse to replace what a target is made from by the target, or what is no file.

    Args:
        target: a file that is to be written, wherever it lies; beside source files, too.
        sources: the source files.
        strategies: files or directories.

    Raises:
        UsageError: the target is one of them, by whatever name, or a file of a strategy directory.
        TargetError: something that is no file stands there.
        RetryableError: one of them cannot be looked at.
    """
    places = _Places()
    place, around = places.of(target), places.of(os.path.dirname(target))
    if place is not None:
        inputs = [*((path, "source file") for path in sources), *((path, "strategy") for path in strategies)]
        for path, what in inputs:
            if places.of(path) in (place, around):
                raise UsageError(f"{target} is {what} {path}, or lies in it", file=target, hint="choose another name")
    Destination(os.path.dirname(target)).check([os.path.basename(target)])


class _Places:
    """Where files and directories lie: the same place may have several names, as mounts have."""

    def __init__(self) -> None:
        self._known: dict[str, Optional[Hashable]] = {}

    def of(self, path: str) -> Optional[Hashable]:
        """The place of a path; None where there is nothing."""
        if path not in self._known:
            with _asking(path):
                self._known[path] = store_of(path).place(path)
        return self._known[path]

    def contains(self, directory: str, path: str) -> bool:
        """Whether a directory is a path, or one of the directories above it."""
        place = self.of(directory)
        while place is not None:
            if self.of(path) == place:
                return True
            above = os.path.dirname(path)
            if above == path:
                break
            path = above
        return False


class Space(NamedTuple):
    """Room on a file system.

    Attributes:
        place: a directory on it, below which files will be written.
        needed: bytes that will be written to it.
        free: bytes that may be; None where it does not say.
    """

    place: str
    needed: int
    free: Optional[int]

    @property
    def problem(self) -> Optional[str]:
        """In words, that there is not enough; None where there is."""
        if self.free is None or self.needed <= self.free:
            return None
        return f"{self.place}: {self.needed:,} bytes are needed, but its file system has {self.free:,} free"


def space_for(needed: Iterable[tuple[str, int]]) -> list[Space]:
    """The room that every file system has that will be written to, and what of it is needed.

    Args:
        needed: directories, existing or not, and bytes that will be written to each.

    Raises:
        RetryableError: a file system cannot be asked.
    """
    places: dict[int, str] = {}
    totals: Counter[int] = Counter()
    for directory, count in needed:
        with _asking(directory):
            volume = store_of(directory).volume(directory)
        if volume is not None:
            device, place = volume
            places.setdefault(device, place)
            totals[device] += count
    found = []
    for device, place in places.items():
        with _asking(place):
            found.append(Space(place, totals[device], store_of(place).free(place)))
    return found


def check_space(spaces: Iterable[Space]) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        UnwritableError: some file system has less free space than is needed on it.
    """
    for space in spaces:
        if space.problem is not None:
            raise UnwritableError(space.problem, file=space.place, hint="free some space or choose another DST")


@contextlib.contextmanager
def _asking(path: str) -> Iterator[None]:
    """Turn what the file system says into an error that names the path."""
    try:
        yield
    except OSError as error:
        raise status_error(path, error) from error


def _contains(directory: str, path: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
