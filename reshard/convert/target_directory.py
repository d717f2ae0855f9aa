"""A target directory during a conversion: finished files, remaining files, completion.

1. `survey` compares the directory with its records and returns the remaining ranks. It refuses
   foreign files and changes nothing.
2. `begin` records that this run writes, and surveys again under the lock.
3. `finished` records a target.
4. `complete` writes the manifest once every rank of the target strategy is written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Callable, Optional

from reshard.checkpoints.edited import EditedCheckpoint
from reshard.convert.options import Options
from reshard.errors import InputError, RetryableError, TargetError
from reshard.execute import Destination
from reshard.forms.registry import counted_as, form_named, forms_among
from reshard.forms.target import UNFINISHED, UNFINISHED_CONTENT, TargetForm
from reshard.named_tuple import NamedTuple
from reshard.plan.pieces import TargetFile
from reshard.plan.plan import Plan
from reshard.records import (
    MANIFEST_NAME,
    DoneRecord,
    FinishingRecord,
    Identity,
    Ledger,
    Manifest,
    ManifestFile,
    RecordedCommand,
    SourceFile,
    SourceSampler,
    header_digest,
    read_manifest,
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
    caches_listings,
    exists,
    is_regular_file,
    names_in,
    opened_regular,
    read_range,
    remove_file,
    status_of_each,
    store_of,
    unlinked,
    write_parts,
    write_whole,
    writing,
)
from reshard.strategies import SAME
from reshard.text.report import Report
from reshard.text.wording import rank_ranges, some_names

# Lifetime in seconds of a check of the directory, which costs a round trip.
_FRESH = 5.0


class _Contents(NamedTuple):
    """The contents of a target directory.

    Attributes:
        present: names of checkpoint files, relative to the directory.
        ledgers: the records of other conversions, current or being replaced.
        against: other conversions that are current.
        going_on: the current conversion is this one, from an earlier run.
    """

    present: set[str]
    ledgers: list[Ledger]
    against: list[Identity]
    going_on: bool


class TargetDirectory:
    """The target directory of a conversion.

    Args:
        plan: the plan.
        options: how the conversion is carried out.
        requested: the requested target files that this run writes, ascending.
        sampler: takes samples of source files.
        report: gets warnings and notes.
        damaged: source files that count as absent, because their contents are damaged.
        command: the command line to record.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options,
        requested: Sequence[int],
        sampler: SourceSampler,
        report: Report,
        damaged: Sequence[SourceFile],
        command: Optional[RecordedCommand],
    ) -> None:
        self._accept_changed_source = options.accept_changed_source
        self._overwrite = options.overwrite
        self._command = command
        self._lost_only = options.lost_only
        # Ranks from an earlier run of the same recovery stay valid.
        self._adding = options.adding or options.lost_only
        # A part of another run, which has recorded the replaced targets and completes the directory.
        self._part = options.part is not None
        # Whether this run writes every file of the target directory.
        self._whole = plan.request.files is None if options.lost_only else len(requested) == plan.form.count
        # The manifest gets a checksum of every file, as if any other run had requested it.
        self._checksum = options.checksum == "crc32"
        self._damaged = damaged
        request = plan.request
        self._plan = plan
        self._report = report
        self._root = unlinked(request.dst)
        self._everything = range(plan.form.count)
        self._requested = requested
        self._sources = sampler.look_at(plan.checkpoint.indexes)
        checkpoint = plan.checkpoint
        # With other names, the strategy of "same" also lists parameters of absent ranks. It differs between runs
        # with different source ranks that write equal files, and from the source's strategy by its names.
        by_source = (
            form_named(request.form).options.by_rank and request.target.path == SAME and not request.edits.is_empty
        )
        identity = Identity(
            source_strategy=strategy_digest(request.source),
            target_strategy=SAME if by_source else strategy_digest(request.target),
            ranks=plan.form.count,
            step=checkpoint.step,
            include=tuple(sorted(request.filters.include)),
            exclude=tuple(sorted(request.filters.exclude)),
            format=plan.form.format,
            names=plan.form.names,
            task="recover" if request.recover else "convert",
            form=plan.form.name,
            division=_division(plan.form),
            edits=short_digest(checkpoint.identity.encode()) if isinstance(checkpoint, EditedCheckpoint) else "",
            without_ranks=request.without_ranks,
        )
        self._destination = Destination(self._root)
        self._ledger = Ledger(self._root, identity, report.note)
        comparable = not request.recover and request.edits.additions is None
        self._refusals = Refusals(
            self._root,
            identity,
            all_files=self._whole,
            adding=self._adding,
            comparable=comparable,
            unit=counted_as(request.form),
        )
        self._unfinished = _unfinished(self._root, identity)
        self._overwritten: set[int] = set()
        self._looked = 0.0
        # Versions of the existing targets when this run began, by name.
        self._versions: dict[str, str] = {}
        self._run = short_digest(f"{identity.digest} {self.sources}".encode())
        self._last_headers: tuple[object, Optional[str]] = (None, None)

    @caches_listings
    def survey(self, guarded: bool = False) -> list[int]:
        """The requested target ranks that are not written yet, ascending.

        Args:
            guarded: this run holds the lock: no other run can begin or end.

        Raises:
            TargetError: the directory contains another conversion, foreign checkpoints, or targets
                without permission to overwrite.
        """
        contents = self._look()
        writing = {self._name(rank) for rank in self._requested}
        recorded = {name for ledger in contents.ledgers for name, _ in self._targets_of(ledger)} - writing
        own_names = writing
        if not (contents.present | recorded) <= writing:
            # For by-rank, the files of all other ranks are seldom needed.
            own_names = {self._name(rank) for rank in self._everything}
        beside = sorted(contents.present & own_names - writing)
        if contents.going_on and self._overwrite and beside and not self._adding:
            raise self._refusals.beside(beside)
        # The part of a run finds another conversion only if that began later.
        if contents.against and contents.present and (self._part or not self._overwrite):
            of_others = {ledger.identity: ledger.commands() for ledger in contents.ledgers}
            commands = [of_others.get(identity, ()) for identity in contents.against]
            unrecorded = sorted(contents.present - own_names - recorded)
            raise self._refusals.another_conversion(contents.against, commands, self._command, unrecorded)
        allowed = own_names if contents.going_on and (self._adding or not self._overwrite) else writing
        # Remains of a half-replaced conversion may be in directories that this run does not list.
        foreign = (contents.present | recorded) - allowed
        if self._replacing:
            foreign -= recorded
        if foreign:
            raise self._refusals.foreign(foreign, recorded)
        if not contents.going_on:
            self._check_other_forms(contents.ledgers)
        self._versions = self._destination.check(writing)
        if not self._plan.form.by_rank:
            self._destination.check(_marks(self._ledger.identity))
        if not contents.going_on and not self._overwrite:
            marks = self._existing_names(_marks(self._ledger.identity))
            if marks:
                raise self._refusals.foreign(marks, set())
        complete = set() if self._anew else self.recorded(self._requested)
        missing = [rank for rank in self._requested if rank not in complete]
        # By the status of each target, whatever its ending: `contents` lists checkpoint endings only.
        in_the_way = [rank for rank in missing if self._name(rank) in self._versions]
        if in_the_way and not self._overwrite:
            raise self._existing(in_the_way)
        self._check_sources(guarded)
        return missing

    def _check_other_forms(self, ledgers: Sequence[Ledger]) -> None:
        """Refuse unrecorded checkpoints of another form in this directory."""
        names = names_in(self._root)
        if not forms_among(self._root, names) - {self._ledger.identity.form}:
            return
        recorded = {
            name.partition(os.sep)[0]
            for identity in (self._ledger.identity, *(ledger.identity for ledger in ledgers))
            for name in (*(identity.file_of(file) for file in range(identity.ranks)), *_marks(identity))
        }
        forms = forms_among(self._root, [name for name in names if name not in recorded])
        if forms - {self._ledger.identity.form}:
            raise self._refusals.another_form(sorted(forms - {self._ledger.identity.form}))

    def _look(self) -> _Contents:
        """The contents of the directory at one moment."""
        while True:
            ledgers = ledgers_in(self._root)
            mine = self._ledger.identity
            of_others = [ledger for ledger in ledgers if ledger.identity != mine]
            against = [ledger.identity for ledger in current(ledgers) if ledger.identity != mine]
            going_on = len(ledgers) > len(of_others) and not against
            # By-rank runs check their own directory only; the first one checks all.
            everywhere = not (going_on and self._adding)
            places = self._directories(self._everything if everywhere else self._requested)
            places.update(
                os.path.dirname(foreign.identity.file_of(rank)) for foreign in of_others for rank in foreign.done()
            )
            present = self._destination.checkpoints(places, everywhere)
            if [ledger.identity for ledger in ledgers_in(self._root)] == [ledger.identity for ledger in ledgers]:
                return _Contents(set(present), of_others, against, going_on)

    @property
    def _replacing(self) -> bool:
        """Whether targets of other conversions may be removed: this run, or its main run, replaces everything."""
        return self._overwrite and (self._whole or self._part)

    def _targets_of(self, ledger: Ledger) -> Iterator[tuple[str, DoneRecord]]:
        """Names and records of unmodified targets of another conversion."""
        recorded = sorted(ledger.done().items())
        statuses = self._destination.files(ledger.identity.file_of(rank) for rank, _ in recorded)
        for rank, records in recorded:
            name = ledger.identity.file_of(rank)
            record = next((record for record in records if record.matches(statuses.get(name))), None)
            if record is not None:
                yield name, record

    def begin(self) -> list[int]:
        """Record that this run writes, until `end`; returns the remaining ranks of a second survey.

        Raises:
            TargetError: as `survey`, or another conversion is writing here.
            RetryableError: the directory cannot be written.
        """
        with self._ledger.guarded() as check:
            missing = self.survey(guarded=True)
            self._looked = time.monotonic()
            anew = self._anew
            check()
            self._ledger.begin(self._replacing)
            if missing:
                self._warn_of_remaining()
                replaced = self._ledger.others() if self._replacing else []
                self._unfinish([self._ledger.identity, *(ledger.identity for ledger in replaced)])
            if anew:
                self._ledger.begin_replacing(self._requested, self._sources)
                if not self._ledger.done():
                    self._ledger.forget_sources()
                    self._ledger.forget_commands()
            self._ledger.request(self._requested if self._lost_only else None)
            self._ledger.add_sources(self._sources)
            self._ledger.add_damaged(self._damaged)
            if self._command is not None:
                self._ledger.add_command(self._command)
        return missing

    def suspects(self) -> list[int]:
        """Source ranks whose files were damaged in an earlier run into this directory.

        Runs that read only parts of them have to come to the same result as that run.
        """
        damaged = {(file.rank, file.content) for file in self._ledger.damaged()}
        return [source.rank for source in self._sources if (source.rank, source.content) in damaged]

    def tidy(self) -> None:
        """Remove temporary files of killed runs in the directories of the requested ranks, and of other conversions."""
        places = self._directories(self._requested)
        # Their records may be gone after this run begins, and no later run would look there.
        others = self._ledger.others()
        if others:
            existing = set(names_in(self._root))
            written = (
                os.path.dirname(other.identity.file_of(rank))
                for other in others
                for rank in range(other.identity.ranks)
            )
            places.update(place for place in written if place.partition(os.sep)[0] in existing)
        self._destination.remove_dead_temporaries(places)

    def tidy_records(self) -> None:
        """Remove files of killed runs among the records, as `begin` does."""
        self._ledger.tidy()

    @property
    def is_complete(self) -> bool:
        """Whether the directory is complete, once all requested ranks are written."""
        if self._lost_only:
            return not (self._overwrite and self._requested)
        records = self._all_done() if self.manifest is not None else None
        if records is None or (self._checksum and self._lacking(records)):
            return False
        if self._unfinished is not None and exists(self._unfinished):
            return False
        names = [file.name for file in self._plan.form.finishing()]
        return len(self._existing_names(names)) == len(names)

    def _existing_names(self, names: Sequence[str]) -> set[str]:
        """The existing ones of some names relative to the directory."""
        statuses = status_of_each([os.path.join(self._root, name) for name in names], through_links=False)
        return {name for name, status in zip(names, statuses) if status is not None}

    @property
    def manifest(self) -> Optional[str]:
        """The manifest's path; None without a manifest."""
        path = os.path.join(self._root, MANIFEST_NAME)
        return path if is_regular_file(path) else None

    @property
    def is_resumable(self) -> bool:
        """Whether a command of this conversion is recorded, so that `resume` works."""
        return bool(self._ledger.commands())

    @property
    def sources(self) -> str:
        """A digest of the source files at the begin of this run."""
        # Not every machine sees fractions of seconds.
        contents = [(*source.content, source.modified // 10**9) for source in self._sources]
        return short_digest(repr(contents).encode())

    @contextlib.contextmanager
    def sign_of_life(self) -> Iterator[str]:
        """The absolute path of a file that exists during this block; use it between `begin` and `end`."""
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
            # In an object store a recent check is enough: conditional writes replace no file of another run.
            fresh = far and time.monotonic() < self._looked + _FRESH
            missing = [target for target in group if fresh or not self.recorded((target.rank,))]
            if missing:
                yield missing

    def expected(self, target: TargetFile) -> Expected:
        """The version of a target when this run began."""
        return Expected(self._versions.get(self._name(target.rank), ""), self._run)

    def finished(self, target: TargetFile, status: FileStatus, crc: Optional[int], has_name: bool) -> None:
        """Record a target whose bytes are on disk.

        A new target is recorded before it gets its name, so it never exists without a record. A
        replacement is recorded afterwards, so the record never describes the old file. If that
        record is missing, a resumed run writes the target again.

        Args:
            target: the target.
            status: of its file.
            crc: CRC-32 of the file, if it was computed.
            has_name: whether it has its name by now.

        Raises:
            TargetError: another file has its name.
            RetryableError: it cannot be recorded.
        """
        if not has_name:
            self._ledger.insist()
        # A store with conditional writes keeps a file that appeared after this run began.
        conditional = store_of(target.path).conditional
        exists_already = self._name(target.rank) in self._versions if conditional else exists(target.path)
        if not has_name and exists_already:
            if self._overwrite:
                self._overwritten.add(target.rank)
            elif not self.recorded((target.rank,)):
                raise self._existing([target.rank])
        if has_name == (target.rank in self._overwritten):
            layout, headers = self._last_headers
            if layout is not target.layout:
                headers = header_digest(target.layout)
                self._last_headers = (target.layout, headers)
            record = DoneRecord(target.rank, status.size, status.modified, headers, crc)
            self._ledger.record(record, flush=not has_name)
        if not has_name:
            self._mark_unfinished()

    def _mark_unfinished(self) -> None:
        """Mark the directory as incomplete for loaders, before a target gets its name there."""
        path = self._unfinished
        if path is None or exists(path):
            return
        # Without the directory, no loader can take it for complete.
        with writing(path), contextlib.suppress(FileNotFoundError):
            write_whole(path, UNFINISHED_CONTENT)

    def complete(self) -> Optional[str]:
        """Write the manifest if every rank is written; returns its path.

        Raises:
            TargetError: a target of another conversion was changed while it was being replaced.
            RetryableError: a file cannot be written or removed, or a requested target was removed or
                modified.
        """
        if self._part:
            return None
        self._ledger.insist()
        self._insist_on_targets()
        if self._replacing:
            with self._ledger.guarded() as check:
                self._remove_replaced(check)
        if self._overwrite:
            self._ledger.end_replacing(self._requested)
        # A cheap check first: by-rank runs come here once per rank.
        if len(self._requested) < len(self._everything) > len(self._ledger.done()):
            return None
        computed: dict[DoneRecord, int] = {}
        while True:
            with self._ledger.guarded() as check:
                records = self._all_done()
                check()
                if records is None:
                    # Another rank's target was removed.
                    self._unfinish([self._ledger.identity])
                    break
                if self._lacking(records).issubset(computed):
                    manifest = self._write_manifest(records, computed)
                    break
            computed.update(self._missing_checksums(records, computed))
        if records is None:
            # Checksums take long: targets may have been removed meanwhile.
            self._insist_on_targets()
            return None
        # Also those of other hosts: a restarted pod has another host name.
        self._destination.remove_dead_temporaries(self._directories(self._everything), complete=True)
        return manifest

    def _insist_on_targets(self) -> None:
        """Refuse if requested targets were removed or modified."""
        lost = set(self._requested) - self.recorded(self._requested)
        if lost:
            raise RetryableError(
                f"{self._root}: targets of {rank_ranges(lost, counted_as(self._plan.form.name))}, or their records, "
                "were removed or modified by another process during this run",
                file=self._root,
                rank=min(lost),
                hint="run the same command again to write missing targets; to rewrite modified ones add --overwrite",
            )

    def _remove_replaced(self, check: Callable[[], None]) -> None:
        """Remove the remaining targets of replaced conversions, then their records.

        Args:
            check: fails if the lock was lost.
        """
        replaced = [ledger for ledger in self._ledger.others() if ledger.replaced]
        own_names = {self._name(rank) for rank in self._requested}
        for ledger in replaced:
            for name, record in self._targets_of(ledger):
                if name not in own_names:
                    check()
                    self._destination.remove(name, record.matches)
        places = {os.path.dirname(ledger.identity.file_of(rank)) for ledger in replaced for rank in ledger.done()}
        foreign = set(self._destination.checkpoints(places)).difference(self._name(rank) for rank in self._everything)
        if replaced and foreign:
            raise self._refusals.foreign(foreign, set())
        check()
        for ledger in replaced:
            _remove(_unfinished(self._root, ledger.identity))
            ledger.remove()

    def _warn_of_remaining(self) -> None:
        """Warn of files that were copied from the source of replaced weights, and that this source lacks.

        Users may have edited them since, so they are not removed.
        """
        with contextlib.suppress(InputError):
            replaced = read_manifest(self._root) if self._replacing else None
            if replaced is None or replaced.plan.form != self._ledger.identity.form:
                return
            written = {file.name for file in self._plan.form.finishing()}
            remaining = sorted(self._existing_names([name for name in replaced.beside if name not in written]))
            if remaining:
                paths = [os.path.join(self._root, name) for name in remaining]
                self._report.warn(
                    f"{self._root}: files of the replaced model remain, which the new source lacks: "
                    f"{some_names(remaining)}; unless they belong to the new model: {shlex.join(['rm', *paths])}"
                )

    def _unfinish(self, identities: Iterable[Identity]) -> None:
        """Remove the files that mark conversions as complete, in reverse order of writing."""
        complete = self.manifest is not None
        for identity in identities:
            # By-rank runs skip this: every rank may have a mark, and without a manifest none exists.
            if complete or not form_named(identity.form).options.by_rank:
                marks = [os.path.join(self._root, name) for name in reversed(_marks(identity))]
                statuses = status_of_each(marks, through_links=False)
                if identity == self._ledger.identity and any(statuses):
                    # A target may be missing: loaders must not take the rest for a complete checkpoint.
                    self._mark_unfinished()
                for mark, status in zip(marks, statuses):
                    if status is not None:
                        _remove(mark)
        Manifest.remove(self._root)

    def _finish(self) -> tuple[tuple[FinishingRecord, ...], tuple[str, ...]]:
        """Write the files that complete the form, in order, each atomically.

        Returns:
            The records of these files, and the names of further model files; none in rank directories.
        """
        marks = _marks(self._ledger.identity)
        finishing: list[FinishingRecord] = []
        beside: list[str] = []
        for file in self._plan.form.finishing():
            if file.name not in marks and not self._plan.form.by_rank:
                beside.append(file.name)
            path = os.path.join(self._root, file.name)
            with writing(path):
                size = sum(map(len, file.make())) if file.size is None else file.size
                if file.name not in marks and exists(path) and not self._overwrite:
                    # An existing configuration or tokenizer is kept.
                    if not _holds(path, size, file.make()):
                        self._report.warn(
                            f"{path}: existing file kept, although the source has another one (to replace it: "
                            "--overwrite)"
                        )
                    continue
                crc = write_parts(path, size, file.make())
            # Rank directories are not recorded: trainings write there later.
            if file.name in marks and not self._plan.form.by_rank:
                finishing.append(FinishingRecord(file.name, size, f"{crc:08x}"))
        return tuple(finishing), tuple(beside)

    def _write_manifest(self, records: Mapping[int, DoneRecord], computed: Mapping[DoneRecord, int]) -> str:
        # Of stopped runs for other ranks than this one's: --overwrite for these ranks would resume them.
        self._ledger.end_replacing()
        files = []
        for rank, record in records.items():
            if record in computed:
                record = record._replace(crc=computed[record])
                self._ledger.record(record, flush=False)
            crc = None if record.crc is None else f"{record.crc:08x}"
            files.append(ManifestFile(rank, self._name(rank), record.size, record.headers, crc))
        finishing, beside = self._finish()
        # The directory is complete for loaders. An abandoned conversion to another form may have left a second mark.
        for path in {os.path.join(self._root, UNFINISHED), self._unfinished}:
            _remove(path)
        return Manifest(self._ledger.identity, tuple(files), finishing, beside).write(self._root)

    def _lacking(self, records: Mapping[int, DoneRecord]) -> set[DoneRecord]:
        """Targets without a checksum, if any run requested checksums; the order of the runs does not matter."""
        lacking = {record for record in records.values() if record.crc is None}
        return lacking if self._checksum or len(lacking) < len(records) else set()

    def _missing_checksums(
        self, records: Mapping[int, DoneRecord], computed: Collection[DoneRecord]
    ) -> dict[DoneRecord, int]:
        """Missing checksums of targets that were written without."""
        missing = self._lacking(records).difference(computed)
        if not missing:
            return {}
        # Loaded only here: most runs request no checksums.
        from reshard.checkpoints.formats.crc import crc_of_file

        return {record: crc_of_file(self._plan.path(rank)) for rank, record in records.items() if record in missing}

    def _all_done(self) -> Optional[dict[int, DoneRecord]]:
        """The record of every rank of the target strategy; None if a target is missing."""
        statuses = self._statuses(self._everything)
        records = self._ledger.done()
        complete = {}
        for rank, status in statuses.items():
            matching = [record for record in records.get(rank, []) if record.matches(status)]
            if not matching:
                return None
            # Several runs may have written equal files; a checksum of any of them is right.
            complete[rank] = next((record for record in matching if record.crc is not None), matching[0])
        return complete

    def _name(self, rank: int) -> str:
        """The file of a rank, relative to the directory."""
        return self._ledger.identity.file_of(rank)

    def _directories(self, ranks: Iterable[int]) -> set[str]:
        """The directories of some ranks' files, relative to the root."""
        return {os.path.dirname(self._name(rank)) for rank in ranks}

    @property
    def _anew(self) -> bool:
        """Whether this run starts to replace targets, and does not resume that."""
        # A repeated part must keep the records, which the whole run needs.
        return self._overwrite and not self._part and not self._ledger.replacing(self._requested, self._sources)

    def _statuses(self, ranks: Iterable[int]) -> dict[int, Optional[FileStatus]]:
        numbers = list(ranks)
        return dict(zip(numbers, status_of_each([self._plan.path(rank) for rank in numbers])))

    def recorded(self, ranks: Sequence[int]) -> set[int]:
        """The ranks with a recorded, unmodified target."""
        # Targets before records: a target that another run finishes in between has its record already.
        statuses = self._statuses(ranks)
        if not any(statuses.values()):
            # The records of many ranks are a long list to read for each new target.
            return set()
        records = self._ledger.done(frozenset(ranks))
        return {rank for rank, of_rank in records.items() if any(record.matches(statuses[rank]) for record in of_rank)}

    def _existing(self, ranks: Sequence[int]) -> TargetError:
        recorded = bool(self._ledger.done(frozenset(ranks)))
        return self._refusals.existing(ranks, recorded=recorded, continuing=self._ledger.exists)

    def _check_sources(self, guarded: bool) -> None:
        # Only runs with a finished target that stays, and live runs, fix the source files.
        bound = self._ledger.done().keys() - (set(self._requested) if self._anew else set())
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
            how = "shared values such as global_step differ from the files read before"
            raise self._refusals.other_source(changes.values, how)
        different = sorted([*changes.content, *changes.values])
        if different:
            self._report.warn(
                f"the {self._refusals.source_files(different)} differ from those at the begin of the conversion in "
                f"{self._root}; it now has targets of both"
            )
        for ranks, change in ((changes.time, "have another time"), (changes.place, "were replaced or touched")):
            if ranks:
                than = "than when" if ranks is changes.time else "since"
                self._report.warn(
                    f"{self._refusals.source_files(ranks)} {change} {than} the conversion in {self._root} was begun, "
                    "though sizes, headers and samples of the contents are the same; unless they were only copied, "
                    f"convert everything again with {self._refusals.replace_all}"
                )


def _marks(identity: Identity) -> list[str]:
    """Files that make the directory of a conversion complete, relative to it."""
    return form_named(identity.form).marks([identity.file_of(file) for file in range(identity.ranks)])


def _unfinished(root: str, identity: Identity) -> Optional[str]:
    """The path of the mark of an incomplete directory; None for rank files, which need none."""
    if form_named(identity.form).options.by_rank:
        return None
    return os.path.join(root, os.path.dirname(identity.file_of(0)), UNFINISHED)


def _remove(path: Optional[str]) -> None:
    """Remove a small file of ours, if it exists."""
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
    """A digest of which tensors are in which file of a form."""
    if form.by_rank:
        return ""
    digests = []
    for file in range(form.count):
        names = form.names_in(file)
        digests.append(repr(sorted(form.section_of(file).layouts if names is None else names)).encode())
    return short_digest(*digests)


def beside(directory: str, identity: Identity) -> list[str]:
    """Checkpoint files of other origin that readers may mix with the conversion's, sorted.

    Args:
        directory: the target directory; the names are relative to it.
        identity: the conversion.

    Raises:
        ReshardError: it cannot be read.
    """
    own_names = {identity.file_of(file) for file in range(identity.ranks)}
    names = Destination(directory).checkpoints({os.path.dirname(name) for name in own_names})
    return [name for name in names if name not in own_names]
