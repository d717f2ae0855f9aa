"""A target directory during a conversion: finished files, remaining files, completion.

1. `survey` compares the directory with its records and returns the remaining files. It refuses
   foreign files and changes nothing.
2. `writing` surveys again under the lock, removes what this run replaces, and records that this run writes.
3. `finished` records a target.
4. `complete` writes the manifest once every rank of the target strategy is written.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from reshard.convert.recorded import record_of
from reshard.errors import InputError, ReshardError, RetryableError
from reshard.execute.destination import checkpoints_in, existing_files, tidy
from reshard.forms.registry import counted_as, form_named, forms_among
from reshard.forms.target import UNFINISHED, UNFINISHED_CONTENT, FinishingFile
from reshard.plan.pieces import TargetFile
from reshard.plan.plan import Plan
from reshard.records import (
    MANIFEST_NAME,
    DoneRecord,
    FinishingRecord,
    Ledger,
    Manifest,
    Record,
    SourceFile,
    header_digest,
    read_manifest,
    refusals,
    source_files,
)
from reshard.records.ledger import ledger_in
from reshard.source_replicas import SourceChecks
from reshard.storage import (
    FileStatus,
    UnfitError,
    exists,
    is_regular_file,
    names_in,
    opened_regular,
    read_range,
    remove_file,
    status_of_each,
    write_parts,
    write_whole,
    writing,
)
from reshard.text.messages import Report, rank_ranges, some_names

# Beginnings of names of records, temporary files, marks and manifests, and of hidden files.
_OURS = (".", "reshard-")
# Maximum number of listed files of a replaced model.
_MOST_REMAINING = 20


class TargetDirectory:
    """The target directory of a conversion.

    Args:
        plan: the plan.
        requested: the requested target files that this run writes, ascending.
        checks: of the sources, with the files that they found damaged.
        report: gets warnings and notes.
    """

    def __init__(
        self,
        plan: Plan,
        requested: Sequence[int],
        checks: SourceChecks,
        report: Report,
    ) -> None:
        request = plan.request
        asked, task = request.asked, request.task
        self._overwrite = asked.target.overwrite
        # Whether this run writes every file of the target directory.
        self._whole = asked.files is None if task.lost_only else len(requested) == plan.form.count
        # The manifest gets a checksum of every file, as if any other run had requested it.
        self._checksum = asked.target.checksum == "crc32"
        self._plan = plan
        self._report = report
        self.kept: set[str] = set()
        self._root = request.dst
        self._everything = range(plan.form.count)
        self._requested = requested
        self._sources = source_files(plan.checkpoint.indexes, checks.handles)
        self._damaged = source_files(checks.found, checks.handles)
        self._checks = checks
        # Of rank files, a run may read only some.
        self._source_whole = not request.form.options.by_rank
        # Without CRC checks, damaged files are read like others.
        self._checks_crcs = asked.effort.crc != "never"
        self._suspected: list[SourceFile] = []
        self._record = record_of(plan)
        self._ledger = Ledger(self._root, self._record, report.note)
        self._unfinished = _unfinished(self._root, self._record)
        self._last_headers: tuple[object, str | None] = (None, None)

    def survey(self) -> list[int]:
        """The requested files that are left to write, by the records of the directory; nothing is changed.

        Raises:
            TargetError: the directory contains another conversion, foreign checkpoints, or targets
                without permission to overwrite.
        """
        return self._survey()[0]

    def _survey(self) -> tuple[list[int], Ledger | None, Mapping[str, DoneRecord], bool]:
        """The files left, the records before this run with its finished files, and whether it replaces these."""
        # Targets before records: another run may finish one at this moment, which then has its record already.
        existing = existing_files(self._root, map(self._name, self._requested))
        before = ledger_in(self._root)
        joined = before is not None and before.joins(self._ledger)
        if before is not None and not joined:
            # Lost ranks alone replace no conversion to all ranks, only other lost ranks.
            replaces = self._whole and (not self._record.lost or bool(before.record.lost))
            if not (self._overwrite and replaces):
                raise refusals.another_conversion(self._root, self._record, before.record, replaces)
        # Of many by-rank runs, the first one lists all directories, the others their own.
        everywhere = not joined or self._whole
        recorded = {} if before is None else before.finished(None if everywhere else self._requested)
        own_names = {self._name(rank) for rank in (self._everything if joined else self._requested)}
        places = {os.path.dirname(name) for name in (*own_names, *recorded)} if everywhere else self._directories()
        present = set(checkpoints_in(self._root, places, everywhere))
        if before is None and ledger_in(self._root) is not None:
            # Another run has begun meanwhile: what is present may be its targets.
            return self._survey()
        foreign = present - own_names - recorded.keys() - {*(() if before is None else _marks(before.record))}
        if foreign:
            raise refusals.foreign(self._root, foreign)
        if not self._plan.form.by_rank:
            existing_files(self._root, _marks(self._record))
        if before is None:
            self._check_other_files()
            marks = set() if self._overwrite else self._existing_names(_marks(self._record))
            if marks:
                raise refusals.foreign(self._root, marks)
        anew = before is not None and self._begins_anew(before, recorded)
        done = recorded.keys() if joined and not anew else set()
        missing = [rank for rank in self._requested if self._name(rank) not in done]
        in_the_way = [rank for rank in missing if self._name(rank) in existing]
        if in_the_way and not self._overwrite:
            known = before is not None and bool(before.done(frozenset(in_the_way)))
            raise self._existing(in_the_way, known)
        if before is not None and joined and not anew:
            self._note_other_path(before)
        return missing, before, recorded, anew

    def _begins_anew(self, before: Ledger, recorded: Mapping[str, DoneRecord]) -> bool:
        """Whether finished targets of this run are written again; otherwise it goes on with those that are missing.

        Raises:
            TargetError: finished targets that stay were made from other source files, or from damaged ones.
        """
        if not before.joins(self._ledger):
            return True
        done = before.done().keys()
        changes = before.changed_sources(self._sources, self._source_whole)
        damaged = self._read_damaged(before)
        # Other runs may be about to finish their first targets.
        stays = not (self._overwrite and (self._whole or (done and done <= set(self._requested))))
        if stays:
            self._refuse_changed(*changes)
            self._refuse_damaged(damaged)
        # A replacement that was stopped goes on: some of its targets are missing.
        finished = recorded.keys() >= {self._name(rank) for rank in self._requested}
        return self._overwrite and (finished or any(changes) or bool(damaged))

    def _read_damaged(self, before: Ledger) -> list[int]:
        """Source ranks whose files are damaged, and from which finished targets may be made.

        Raises:
            RetryableError: another run has found a file of this run damaged meanwhile.
        """
        if not self._checks_crcs:
            return []
        new = [source.rank for source in before.known_damaged(self._unchecked()) if source not in self._suspected]
        if new:
            files = refusals.source_files(new, self._plan.request.form.options.unit)
            raise RetryableError(
                f"another run has found the {files} damaged meanwhile",
                file=self._root,
                rank=new[0],
                hint="run the same command again: it treats them as missing",
            )
        return before.read_damaged(self._damaged) if before.done() else []

    def _refuse_damaged(self, damaged: Sequence[int]) -> None:
        """Refuse to go on with targets made from damaged source files, which are recorded."""
        if not damaged:
            return
        if not self._plan.request.task.dry_run:
            # They may be repaired before the next run.
            with contextlib.suppress(ReshardError):
                self._ledger.add_damaged(self._damaged)
        files = refusals.source_files(damaged, self._plan.request.form.options.unit)
        replace = refusals.replacing(self._record, self._whole)
        raise refusals.damaged_sources(self._root, files, damaged[0], replace)

    def _refuse_changed(self, contents: Sequence[int], values: Sequence[int]) -> None:
        """Refuse other source files than those of the finished targets; see `Ledger.changed_sources`."""
        changed = sorted([*contents, *values])
        if changed:
            how = "sizes, headers or contents" if contents else "shared values such as global_step"
            how = f"number, {how}" if contents and self._source_whole else how
            files = refusals.source_files(changed, self._plan.request.form.options.unit)
            replace = refusals.replacing(self._record, self._whole)
            raise refusals.other_source(self._root, files, changed[0], how, replace)

    def _note_other_path(self, before: Ledger) -> None:
        """Note that the finished targets were made from another path, whose files look like those of this run."""
        theirs, mine = before.record.asked.source.path, self._record.asked.source.path
        if theirs != mine and before.done():
            self._report.note(
                f"{self._root} was begun from {theirs}; the files read of {mine} look the same: equal in size, headers "
                "and samples of their contents"
            )

    def _existing(self, ranks: Sequence[int], modified: bool) -> ReshardError:
        """Targets of some ranks exist; see `refusals.existing`."""
        request = self._plan.request
        comparable = not request.task.recover and request.edits.additions is None
        return refusals.existing(self._root, self._record, ranks, modified=modified, comparable=comparable)

    def _check_other_files(self) -> None:
        """Refuse checkpoints of another form in this directory; note other files, which stay."""
        names = names_in(self._root)
        if not names:
            return
        finishing = (file.name for file in self._plan.form.finishing())
        own_names = (*map(self._name, self._everything), *_marks(self._record), *finishing)
        firsts = {name.partition(os.sep)[0] for name in own_names}
        others = [name for name in names if name not in firsts]
        forms = forms_among(self._root, others) - {self._record.form}
        if forms:
            raise refusals.another_form(self._root, sorted(forms))
        foreign = [name for name in others if not name.startswith(_OURS)]
        if foreign:
            self._report.note(f"{self._root}: holds other files, which stay: {some_names(foreign)}")

    @contextlib.contextmanager
    def writing(self) -> Iterator[list[int]]:
        """Record that this run writes while the block runs, which receives the files that are left by a second survey.

        Raises:
            TargetError: as `survey`.
            RetryableError: the directory cannot be written.
        """
        self._tidy()
        try:
            try:
                with self._ledger.locked():
                    self._renew()
                    left, before, recorded, anew = self._survey()
                    if before is not None and anew:
                        self._remove(before, recorded)
                    elif left:
                        self._unfinish(self._record)
                    if before is None:
                        # They say nothing of this conversion, and would be taken for its own.
                        self._ledger.remove_leftovers()
                    self._ledger.claim()
                    self._add_records()
                yield left
            finally:
                if not self._ledger.done():
                    self._ledger.leave_nothing()
        except BaseException:
            task, shard = self._plan.request.task, self._plan.request.asked.shard
            # For one of several runs, resume would do the work of all; after another run, that of the other.
            if not task.by_rank and shard is None and self._record.is_repeatable:
                with contextlib.suppress(ReshardError, OSError):
                    before = ledger_in(self._root)
                    if before is not None and before.record.to_json() == self._record.to_json():
                        self._report.next_command = f"reshard resume {shlex.quote(self._root)}"
            raise

    def _claim(self) -> bool:
        """Check that the directory is still of this conversion and made from this run's sources; whether it is so anew.

        Raises:
            TargetError: it is not.
            RetryableError: it cannot be recorded.
        """
        anew = self._ledger.claim()
        if anew:
            # Another run failed before its first target and removed the records, or it replaces targets, or it found
            # a source damaged. It holds the lock until its records say so.
            with self._ledger.locked():
                self._refuse_changed(*self._ledger.changed_sources(self._sources, self._source_whole))
                self._refuse_damaged(self._read_damaged(self._ledger))
                self._add_records()
        return anew

    def _renew(self) -> None:
        """Make running runs compare their sources again, if this run read others, or found some damaged.

        It comes before this run lists finished targets. They do it after they record one, when this run has recorded
        its sources.
        """
        before = ledger_in(self._root)
        if before is None or not before.joins(self._ledger):
            return
        damaged = set(self._damaged) - before.damaged()
        if damaged or any(before.changed_sources(self._sources, self._source_whole)):
            before.renew()

    def _add_records(self) -> None:
        """Record the sources of this run."""
        if self._checks_crcs:
            self._ledger.settle(self._suspected, self._damaged)
        self._ledger.add_sources(self._sources, self._source_whole)
        self._ledger.add_damaged(self._damaged)
        self._ledger.add_unchecked(self._unchecked())

    def _unchecked(self) -> list[SourceFile]:
        """The sources of this run that it reads without a check of their CRC."""
        indexes = self._plan.checkpoint.indexes
        return [source for source in self._sources if indexes[source.rank].path in self._checks.unchecked]

    def _remove(self, before: Ledger, recorded: Mapping[str, DoneRecord]) -> None:
        """Remove what this run replaces: what marks the directory as complete first, records last."""
        self._warn_of_remaining(before)
        self._unfinish(before.record)
        if not self._whole:
            # These files are replaced one by one.
            before.forget(self._requested)
            return
        for name in recorded:
            path = os.path.join(self._root, name)
            with writing(path, "removed"):
                remove_file(path)
        # No later run would look there for temporary files of killed runs.
        tidy(self._root, {os.path.dirname(before.record.file_of(rank)) for rank in range(before.record.file_count)})
        _remove(_unfinished(self._root, before.record))
        before.remove()

    def _warn_of_remaining(self, before: Ledger) -> None:
        """Warn of files that were copied beside replaced weights, and that this run does not write.

        Users may have edited them since, so they are not removed.
        """
        with contextlib.suppress(InputError):
            written = {file.name for file in self._plan.form.finishing()}
            remaining = sorted(
                self._existing_names([name for name in read_manifest(self._root).beside if name not in written])
            )
            if remaining:
                self._report.warn(
                    f"{self._root}: files of the replaced model remain, which this run does not write: "
                    f"{some_names(remaining, _MOST_REMAINING)}; remove them unless they belong to the new model"
                )

    def suspects(self) -> list[int]:
        """Source ranks whose files were damaged in an earlier run into this directory.

        Runs that read only parts of them have to come to the same result as that run.
        """
        self._suspected = self._ledger.known_damaged(self._sources)
        return [source.rank for source in self._suspected]

    def _tidy(self) -> None:
        """Remove temporary files of killed runs."""
        tidy(self._root, self._directories())
        self._ledger.remove_dead_temporaries()

    def keep(self) -> str | None:
        """The manifest of a complete directory, after warnings of other files that the source has now."""
        self._tidy()
        for file in self._plan.form.finishing():
            self._kept(file)
        return self._manifest

    @property
    def is_complete(self) -> bool:
        """Whether the directory is complete, once all requested ranks are written."""
        if self._record.lost:
            return True
        records = self._all_done() if self._manifest is not None else None
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
    def _manifest(self) -> str | None:
        """The manifest's path; None without a manifest."""
        path = os.path.join(self._root, MANIFEST_NAME)
        return path if is_regular_file(path) else None

    def missing(self, groups: Iterable[Sequence[TargetFile]]) -> Iterator[list[TargetFile]]:
        """Groups without the targets that other runs have finished meanwhile."""
        for group in groups:
            missing = [target for target in group if not self.recorded((target.rank,))]
            if missing:
                yield missing

    def finished(self, target: TargetFile, status: FileStatus, crc: int | None) -> None:
        """Record a target whose bytes are on disk, before it gets its name: it never exists without a record.

        Args:
            target: the target.
            status: of its file.
            crc: CRC-32 of the file, if it was computed.

        Raises:
            TargetError: another file has its name, or another conversion has begun in the directory, or this one again
                from other sources.
            RetryableError: it cannot be recorded.
        """
        self._claim()
        if not self._overwrite and exists(target.path) and not self.recorded((target.rank,)):
            raise self._existing([target.rank], bool(self._ledger.done({target.rank})))
        layout, headers = self._last_headers
        if layout is not target.layout:
            headers = header_digest(target.layout)
            self._last_headers = (target.layout, headers)
        checksum, name = None if crc is None else f"{crc:08x}", self._name(target.rank)
        record = DoneRecord(target.rank, name, status.size, headers, checksum, status.modified)
        self._ledger.add_done(record, flush=True)
        try:
            if self._claim():
                # Perhaps removed with the others.
                self._ledger.add_done(record, flush=True)
        except ReshardError:
            self._ledger.drop_done(record)
            raise
        self._mark_unfinished()

    def _mark_unfinished(self) -> None:
        """Mark the directory as incomplete for loaders, before a target gets its name there."""
        path = self._unfinished
        if path is None or exists(path):
            return
        # Without the directory, no loader can take it for complete.
        with writing(path), contextlib.suppress(FileNotFoundError):
            write_whole(path, UNFINISHED_CONTENT)

    def complete(self) -> str | None:
        """Write the manifest if every rank is written; returns its path.

        Raises:
            TargetError: another conversion has begun in the directory, or wrote checkpoints there.
            RetryableError: a file cannot be written or removed, or a requested target was removed or
                modified.
        """
        self._claim()
        self._insist_on_targets()
        # A cheap check first: by-rank runs come here once per rank.
        if len(self._requested) < len(self._everything) > len(self._ledger.done()):
            return None
        computed: dict[DoneRecord, str] = {}
        while True:
            with self._ledger.locked():
                records = self._all_done()
                if records is None:
                    # Another rank's target was removed.
                    self._unfinish(self._record)
                    break
                if self._lacking(records).issubset(computed):
                    self._ledger.claim()
                    manifest = self._write_manifest(records, computed)
                    tidy(self._root, set(map(os.path.dirname, map(self._name, self._everything))))
                    return manifest
            computed.update(self._missing_checksums(records, computed))
        # Checksums take long: targets may have been removed meanwhile.
        self._insist_on_targets()
        return None

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

    def _unfinish(self, record: Record) -> None:
        """Remove the files that mark a conversion as complete, in reverse order of writing."""
        # By-rank runs skip this: every rank may have a mark, and without a manifest none exists.
        if self._manifest is not None or not form_named(record.form).options.by_rank:
            marks = [os.path.join(self._root, name) for name in reversed(_marks(record))]
            statuses = status_of_each(marks, through_links=False)
            if record.identity == self._record.identity and any(statuses):
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
        marks = _marks(self._record)
        finishing: list[FinishingRecord] = []
        beside: list[str] = []
        for file in self._plan.form.finishing():
            if file.name not in marks and not self._plan.form.by_rank:
                beside.append(file.name)
            path = os.path.join(self._root, file.name)
            with writing(path):
                if self._kept(file):
                    continue
                size = _size(file)
                crc = write_parts(path, size, file.make())
            # Rank directories are not recorded: trainings write there later.
            if file.name in marks and not self._plan.form.by_rank:
                finishing.append(FinishingRecord(file.name, size, f"{crc:08x}"))
        return tuple(finishing), tuple(beside)

    def _kept(self, file: FinishingFile) -> bool:
        """Whether an existing configuration or tokenizer stays; a warning if the source has another one."""
        path = os.path.join(self._root, file.name)
        if self._overwrite or file.name in _marks(self._record) or not exists(path):
            return False
        if not _holds(path, _size(file), file.make()):
            self.kept.add(file.name)
            self._report.warn(
                f"{path}: existing file kept, although the source has another one (to replace it: --overwrite)"
            )
        return True

    def _write_manifest(self, records: Collection[DoneRecord], computed: Mapping[DoneRecord, str]) -> str:
        foreign = beside(self._root, self._record)
        if foreign:
            # Of another conversion that went on here after its records were removed.
            raise refusals.foreign(self._root, foreign)
        files = []
        for record in records:
            if record in computed:
                record = record._replace(crc32=computed[record])
                self._ledger.add_done(record, flush=False)
            files.append(record)
        finishing, copied = self._finish()
        # The directory is complete for loaders. An abandoned conversion to another form may have left a second mark.
        for path in {os.path.join(self._root, UNFINISHED), self._unfinished}:
            _remove(path)
        return Manifest(self._ledger.record, tuple(files), finishing, copied).write(self._root)

    def _lacking(self, records: Collection[DoneRecord]) -> set[DoneRecord]:
        """Targets without a checksum, if any run requested checksums; the order of the runs does not matter."""
        lacking = {record for record in records if record.crc32 is None}
        return lacking if self._checksum or len(lacking) < len(records) else set()

    def _missing_checksums(
        self, records: Collection[DoneRecord], computed: Collection[DoneRecord]
    ) -> dict[DoneRecord, str]:
        """Missing checksums of targets that were written without."""
        missing = self._lacking(records).difference(computed)
        if not missing:
            return {}
        # Loaded only here: most runs request no checksums.
        from reshard.checkpoints.formats.crc import crc_of_file

        return {record: f"{crc_of_file(self._plan.path(record.rank)):08x}" for record in records if record in missing}

    def _all_done(self) -> list[DoneRecord] | None:
        """The records of all targets, by rank; None if a target is missing."""
        finished = [*self._ledger.finished().values()]
        return finished if len(finished) == len(self._everything) else None

    def _name(self, rank: int) -> str:
        """The file of a rank, relative to the directory."""
        return self._record.file_of(rank)

    def _directories(self) -> set[str]:
        """The directories of the requested ranks' files, relative to the root."""
        return {os.path.dirname(self._name(rank)) for rank in self._requested}

    def recorded(self, ranks: Sequence[int]) -> set[int]:
        """The ranks with a recorded, unmodified target."""
        # Targets before records: a target that another run finishes in between has its record already.
        statuses = dict(zip(ranks, status_of_each([self._plan.path(rank) for rank in ranks])))
        if not any(statuses.values()):
            # The records of many ranks are a long list to read for each new target.
            return set()
        records = self._ledger.done(frozenset(ranks))
        return {rank for rank, of_rank in records.items() if any(record.matches(statuses[rank]) for record in of_rank)}


def _marks(record: Record) -> list[str]:
    """Files that make the directory of a conversion complete, relative to it."""
    return form_named(record.form).marks([record.file_of(file) for file in range(record.file_count)])


def _unfinished(root: str, record: Record) -> str | None:
    """The path of the mark of an incomplete directory; None for rank files, which need none."""
    if form_named(record.form).options.by_rank:
        return None
    return os.path.join(root, os.path.dirname(record.file_of(0)), UNFINISHED)


def _remove(path: str | None) -> None:
    """Remove a small file of ours, if it exists."""
    if path is not None:
        remove_file(path)


def _size(file: FinishingFile) -> int:
    return sum(map(len, file.make())) if file.size is None else file.size


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


def beside(directory: str, record: Record) -> list[str]:
    """Checkpoint files of other origin that readers may mix with the conversion's, sorted.

    Args:
        directory: the target directory; the names are relative to it.
        record: the conversion.

    Raises:
        ReshardError: it cannot be read.
    """
    own_names = {*_marks(record), *map(record.file_of, range(record.file_count))}
    names = checkpoints_in(directory, {os.path.dirname(name) for name in own_names})
    return [name for name in names if name not in own_names]
