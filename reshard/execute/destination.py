"""Checks of the target directory and of free space before anything is written.

A conversion replaces only files that it would write itself. No checkpoint of another conversion may remain beside
the new ones: a training job would load both as one.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

from reshard.errors import TargetError, UsageError
from reshard.forms.target import UNFINISHED
from reshard.storage import (
    exists,
    for_each,
    inspecting,
    is_directory,
    is_regular_file,
    names_in,
    real,
    same_store,
    status_at,
    status_of_each,
    store_of,
)

_RANK_DIRECTORY = re.compile(r"rank_?\d+|\d+")
_CHECKPOINT_ENDINGS = (".ckpt", ".safetensors", ".distcp")
# The directory of a rank in a legacy tree. Elsewhere, files with its ending may be no checkpoints.
_LEGACY_DIRECTORY = re.compile(r"(?:^|/)mp_rank_\d+(?:_\d+)*\Z")
_LEGACY_ENDING = ".pt"


def checkpoints_in(dst: str, directories: Collection[str], all_ranks: bool = True) -> list[str]:
    """Checkpoint files in some directories of a target directory, by name relative to it, sorted.

    Args:
        directories: directories to list, relative to it; an empty name is the target directory itself.
        all_ranks: list all rank directories, too, and those of legacy trees (`mp_rank_00`) there.

    Raises:
        TargetError: the path is not a directory.
        RetryableError: it cannot be read.
    """
    status, dangling = status_at(dst), False
    if status is None and exists(dst):
        # A link that leads nowhere, or a directory that another run has just made.
        status = status_at(dst)
        dangling = status is None
    if dangling or (status is not None and not status.directory):
        raise TargetError(
            f"{dst} is not a directory", file=dst, hint="choose another DST: a new directory, or an empty one"
        )
    # One listing of the target directory instead of a look for each of many rank directories.
    entries = {name for name in directories if not (all_ranks and _RANK_DIRECTORY.fullmatch(name))}
    if all_ranks:
        entries.update([*filter(_RANK_DIRECTORY.fullmatch, names_in(dst)), *_legacy_trees(dst, entries)])
    # A directory that another run has just removed lists as empty.
    ordered = sorted(entries)
    names_by_entry = for_each(names_in, [os.path.join(dst, entry) if entry else dst for entry in ordered])
    return sorted(
        os.path.join(entry, name)
        for entry, names in zip(ordered, names_by_entry)
        for name in names
        if name.endswith(_LEGACY_ENDING if _LEGACY_DIRECTORY.search(entry) else _CHECKPOINT_ENDINGS)
        and name != UNFINISHED
    )


def _legacy_trees(dst: str, directories: Collection[str]) -> Iterator[str]:
    """The iterations of legacy trees among some directories, and the directories of ranks in them."""
    for iteration in {_LEGACY_DIRECTORY.sub("", name) for name in directories} - {""}:
        yield iteration
        names = names_in(os.path.join(dst, iteration))
        yield from (os.path.join(iteration, name) for name in names if _LEGACY_DIRECTORY.search(name))


def existing_files(dst: str, names: Iterable[str]) -> set[str]:
    """The names of a target directory that exist; only regular files are replaced.

    Raises:
        TargetError: one is not a regular file.
    """
    paths = {os.path.join(dst, name): name for name in names}
    existing: set[str] = set()
    for path, status in zip(paths, status_of_each([*paths], through_links=False)):
        if status is not None and not status.regular and not is_regular_file(path):
            raise TargetError(f"{path} is not a regular file", file=path, hint="remove it, or choose another DST")
        if status is not None:
            existing.add(paths[path])
    return existing


def tidy(dst: str, directories: Iterable[str]) -> None:
    """Remove temporary files of killed runs in a target directory and directories relative to it, then empty ones."""
    places = [dst, *(os.path.join(dst, name) for name in directories if name)]
    for_each(lambda place: store_of(place).remove_dead(place), places)
    for place in places[1:]:
        with contextlib.suppress(OSError):
            store_of(place).remove_directory(place)


def check_bucket(dst: str) -> None:
    """Check that the bucket of a target directory in an object store exists.

    Raises:
        UsageError: the path is not valid in its store.
        InputError: the bucket does not exist.
    """
    # Credentials for a part of a bucket may not list its root: that is no error.
    with contextlib.suppress(OSError, ValueError):
        store_of(dst).status(dst)


def check_disjoint(
    src: str | Mapping[int, str],
    sources: Iterable[str],
    dst: str,
    targets: Iterable[str] = (),
) -> None:
    """Refuse a source and a target of which one contains the other, also through links or mounts.

    Raises:
        UsageError: they overlap.
        RetryableError: the status of one cannot be read.
    """
    if isinstance(src, str) and not same_store(src, dst):
        return
    target = real(dst)
    place_of = functools.cache(_place_of)
    if isinstance(src, str) and is_directory(src):
        root = real(src)
        if _contains(root, target) or _contains(target, root) or _leads_to(root, target, place_of):
            raise UsageError(
                f"SRC {src} and DST {dst} overlap", file=dst, hint="choose a DST outside the source's directories"
            )
    rank_directories = isinstance(src, str) and "{rank}" in os.path.dirname(src)
    sources_by_place: dict[Hashable, str] = {}
    for path in sources:
        resolved = real(path)
        if _contains(target, resolved) or _leads_to(target, resolved, place_of):
            raise UsageError(f"source file {path} lies in DST {dst}", file=path, hint="choose another DST")
        if rank_directories and _contains(os.path.dirname(resolved), target):
            raise UsageError(f"DST {dst} lies beside source file {path}", file=path, hint="choose another DST")
        for name in (resolved, os.path.dirname(resolved)):
            place = place_of(name)
            if place is not None:
                sources_by_place.setdefault(place, path)
    for path in targets:
        resolved = real(path)
        beside = sources_by_place.get(place_of(os.path.dirname(resolved)))
        source = sources_by_place.get(place_of(resolved), beside)
        if source is not None:
            raise UsageError(
                f"{path} is another name of a place of source file {source}", file=path, hint="choose another DST"
            )


def check_apart(target: str, sources: Iterable[str], strategies: Iterable[str]) -> None:
    """Refuse a target that would replace an input, or anything but a regular file.

    Args:
        target: a file that will be written; it may lie beside source files.
        sources: the source files.
        strategies: files or directories.

    Raises:
        UsageError: the target is one of them, also by another name, or a file of a strategy directory.
        TargetError: the target exists and is not a regular file.
        RetryableError: the status of one cannot be read.
    """
    place, around = _place_of(target), _place_of(os.path.dirname(target))
    if place is not None:
        inputs = [*((path, "source file") for path in sources), *((path, "strategy") for path in strategies)]
        for path, kind in inputs:
            if _place_of(path) in (place, around):
                raise UsageError(f"{target} is {kind} {path}, or lies in it", file=target, hint="choose another name")
    existing_files(os.path.dirname(target), [os.path.basename(target)])


def _place_of(path: str) -> Hashable | None:
    """The place of a path, which may have several names, through mounts; None if nothing exists there."""
    with inspecting(path):
        return store_of(path).place(path)


def _leads_to(directory: str, path: str, place_of: Callable[[str], Hashable | None]) -> bool:
    """Whether a path lies in a directory, by any of its names."""
    place = place_of(directory)
    while place is not None:
        if place_of(path) == place:
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
        free: free bytes; None if unknown.
    """

    place: str
    needed: int
    free: int | None

    @property
    def problem(self) -> str | None:
        """The message for too little space; None if there is enough."""
        if self.free is None or self.needed <= self.free:
            return None
        return f"{self.place}: {self.needed:,} bytes are needed, but its file system has {self.free:,} free"


def space_for(needed: Iterable[tuple[str, int]]) -> list[Space]:
    """Needed and free space of every file system of the target.

    Raises:
        RetryableError: the free space cannot be read.
    """
    places: dict[int, tuple[str, int | None]] = {}
    totals: Counter[int] = Counter()
    for directory, count in needed:
        with inspecting(directory):
            space = store_of(directory).space(directory)
        if space is not None:
            device, place, free = space
            places.setdefault(device, (place, free))
            totals[device] += count
    return [Space(place, totals[device], free) for device, (place, free) in places.items()]


def _contains(directory: str, path: str) -> bool:
    return path == directory or path.startswith(directory.rstrip("/") + "/")
