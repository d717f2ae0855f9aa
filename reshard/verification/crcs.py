"""Source files whose contents are not what their recorded CRC was made of count as absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Callable, Optional

from reshard.checkpoints import CheckpointIndex, check_crcs
from reshard.storage import storage_of
from reshard.text.report import Report
from reshard.verification.reading import Means
from reshard.verification.stored import Source

_LEAST_BLOCK, _MOST_BLOCK = 4 << 10, 8 << 20


class RecordedCrcs:
    """Compares files with the CRCs that they record, if they do; reads each once.

    Args:
        means: what may be used for reading.
        report: told of CRCs that say nothing.
    """

    def __init__(self, means: Means, report: Report) -> None:
        self._means = means
        self._report = report
        self._checked: set[str] = set()

    def damaged(self, indexes: Iterable[CheckpointIndex]) -> dict[str, str]:
        """Why files are damaged, by path, of those that are and were not looked at before.

        Raises:
            ReshardError: a file cannot be read.
        """
        checkable = {index.path: index for index in indexes if index.checkable or index.archived}
        new = [index for path, index in checkable.items() if path not in self._checked]
        if not new:
            return {}
        means = self._means
        threads = means.jobs * storage_of(new[0].path).in_flight
        block = max(_LEAST_BLOCK, min(_MOST_BLOCK, means.max_memory // threads))
        means.progress.begin(sum(index.size for index in new), "checking CRCs")
        try:
            checks = check_crcs(means.handles, new, threads, block, means.progress.wrote)
        finally:
            means.progress.end()
        self._checked.update(index.path for index in new)
        for path, reason in sorted(checks.unchecked.items()):
            self._report.note(f"{path}: its CRC was not checked: {reason}")
        return {path: error.message for path, error in checks.damaged.items()}


def read_sound(
    read: Callable[[Mapping[str, str]], Source],
    crcs: Optional[RecordedCrcs],
    known: Mapping[str, str] = MappingProxyType({}),
    copies: bool = False,
) -> Source:
    """Read the files of a step, without those whose contents are damaged.

    Only files whose contents will be read are looked at: of several replicas that of the lowest rank. Without
    it that is the next one's.

    Args:
        read: reads a step, given files that are known to be damaged, and why, by path.
        crcs: tells which files are damaged; no others than the known ones are where None.
        known: files that are known to be.
        copies: the contents of all files will be read.

    Raises:
        ReshardError: as `read`, or a file cannot be read.
    """
    damaged = dict(known)
    while True:
        source = read(damaged)
        more = {} if crcs is None else crcs.damaged(source.indexes.values() if copies else source.files_read)
        if not more:
            return source
        damaged.update(more)
