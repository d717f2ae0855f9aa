"""How far a target directory is, from its records alone."""

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
from reshard.text.near_names import path_meant


@dataclass(frozen=True)
class Status:
    """How far a conversion is.

    Attributes:
        plan: which conversion.
        wanted: target ranks that it is complete with, ascending: all, or the lost ones that alone are recovered.
        done: target ranks that are there as they were written, ascending.
        changed: target ranks that were written and whose file is another one now.
        missing: those of ``wanted`` that were not written yet, or whose file is gone.
        bytes_done: size of the files of ``done``.
        writing: whether some run is writing at this moment, as far as locks tell.
        manifest: the manifest's path, if it is there, and so are all small files that it lists.
        resumable: whether the records say what runs were given, so that it need not be typed again.
        asked: the target ranks that they were asked for, ascending; None for all, or where nothing tells.
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
        """Whether every rank of ``wanted`` is there, and the manifest says so where these are all."""
        told = self.manifest is not None or self.lost_only
        return told and not self.missing and not self.changed

    @property
    def lost_only(self) -> bool:
        """Whether only lost ranks are recovered."""
        return len(self.wanted) < self.plan.ranks


def status_of(directory: str) -> Status:
    """How far the conversion in a directory is.

    Raises:
        TargetError: no conversion was begun there, or several were.
        CheckpointError: the manifest is damaged.
        RetryableError: it cannot be read.
    """
    begun = current(ledgers_in(directory))
    path = os.path.join(directory, MANIFEST_NAME)
    if len(begun) > 1:
        raise TargetError(
            f"{directory} holds records of {len(begun)} conversions",
            file=directory,
            hint="give the command of the one that is to stay there with --overwrite",
        )
    if not begun:
        if exists(path):
            return _by_manifest(directory)
        meant = None if exists(directory) else path_meant(directory)
        raise TargetError(
            f"{directory}: no conversion was begun here",
            file=directory,
            hint=meant or "name the DST of a conversion",
        )
    (ledger,) = begun
    identity = ledger.identity
    found_there = status_of_each([os.path.join(directory, identity.file_of(rank)) for rank in range(identity.ranks)])
    statuses = {rank: status for rank, status in enumerate(found_there) if status is not None}
    records = ledger.done()
    done: list[int] = []
    changed: list[int] = []
    size = 0
    for rank, found in sorted(records.items()):
        match = next((record for record in found if record.matches(statuses.get(rank))), None)
        if match is not None:
            done.append(rank)
            size += match.size
        elif rank in statuses:
            changed.append(rank)
    known = {*done, *changed}
    only = ledger.only()
    wanted = tuple(range(identity.ranks) if only is None else sorted(only))
    missing = tuple(rank for rank in wanted if rank not in known)
    finished = path if exists(path) else None
    # A damaged one is told of where it is needed, or is being replaced at this moment.
    with contextlib.suppress(CheckpointError):
        finished = _finished(directory, read_manifest(directory)) if finished else None
    given: list[Given] = []
    # Records that are damaged are told of where they are needed.
    with contextlib.suppress(TargetError):
        given = ledger.given()
    asked = asked_ranks(given) if given else None
    return Status(
        identity, wanted, tuple(done), tuple(changed), missing, size, ledger.in_use, finished, bool(given), asked
    )


def _finished(directory: str, manifest: Manifest) -> Optional[str]:
    """The path of the manifest of a directory, if all small files are there that it lists."""
    names = [*(file.file for file in manifest.finishing), *manifest.beside]
    there = all(exists(os.path.join(directory, name)) for name in names)
    return os.path.join(directory, MANIFEST_NAME) if there else None


def _by_manifest(directory: str) -> Status:
    """What the manifest of a directory says whose records are gone, as after a copy."""
    manifest = read_manifest(directory)
    done: list[int] = []
    changed: list[int] = []
    size = 0
    there = status_of_each([os.path.join(directory, file.file) for file in manifest.files])
    for file, status in zip(manifest.files, there):
        if status is not None and status.size == file.size:
            done.append(file.rank)
            size += file.size
        elif status is not None:
            changed.append(file.rank)
    known = {*done, *changed}
    wanted = tuple(range(manifest.plan.ranks))
    missing = tuple(rank for rank in wanted if rank not in known)
    finished = _finished(directory, manifest)
    return Status(manifest.plan, wanted, tuple(done), tuple(changed), missing, size, False, finished)
