"""Progress of a target directory, from its records alone."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from typing import Optional

from reshard.errors import CheckpointError, TargetError
from reshard.records.given import Given, asked_ranks
from reshard.records.identity import Identity
from reshard.records.ledger import current, ledgers_in
from reshard.records.manifest import MANIFEST_NAME, Manifest, read_manifest
from reshard.storage import exists, status_of_each
from reshard.text.near_names import similar_path_hint


@dataclass(frozen=True)
class Status:
    """Progress of a conversion.

    Attributes:
        plan: its identity.
        wanted: target ranks of the complete conversion, ascending: all, or only the lost ones to recover.
        done: target ranks with unchanged files, ascending.
        changed: target ranks whose files were modified after they were written.
        missing: ranks of ``wanted`` that are not written yet, or whose files were removed.
        bytes_done: size of the files of ``done``.
        writing: whether a run is writing, as far as locks show.
        manifest: the manifest's path, if it and all small files that it lists exist.
        resumable: whether commands are recorded, so that `resume` works.
        asked: the requested target ranks, ascending; None for all, or if unknown.
    """

    plan: Identity
    wanted: tuple[int, ...]
    done: tuple[int, ...]
    changed: tuple[int, ...]
    missing: tuple[int, ...]
    bytes_done: int
    writing: bool
    manifest: Optional[str]
    resumable: bool = False
    asked: Optional[tuple[int, ...]] = None

    @property
    def complete(self) -> bool:
        """Whether every rank of ``wanted`` is done, and the manifest exists if these are all ranks."""
        recorded = self.manifest is not None or self.lost_only
        return recorded and not self.missing and not self.changed

    @property
    def lost_only(self) -> bool:
        """Whether only lost ranks are recovered."""
        return len(self.wanted) < self.plan.ranks


def status_of(directory: str) -> Status:
    """The progress of the conversion in a directory.

    Raises:
        TargetError: the directory holds no conversion, or several.
        CheckpointError: the manifest is damaged.
        RetryableError: it cannot be read.
    """
    begun = current(ledgers_in(directory))
    path = os.path.join(directory, MANIFEST_NAME)
    if len(begun) > 1:
        raise TargetError(
            f"{directory} holds records of {len(begun)} conversions",
            file=directory,
            hint="run the command of the one to keep again, with --overwrite",
        )
    if not begun:
        if exists(path):
            return _by_manifest(directory)
        meant = None if exists(directory) else similar_path_hint(directory)
        raise TargetError(
            f"{directory}: holds no records of a conversion",
            file=directory,
            hint=meant or "name the DST of a conversion",
        )
    (ledger,) = begun
    identity = ledger.identity
    targets = status_of_each([os.path.join(directory, identity.file_of(rank)) for rank in range(identity.ranks)])
    statuses = {rank: status for rank, status in enumerate(targets) if status is not None}
    records = ledger.done()
    done: list[int] = []
    changed: list[int] = []
    size = 0
    for rank, rank_records in sorted(records.items()):
        match = next((record for record in rank_records if record.matches(statuses.get(rank))), None)
        if match is not None:
            done.append(rank)
            size += match.size
        elif rank in statuses:
            changed.append(rank)
    written = {*done, *changed}
    only = ledger.only()
    wanted = tuple(range(identity.ranks) if only is None else sorted(only))
    missing = tuple(rank for rank in wanted if rank not in written)
    finished = path if exists(path) else None
    # A damaged manifest is reported by commands that need it; it may be being replaced.
    with contextlib.suppress(CheckpointError):
        finished = _finished(directory, read_manifest(directory)) if finished else None
    given: list[Given] = []
    # Damaged records are reported by commands that need them.
    with contextlib.suppress(TargetError):
        given = ledger.given()
    asked = asked_ranks(given) if given else None
    return Status(
        identity, wanted, tuple(done), tuple(changed), missing, size, ledger.in_use, finished, bool(given), asked
    )


def _finished(directory: str, manifest: Manifest) -> Optional[str]:
    """The path of the manifest of a directory, if all small files that it lists exist."""
    names = [*(file.file for file in manifest.finishing), *manifest.beside]
    complete = all(exists(os.path.join(directory, name)) for name in names)
    return os.path.join(directory, MANIFEST_NAME) if complete else None


def _by_manifest(directory: str) -> Status:
    """The status from the manifest of a directory without records, as after a copy."""
    manifest = read_manifest(directory)
    done: list[int] = []
    changed: list[int] = []
    size = 0
    statuses = status_of_each([os.path.join(directory, file.file) for file in manifest.files])
    for file, status in zip(manifest.files, statuses):
        if status is not None and status.size == file.size:
            done.append(file.rank)
            size += file.size
        elif status is not None:
            changed.append(file.rank)
    written = {*done, *changed}
    wanted = tuple(range(manifest.plan.ranks))
    missing = tuple(rank for rank in wanted if rank not in written)
    finished = _finished(directory, manifest)
    return Status(manifest.plan, wanted, tuple(done), tuple(changed), missing, size, False, finished)
