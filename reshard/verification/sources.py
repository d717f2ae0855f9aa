"""The files of a checkpoint that match the CRCs that they record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Callable, Optional

from reshard.checkpoints import CheckpointIndex, unchecked
from reshard.checkpoints.formats.crc import check_crcs
from reshard.forms.registry import form_named
from reshard.storage import storage_of
from reshard.text.messages import Report
from reshard.verification.reading import Means
from reshard.verification.stored import Source, files_read

_MIN_BLOCK, _MAX_BLOCK = 4 << 10, 8 << 20


class RecordedCrcs:
    """Compares files with the CRCs that they record; reads each file once.

    Args:
        means: files, threads and memory.
        report: gets notes on CRCs that cannot be checked.
    """

    def __init__(self, means: Means, report: Report) -> None:
        self._means = means
        self._report = report
        self._checked: set[object] = set()

    def damaged(self, indexes: Iterable[CheckpointIndex]) -> dict[str, str]:
        """The damage of files, by path, for damaged files that were not checked before.

        Raises:
            ReshardError: a file cannot be read.
        """
        new = unchecked(indexes, self._checked)
        if not new:
            return {}
        means = self._means
        threads = means.jobs * storage_of(new[0].path).in_flight
        block = max(_MIN_BLOCK, min(_MAX_BLOCK, means.max_memory // threads))
        with means.counting(sum(index.check_bytes for index in new), "checking CRCs"):
            checks = check_crcs(means.handles, new, threads, block, means.progress.wrote)
        for note in checks.notes():
            self._report.note(note)
        return {path: error.message for path, error in checks.damaged.items()}


def read_sound(
    read: Callable[[Mapping[str, str]], Source],
    crcs: Optional[RecordedCrcs],
    report: Report,
    damage: Mapping[str, str] = MappingProxyType({}),
) -> Source:
    """Read a step without the files that do not match their recorded CRC.

    Only files to read are checked: of several replicas the lowest rank's. If it is damaged, the next replica
    replaces it and is checked.

    Args:
        read: reads a step; its argument is the damage of files, by path.
        crcs: checks CRCs; None for no check.
        report: gets warnings about damaged files.
        damage: damage that is already known, by path.

    Raises:
        ReshardError: as `read`, or a file cannot be read.
    """
    damaged = dict(damage)
    while True:
        source = read(damaged)
        checkpoint = source.checkpoint
        for rank, path in checkpoint.files.items() if form_named(checkpoint.form).options.by_rank else ():
            if path in damaged:
                report.warn(f"{damaged[path]}; rank {rank} counts as absent at {checkpoint.label}")
        new_damage = {} if crcs is None else crcs.damaged(files_read(source))
        if not new_damage:
            return source
        damaged.update(new_damage)
