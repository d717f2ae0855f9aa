"""The records of a conversion in its target directory.

``DST/.reshard/<digest of the identity>/`` holds ``plan.json`` (the identity), ``lock`` (shared by all
writing runs), and empty files whose *names* are the records: one per finished target in
``done/``, one per source file that a run has read in ``sources/``, and one per damaged source file in
``damaged/``, including files of newer steps. Other names are ``only.<rank>`` if only these ranks were requested,
``replacing.<what>`` while targets are replaced, and ``replaced`` while another
conversion replaces these. Every file system creates an empty file atomically: a record is
complete or missing, machines cannot damage each other's, and one listing reads all.
Each run holds ``DST/.reshard/lock`` while it begins or ends, so that no run decides on what another is
changing.

A new target is recorded after its bytes are on disk under the temporary name and before it gets its
final one, so every finished target has a record. A record without its target, or with one
of another size or time, is ignored. Comparisons read the target's status first and the
records after it, since they are written in the other order.

Commands are recorded next to them in files of their own; see `commands`.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator
from typing import Callable, NamedTuple, Optional

from reshard.errors import ReshardError, RetryableError, TargetError
from reshard.records.commands import IS_COMMAND, RecordedCommand, commands_in
from reshard.records.identity import Identity, short_digest
from reshard.records.record_files import make_empty, names_in, remove, remove_directory, try_lock
from reshard.records.sources import SourceFile
from reshard.storage import (
    SIGNS,
    FileStatus,
    Lock,
    Notify,
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
# Age in seconds at which an unchanged run counts as dead where locks do not work.
_LONG_UNTOUCHED = 24 * 3600.0
_TIMES = 100
# The plan contains the patterns of --include and --exclude, whose size the command line limits.
_MAX_PLAN_BYTES = 16 << 20


class DoneRecord(NamedTuple):
    """A finished target.

    Attributes:
        rank: target rank.
        size: bytes of its file.
        modified: time of last modification, in nanoseconds.
        headers: digest of all its bytes except tensor contents; None for a copied file.
        crc: CRC-32 of the whole file, or None.
    """

    rank: int
    size: int
    modified: int
    headers: Optional[str]
    crc: Optional[int]

    def matches(self, status: Optional[FileStatus]) -> bool:
        """Whether a file with this status is the recorded one; read the status before the record."""
        if status is None:
            return False
        return status.size == self.size and _same_time(status.modified, self.modified)


class SourceChanges(NamedTuple):
    """Source ranks whose files differ from the records of earlier runs.

    Attributes:
        content: size, headers or contents differ.
        values: not read before, and values such as ``global_step`` differ from those of other ranks.
        time: only the time of modification differs.
        place: only inode or time of change differ.
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
        notify: called when another run keeps this one waiting.
    """

    def __init__(self, destination: str, identity: Identity, notify: Notify = lambda text: None) -> None:
        self.identity = identity
        self._notify = notify
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
        """Whether a run is writing, as far as locks show."""
        with try_lock(os.path.join(self._own, "lock")) as alone:
            return alone is False

    @property
    def replaced(self) -> bool:
        """Whether another conversion has begun to replace all targets of this one."""
        return exists(os.path.join(self._own, _REPLACED))

    def others(self) -> list[Ledger]:
        """The records of all other conversions in the same directory, current or being replaced."""
        return [ledger for ledger in ledgers_in(self._destination) if ledger.identity != self.identity]

    @contextlib.contextmanager
    def guarded(self) -> Iterator[Callable[[], None]]:
        """Keep other runs from beginning or ending in the same directory while this block runs.

        Yields a check to call before every irreversible action: it raises `OSError` if the lock is
        lost.

        Raises:
            TargetError: the records' directory is a link or another kind of file.
            RetryableError: it cannot be written, or another run holds the lock for too long.
        """
        try:
            self._made_destination = make_directory(self._destination) or self._made_destination
            self._make_root()
            self._check_own()
            with store_of(self._root).lock(os.path.join(self._root, "lock"), self._make_root, self._notify) as check:
                yield check
        except OSError as error:
            raise writing_error(self._root, error) from error

    def _is_idle(self) -> bool:
        with try_lock(os.path.join(self._own, "lock")) as alone:
            return alone is True or (alone is None and _long_untouched(self._own))

    def _nothing_done(self) -> bool:
        """Whether no target is recorded; unlike in `done`, a missing directory does not count as empty.

        Raises:
            OSError: it cannot be listed, or is missing although it was made.
        """
        return not any(map(_parsed, store_of(self._own).own_names(os.path.join(self._own, "done"))))

    def _make_own(self) -> None:
        paths = [self._own, *(os.path.join(self._own, name) for name in ("done", "sources"))]
        for_each(store_of(self._own).make_empty_directory, paths)

    def _marks(self) -> list[str]:
        return [name for name in names_in(self._own) if name.startswith(_REPLACING)]

    def _make_root(self) -> None:
        for _ in range(_TIMES):
            # Another run that ends may remove it, or DST, until it is locked.
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                make_directory(self._root)
                return
            if exists(self._root):
                return

    def _check_own(self) -> None:
        """Refuse links and other kinds of files in the place of records, of this conversion or of others."""
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
        """Record that this conversion is writing here, until `end`; to be called `guarded`.

        Sources of runs that ended without a finished target are forgotten.

        Args:
            replacing: all targets of other conversions will be replaced or removed, so their records
                stay, marked. Otherwise they are forgotten: the caller has checked that no such target is
                left, or that all will be rewritten.

        Raises:
            TargetError: another conversion is writing here.
            RetryableError: the directory cannot be written.
        """
        store = store_of(self._root)
        try:
            names = names_in(self._root)
            if any(name.startswith(SIGNS) for name in names):
                store.remove_dead_signs(self._root)
            begun = list(filter(_OURS.fullmatch, names))
            foreign = [name for name in begun if name != self.identity.digest]
            for name in foreign:
                self._refuse_alive(name)
            for name in foreign:
                # A record without a plan was created before any target was written.
                if replacing and "plan.json" in store.own_names(os.path.join(self._root, name)):
                    make_empty(os.path.join(self._root, name, _REPLACED))
                    # The removal informs runs that were taken for dead, see `insist`.
                    store.remove_dead_signs(os.path.join(self._root, name))
                else:
                    _remove_records(os.path.join(self._root, name))
            if self.identity.digest in begun:
                remove(os.path.join(self._own, _REPLACED))
                self._make_own()
                if self._nothing_done() and self._is_idle():
                    if self._marks():
                        # A run that replaces targets may continue before the first is replaced.
                        self.forget_sources()
                    else:
                        _remove_records(self._own)
                        self._make_own()
            else:
                self._make_own()
            self._writing = store.share(os.path.join(self._own, "lock"), self._notify)
            store.remove_dead_signs(self._own)
            path = os.path.join(self._own, "plan.json")
            if not exists(path):
                write_whole(path, (self.identity.to_json() + "\n").encode())
        except OSError as error:
            raise writing_error(self._root, error) from error

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator[str]:
        """A file that exists while this block runs, for other processes that write for this run; its path.

        Where locks do not reach other machines, it has to be touched from time to time.

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
        """Raise if another run has taken this one for dead, for example after the machine was suspended.

        Raises:
            RetryableError: it has, or the state of the lock is unknown.
        """
        if self._writing is not None:
            try:
                self._writing.check()
            except OSError as error:
                raise writing_error(self._root, error) from error

    def end(self) -> None:
        """End writing. Empty records are removed, unless another run is writing."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        writing.release()
        # A failed cleanup is harmless.
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
        """The only requested ranks; None if all were requested."""
        ranks = {int(name[len(_ONLY) :]) for name in names_in(self._own) if re.fullmatch(_ONLY + "[0-9]+", name)}
        return ranks or None

    def ask_only(self, ranks: Collection[int]) -> None:
        """Record that these ranks were requested; no effect once all were."""
        if self.only() is not None or not self.done():
            self._mark_each("", [f"{_ONLY}{rank}" for rank in ranks])

    def ask_all(self) -> None:
        """Record that all ranks were requested."""
        self._remove_each("", [f"{_ONLY}{rank}" for rank in self.only() or ()])

    def compare_sources(self, sources: Iterable[SourceFile]) -> SourceChanges:
        """Compare source files with the records of earlier runs."""
        before: dict[int, list[SourceFile]] = {}
        values: dict[str, set[str]] = {}
        for file in _sources_in(os.path.join(self._own, "sources")):
            before.setdefault(file.rank, []).append(file)
            values.setdefault(file.value_names, set()).add(file.values)
        changes = SourceChanges([], [], [], [])
        for source in sources:
            recorded = before.get(source.rank, [])
            if any(one.content != source.content for one in recorded):
                changes.content.append(source.rank)
            elif not recorded and source.values not in values.get(source.value_names, {source.values}):
                changes.values.append(source.rank)
            elif recorded and not any(_same_time(source.modified, one.modified) for one in recorded):
                changes.time.append(source.rank)
            elif recorded and not any(one.place == source.place for one in recorded):
                changes.place.append(source.rank)
        return changes

    def add_sources(self, sources: Iterable[SourceFile]) -> None:
        """Record source files, replacing records of the same ranks with other content."""
        recorded: dict[int, list[SourceFile]] = {}
        for file in _sources_in(os.path.join(self._own, "sources")):
            recorded.setdefault(file.rank, []).append(file)
        new: list[str] = []
        old: list[str] = []
        for source in sources:
            of_rank = recorded.get(source.rank, [])
            if source not in of_rank:
                new.append(source.record)
            old.extend(previous.record for previous in of_rank if previous.content != source.content)
        self._mark_each("sources", new)
        self._remove_each("sources", old)

    def damaged(self) -> set[SourceFile]:
        """Source files that a conversion into this directory found damaged, including files of older steps."""
        return {
            file
            for name in filter(_OURS.fullmatch, names_in(self._root))
            for file in _sources_in(os.path.join(self._root, name, "damaged"))
        }

    def add_damaged(self, sources: Iterable[SourceFile]) -> None:
        """Record source files with damaged contents."""
        names = [source.record for source in sources]
        if names:
            damaged = os.path.join(self._own, "damaged")
            store_of(damaged).make_empty_directory(damaged)
            self._mark_each("damaged", names)

    def add_command(self, command: RecordedCommand) -> None:
        """Record a command.

        Raises:
            RetryableError: it cannot be written.
        """
        try:
            command.write(self._own)
        except OSError as error:
            raise writing_error(self._own, error) from error

    def forget_commands(self) -> None:
        """Remove recorded commands: everything will be rewritten, perhaps from other files."""
        for name in filter(IS_COMMAND.fullmatch, names_in(self._own)):
            remove(os.path.join(self._own, name))

    def commands(self) -> list[RecordedCommand]:
        """The recorded commands, the latest first.

        Raises:
            TargetError: a record is damaged, or of another version.
            RetryableError: one cannot be read.
        """
        return commands_in(self._own)

    def forget_sources(self) -> None:
        """Remove recorded source files: everything will be rewritten, perhaps from other files."""
        self._remove_each("sources", names_in(os.path.join(self._own, "sources")))

    def done(self, ranks: Optional[Collection[int]] = None) -> dict[int, list[DoneRecord]]:
        """Records of finished targets, by rank; a rank has several if several runs wrote it."""
        records: dict[int, list[DoneRecord]] = {}
        for name in names_in(os.path.join(self._own, "done")):
            record = _parsed(name)
            if record is not None and (ranks is None or record.rank in ranks):
                records.setdefault(record.rank, []).append(record)
        return records

    def record(self, record: DoneRecord, flush: bool) -> None:
        """Record a finished target.

        Args:
            record: the target.
            flush: make the record durable before the target gets its name.

        Raises:
            RetryableError: it cannot be written.
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
        """Remove the records of finished targets that will be rewritten."""
        chosen = set(ranks)
        records = {name: _parsed(name) for name in names_in(os.path.join(self._own, "done"))}
        self._remove_each("done", [name for name, one in records.items() if one is None or one.rank in chosen])

    def replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> bool:
        """Whether a run that replaces targets of these ranks, from these sources, has begun and not ended."""
        return exists(os.path.join(self._own, _replacing(ranks, sources)))

    def is_replacing(self, ranks: Optional[Collection[int]] = None) -> bool:
        """Whether a run that replaces targets, of exactly these ranks or of any, has begun and not ended."""
        start = "replacing." if ranks is None else _replacing(ranks, ()).rsplit(".", 1)[0] + "."
        return any(name.startswith(start) for name in self._marks())

    def begin_replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> None:
        """Record that all targets of these ranks will be rewritten, until `end_replacing`."""
        self.end_replacing(ranks)
        self.forget(ranks)
        self._mark("", _replacing(ranks, sources))

    def end_replacing(self, ranks: Optional[Collection[int]] = None) -> None:
        """Record that these ranks, or all, are rewritten."""
        start = _REPLACING if ranks is None else _replacing(ranks, ()).rsplit(".", 1)[0] + "."
        for name in names_in(self._own):
            if name.startswith(start):
                remove(os.path.join(self._own, name))

    def remove(self) -> None:
        """Remove the records, and no other files in their directories."""
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
                    f"another conversion is writing to {self._destination}",
                    file=self._destination,
                    hint="wait until it ends, or choose another DST"
                    + ("" if alone is False else f"; if it is dead, remove {os.path.join(path, 'lock')}"),
                )


def current(ledgers: Collection[Ledger]) -> list[Ledger]:
    """The conversions of a directory that no other one is replacing; usually one."""
    # The replacing run may have ended before it began.
    return [ledger for ledger in ledgers if not ledger.replaced] or list(ledgers)


def ledgers_in(destination: str) -> list[Ledger]:
    """The records of every conversion in a directory.

    Raises:
        TargetError: a record has content that no run of ours writes.
        RetryableError: the records cannot be read.
    """
    root = os.path.join(destination, OWN)
    ledgers = []
    for name in filter(_OURS.fullmatch, names_in(root)):
        path = os.path.join(root, name, "plan.json")
        try:
            store_of(path).check_own(path, directory=False)
            identity = Identity.from_json(read_small(path, _MAX_PLAN_BYTES, through_links=False))
        except (FileNotFoundError, NotADirectoryError):
            # Killed before it wrote its plan: it wrote no targets either.
            continue
        except JsonError as error:
            raise _foreign(path, f"is damaged: {error}") from error
        except UnfitError as error:
            raise _foreign(path, str(error)) from error
        except OSError as error:
            raise RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path) from error
        if identity.digest != name:
            raise _foreign(path, "was changed after it was written")
        ledgers.append(Ledger(destination, identity))
    return ledgers


def _foreign(path: str, problem: str) -> TargetError:
    return TargetError(
        f"{path}: {problem}; it is not a record of reshard",
        file=path,
        hint=f"choose another DST, or remove {os.path.dirname(path)} if nothing else uses it",
    )


def _replacing(ranks: Collection[int], sources: Iterable[SourceFile]) -> str:
    """The name that marks a run that replaces targets: a digest of its ranks and sources."""
    targets = short_digest(repr(sorted(ranks)).encode())
    origins = short_digest(repr(sorted(sources)).encode())
    return f"{_REPLACING}{targets}.{origins}"


def _remove_records(path: str) -> None:
    """Remove a conversion's records, and no other files in their directories.

    Raises:
        TargetError: a link or another kind of file is in the place of records.
    """
    store = store_of(path)
    for name, ours in _RECORDS.items():
        store.remove_dead_signs(os.path.join(path, name))
        remove_directory(os.path.join(path, name), ours)
    store.remove_dead_signs(path)
    remove_directory(path, _is_own)


def _is_own(name: str) -> bool:
    """Whether a file of a conversion's own directory is one of its records."""
    return name in _FILES or name.startswith((_REPLACING, _ONLY, *SIGNS)) or IS_COMMAND.fullmatch(name) is not None


def _long_untouched(path: str) -> bool:
    """Whether nothing was recorded for long, where locks do not show living runs."""
    newest = 0.0
    for place in (path, os.path.join(path, "done"), os.path.join(path, "sources")):
        with contextlib.suppress(OSError):
            newest = max(newest, store_of(place).status(place).modified / _SECOND)
    return time.time() - newest > _LONG_UNTOUCHED


def _same_time(current: int, recorded: int) -> bool:
    """Whether a file's time is the recorded one; some file systems keep whole seconds only."""
    return current == recorded or current == recorded // _SECOND * _SECOND


def _parsed(name: str) -> Optional[DoneRecord]:
    try:
        rank, size, modified, headers, crc = name.split(".")
        digest, checksum = None if headers == _NONE else headers, None if crc == _NONE else int(crc, 16)
        return DoneRecord(int(rank), int(size), int(modified), digest, checksum)
    except ValueError:
        return None


def _sources_in(directory: str) -> Iterator[SourceFile]:
    """The source files recorded in a directory."""
    return filter(None, map(SourceFile.parse, names_in(directory)))


# The directories of a conversion's records, and the parsers of their names.
_RECORDS: dict[str, Callable[[str], bool]] = {
    "done": lambda name: _parsed(name) is not None,
    "sources": lambda name: SourceFile.parse(name) is not None,
    "damaged": lambda name: SourceFile.parse(name) is not None,
}
