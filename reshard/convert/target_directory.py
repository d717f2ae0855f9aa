"""A target directory while a conversion fills it: what is done already, what is next, what is complete.

1. `survey` compares the directory with its records and tells which ranks are still to be written; it
   refuses what is not ours. Nothing is changed.
2. `begin` says that this run is writing, and looks once more, while no other run may begin or end.
3. `finished` records a target.
4. `complete` writes the manifest when every rank of the target strategy is there.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import crc_of_file
from reshard.checkpoints.edited import EditedCheckpoint
from reshard.errors import RetryableError, TargetError
from reshard.execute import Destination
from reshard.forms.registry import form_named, forms_among
from reshard.forms.target import UNFINISHED, UNFINISHED_CONTENT, TargetForm
from reshard.plan.pieces import TargetFile
from reshard.plan.plan import Plan
from reshard.records import (
    MANIFEST_NAME,
    DoneRecord,
    FinishingRecord,
    Given,
    Identity,
    Ledger,
    Manifest,
    ManifestFile,
    SourceFile,
    SourceSampler,
    header_digest,
    strategy_digest,
)
from reshard.records.identity import short_digest
from reshard.records.ledger import current, ledgers_in
from reshard.records.refusals import Refusals
from reshard.storage import (
    Expected,
    FileStatus,
    UnfitError,
    absolute,
    asks_once,
    exists,
    is_regular_file,
    names_in,
    opened_regular,
    read_range,
    remove_file,
    status_at,
    status_of_each,
    store_of,
    unlinked,
    write_parts,
    write_whole,
    writing_error,
)
from reshard.strategies import SAME
from reshard.text.report import Report
from reshard.text.wording import rank_ranges

# Seconds for which a look at the directory counts, where each costs a round trip.
_FRESH = 5.0


class _Seen(NamedTuple):
    """What is in a target directory.

    Attributes:
        present: checkpoints, by name relative to it.
        others: the records of other conversions, current or being replaced.
        against: other conversions that are current.
        going_on: this conversion was begun before, and is the current one.
    """

    present: set[str]
    others: list[Ledger]
    against: list[Identity]
    going_on: bool


class TargetDirectory:
    """The target directory of a conversion.

    Args:
        plan: what is written.
        asked: this run's target files, of those that were asked for, ascending.
        sampler: looks at source files.
        report: told what was found.
        overwrite: existing targets may be replaced.
        adding: other ranks of the same conversion may stay beside what is replaced.
        checksum: the manifest shall have a checksum of every file, as it has where any other run asked for them.
        part: on behalf of a run that has begun, that has said what is replaced, and that completes it.
        damaged: source files that count as absent, because their contents are damaged.
        accept_changed_source: go on though what is there was made of other source files.
        given: what was typed, to be recorded.
        lost_only: a recovery of lost ranks alone: the directory is complete when these are there.
        whole: all that the directory is to hold is asked for.
    """

    def __init__(
        self,
        plan: Plan,
        asked: Sequence[int],
        sampler: SourceSampler,
        report: Report,
        *,
        overwrite: bool,
        adding: bool,
        checksum: bool,
        part: bool,
        damaged: Sequence[SourceFile],
        lost_only: bool,
        whole: bool,
        accept_changed_source: bool,
        given: Optional[Given] = None,
    ) -> None:
        self._accept_changed_source = accept_changed_source
        self._given = given
        # Other ranks of the same recovery are no less right for being recovered before.
        self._adding = adding or lost_only
        self._part = part
        self._lost_only = lost_only
        self._whole = whole
        self._checksum = checksum
        self._damaged = damaged
        request = plan.request
        self._plan = plan
        self._overwrite = overwrite
        self._report = report
        self._root = unlinked(request.dst)
        self._everything = range(plan.form.count)
        self._asked = asked
        self._sources = sampler.look_at(plan.checkpoint.indexes)
        made = plan.checkpoint
        # With other names, the strategy that "same" stands for also lists what only absent ranks may hold. So it
        # differs between runs that have different source ranks, although they write the same. It is not the source's
        # either, which has the old names.
        same = form_named(request.form).options.by_rank and request.target.path == SAME and request.edits is not None
        identity = Identity(
            source_strategy=strategy_digest(request.source),
            target_strategy=SAME if same else strategy_digest(request.target),
            ranks=plan.form.count,
            step=plan.checkpoint.step,
            include=tuple(sorted(request.filters.include)),
            exclude=tuple(sorted(request.filters.exclude)),
            format=plan.form.format,
            names=plan.form.names,
            task="recover" if request.recover else "convert",
            form=plan.form.name,
            division=_division(plan.form),
            edits=short_digest(made.identity.encode()) if isinstance(made, EditedCheckpoint) else "",
        )
        self._destination = Destination(self._root)
        self._ledger = Ledger(self._root, identity, report.note)
        self._refusals = Refusals(self._root, identity, whole=whole, adding=self._adding)
        self._unfinished = _unfinished(self._root, identity)
        self._overwritten: set[int] = set()
        self._looked = 0.0
        # Of the targets that stood there when this run began, by name.
        self._versions: dict[str, str] = {}
        self._run = short_digest(f"{identity.digest} {self.sources}".encode())
        self._last_headers: tuple[object, Optional[str]] = (None, None)

    @asks_once
    def survey(self, guarded: bool = False) -> list[int]:
        """Target ranks, of those asked for, that are still to be written, ascending.

        Args:
            guarded: no other run can begin or end meanwhile.

        Raises:
            TargetError: the directory holds another conversion, foreign checkpoints, or targets that
                may not be replaced.
        """
        seen = self._look()
        writing = {self._name(rank) for rank in self._asked}
        recorded = self._recorded_by(seen.others) - writing
        own = writing
        if not (seen.present | recorded) <= writing:
            # One of many by-rank runs seldom needs to know what the others write.
            own = {self._name(rank) for rank in self._everything}
        beside = sorted(seen.present & own - writing)
        if seen.going_on and self._overwrite and beside and not self._adding:
            raise self._refusals.beside(beside)
        # What works for a run that has begun finds no other one, unless it is late.
        if seen.against and seen.present and (self._part or not self._overwrite):
            of_others = {ledger.identity: ledger.given() for ledger in seen.others}
            commands = [of_others.get(identity, ()) for identity in seen.against]
            unrecorded = sorted(seen.present - own - recorded)
            raise self._refusals.another_conversion(seen.against, commands, self._given, unrecorded)
        allowed = own if seen.going_on and (self._adding or not self._overwrite) else writing
        # What is left of a conversion whose replacement was not finished may lie where this run does not look.
        foreign = (seen.present | recorded) - allowed
        if self._replacing:
            foreign -= recorded
        if foreign:
            raise self._refusals.foreign(foreign, recorded)
        if not seen.going_on:
            self._check_other_forms(seen.others)
        self._versions = self._destination.check(writing)
        if not self._plan.form.by_rank:
            self._destination.check(_marks(self._ledger.identity))
        if not seen.going_on and not self._overwrite:
            marks = self._there(_marks(self._ledger.identity))
            if marks:
                raise self._refusals.foreign(marks, set())
        done = self._done()
        left = [rank for rank in self._asked if rank not in done]
        in_the_way = [rank for rank in left if self._name(rank) in seen.present]
        if in_the_way and not self._overwrite:
            raise self._existing(in_the_way)
        self._check_sources(guarded)
        return left

    def _check_other_forms(self, others: Sequence[Ledger]) -> None:
        """Insist that no checkpoint of another form, which no record knows, stays beside this one."""
        names = names_in(self._root)
        if not forms_among(self._root, names) - {self._ledger.identity.form}:
            return
        known = {
            name.partition(os.sep)[0]
            for identity in (self._ledger.identity, *(other.identity for other in others))
            for name in (*(identity.file_of(file) for file in range(identity.ranks)), *_marks(identity))
        }
        forms = forms_among(self._root, [name for name in names if name not in known])
        if forms - {self._ledger.identity.form}:
            raise self._refusals.another_form(sorted(forms - {self._ledger.identity.form}))

    def _look(self) -> _Seen:
        """What is in the directory at one moment."""
        while True:
            ledgers = ledgers_in(self._root)
            mine = self._ledger.identity
            others = [ledger for ledger in ledgers if ledger.identity != mine]
            against = [ledger.identity for ledger in current(ledgers) if ledger.identity != mine]
            going_on = len(ledgers) > len(others) and not against
            # One of many by-rank runs looks after its own directory; the first one looks everywhere.
            everywhere = not (going_on and self._adding)
            places = self._directories(self._everything if everywhere else self._asked)
            places.update(os.path.dirname(other.identity.file_of(rank)) for other in others for rank in other.done())
            present = self._destination.checkpoints(places, everywhere)
            if [ledger.identity for ledger in ledgers_in(self._root)] == [ledger.identity for ledger in ledgers]:
                return _Seen(set(present), others, against, going_on)

    @property
    def _replacing(self) -> bool:
        """Whether targets of other conversions may go: everything is replaced, by this run or one it works for."""
        return self._overwrite and (self._whole or self._part)

    def _recorded_by(self, others: Iterable[Ledger]) -> set[str]:
        """Targets of other conversions, by name, that are there as they were recorded."""
        return {name for other in others for name, _ in self._targets_of(other)}

    def _targets_of(self, other: Ledger) -> Iterator[tuple[str, DoneRecord]]:
        recorded = sorted(other.done().items())
        there = self._destination.files(other.identity.file_of(rank) for rank, _ in recorded)
        for rank, records in recorded:
            name = other.identity.file_of(rank)
            record = next((record for record in records if record.matches(there.get(name))), None)
            if record is not None:
                yield name, record

    def begin(self) -> list[int]:
        """Say that this run writes, until `end`; the ranks that are still to be written, looked at once more.

        Raises:
            TargetError: as `survey`, or another conversion is writing here at this moment.
            RetryableError: the directory cannot be written.
        """
        with self._ledger.guarded() as check:
            left = self.survey(guarded=True)
            self._looked = time.monotonic()
            anew = self._anew
            check()
            self._ledger.begin(self._replacing)
            if left:
                replaced = self._ledger.others() if self._replacing else []
                self._unfinish([self._ledger.identity, *(other.identity for other in replaced)])
            if anew:
                self._ledger.begin_replacing(self._asked, self._sources)
                if not self._ledger.done():
                    self._ledger.forget_sources()
                    self._ledger.forget_given()
            if self._lost_only:
                self._ledger.ask_only(self._asked)
            else:
                self._ledger.ask_all()
            self._ledger.add_sources(self._sources)
            self._ledger.add_damaged(self._damaged)
            if self._given is not None:
                self._ledger.add_given(self._given)
        return left

    def suspects(self) -> list[int]:
        """Source ranks whose files an earlier run into this directory found damaged; they may be sound by now.

        Runs that read only parts of them, and so would not check them, are to agree with that run.
        """
        damaged = {(found.rank, found.content) for found in self._ledger.damaged()}
        return [source.rank for source in self._sources if (source.rank, source.content) in damaged]

    def tidy(self) -> None:
        """Remove what killed runs left of new files in the directories of the ranks asked for."""
        self._destination.remove_dead_temporaries(self._directories(self._asked))

    @property
    def is_complete(self) -> bool:
        """Whether nothing at all is left to do, where no rank that was asked for is left to write."""
        if self._lost_only:
            return not (self._overwrite and self._asked)
        found = self._all_done() if self.manifest is not None else None
        if found is None or (self._checksum and self._lacking(found)):
            return False
        if self._unfinished is not None and exists(self._unfinished):
            return False
        names = [file.name for file in self._plan.form.finishing()]
        return len(self._there(names)) == len(names)

    def _there(self, names: Sequence[str]) -> set[str]:
        """Those of some names, relative to the directory, where something stands."""
        found = status_of_each([os.path.join(self._root, name) for name in names], through_links=False)
        return {name for name, status in zip(names, found) if status is not None}

    @property
    def manifest(self) -> Optional[str]:
        """The manifest's path, if it is there."""
        path = os.path.join(self._root, MANIFEST_NAME)
        return path if is_regular_file(path) else None

    @property
    def sources(self) -> str:
        """A digest of the source files, as they were when this was made."""
        # Not every machine sees fractions of seconds.
        found = [(*source.content, source.modified // 10**9) for source in self._sources]
        return short_digest(repr(found).encode())

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator[str]:
        """A file that is there while this block runs; its absolute path. To be used between `begin` and `end`."""
        with self._ledger.sign_of_life() as path:
            # By the name that was typed: other machines may have other links.
            yield absolute(self._plan.request.dst + path[len(self._root) :])

    def end(self) -> None:
        """This run writes no more."""
        self._ledger.end()

    def missing(self, groups: Iterable[Sequence[TargetFile]]) -> Iterator[list[TargetFile]]:
        """Groups without the targets that other runs have finished meanwhile."""
        far = store_of(self._root).costs(self._root).remote
        for group in groups:
            # Where a look is a round trip, that of a moment ago will do: what another run writes now is not replaced.
            fresh = far and time.monotonic() < self._looked + _FRESH
            left = [target for target in group if fresh or not self._finished_meanwhile(target)]
            if left:
                yield left

    def expected(self, target: TargetFile) -> Expected:
        """What stood in a target's place when this run began."""
        return Expected(self._versions.get(self._name(target.rank), ""), self._run)

    def finished(self, target: TargetFile, status: FileStatus, crc: Optional[int], named: bool) -> None:
        """Record a target whose bytes are on disk.

        A new target is recorded before it gets its name, so that it never stands there without a
        record. One that replaces another is recorded after, so that the record never stands for the
        old one; without it the run that goes on writes it once more.

        Args:
            target: the target.
            status: of its file.
            crc: CRC-32 of the file, if it was computed.
            named: whether it has its name by now.

        Raises:
            TargetError: something stands in its place.
            RetryableError: it cannot be recorded.
        """
        if not named:
            self._ledger.insist()
        # What has come there since this run began is not replaced in a store with conditional writes.
        conditional = store_of(target.path).conditional
        there = self._name(target.rank) in self._versions if conditional else exists(target.path)
        if not named and there:
            if self._overwrite:
                self._overwritten.add(target.rank)
            elif not self._finished_meanwhile(target):
                raise self._existing([target.rank])
        if named == (target.rank in self._overwritten):
            layout, headers = self._last_headers
            if layout is not target.layout:
                headers = header_digest(target.layout)
                self._last_headers = (target.layout, headers)
            record = DoneRecord(target.rank, status.size, status.modified, headers, crc)
            self._ledger.record(record, flush=not named)
        if not named:
            self._mark_unfinished()

    def _mark_unfinished(self) -> None:
        """See that no loader takes the directory for a complete one, before a target gets its name there."""
        path = self._unfinished
        if path is None or exists(path):
            return
        try:
            write_whole(path, UNFINISHED_CONTENT)
        except FileNotFoundError:
            # Its directory is not there, and nothing in it that could be taken for complete.
            return
        except OSError as error:
            raise writing_error(path, error) from error

    def complete(self) -> Optional[str]:
        """Write the manifest if every rank is there; returns its path.

        Raises:
            TargetError: a target of another conversion was changed while it was being replaced.
            RetryableError: something cannot be written, or removed, or targets that were asked for are not
                there as they were written.
        """
        if self._part:
            return None
        self._ledger.insist()
        self._insist_on_targets()
        if self._replacing:
            with self._ledger.guarded() as check:
                self._remove_replaced(check)
        if self._overwrite:
            self._ledger.end_replacing(self._asked)
        # A look that costs little first, for one of many by-rank runs.
        if len(self._asked) < len(self._everything) > len(self._ledger.done()):
            return None
        computed: dict[DoneRecord, int] = {}
        while True:
            with self._ledger.guarded() as check:
                found = self._all_done()
                check()
                if found is None:
                    # Of another rank, which somebody has removed.
                    self._unfinish([self._ledger.identity])
                    break
                if self._lacking(found).issubset(computed):
                    manifest = self._write_manifest(found, computed)
                    break
            computed.update(self._missing_checksums(found, computed))
        if found is None:
            # Checksums take long, and the targets were there before.
            self._insist_on_targets()
            return None
        # Also of machines that have got another name since, as pods do.
        self._destination.remove_dead_temporaries(self._directories(self._everything), complete=True)
        return manifest

    def _insist_on_targets(self) -> None:
        """Insist that what was asked for is there as it was written.

        Raises:
            RetryableError: something is not.
        """
        lost = set(self._asked) - self.recorded(self._asked)
        if lost:
            raise RetryableError(
                f"{self._root}: the targets of {rank_ranges(lost)}, or their records, were removed or changed by "
                "somebody else while this ran",
                file=self._root,
                rank=min(lost),
                hint="the same command writes again what is missing; what was changed is replaced with --overwrite",
            )

    def _remove_replaced(self, check: Callable[[], None]) -> None:
        """Remove the other conversions' targets that this one has not overwritten, and then their records.

        Args:
            check: insists that no other run can begin or end.
        """
        others = [other for other in self._ledger.others() if other.replaced]
        own = {self._name(rank) for rank in self._asked}
        for other in others:
            for name, record in self._targets_of(other):
                if name not in own:
                    check()
                    self._destination.remove(name, record.matches)
        places = {os.path.dirname(other.identity.file_of(rank)) for other in others for rank in other.done()}
        left = set(self._destination.checkpoints(places)).difference(self._name(rank) for rank in self._everything)
        if others and left:
            raise self._refusals.foreign(left, set())
        check()
        for other in others:
            _remove(_unfinished(self._root, other.identity))
            other.remove()

    def _unfinish(self, identities: Iterable[Identity]) -> None:
        """Take away what says that conversions are complete, the last that was written first."""
        complete = self.manifest is not None
        for identity in identities:
            # Every rank may have a mark: one of many runs does not look for all of them where there are none.
            if complete or not form_named(identity.form).options.by_rank:
                marks = [os.path.join(self._root, name) for name in reversed(_marks(identity))]
                there = status_of_each(marks, through_links=False)
                if identity == self._ledger.identity and any(there):
                    # Some file may be gone: what is left shall not be taken for all there was.
                    self._mark_unfinished()
                for mark, status in zip(marks, there):
                    if status is not None:
                        _remove(mark)
        Manifest.remove(self._root)

    def _finish(self) -> tuple[tuple[FinishingRecord, ...], tuple[str, ...]]:
        """Write what makes the directory a checkpoint of its form, in order; each whole or not at all.

        Returns:
            The records of these files, and the names of others that belong to the model; none in rank directories.

        Raises:
            RetryableError: something cannot be written.
        """
        marks = _marks(self._ledger.identity)
        written: list[FinishingRecord] = []
        beside: list[str] = []
        for file in self._plan.form.finishing():
            if file.name not in marks and not self._plan.form.by_rank:
                beside.append(file.name)
            path = os.path.join(self._root, file.name)
            try:
                size = sum(map(len, file.make())) if file.size is None else file.size
                if file.name not in marks and exists(path) and not self._overwrite:
                    # Of what only goes with the weights, somebody's own stays.
                    if not _holds(path, size, file.make()):
                        self._report.warn(
                            f"{path}: was there already and is kept; the source's is another (--overwrite takes that)"
                        )
                    continue
                crc = write_parts(path, size, file.make())
            except OSError as error:
                raise writing_error(path, error) from error
            # Trainings go on writing in rank directories.
            if file.name in marks and not self._plan.form.by_rank:
                written.append(FinishingRecord(file.name, size, f"{crc:08x}"))
        return tuple(written), tuple(beside)

    def _write_manifest(self, found: Mapping[int, DoneRecord], computed: Mapping[DoneRecord, int]) -> str:
        files = []
        for rank, record in found.items():
            if record in computed:
                record = record._replace(crc=computed[record])
                self._ledger.record(record, flush=False)
            crc = None if record.crc is None else f"{record.crc:08x}"
            files.append(ManifestFile(rank, self._name(rank), record.size, record.headers, crc))
        finishing, beside = self._finish()
        # Loaders have what they go by now. One of another form may be left of a conversion that was given up here.
        for path in {os.path.join(self._root, UNFINISHED), self._unfinished}:
            _remove(path)
        return Manifest(self._ledger.identity, tuple(files), finishing, beside).write(self._root)

    def _lacking(self, found: Mapping[int, DoneRecord]) -> set[DoneRecord]:
        """Targets without a checksum, where this run or any that wrote a target asked for them.

        So it does not matter in which order runs with and without them ended.
        """
        lacking = {record for record in found.values() if record.crc is None}
        return lacking if self._checksum or len(lacking) < len(found) else set()

    def _missing_checksums(
        self, found: Mapping[int, DoneRecord], computed: Collection[DoneRecord]
    ) -> dict[DoneRecord, int]:
        """Checksums that are asked for and not computed yet, of targets that were written without."""
        lacking = self._lacking(found)
        return {
            record: crc_of_file(self._plan.path(rank))
            for rank, record in found.items()
            if record in lacking and record not in computed
        }

    def _all_done(self) -> Optional[dict[int, DoneRecord]]:
        """The record of every rank of the target strategy, or None where some target is not there."""
        statuses = self._statuses(self._everything)
        records = self._ledger.done()
        found = {}
        for rank, status in statuses.items():
            matching = [record for record in records.get(rank, []) if record.matches(status)]
            if not matching:
                return None
            # Several runs may have made the same file; a checksum that any of them computed holds.
            found[rank] = next((record for record in matching if record.crc is not None), matching[0])
        return found

    def _name(self, rank: int) -> str:
        """The file of a rank, relative to the directory."""
        return self._ledger.identity.file_of(rank)

    def _directories(self, ranks: Iterable[int]) -> set[str]:
        """Where the files of some ranks lie, relative to the directory."""
        return {os.path.dirname(self._name(rank)) for rank in ranks}

    @property
    def _anew(self) -> bool:
        """Whether this run replaces targets, and does not go on with replacing them."""
        # Done twice, a part must not forget what was done, which the whole run relies on.
        return self._overwrite and not self._part and not self._ledger.replacing(self._asked, self._sources)

    def _status(self, rank: int) -> Optional[FileStatus]:
        return status_at(self._plan.path(rank))

    def _statuses(self, ranks: Iterable[int]) -> dict[int, Optional[FileStatus]]:
        wanted = list(ranks)
        return dict(zip(wanted, status_of_each([self._plan.path(rank) for rank in wanted])))

    def _done(self) -> set[int]:
        """Ranks asked for whose targets are there as this conversion recorded them."""
        return set() if self._anew else self.recorded(self._asked)

    def recorded(self, ranks: Sequence[int]) -> set[int]:
        """Those of these ranks whose targets are there as this conversion recorded them."""
        # Targets first: another run that finishes one meanwhile has recorded it before it was there.
        statuses = self._statuses(ranks)
        records = self._ledger.done(frozenset(ranks))
        return {rank for rank, found in records.items() if any(record.matches(statuses[rank]) for record in found)}

    def _finished_meanwhile(self, target: TargetFile) -> bool:
        status = self._status(target.rank)
        if status is None:
            return False
        found = self._ledger.done((target.rank,)).get(target.rank, [])
        return any(record.matches(status) for record in found)

    def _existing(self, ranks: Sequence[int]) -> TargetError:
        recorded = bool(self._ledger.done(frozenset(ranks)))
        return self._refusals.existing(ranks, recorded=recorded, continuing=self._ledger.exists)

    def _check_sources(self, guarded: bool) -> None:
        # Sources of runs that ended before they had finished anything do not bind, and neither do
        # those of targets that are all replaced now; those of a run that is alive always do.
        bound = self._ledger.done().keys() - (set(self._asked) if self._anew else set())
        live = guarded and self._ledger.in_use
        if not bound and not live:
            return
        changes = self._ledger.compare_sources(self._sources)
        changed = [*changes.content, *changes.values, *changes.time]
        if changed and not bound:
            raise self._refusals.live_source(changed)
        if changes.content and not self._accept_changed_source:
            raise self._refusals.other_source(changes.content)
        if changes.values and not self._accept_changed_source:
            how = "values that ranks have alike, such as global_step, are not those of the files read before"
            raise self._refusals.other_source(changes.values, how)
        others = sorted([*changes.content, *changes.values])
        if others:
            self._report.warn(
                f"the source files of {rank_ranges(others)} are not those that the conversion in {self._root} "
                "was begun with; targets of both stand beside each other"
            )
        for ranks, what in ((changes.time, "have another time"), (changes.place, "were replaced or touched")):
            if ranks:
                than = "than when" if ranks is changes.time else "since"
                self._report.warn(
                    f"source files of {rank_ranges(ranks)} {what} {than} the conversion in {self._root} was begun, "
                    "though sizes, headers and samples of the contents are the same; unless they were only copied, "
                    f"convert everything again with {self._refusals.replace_all}"
                )


def _marks(identity: Identity) -> list[str]:
    """Files that make the directory of a conversion complete, relative to it."""
    return form_named(identity.form).marks([identity.file_of(file) for file in range(identity.ranks)])


def _unfinished(root: str, identity: Identity) -> Optional[str]:
    """The path of what tells loaders that a conversion's directory is not complete; None where each rank has a file."""
    if form_named(identity.form).options.by_rank:
        return None
    return os.path.join(root, os.path.dirname(identity.file_of(0)), UNFINISHED)


def _remove(path: Optional[str]) -> None:
    """Remove a small file of ours, if it is there."""
    if path is not None:
        remove_file(path)


def _holds(path: str, size: int, parts: Iterable[bytes]) -> bool:
    """Whether a file is a regular one of this content."""
    try:
        with opened_regular(path) as file:
            offset = 0
            for part in parts if file.size() == size else ():
                if read_range(file, offset, len(part)) != part:
                    return False
                offset += len(part)
            return offset == size
    except UnfitError:
        return False


def _division(form: TargetForm) -> str:
    """Which tensors are in which file of a form, in a few characters."""
    if form.by_rank:
        return ""
    told = []
    for file in range(form.count):
        names = form.names_in(file)
        told.append(repr(sorted(form.section_of(file).layouts if names is None else names)).encode())
    return short_digest(*told)


def beside(directory: str, identity: Identity) -> list[str]:
    """Checkpoint files that the conversion did not write and that readers may take for its own, sorted.

    Args:
        directory: the target directory; the names are relative to it.
        identity: which conversion.

    Raises:
        ReshardError: it cannot be read.
    """
    own = {identity.file_of(file) for file in range(identity.ranks)}
    found = Destination(directory).checkpoints({os.path.dirname(name) for name in own})
    return [name for name in found if name not in own]
