"""Progress of a target directory, from its records alone."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from reshard.errors import CheckpointError, TargetError
from reshard.records.ledger import ledger_in
from reshard.records.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard.records.record import Record
from reshard.storage import absolute, exists, status_of_each
from reshard.text.names import similar_path_hint


@dataclass(frozen=True)
class Status:
    """Progress of a conversion.

    Attributes:
        record: what was asked, and found out.
        written: target ranks that any run recorded as finished, ascending, whatever became of their files.
        done: target ranks with unchanged files, ascending.
        changed: target ranks whose files were modified after they were written.
        missing: wanted ranks of the record that are not written yet, or whose files were removed.
        bytes_done: size of the files of ``done``.
        manifest: the manifest's path, if it and all small files that it lists exist.
        unfinished: missing small files: the manifest, or files that it lists.
    """

    record: Record
    written: tuple[int, ...]
    done: tuple[int, ...]
    changed: tuple[int, ...]
    missing: tuple[int, ...]
    bytes_done: int
    manifest: str | None
    unfinished: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every wanted rank is done, and the manifest exists unless only lost ranks are recovered."""
        recorded = self.manifest is not None or bool(self.record.lost)
        return recorded and not self.missing and not self.changed


def status_of(directory: str) -> Status:
    """The progress of the conversion in a directory.

    Raises:
        TargetError: the directory holds no conversion.
        CheckpointError: the manifest is damaged.
        RetryableError: it cannot be read.
    """
    ledger = ledger_in(directory)
    path = os.path.join(directory, MANIFEST_NAME)
    if ledger is None:
        if exists(path):
            return _by_manifest(directory)
        advice = "name the DST of a conversion"
        above = os.path.dirname(absolute(directory)) if exists(directory) else ""
        if above and ledger_in(above) is not None:
            advice = f"name the DST of its conversion: {shlex.quote(above)}"
        if not exists(directory):
            # A run that fails before its first file removes the directory that it has made.
            advice = (
                similar_path_hint(directory)
                or f"{advice}; a run that wrote no file leaves no DST: run its command again"
            )
        raise TargetError(f"{directory}: holds no records of a conversion", file=directory, hint=advice)
    ranks = range(ledger.record.file_count)
    files = [os.path.join(directory, ledger.record.file_of(rank)) for rank in ranks]
    statuses = dict(zip(ranks, status_of_each(files)))
    recorded = ledger.done()
    matching = [
        (rank, one.size) for rank, records in recorded.items() for one in records if one.matches(statuses.get(rank))
    ]
    sizes = dict(matching)
    unfinished: tuple[str, ...] = (MANIFEST_NAME,)
    if exists(path):
        unfinished = ()
        # A damaged manifest is reported by commands that need it; it may be being replaced.
        with contextlib.suppress(CheckpointError):
            unfinished = _unfinished(directory, read_manifest(directory))
    changed = [rank for rank in recorded if rank not in sizes and statuses.get(rank) is not None]
    return _status(directory, ledger.record, recorded, sizes, changed, unfinished)


def _status(
    directory: str,
    record: Record,
    written: Iterable[int],
    sizes: Mapping[int, int],
    changed: Iterable[int],
    unfinished: tuple[str, ...],
) -> Status:
    existing = {*sizes, *changed}
    missing = tuple(rank for rank in record.wanted if rank not in existing)
    manifest = None if unfinished else os.path.join(directory, MANIFEST_NAME)
    done, modified, size = tuple(sorted(sizes)), tuple(sorted(changed)), sum(sizes.values())
    ever = tuple(sorted(written))
    return Status(record, ever, done, modified, missing, size, manifest, unfinished)


def _unfinished(directory: str, manifest: Manifest) -> tuple[str, ...]:
    """The small files that a manifest lists and that are missing."""
    names = [*(file.file for file in manifest.finishing), *manifest.beside]
    return tuple(name for name in names if not exists(os.path.join(directory, name)))


def _by_manifest(directory: str) -> Status:
    """The status from the manifest of a directory without records, as after a copy."""
    manifest = read_manifest(directory)
    statuses = status_of_each([os.path.join(directory, file.file) for file in manifest.files])
    existing = [(file, status) for file, status in zip(manifest.files, statuses) if status is not None]
    sizes = {file.rank: file.size for file, status in existing if status.size == file.size}
    changed = [file.rank for file, _ in existing if file.rank not in sizes]
    written = [file.rank for file in manifest.files]
    return _status(directory, manifest.record, written, sizes, changed, _unfinished(directory, manifest))
