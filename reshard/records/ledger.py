"""The records of a conversion in its target directory.

``DST/.reshard/<digest of the identity>/`` holds ``plan.json`` (the identity), ``lock`` (shared by every
run that is writing), and empty files whose *names* are the records: one per finished target in
``done/``, one per source file that a run has read in ``sources/``, and in ``damaged/`` one per source
file whose contents were found damaged, be it of a newer step; beside them ``only.<rank>`` where no other
ranks were asked for, ``replacing.<what>`` while targets are replaced, and ``replaced`` while another
conversion replaces these. An empty file is made in one step on every file system, so a record is there
whole or not at all, two machines cannot tear each other's, and one listing tells everything.
``DST/.reshard/lock`` is held while a run begins or ends, so that nobody decides on what another is
changing.

A new target is recorded after its bytes are on disk under the temporary name and before it gets its
final one, so no finished target is ever without a record. A record without its target, or with one
of another size or time, counts for nothing. Whoever compares looks at the target first and at the
records after, since they come in the other order.

What runs were given lies beside them in files of its own; see `given`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Callable, NamedTuple, Optional

from reshard.errors import ReshardError, RetryableError, TargetError
from reshard.records.given import IS_GIVEN, Given, given_in
from reshard.records.identity import Identity, short_digest
from reshard.records.record_files import make_empty, names_in, remove, remove_directory, try_lock
from reshard.records.sources import SourceFile
from reshard.storage import (
    SIGNS,
    FileStatus,
    Lock,
    Tell,
    UnfitError,
    exists,
    for_each,
    is_regular_file,
    make_directory,
    read_small,
    remove_file,
    store_of,
    write_whole,
    writing_error,
)
from reshard.storage.directories import OWN
from reshard.storage.json_text import JsonError

_OURS = re.compile(r"[0-9a-f]{16}")
_SECOND = 10**9
_NONE = "none"
_REPLACED = "replaced"
_FILES = ("lock", "plan.json", _REPLACED)
_REPLACING = "replacing."
_ONLY = "only."
# Where locks tell nothing, a run that has left no trace for so long is taken for dead.
_LONG_UNTOUCHED = 24 * 3600.0
_TIMES = 100
# A plan holds the patterns of --include and --exclude, which a command line bounds.
_LARGEST_PLAN = 16 << 20


class DoneRecord(NamedTuple):
    """A finished target.

    Attributes:
        rank: target rank.
        size: bytes of its file.
        modified: time of its last change, in nanoseconds.
        headers: digest of all of its bytes that are not tensor contents; None for a file taken over.
        crc: CRC-32 of the whole file, or None.
    """

    rank: int
    size: int
    modified: int
    headers: Optional[str]
    crc: Optional[int]

    def matches(self, status: Optional[FileStatus]) -> bool:
        """Whether a file of this status, looked at before the record was read, is what was written."""
        if status is None:
            return False
        return status.size == self.size and _same_time(status.modified, self.modified)


class SourceChanges(NamedTuple):
    """Source ranks whose files are not as earlier runs found them.

    Attributes:
        content: of another size, with other headers or other contents.
        values: that no earlier run has read, and whose values, such as ``global_step``, are not those of others.
        time: of another time of modification, alike for the rest.
        place: of another inode or time of change, alike for the rest.
    """

    content: list[int]
    values: list[int]
    time: list[int]
    place: list[int]


class Ledger:
    """The records of one conversion.

    Args:
        destination: the target directory.
        identity: which conversion.
        tell: told when another run keeps this one waiting.
    """

    def __init__(self, destination: str, identity: Identity, tell: Tell = lambda text: None) -> None:
        self.identity = identity
        self._tell = tell
        self._destination = destination
        self._root = os.path.join(destination, OWN)
        self._own = os.path.join(self._root, identity.digest)
        self._writing: Optional[Lock] = None
        self._made_destination = False

    @property
    def exists(self) -> bool:
        """Whether some run of this conversion has begun."""
        return is_regular_file(os.path.join(self._own, "plan.json"))

    @property
    def in_use(self) -> bool:
        """Whether some run is writing at this moment, as far as locks tell."""
        with try_lock(os.path.join(self._own, "lock")) as alone:
            return alone is False

    @property
    def replaced(self) -> bool:
        """Whether another conversion has begun to replace all targets of this one."""
        return exists(os.path.join(self._own, _REPLACED))

    def others(self) -> list[Ledger]:
        """The records of all other conversions in the same directory, current or being replaced."""
        return [found for found in ledgers_in(self._destination) if found.identity != self.identity]

    @contextlib.contextmanager
    def guarded(self) -> Iterator[Callable[[], None]]:
        """Keep other runs from beginning or ending in the same directory while this block runs.

        The block is given what insists that this is so, as it is to do before anything that cannot be undone; it
        raises `OSError`.

        Raises:
            TargetError: what should be the records' directory is something else.
            RetryableError: it cannot be written, or another run takes too long.
        """
        try:
            self._made_destination = make_directory(self._destination) or self._made_destination
            self._make_root()
            self._check_own()
            with store_of(self._root).lock(os.path.join(self._root, "lock"), self._make_root, self._tell) as check:
                yield check
        except OSError as error:
            raise writing_error(self._root, error) from error

    def _nobody_writes(self) -> bool:
        with try_lock(os.path.join(self._own, "lock")) as alone:
            return alone is True or (alone is None and _long_untouched(self._own))

    def _nothing_done(self) -> bool:
        """Whether no target is recorded; unlike by `done`, a directory that is not found is not an empty one.

        Raises:
            OSError: it cannot be looked at, or is not found, though it was made.
        """
        return not any(map(_parsed, store_of(self._own).own_names(os.path.join(self._own, "done"))))

    def _make_own(self) -> None:
        paths = [self._own, *(os.path.join(self._own, name) for name in ("done", "sources"))]
        for_each(store_of(self._own).make_empty_directory, paths)

    def _marks(self) -> list[str]:
        return [name for name in names_in(self._own) if name.startswith(_REPLACING)]

    def _make_root(self) -> None:
        for _ in range(_TIMES):
            # Another run that ends may remove it, or DST, at any moment before it is locked.
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                make_directory(self._root)
                return
            if exists(self._root):
                return

    def _check_own(self) -> None:
        """Refuse links and the like in the place of records, of this conversion or of others."""
        store = store_of(self._root)
        if not store.special_files:
            return
        store.check_own(self._root, directory=True)
        store.check_own(os.path.join(self._root, "lock"), directory=False)
        for conversion in filter(_OURS.fullmatch, names_in(self._root)):
            path = os.path.join(self._root, conversion)
            for directory in _RECORDS:
                store.check_own(os.path.join(path, directory), directory=True)
            for name in _FILES:
                store.check_own(os.path.join(path, name), directory=False)

    def begin(self, replacing: bool = False) -> None:
        """Say that this conversion is writing here, until `end`; to be called `guarded`.

        Sources of runs that ended before they had finished anything are forgotten.

        Args:
            replacing: all targets of other conversions are to be replaced or removed, so their records
                stay, marked; else they are forgotten: the caller has seen that none of these targets is
                left, or that all will be written anew.

        Raises:
            TargetError: another conversion is writing here at this moment.
            RetryableError: the directory cannot be written.
        """
        store = store_of(self._root)
        try:
            names = names_in(self._root)
            if any(name.startswith(SIGNS) for name in names):
                store.remove_dead_signs(self._root)
            begun = list(filter(_OURS.fullmatch, names))
            others = [name for name in begun if name != self.identity.digest]
            for name in others:
                self._refuse_alive(name)
            for name in others:
                # What has no plan wrote nothing that is to be replaced.
                if replacing and "plan.json" in store.own_names(os.path.join(self._root, name)):
                    make_empty(os.path.join(self._root, name, _REPLACED))
                    # Runs that were taken for dead learn of it by that, see `insist`.
                    store.remove_dead_signs(os.path.join(self._root, name))
                else:
                    _remove_records(os.path.join(self._root, name))
            if self.identity.digest in begun:
                remove(os.path.join(self._own, _REPLACED))
                self._make_own()
                if self._nothing_done() and self._nobody_writes():
                    if self._marks():
                        # A run that replaces targets goes on, though none was replaced yet.
                        self.forget_sources()
                    else:
                        _remove_records(self._own)
                        self._make_own()
            else:
                self._make_own()
            self._writing = store.share(os.path.join(self._own, "lock"), self._tell)
            store.remove_dead_signs(self._own)
            path = os.path.join(self._own, "plan.json")
            if not exists(path):
                write_whole(path, (self.identity.to_json() + "\n").encode())
        except OSError as error:
            raise writing_error(self._root, error) from error

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator[str]:
        """A file that is there while this block runs, for others that write on behalf of this run; its path.

        Where locks do not reach other machines, it has to be touched now and then.

        Raises:
            RetryableError: it cannot be made.
        """
        try:
            sign = store_of(self._own).sign_in(self._own)
        except OSError as error:
            raise writing_error(self._own, error) from error
        try:
            yield sign.path
        finally:
            sign.release()

    def insist(self) -> None:
        """Insist that no other run has taken this one for dead, as after a night of a laptop's sleep.

        Raises:
            RetryableError: one has, or nobody can tell.
        """
        if self._writing is not None:
            try:
                self._writing.check()
            except OSError as error:
                raise writing_error(self._root, error) from error

    def end(self) -> None:
        """This run writes no more. Records of nothing are removed, unless another run is writing."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.release()
        # What cannot be tidied up does no harm.
        with contextlib.suppress(OSError, ReshardError):
            if not self._nothing_done():
                return
            with self.guarded():
                with try_lock(os.path.join(self._own, "lock")) as alone:
                    if alone is not True or not self._nothing_done() or self._marks():
                        return
                    _remove_records(self._own)
                if any(name != "lock" for name in names_in(self._root)):
                    return
                remove_file(os.path.join(self._root, "lock"))
                store_of(self._root).remove_directory(self._root)
            if self._made_destination:
                store_of(self._destination).remove_directory(self._destination)

    def only(self) -> Optional[set[int]]:
        """The ranks that alone were asked for; None where all were."""
        found = {int(name[len(_ONLY) :]) for name in names_in(self._own) if re.fullmatch(_ONLY + "[0-9]+", name)}
        return found or None

    def ask_only(self, ranks: Collection[int]) -> None:
        """Remember that these ranks were asked for; once all were, it makes no difference."""
        if self.only() is not None or not self.done():
            self._mark_each("", [f"{_ONLY}{rank}" for rank in ranks])

    def ask_all(self) -> None:
        """Remember that all ranks were asked for."""
        self._remove_each("", [f"{_ONLY}{rank}" for rank in self.only() or ()])

    def compare_sources(self, sources: Iterable[SourceFile]) -> SourceChanges:
        """Compare source files with what earlier runs of this conversion read."""
        before: dict[int, list[SourceFile]] = {}
        values: dict[str, set[str]] = {}
        for known in _sources_in(os.path.join(self._own, "sources")):
            before.setdefault(known.rank, []).append(known)
            values.setdefault(known.value_names, set()).add(known.values)
        changes = SourceChanges([], [], [], [])
        for source in sources:
            found = before.get(source.rank, [])
            if any(one.content != source.content for one in found):
                changes.content.append(source.rank)
            elif not found and source.values not in values.get(source.value_names, {source.values}):
                changes.values.append(source.rank)
            elif found and not any(_same_time(source.modified, one.modified) for one in found):
                changes.time.append(source.rank)
            elif found and not any(one.place == source.place for one in found):
                changes.place.append(source.rank)
        return changes

    def add_sources(self, sources: Iterable[SourceFile]) -> None:
        """Remember source files, instead of those of the same ranks whose content is another."""
        known: dict[int, list[SourceFile]] = {}
        for found in _sources_in(os.path.join(self._own, "sources")):
            known.setdefault(found.rank, []).append(found)
        new: list[str] = []
        old: list[str] = []
        for source in sources:
            others = known.get(source.rank, [])
            if source not in others:
                new.append(source.record)
            old.extend(other.record for other in others if other.content != source.content)
        self._mark_each("sources", new)
        self._remove_each("sources", old)

    def damaged(self) -> set[SourceFile]:
        """Source files that a conversion into this directory found damaged, be it one of an older step."""
        return {
            found
            for name in filter(_OURS.fullmatch, names_in(self._root))
            for found in _sources_in(os.path.join(self._root, name, "damaged"))
        }

    def add_damaged(self, sources: Iterable[SourceFile]) -> None:
        """Remember source files whose contents are damaged."""
        names = [source.record for source in sources]
        if names:
            damaged = os.path.join(self._own, "damaged")
            store_of(damaged).make_empty_directory(damaged)
            self._mark_each("damaged", names)

    def add_given(self, given: Given) -> None:
        """Remember what a run was given.

        Raises:
            RetryableError: it cannot be written down.
        """
        try:
            given.write(self._own)
        except OSError as error:
            raise writing_error(self._own, error) from error

    def forget_given(self) -> None:
        """Everything is made anew, perhaps of other files."""
        for name in filter(IS_GIVEN.fullmatch, names_in(self._own)):
            remove(os.path.join(self._own, name))

    def given(self) -> list[Given]:
        """What runs were given, the last that was begun first.

        Raises:
            TargetError: a record is damaged, or of another version.
            RetryableError: one cannot be read.
        """
        return given_in(self._own)

    def forget_sources(self) -> None:
        """Everything is made anew, perhaps of other files."""
        self._remove_each("sources", names_in(os.path.join(self._own, "sources")))

    def done(self, ranks: Optional[Collection[int]] = None) -> dict[int, list[DoneRecord]]:
        """Records of finished targets, by rank; several where several runs have made the same."""
        found: dict[int, list[DoneRecord]] = {}
        for name in names_in(os.path.join(self._own, "done")):
            record = _parsed(name)
            if record is not None and (ranks is None or record.rank in ranks):
                found.setdefault(record.rank, []).append(record)
        return found

    def record(self, record: DoneRecord, flush: bool) -> None:
        """Remember that a target is finished.

        Args:
            record: the target.
            flush: see that the record outlasts a crash before the target gets its name.

        Raises:
            RetryableError: it cannot be written down.
        """
        crc = _NONE if record.crc is None else f"{record.crc:08x}"
        headers = _NONE if record.headers is None else record.headers
        self._mark("done", f"{record.rank}.{record.size}.{record.modified}.{headers}.{crc}")
        if flush:
            try:
                store_of(self._own).flush(os.path.join(self._own, "done"))
            except OSError as error:
                raise writing_error(self._own, error) from error

    def forget(self, ranks: Collection[int]) -> None:
        """Forget that targets are finished, because they are to be made again."""
        chosen = set(ranks)
        found = {name: _parsed(name) for name in names_in(os.path.join(self._own, "done"))}
        self._remove_each("done", [name for name, one in found.items() if one is None or one.rank in chosen])

    def replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> bool:
        """Whether a run that replaces targets of these ranks, from these sources, was begun and has not ended."""
        return exists(os.path.join(self._own, _replacing(ranks, sources)))

    def is_replacing(self, ranks: Optional[Collection[int]] = None) -> bool:
        """Whether a run that replaces targets, of just these ranks or of any, was begun and has not ended."""
        start = "replacing." if ranks is None else _replacing(ranks, ()).rsplit(".", 1)[0] + "."
        return any(name.startswith(start) for name in self._marks())

    def begin_replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> None:
        """Remember that all targets of these ranks are to be made again, until `end_replacing`."""
        self.end_replacing(ranks)
        self.forget(ranks)
        self._mark("", _replacing(ranks, sources))

    def end_replacing(self, ranks: Optional[Collection[int]] = None) -> None:
        """All of these ranks, or of all, have been made."""
        start = _REPLACING if ranks is None else _replacing(ranks, ()).rsplit(".", 1)[0] + "."
        for name in names_in(self._own):
            if name.startswith(start):
                remove(os.path.join(self._own, name))

    def remove(self) -> None:
        """Remove the records; nothing else that may lie there."""
        _remove_records(self._own)

    def _mark(self, directory: str, name: str) -> None:
        make_empty(os.path.join(self._own, directory, name))

    def _mark_each(self, directory: str, names: Iterable[str]) -> None:
        for_each(make_empty, [os.path.join(self._own, directory, name) for name in names])

    def _remove_each(self, directory: str, names: Iterable[str]) -> None:
        for_each(remove, [os.path.join(self._own, directory, name) for name in names])

    def _refuse_alive(self, name: str) -> None:
        path = os.path.join(self._root, name)
        with try_lock(os.path.join(path, "lock")) as alone:
            if alone is False or (alone is None and not _long_untouched(path)):
                raise TargetError(
                    f"another conversion is being written to {self._destination} at this moment",
                    file=self._destination,
                    hint="wait until it has ended, or choose another DST"
                    + ("" if alone is False else f"; if it is dead, remove {os.path.join(path, 'lock')}"),
                )


def current(ledgers: Collection[Ledger]) -> list[Ledger]:
    """Those conversions of a directory that no other one is replacing; one, unless something went wrong."""
    # What was to replace them may have ended before it had begun.
    return [ledger for ledger in ledgers if not ledger.replaced] or list(ledgers)


def ledgers_in(destination: str) -> list[Ledger]:
    """The records of every conversion in a directory.

    Raises:
        TargetError: a record is not what a run of ours writes.
        RetryableError: the records cannot be read.
    """
    root = os.path.join(destination, OWN)
    found = []
    for name in filter(_OURS.fullmatch, names_in(root)):
        path = os.path.join(root, name, "plan.json")
        try:
            store_of(path).check_own(path, directory=False)
            identity = Identity.from_json(read_small(path, _LARGEST_PLAN, through_links=False))
        except (FileNotFoundError, NotADirectoryError):
            # Killed before it said what it is: nothing was written by it.
            continue
        except JsonError as error:
            raise _foreign(path, f"is damaged: {error}") from error
        except UnfitError as error:
            raise _foreign(path, str(error)) from error
        except OSError as error:
            raise RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path) from error
        if identity.digest != name:
            raise _foreign(path, "says something else than when it was written")
        found.append(Ledger(destination, identity))
    return found


def _foreign(path: str, what: str) -> TargetError:
    return TargetError(
        f"{path}: {what}; it is no record of reshard",
        file=path,
        hint=f"choose another DST, or remove {os.path.dirname(path)} if nothing else uses it",
    )


def _replacing(ranks: Collection[int], sources: Iterable[SourceFile]) -> str:
    """The name that marks a run that replaces targets: what it replaces, and from which sources."""
    what = short_digest(repr(sorted(ranks)).encode())
    whence = short_digest(repr(sorted(sources)).encode())
    return f"{_REPLACING}{what}.{whence}"


def _remove_records(path: str) -> None:
    """Remove a conversion's records, and nothing else that may lie there.

    Raises:
        TargetError: a link or something else stands in the place of records.
    """
    store = store_of(path)
    for name, ours in _RECORDS.items():
        store.remove_dead_signs(os.path.join(path, name))
        remove_directory(os.path.join(path, name), ours)
    store.remove_dead_signs(path)
    remove_directory(path, _is_own)


def _is_own(name: str) -> bool:
    """Whether a file of a conversion's own directory is one of its records."""
    return name in _FILES or name.startswith((_REPLACING, _ONLY, *SIGNS)) or IS_GIVEN.fullmatch(name) is not None


def _long_untouched(path: str) -> bool:
    """Whether nothing was recorded for long, where locks do not tell who lives."""
    newest = 0.0
    for place in (path, os.path.join(path, "done"), os.path.join(path, "sources")):
        with contextlib.suppress(OSError):
            newest = max(newest, store_of(place).status(place).modified / _SECOND)
    return time.time() - newest > _LONG_UNTOUCHED


def _same_time(found: int, recorded: int) -> bool:
    """Whether a file's time is the recorded one; some file systems keep whole seconds only."""
    return found == recorded or found == recorded // _SECOND * _SECOND


def _parsed(name: str) -> Optional[DoneRecord]:
    try:
        rank, size, modified, headers, crc = name.split(".")
        digest, checksum = None if headers == _NONE else headers, None if crc == _NONE else int(crc, 16)
        return DoneRecord(int(rank), int(size), int(modified), digest, checksum)
    except ValueError:
        return None


def _sources_in(directory: str) -> Iterator[SourceFile]:
    """The source files whose records lie in a directory."""
    return filter(None, map(SourceFile.parse, names_in(directory)))


# The directories of a conversion's records, and what the names in them are.
_RECORDS: dict[str, Callable[[str], bool]] = {
    "done": lambda name: _parsed(name) is not None,
    "sources": lambda name: SourceFile.parse(name) is not None,
    "damaged": lambda name: SourceFile.parse(name) is not None,
}
