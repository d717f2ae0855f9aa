"""The records of a conversion in its target directory.

``DST/.reshard/`` holds ``plan.json``, the `Record` of the conversion, and empty files whose *names* are the records:
one per finished target in ``done/``, one per source file that a run has read in ``sources/``, and one per damaged
source file in ``damaged/``, including files of newer steps. Every file system creates an empty file atomically: a
record is complete or missing, and one listing reads all.

A directory holds one conversion. Its plan is created only if it is absent, so of several conversions that begin at
once, one goes on. Runs of the same conversion join it. A run looks at the plan again before it gives a target its
name, and before it completes the directory.

A target is recorded after its bytes are on disk under the temporary name and before it gets its final one, so every
finished target has a record. A record without its target, with one of another size or time, or of another conversion,
which was replaced just before its run recorded the target, is ignored.
Comparisons read the target's status first and the records after it, since they are written in the other order.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints import CheckpointIndex, FileHandles, Literal, OutputLayout, read_index
from reshard.checkpoints.checkpoint import Packing
from reshard.checkpoints.formats.dtypes import ARCHIVES, PT
from reshard.errors import ReshardError, TargetError
from reshard.forms.ranks.form import STRATEGY_FILE
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.ranks.tree import RankFile, find_checkpoints
from reshard.records.record import VERSION, Record, old_hint, read_record, strategy_digest
from reshard.records.sources import SourceFile, digest_of, short_digest
from reshard.storage import (
    FileStatus,
    Notify,
    exists,
    for_each,
    is_directory,
    is_regular_file,
    names_in,
    read_range,
    read_small,
    reading,
    remove_file,
    status_at,
    status_of_each,
    store_of,
    writing,
)
from reshard.storage.json_text import Fields, parse_json
from reshard.storage.store import OWN
from reshard.strategies import NONE, SAME, Strategy, names_files, read_strategy

_PLAN = "plan.json"
_PART_OF_TARGET = re.compile(r"(rank|iteration)_[0-9]+")
_SECOND = 10**9
_NONE = "none"
_DIGEST = "[0-9a-f]{16}"
_DONE = rf"(\d{{1,9}})\.(\d{{1,20}})\.(-?\d{{1,20}})\.(?:{_NONE}|({_DIGEST}))\.(?:{_NONE}|([0-9a-f]{{8}}))\.{_DIGEST}"
# The plan contains the patterns of --include and --exclude, whose size the command line limits.
_MAX_PLAN_BYTES = 16 << 20


class DoneRecord(NamedTuple):
    """A finished target: the name of an empty file, and an entry of the manifest.

    Attributes:
        rank: target rank, or number of the file where its form has no ranks.
        file: its name, relative to the target directory.
        size: bytes.
        headers: digest of all bytes except tensor contents; None for a copied file.
        crc32: CRC-32 of the whole file as 8 hexadecimal digits, or None.
        modified: time of last modification, in nanoseconds; 0 in the manifest, which contains no times.
    """

    rank: int
    file: str
    size: int
    headers: str | None
    crc32: str | None
    modified: int = 0

    @property
    def entry(self) -> dict[str, Any]:
        """The fields in the manifest."""
        return {field: value for field, value in self._asdict().items() if field != "modified"}

    def matches(self, status: FileStatus | None) -> bool:
        """Whether a file with this status is the recorded one; read the status before the record."""
        if status is None:
            return False
        # Not by inode and time of change: the rename after the record, copies with their records, and restored backups
        # have others. A file with another content and the old time is found by its checksum, or with --verify.
        # Some file systems keep whole seconds only.
        times = (self.modified, self.modified // _SECOND * _SECOND)
        return status.size == self.size and status.modified in times


def header_digest(layout: OutputLayout) -> str | None:
    """A digest of all bytes of a file except tensor contents, in file order; None without any."""
    literals = (segment.data for segment in layout.segments() if isinstance(segment, Literal))
    first = next(literals, None)
    return None if first is None else digest_of(itertools.chain([first], literals))


def stored_header_digest(index: CheckpointIndex, handles: FileHandles) -> str:
    """Likewise, of a file that exists."""

    def literals() -> Iterator[bytes]:
        position = 0
        for offset, size in itertools.chain(index.extents(), [(index.size, 0)]):
            yield read_range(file, position, offset - position)
            position = offset + size

    with reading(index.path), handles.borrow(index.path) as file:
        return digest_of(literals())


class Ledger:
    """The records of one conversion.

    Args:
        destination: the target directory.
        record: which conversion; after `claim`, that of the run that began.
        notify: called when another run keeps this one waiting.
    """

    def __init__(self, destination: str, record: Record, notify: Notify = lambda text: None) -> None:
        self.record = record
        self._identity = record.identity
        self._notify = notify
        self._destination = destination
        self._root = os.path.join(destination, OWN)
        self._made_destination = False
        self._plan_seen: tuple[int, int, int] | None = None
        # The plan: as this run would record it, or as it was read last.
        content = {"version": VERSION, "conversion": record.to_json()}
        self._plan = (json.dumps(content, sort_keys=True) + "\n").encode()
        # At the end of the names of its targets' records.
        self._ending = f".{short_digest(self._identity.encode())}"

    def joins(self, other: Ledger) -> bool:
        """Whether both are of one conversion."""
        return self._identity == other._identity

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs on this file system from beginning or completing while this block runs.

        Raises:
            TargetError: a file is in the place of the records.
            RetryableError: it cannot be written, or another run holds the lock for too long.
        """
        if exists(self._root) and not is_directory(self._root):
            raise TargetError(
                f"{self._root}: is no directory, where the records of reshard belong",
                file=self._root,
                hint="remove it, or choose another DST",
            )
        with writing(self._root):
            self._made_destination = store_of(self._root).make_directory(self._destination) or self._made_destination
        lock = os.path.join(self._root, "lock")
        with contextlib.ExitStack() as stack:
            with writing(lock):
                stack.enter_context(store_of(self._root).lock(lock, self._notify))
            with writing(self._root):
                yield

    def remove_leftovers(self) -> None:
        """Remove records without a plan, such as those of a conversion of which somebody removed only the plan."""
        # Listed first: those of a run that begins meanwhile come after its plan.
        left = {kind: [*filter(parsed, self._names(kind))] for kind, parsed in _KINDS.items()}
        if _plan_in(self._destination) is None:
            for kind, names in left.items():
                self._discard(kind, names)

    def renew(self) -> None:
        """Write the plan again: running runs of the conversion compare their sources with the records once more."""
        path, plan = os.path.join(self._root, _PLAN), _plan_in(self._destination)
        if plan is not None:
            # Another size as well: some stores keep times in whole seconds.
            with writing(path):
                store_of(path).write_whole(path, plan + b"\n")

    def claim(self) -> bool:
        """Record that the directory is of this conversion; whether the record is new since the last call.

        Then this call made it, or another run removed all records and made them again, or `renew` was called.

        Raises:
            TargetError: it is another conversion's.
            RetryableError: it cannot be written.
        """
        path = os.path.join(self._root, _PLAN)
        plan, created = _plan_in(self._destination), False
        if plan is None:
            with writing(path):
                for directory in (self._root, *(os.path.join(self._root, kind) for kind in _KINDS)):
                    store_of(path).make_directory(directory)
                created = store_of(path).create(path, self._plan)
            # Some object stores ignore the condition: read it back.
            plan = _plan_in(self._destination)
        current = self if plan is None or plan == self._plan else _ledger_of(self._destination, plan)
        if plan is None or not self.joins(current):
            raise TargetError(
                f"{self._destination}: another conversion has begun here meanwhile",
                file=self._destination,
                hint="choose another DST, or wait until it ends and replace it with --overwrite for all ranks",
            )
        self._plan, self.record, status = plan, current.record, status_at(path)
        seen = None if status is None else (status.inode, status.modified, len(plan))
        before, self._plan_seen = self._plan_seen, seen
        return created or before not in (None, seen)

    def leave_nothing(self) -> None:
        """Remove the records, and what they made, of a conversion without a finished target; failures are harmless."""
        with contextlib.suppress(OSError, ReshardError):
            with self.locked():
                current = ledger_in(self._destination)
                if (current is not None and not self.joins(current)) or self.done():
                    return
                self.remove()
                remove_file(os.path.join(self._root, "lock"))
                store_of(self._root).remove_directory(self._root)
            if self._made_destination:
                store_of(self._root).remove_directory(self._destination)

    def changed_sources(self, sources: Collection[SourceFile], whole: bool) -> tuple[list[int], list[int]]:
        """Source ranks whose files differ from the records of earlier runs.

        Args:
            sources: the files that this run reads.
            whole: every run reads all files of the source, so that a file that only some of them read is a difference.

        Returns:
            Ranks whose size, headers or contents differ, or that are new or gone; and ranks that were not read
            before, and whose values such as ``global_step`` differ from those of other ranks.
        """
        before = self._sources()
        values: dict[str, set[str]] = {}
        for file in itertools.chain.from_iterable(before.values()):
            values.setdefault(file.value_names, set()).add(file.values)
        contents: list[int] = []
        other_values: list[int] = []
        for source in sources:
            recorded = before.get(source.rank, [])
            if any(one.content != source.content for one in recorded):
                contents.append(source.rank)
            elif not recorded and source.values not in values.get(source.value_names, {source.values}):
                other_values.append(source.rank)
        if whole and self.done():
            # Before the first target, a killed run may have recorded some files only.
            damaged = {file.rank for file in self.damaged()}
            contents += (before.keys() ^ {source.rank for source in sources}) - damaged
        return sorted(contents), other_values

    def add_sources(self, sources: Collection[SourceFile], whole: bool) -> None:
        """Record source files, replacing records of the same ranks with other content; if ``whole``, all records."""
        recorded = self._sources()
        self._add("sources", [source.record for source in sources if source not in recorded.get(source.rank, ())])
        now = {source.rank: source.content for source in sources}
        replaced = [
            one
            for rank, files in recorded.items()
            if whole or rank in now
            for one in files
            if one.content != now.get(rank)
        ]
        self._discard("sources", [one.record for one in replaced])

    def _sources(self) -> dict[int, list[SourceFile]]:
        """The recorded source files, by rank."""
        recorded: dict[int, list[SourceFile]] = {}
        for file in self._files("sources"):
            recorded.setdefault(file.rank, []).append(file)
        return recorded

    def damaged(self) -> set[SourceFile]:
        """Source files that runs of this conversion found damaged, including files of older steps."""
        return set(self._files("damaged"))

    def known_damaged(self, sources: Iterable[SourceFile]) -> list[SourceFile]:
        """Those of some source files that a run found damaged."""
        damaged = set(map(_same, self.damaged()))
        return [source for source in sources if _same(source) in damaged]

    def read_damaged(self, damaged: Iterable[SourceFile]) -> list[int]:
        """Ranks of source files that runs have read unchecked and that are damaged, by records or among ``damaged``."""
        found = set(map(_same, itertools.chain(self.damaged(), damaged)))
        return sorted({source.rank for source in self._files("unchecked") if _same(source) in found})

    def settle(self, repaired: Iterable[SourceFile], damaged: Iterable[SourceFile]) -> None:
        """Drop what `read_damaged` would find, once no finished target can be made from it.

        Args:
            repaired: files of damaged ones' size, headers and samples that are intact.
            damaged: files that this run found damaged.
        """
        for kind, files in (("damaged", repaired), ("unchecked", damaged)):
            dropped = set(map(_same, files))
            self._discard(kind, [record.record for record in self._files(kind) if _same(record) in dropped])

    def add_damaged(self, sources: Iterable[SourceFile]) -> None:
        """Record source files with damaged contents."""
        self._add("damaged", [source.record for source in sources])

    def add_unchecked(self, sources: Iterable[SourceFile]) -> None:
        """Record source files that a run reads without a check of their CRC, as it reads only parts of them."""
        self._add("unchecked", [source.record for source in sources])

    def done(self, ranks: Collection[int] | None = None) -> dict[int, list[DoneRecord]]:
        """Records of finished targets, by rank; a rank has several if several runs wrote it."""
        records: dict[int, list[DoneRecord]] = {}
        names = (name for name in self._names("done") if name.endswith(self._ending))
        for record in filter(None, map(_parsed, names)):
            if ranks is None or record.rank in ranks:
                record = record._replace(file=self.record.file_of(record.rank))
                records.setdefault(record.rank, []).append(record)
        return records

    def finished(self, ranks: Collection[int] | None = None) -> dict[str, DoneRecord]:
        """The records of finished targets whose files are unchanged, by the name of the file in the directory.

        Args:
            ranks: only these; by default all.
        """
        ranks = range(self.record.file_count) if ranks is None else ranks
        names = [self.record.file_of(rank) for rank in ranks]
        statuses = status_of_each([os.path.join(self._destination, name) for name in names])
        recorded = self.done() if any(statuses) else {}
        finished: dict[str, DoneRecord] = {}
        for rank, name, status in zip(ranks, names, statuses):
            matching = [record for record in recorded.get(rank, ()) if record.matches(status)]
            if matching:
                # Several runs may have written equal files; a checksum of any of them is right.
                finished[name] = next((record for record in matching if record.crc32 is not None), matching[0])
        return finished

    def drop_done(self, record: DoneRecord) -> None:
        """Remove the record of a target that does not get its name."""
        self._discard("done", [self._done_name(record)])

    def _done_name(self, record: DoneRecord) -> str:
        rank, _, size, headers, crc, modified = record
        return f"{rank}.{size}.{modified}.{headers or _NONE}.{crc or _NONE}{self._ending}"

    def touched(self) -> dict[str, list[DoneRecord]]:
        """The records of targets whose files have another time or size, by path."""
        finished = self.finished()
        records = {
            os.path.join(self._destination, of_rank[0].file): of_rank
            for of_rank in self.done().values()
            if of_rank[0].file not in finished
        }
        return {path: records[path] for path in records if is_regular_file(path)}

    def add_done(self, record: DoneRecord, flush: bool) -> None:
        """Record a finished target.

        Args:
            record: the target.
            flush: make the record durable before the target gets its name.

        Raises:
            RetryableError: it cannot be written.
        """
        self._add("done", [self._done_name(record)])
        if flush:
            with writing(self._root):
                store_of(self._root).flush(os.path.join(self._root, "done"))

    def forget(self, ranks: Collection[int]) -> None:
        """Remove the records of finished targets that will be rewritten."""
        chosen = set(ranks)
        records = {name: _parsed(name) for name in self._names("done")}
        self._discard("done", [name for name, one in records.items() if one is not None and one.rank in chosen])

    def remove(self) -> None:
        """Remove the records, the plan last."""
        for kind, parsed in _KINDS.items():
            self._discard(kind, filter(parsed, self._names(kind)))
        self._discard("", [_PLAN])
        # With a plan, later runs expect the directories.
        for kind in _KINDS:
            with contextlib.suppress(OSError):
                store_of(self._root).remove_directory(os.path.join(self._root, kind))

    def remove_dead_temporaries(self) -> None:
        """Remove files of killed runs among the records, if possible."""
        store_of(self._root).remove_dead(self._root)

    def _files(self, kind: str) -> Iterator[SourceFile]:
        return filter(None, map(SourceFile.parse, self._names(kind)))

    def _names(self, kind: str) -> list[str]:
        return names_in(os.path.join(self._root, kind))

    def _add(self, kind: str, names: Iterable[str]) -> None:
        def add(path: str) -> None:
            with writing(path):
                store_of(path).make_empty(path)

        for_each(add, [os.path.join(self._root, kind, name) for name in names])

    def _discard(self, kind: str, names: Iterable[str]) -> None:
        def discard(path: str) -> None:
            with writing(path, "removed"):
                remove_file(path)

        for_each(discard, [os.path.join(self._root, kind, name) for name in names])


def recorded_packing(src: str) -> Packing | None:
    """The packing that the conversion that wrote a checkpoint recorded.

    Args:
        src: a directory, a rank's directory or a file in one, or a path with ``{rank}``.

    Returns:
        None if it is unknown, or if a file was replaced: its size or headers are not those of its record.
    """
    # Damaged records of a source are no reason to refuse it.
    with contextlib.suppress(ReshardError):
        written = _conversion_of(src)
        if written is not None and written[1].record.packing is not None:
            touched = written[1].touched()
            with FileHandles() as handles:
                if all(for_each(lambda path: _is_recorded(path, touched[path], handles), [*touched])):
                    return written[1].record.packing
    return None


def is_touched(src: str) -> bool:
    """Whether a file of the conversion that wrote a checkpoint has another time than its record, as after a copy.

    Args:
        src: as for `recorded_packing`.
    """
    with contextlib.suppress(ReshardError):
        written = _conversion_of(src)
        return written is not None and bool(written[1].touched())
    return False


def _is_recorded(path: str, records: Sequence[DoneRecord], handles: FileHandles) -> bool:
    """Whether a file has the size and, if it is no archive, the headers of one of its records."""
    with reading(path), handles.borrow(path) as file:
        headers = {record.headers for record in records if record.size == file.size()}
    if not headers or None in headers or path.endswith((f".{ARCHIVES}", f".{PT}")):
        return bool(headers)
    return stored_header_digest(read_index(handles, path), handles) in headers


class RecordedStrategy(NamedTuple):
    """The target strategy of the conversion that wrote all files of a rank tree.

    Attributes:
        strategy: the strategy.
        complete: whether all wanted ranks have files; also for a part of the tree.
    """

    strategy: Strategy
    complete: bool


def recorded_strategy(src: str) -> RecordedStrategy | None:
    """The target strategy of the conversion that wrote all files of a rank tree.

    Args:
        src: as for `recorded_packing`.

    Returns:
        None if it is unknown, missing or changed, or if other runs may have written some of the files: a file has no
        record of its size and time.
    """
    with contextlib.suppress(ReshardError):
        written = _conversion_of(src)
        if written is None:
            return None
        directory, ledger = written
        record, tree = ledger.record, find_checkpoints(src)
        if (tree.single_file and record.file_count > 1) or not _all_recorded(directory, ledger, tree.files):
            return None
        path = record.asked.target.strategy
        if path == SAME or record.task.recover:
            made = os.path.join(directory, STRATEGY_FILE)
            path = made if exists(made) else record.asked.source.strategy
        complete = directory != src.rstrip("/") or {file.rank for file in tree.files}.issuperset(record.wanted)
        if path == NONE and record.file_count == 1:
            return RecordedStrategy(Strategy.none(), complete)
        if path is not None and names_files(path) and exists(path):
            strategy = read_strategy(path)
            if strategy_digest(strategy) == record.digests["target_strategy"]:
                return RecordedStrategy(strategy, complete)
    return None


def _all_recorded(directory: str, ledger: Ledger, files: Sequence[RankFile]) -> bool:
    """Whether a conversion recorded each of some files of its directory, and it is unchanged."""
    finished = ledger.finished()
    return all(os.path.relpath(file.path, directory or os.curdir) in finished for file in files)


def _conversion_of(src: str) -> tuple[str, Ledger] | None:
    """The directory and the records of the conversion that wrote a checkpoint; see `recorded_packing`."""
    directory = (fixed_directory(src) if RANK in src else src).rstrip("/")
    places = [os.path.dirname(directory) if is_regular_file(directory) else directory]
    # A rank's or an iteration's directory is a part of the conversion's; other directories in it are not.
    if _PART_OF_TARGET.fullmatch(os.path.basename(places[0])):
        places.append(os.path.dirname(places[0]))
    for place in places:
        # A cached listing answers this without a request.
        ledger = ledger_in(place or os.curdir) if is_directory(os.path.join(place, OWN)) else None
        if ledger is not None:
            return place, ledger
    return None


def ledger_in(destination: str) -> Ledger | None:
    """The records of the conversion in a directory; None without records.

    Raises:
        TargetError: the plan is damaged, or of another version.
        RetryableError: it cannot be read.
    """
    plan = _plan_in(destination)
    return None if plan is None else _ledger_of(destination, plan)


def _plan_in(destination: str) -> bytes | None:
    """The content of the plan in a directory; None without one."""
    with _reading_plan(destination) as path:
        try:
            return read_small(path, _MAX_PLAN_BYTES, through_links=False)
        except (FileNotFoundError, NotADirectoryError):
            return None


def _ledger_of(destination: str, plan: bytes) -> Ledger:
    with _reading_plan(destination):
        return Ledger(destination, read_record(Fields(parse_json(plan, file_names=True), "the record")))


@contextlib.contextmanager
def _reading_plan(destination: str) -> Iterator[str]:
    path = os.path.join(destination, OWN, _PLAN)
    with reading(
        path,
        TargetError,
        f"choose another DST, or remove {shlex.quote(destination)} if it is not needed; {old_hint(destination)}",
    ):
        yield path


def _same(source: SourceFile) -> tuple[int, tuple[int, str, str]]:
    """Equal for records of the same file."""
    return source.rank, source.content


def _parsed(name: str) -> DoneRecord | None:
    """The target in the name of a record, still without the name of its file; None for another name."""
    match = re.fullmatch(_DONE, name)
    if match is None:
        return None
    rank, size, modified, headers, crc = match.groups()
    return DoneRecord(int(rank), "", int(size), headers, crc, int(modified))


# The directories of records, and the parsers of their names.
_KINDS: dict[str, Callable[[str], object]] = {
    "done": _parsed,
    "sources": SourceFile.parse,
    "damaged": SourceFile.parse,
    "unchecked": SourceFile.parse,
}
