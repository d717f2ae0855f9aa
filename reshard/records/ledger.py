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
import itertools
import os
import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Callable, Optional

from reshard.errors import CheckpointError, ReshardError, TargetError
from reshard.forms.ranks import find_checkpoints
from reshard.forms.ranks.rank_files import STRATEGY_FILE
from reshard.forms.ranks.steps import RANK, fixed_directory
from reshard.forms.ranks.tree import RankFile
from reshard.named_tuple import NamedTuple
from reshard.records.commands import RecordedCommand, commands_in, is_command
from reshard.records.identity import Identity, short_digest, strategy_digest
from reshard.records.record_files import PLAN, REPLACED, RecordDirectory, names_in
from reshard.records.sources import SourceFile
from reshard.storage import (
    SIGNS,
    FileStatus,
    Lock,
    Notify,
    UnfitError,
    exists,
    is_directory,
    is_regular_file,
    read_json,
    reading,
    remove_file,
    status_at,
    status_of_each,
    store_of,
    write_whole,
    writing,
)
from reshard.storage.directories import OWN
from reshard.storage.json_text import Fields
from reshard.strategies import NONE, SAME, Strategy, names_files, read_strategy

_OURS = re.compile(r"[0-9a-f]{16}")
_PART_OF_TARGET = re.compile(r"(rank|iteration)_[0-9]+")
_SECOND = 10**9
_NONE = "none"
_REPLACING = "replacing."
_ONLY = "only."
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
        # Not by inode and time of change: the rename after the record, copies with their records, and restored backups
        # have others. A file with another content and the old time is found by its checksum, or with --verify.
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
        self._records = _records(self._root, identity.digest)
        self._writing: Optional[Lock] = None
        self._made_destination = False

    @property
    def exists(self) -> bool:
        """Whether some run of this conversion has begun."""
        return is_regular_file(self._records.plan)

    @property
    def in_use(self) -> bool:
        """Whether a run is writing, as far as locks show."""
        return self._records.in_use

    @property
    def replaced(self) -> bool:
        """Whether another conversion has begun to replace all targets of this one."""
        return self._records.has(REPLACED)

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
        with writing(self._root):
            made = store_of(self._destination).make_directory(self._destination)
            self._made_destination = made or self._made_destination
            self._make_root()
            self._check_own()
        lock = os.path.join(self._root, "lock")
        with contextlib.ExitStack() as stack:
            # The lock may be another user's file in a directory that this one may write to.
            with writing(lock):
                check = stack.enter_context(store_of(self._root).lock(lock, self._make_root, self._notify))
            with writing(self._root):
                yield check

    def _nothing_done(self) -> bool:
        """Whether no target is recorded; unlike in `done`, a missing directory does not count as empty.

        Raises:
            OSError: it cannot be listed, or is missing although it was made.
        """
        return not any(map(_parsed, store_of(self._root).own_names(os.path.join(self._records.path, "done"))))

    def _marks(self, ranks: Optional[Collection[int]] = None) -> list[str]:
        """The marks of runs that replace targets, of exactly these ranks or of any."""
        start = _REPLACING if ranks is None else _replacing(ranks, ()).rsplit(".", 1)[0] + "."
        return [name for name in self._records.names() if name.startswith(start)]

    def _make_root(self) -> None:
        for _ in range(_TIMES):
            # Another run that ends may remove it, or DST, until it is locked.
            with contextlib.suppress(FileExistsError, FileNotFoundError, NotADirectoryError):
                store_of(self._root).make_directory(self._root)
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
            _records(self._root, conversion).check()

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
        records = self._records
        with writing(self._root):
            names = names_in(self._root)
            if any(name.startswith(SIGNS) for name in names):
                store_of(self._root).remove_dead_signs(self._root)
            begun = [_records(self._root, name) for name in filter(_OURS.fullmatch, names)]
            others = [other for other in begun if other.path != records.path]
            for other in others:
                self._refuse_alive(other)
            for other in others:
                # A record without a plan was created before any target was written.
                if replacing and PLAN in store_of(other.path).own_names(other.path):
                    other.add("", [REPLACED])
                    # The removal informs runs that were taken for dead, see `insist`.
                    other.remove_dead_signs()
                else:
                    other.remove()
            resumed = len(begun) > len(others)
            if resumed:
                records.discard("", [REPLACED])
            records.make("", "done", "sources")
            if resumed and self._nothing_done() and records.is_idle:
                if self._marks():
                    # A run that replaces targets may continue before the first is replaced.
                    self.forget_sources()
                else:
                    records.remove()
                    records.make("", "done", "sources")
            self._writing = records.share_lock(self._notify)
            records.remove_dead_signs()
            if not exists(records.plan):
                write_whole(records.plan, (self.identity.to_json() + "\n").encode())

    def tidy(self) -> None:
        """Remove files of killed runs among the records, if possible."""
        store_of(self._root).remove_dead_signs(self._root)
        self._records.remove_dead_signs()

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator[str]:
        """A file that exists while this block runs, for other processes that write for this run; its path.

        Where locks do not reach other machines, it has to be touched from time to time.

        Raises:
            RetryableError: it cannot be made.
        """
        with writing(self._records.path):
            sign = store_of(self._root).sign_in(self._records.path)
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
            with writing(self._root):
                self._writing.check()

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
                with self._records.try_lock() as alone:
                    if alone is not True or not self._nothing_done() or self._marks():
                        return
                    self._records.remove()
                if any(name != "lock" for name in names_in(self._root)):
                    return
                remove_file(os.path.join(self._root, "lock"))
                store_of(self._root).remove_directory(self._root)
            if self._made_destination:
                store_of(self._destination).remove_directory(self._destination)

    def only(self) -> Optional[set[int]]:
        """The only requested ranks; None if all were requested."""
        numbers = [name[len(_ONLY) :] for name in self._records.names() if name.startswith(_ONLY)]
        ranks = {int(number) for number in numbers if number.isascii() and number.isdecimal()}
        return ranks or None

    def request(self, ranks: Optional[Collection[int]]) -> None:
        """Record that only these ranks, or all, were requested; once all were, no others can be."""
        only = self.only()
        if ranks is None:
            self._records.discard("", [f"{_ONLY}{rank}" for rank in only or ()])
        elif only is not None or not self.done():
            self._records.add("", [f"{_ONLY}{rank}" for rank in ranks])

    def compare_sources(self, sources: Iterable[SourceFile]) -> SourceChanges:
        """Compare source files with the records of earlier runs."""
        before = self._sources()
        values: dict[str, set[str]] = {}
        for file in itertools.chain.from_iterable(before.values()):
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
        recorded = self._sources()
        new: list[str] = []
        old: list[str] = []
        for source in sources:
            of_rank = recorded.get(source.rank, [])
            if source not in of_rank:
                new.append(source.record)
            old.extend(previous.record for previous in of_rank if previous.content != source.content)
        self._records.add("sources", new)
        self._records.discard("sources", old)

    def _sources(self) -> dict[int, list[SourceFile]]:
        """The recorded source files, by rank."""
        recorded: dict[int, list[SourceFile]] = {}
        for file in filter(None, map(SourceFile.parse, self._records.names("sources"))):
            recorded.setdefault(file.rank, []).append(file)
        return recorded

    def damaged(self) -> set[SourceFile]:
        """Source files that a conversion into this directory found damaged, including files of older steps."""
        return {
            file
            for name in filter(_OURS.fullmatch, names_in(self._root))
            for file in filter(None, map(SourceFile.parse, _records(self._root, name).names("damaged")))
        }

    def add_damaged(self, sources: Iterable[SourceFile]) -> None:
        """Record source files with damaged contents."""
        names = [source.record for source in sources]
        if names:
            self._records.make("damaged")
            self._records.add("damaged", names)

    def add_command(self, command: RecordedCommand) -> None:
        """Record a command.

        Raises:
            RetryableError: it cannot be written.
        """
        with writing(self._records.path):
            command.write(self._records.path)

    def forget_commands(self) -> None:
        """Remove recorded commands: everything will be rewritten, perhaps from other files."""
        self._records.discard("", filter(is_command, self._records.names()))

    def commands(self) -> list[RecordedCommand]:
        """The recorded commands, the latest first.

        Raises:
            TargetError: a record is damaged, or of another version.
            RetryableError: one cannot be read.
        """
        return commands_in(self._records.path)

    def forget_sources(self) -> None:
        """Remove recorded source files: everything will be rewritten, perhaps from other files."""
        self._records.discard("sources", self._records.names("sources"))

    def done(self, ranks: Optional[Collection[int]] = None) -> dict[int, list[DoneRecord]]:
        """Records of finished targets, by rank; a rank has several if several runs wrote it."""
        records: dict[int, list[DoneRecord]] = {}
        for name in self._records.names("done"):
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
        name = f"{record.rank}.{record.size}.{record.modified}.{headers}.{crc}"
        self._records.add("done", [name])
        if flush:
            with writing(self._records.path):
                store_of(self._root).flush(os.path.join(self._records.path, "done"))

    def forget(self, ranks: Collection[int]) -> None:
        """Remove the records of finished targets that will be rewritten."""
        chosen = set(ranks)
        records = {name: _parsed(name) for name in self._records.names("done")}
        self._records.discard("done", [name for name, one in records.items() if one is None or one.rank in chosen])

    def replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> bool:
        """Whether a run that replaces targets of these ranks, from these sources, has begun and not ended."""
        return self._records.has(_replacing(ranks, sources))

    def is_replacing(self, ranks: Optional[Collection[int]] = None) -> bool:
        """Whether a run that replaces targets, of exactly these ranks or of any, has begun and not ended."""
        return bool(self._marks(ranks))

    def is_partly_replaced(self, others: bool) -> bool:
        """Whether a run that replaces targets has replaced some and left others.

        Args:
            others: targets of another conversion are replaced; they are removed last.
        """
        marks = [status_at(os.path.join(self._records.path, mark)) for mark in self._marks()]
        began = min((mark.modified for mark in marks if mark is not None), default=None)
        if began is None:
            return False
        targets = [os.path.join(self._destination, self.identity.file_of(rank)) for rank in range(self.identity.ranks)]
        # Targets before records, as in other comparisons.
        existing = [(rank, status) for rank, status in enumerate(status_of_each(targets)) if status is not None]
        records = self.done()
        recorded = [any(one.matches(status) for one in records.get(rank, ())) for rank, status in existing]
        # A replacement gets its name before its record.
        replaced = any(recorded) or any(status.modified >= began for _, status in existing)
        return replaced and (others or not all(recorded))

    def begin_replacing(self, ranks: Collection[int], sources: Iterable[SourceFile]) -> None:
        """Record that all targets of these ranks will be rewritten, until `end_replacing`."""
        self.end_replacing(ranks)
        self.forget(ranks)
        self._records.add("", [_replacing(ranks, sources)])

    def end_replacing(self, ranks: Optional[Collection[int]] = None) -> None:
        """Record that these ranks, or all, are rewritten."""
        self._records.discard("", self._marks(ranks))

    def remove(self) -> None:
        """Remove the records, and no other files in their directories."""
        self._records.remove()

    def _refuse_alive(self, other: RecordDirectory) -> None:
        if not other.is_idle:
            raise TargetError(
                f"another conversion is writing to {self._destination}",
                file=self._destination,
                hint="wait until it ends, or choose another DST"
                + ("" if other.in_use else f"; if it is dead, remove {other.lock}"),
            )


def current(ledgers: Collection[Ledger]) -> list[Ledger]:
    """The conversions of a directory that no other one is replacing; usually one."""
    # The replacing run may have ended before it began.
    return [ledger for ledger in ledgers if not ledger.replaced] or list(ledgers)


def packing_of(src: str) -> tuple[str, ...]:
    """The table of names that the conversion that wrote a checkpoint applied; see `RecordedCommand.packing`.

    Args:
        src: a directory, a rank's directory or a file in one, or a path with ``{rank}``.
    """
    # Damaged records of a source are no reason to refuse it.
    with contextlib.suppress(ReshardError):
        written = _conversion_of(src)
        return () if written is None else next((command.packing for command in written[1].commands()), ())
    return ()


def check_not_replaced(src: str) -> None:
    """Refuse rank files of which an unfinished run has replaced some: they are of two checkpoints.

    Args:
        src: as for `packing_of`.

    Raises:
        CheckpointError: a run with ``--overwrite`` is replacing them, or was stopped.
    """
    for place in _places_of(src):
        # A cached listing answers this without a request.
        if not is_directory(os.path.join(place, OWN)):
            continue
        with contextlib.suppress(TargetError):
            begun = ledgers_in(place or os.curdir)
            if any(ledger.is_partly_replaced(len(begun) > 1) for ledger in begun):
                raise CheckpointError(
                    f"{src}: a run with --overwrite has not replaced all ranks, so they may be of two checkpoints",
                    file=src,
                    hint=f"wait until it ends; if it was stopped: reshard resume {shlex.quote(place or os.curdir)}\n"
                    "if another program has written all of the files since: "
                    f"rm -r {shlex.quote(os.path.join(place, OWN))}",
                )


class RecordedStrategy(NamedTuple):
    """The target strategy of the conversion that wrote all files of a rank tree.

    Attributes:
        strategy: the strategy.
        complete: whether all requested ranks have files; also for a part of the tree.
    """

    strategy: Strategy
    complete: bool


def recorded_strategy(src: str) -> Optional[RecordedStrategy]:
    """The target strategy of the conversion that wrote all files of a rank tree.

    Args:
        src: as for `packing_of`.

    Returns:
        None if it is unknown, missing or changed, or if other runs may have written some of the files: a file has no
        record of its size and time, or targets are being replaced.
    """
    with contextlib.suppress(ReshardError):
        written = _conversion_of(src)
        if written is None:
            return None
        directory, ledger = written
        identity, tree = ledger.identity, find_checkpoints(src)
        if tree.single_file and identity.ranks > 1:
            return None
        if ledger.is_replacing() or ledger.others() or not _all_recorded(directory, ledger, tree.files):
            return None
        commands = ledger.commands()
        path = commands[0].target_strategy if commands else None
        if path == SAME:
            made = os.path.join(directory, STRATEGY_FILE)
            path = made if exists(made) else commands[0].source_strategy
        requested = ledger.only() or range(identity.ranks)
        complete = directory != src.rstrip("/") or {file.rank for file in tree.files}.issuperset(requested)
        if path == NONE and identity.ranks == 1:
            return RecordedStrategy(Strategy.none(), complete)
        if path is not None and names_files(path) and exists(path):
            strategy = read_strategy(path)
            if strategy_digest(strategy) == identity.target_strategy:
                return RecordedStrategy(strategy, complete)
    return None


def _all_recorded(directory: str, ledger: Ledger, files: Sequence[RankFile]) -> bool:
    """Whether a conversion recorded each of some files of its directory, and it is unchanged."""
    recorded = ledger.done()
    return all(
        os.path.relpath(file.path, directory or os.curdir) == ledger.identity.file_of(file.rank)
        and any(record.matches(status) for record in recorded.get(file.rank, ()))
        for file, status in zip(files, status_of_each([file.path for file in files]))
    )


def _conversion_of(src: str) -> Optional[tuple[str, Ledger]]:
    """The directory and the records of the only conversion that wrote a checkpoint; see `packing_of`."""
    for place in _places_of(src):
        begun = current(ledgers_in(place or os.curdir))
        if begun:
            return (place, begun[0]) if len(begun) == 1 else None
    return None


def _places_of(src: str) -> list[str]:
    """The directories that may have the records of a checkpoint; see `packing_of`."""
    directory = (fixed_directory(src) if RANK in src else src).rstrip("/")
    places = [os.path.dirname(directory) if is_regular_file(directory) else directory]
    # A rank's or an iteration's directory is a part of the conversion's; other directories in it are not.
    if _PART_OF_TARGET.fullmatch(os.path.basename(places[0])):
        places.append(os.path.dirname(places[0]))
    return places


def ledgers_in(destination: str) -> list[Ledger]:
    """The records of every conversion in a directory.

    Raises:
        TargetError: a record has content that no run of ours writes.
        RetryableError: the records cannot be read.
    """
    root = os.path.join(destination, OWN)
    ledgers = []
    for name in filter(_OURS.fullmatch, names_in(root)):
        path = _records(root, name).plan
        hint = (
            "if another version of reshard wrote it, use that version; otherwise choose another DST, or remove "
            f"{os.path.dirname(path)} if nothing else uses it"
        )
        with reading(path, TargetError, hint):
            store_of(path).check_own(path, directory=False)
            content = read_json(path, _MAX_PLAN_BYTES, TargetError, hint, through_links=False, file_names=True)
            if content is None:
                # Killed before it wrote its plan: it wrote no targets either.
                continue
            identity = Identity.from_fields(Fields(content, "the record"))
            if identity.digest != name:
                raise UnfitError("was changed after it was written; it is not a record of reshard")
        ledgers.append(Ledger(destination, identity))
    return ledgers


def _replacing(ranks: Collection[int], sources: Iterable[SourceFile]) -> str:
    """The name that marks a run that replaces targets: a digest of its ranks and sources."""
    targets = short_digest(repr(sorted(ranks)).encode())
    origins = short_digest(repr(sorted(sources)).encode())
    return f"{_REPLACING}{targets}.{origins}"


def _records(root: str, conversion: str) -> RecordDirectory:
    """The directory of a conversion's records."""
    return RecordDirectory(os.path.join(root, conversion), _RECORDS, _is_record)


def _is_record(name: str) -> bool:
    return name.startswith((_REPLACING, _ONLY, *SIGNS)) or is_command(name)


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


# The directories of a conversion's records, and the parsers of their names.
_RECORDS: dict[str, Callable[[str], bool]] = {
    "done": lambda name: _parsed(name) is not None,
    "sources": lambda name: SourceFile.parse(name) is not None,
    "damaged": lambda name: SourceFile.parse(name) is not None,
}
