"""A target directory while a conversion fills it: what is done already, what is next, what is complete.

1. `survey` compares the directory with its records and tells which ranks are still to be written; it
   refuses what is not ours. Nothing is changed.
2. `begin` says that this run is writing, and removes what dead runs left.
3. `finished` records a target.
4. `complete` writes the manifest when every rank of the target strategy is there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Optional

from reshard.errors import TargetError
from reshard.execute import Destination
from reshard.plan.conversion import Conversion
from reshard.plan.pieces import TargetFile
from reshard.plan.recovery import Recovery
from reshard.records import (
    DoneRecord,
    Identity,
    Ledger,
    Manifest,
    ManifestFile,
    SourceFile,
    header_digest,
    source_file,
    strategy_digest,
)
from reshard.records.ledger import another_conversion
from reshard.report import Report
from reshard.wording import rank_ranges, some_names


class TargetDirectory:
    """The target directory of a conversion.

    Args:
        conversion: what is written.
        report: told what was found.
        overwrite: existing targets may be replaced.
        adding: other ranks of the same conversion may stay beside what is replaced.
    """

    def __init__(self, conversion: Conversion, report: Report, *, overwrite: bool, adding: bool) -> None:
        self._adding = adding
        request = conversion.request
        self._conversion = conversion
        self._overwrite = overwrite
        self._report = report
        self._root = request.dst
        self._everything = range(request.target.device_count)
        self._asked = conversion.ranks
        self._take_over = False
        identity = Identity(
            source_strategy=strategy_digest(request.source),
            target_strategy=strategy_digest(request.target),
            ranks=request.target.device_count,
            step=str(conversion.step.step) if conversion.step.step is not None else None,
            include=tuple(sorted(request.filters.include)),
            exclude=tuple(sorted(request.filters.exclude)),
            format=conversion.format,
            prefix=request.prefix,
            task="recover" if isinstance(conversion, Recovery) else "convert",
        )
        self._destination = Destination(self._root)
        self._ledger = Ledger(self._root, identity)
        self._last_headers: tuple[object, Optional[str]] = (None, None)

    def survey(self) -> list[int]:
        """Target ranks, of those asked for, that are still to be written, ascending.

        Raises:
            TargetError: the directory holds another conversion, foreign checkpoints, or targets that
                may not be replaced.
        """
        going_on = self._ledger.exists
        # One of many by-rank runs looks after its own directory; the first one looked everywhere.
        own = [f"rank_{rank}" for rank in self._asked] if going_on and self._adding else None
        present = self._destination.checkpoints(own)
        writing = [self._name(rank) for rank in self._asked]
        others = self._ledger.others()
        self._take_over = self._overwrite or not present
        if others and not self._take_over:
            raise another_conversion(self._root, self._ledger.identity, others)
        if going_on and not others and (self._adding or not self._overwrite):
            allowed = [self._name(rank) for rank in self._everything] if own is None else writing
        else:
            allowed = writing
        self._destination.check(present, allowed, writing)
        done = self._done()
        existing = set(present)
        left = [rank for rank in self._asked if rank not in done]
        in_the_way = [rank for rank in left if self._name(rank) in existing]
        if in_the_way and not self._overwrite:
            raise self._existing(in_the_way)
        self._check_sources(left)
        return left

    def begin(self, left: Sequence[int]) -> None:
        """Say that this run writes these ranks, until `end`.

        Raises:
            TargetError: another conversion is writing here at this moment.
            RetryableError: the directory cannot be written.
        """
        self._ledger.begin(self._take_over)
        self._destination.remove_dead_temporaries([f"rank_{rank}" for rank in self._asked])
        if self._overwrite and left and not self._ledger.replacing(self._asked):
            Manifest.remove(self._root)
            if len(self._asked) == len(self._everything):
                self._ledger.forget_sources()
            self._ledger.begin_replacing(self._asked)
        else:
            # Once more, because another run may have begun meanwhile.
            self._ledger.check_sources(self._sources)
        self._ledger.add_sources(self._sources)

    def end(self) -> None:
        """This run writes no more."""
        self._ledger.end()

    def missing(self, groups: Iterable[Sequence[TargetFile]]) -> Iterator[list[TargetFile]]:
        """Groups without the targets that other runs have finished meanwhile."""
        for group in groups:
            left = [target for target in group if not self._finished_meanwhile(target)]
            if left:
                yield left

    def finished(self, target: TargetFile, status: os.stat_result, crc: Optional[int], named: bool) -> None:
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
        if not named and not self._overwrite and os.path.lexists(target.path) and not self._finished_meanwhile(target):
            raise self._existing([target.rank])
        if named != self._overwrite:
            return
        layout, headers = self._last_headers
        if layout is not target.layout:
            headers = header_digest(target.layout)
            self._last_headers = (target.layout, headers)
        self._ledger.record(DoneRecord(target.rank, status.st_size, status.st_mtime_ns, headers, crc))

    def complete(self) -> Optional[str]:
        """Write the manifest if every rank is there; returns its path."""
        self._ledger.end_replacing(self._asked)
        records = self._ledger.done()
        if len(records) < len(self._everything):
            return None
        files = []
        for rank in self._everything:
            name = self._name(rank)
            path = os.path.join(self._root, name)
            found = [record for record in records.get(rank, []) if record.matches(path)]
            if not found:
                return None
            # Several runs may have made the same file; a checksum that any of them computed holds.
            best = next((record for record in found if record.crc is not None), found[0])
            crc = None if best.crc is None else f"{best.crc:08x}"
            files.append(ManifestFile(rank, name, best.size, best.headers, crc))
        return Manifest(self._ledger.identity, tuple(files)).write(self._root)

    def _name(self, rank: int) -> str:
        return os.path.relpath(self._conversion.path(rank), self._root)

    def _done(self) -> set[int]:
        """Ranks asked for whose targets are there as this conversion recorded them."""
        if self._overwrite and not self._ledger.replacing(self._asked):
            return set()
        records = self._ledger.done(frozenset(self._asked))
        return {
            rank
            for rank, found in records.items()
            if any(record.matches(self._conversion.path(rank)) for record in found)
        }

    def _finished_meanwhile(self, target: TargetFile) -> bool:
        if not os.path.lexists(target.path):
            return False
        found = self._ledger.done((target.rank,)).get(target.rank, [])
        return any(record.matches(target.path) for record in found)

    def _check_sources(self, left: Sequence[int]) -> None:
        structures: dict[int, str] = {}
        indexes = self._conversion.step.indexes
        self._sources: list[SourceFile] = [
            source_file(rank, index, structures) for rank, index in sorted(indexes.items())
        ]
        anew = self._overwrite and len(left) == len(self._everything)
        # Sources of runs that were killed before they had finished anything do not bind.
        if anew or not self._ledger.done():
            return
        touched = self._ledger.check_sources(self._sources)
        if touched:
            self._report.warn(
                f"source files of {rank_ranges(touched)} have another time than when the conversion in {self._root} "
                "was begun, though the same sizes and headers; unless they were only copied, convert everything "
                "again with --overwrite"
            )

    def _existing(self, ranks: Sequence[int]) -> TargetError:
        path = self._conversion.path(ranks[0])
        names = some_names([self._name(rank) for rank in ranks], 3)
        recorded = self._ledger.done(frozenset(ranks))
        why = ", which were changed since they were written" if recorded else ""
        return TargetError(
            f"{self._root} already holds {names}{why}",
            file=path,
            rank=ranks[0],
            hint="choose another DST, or replace them with --overwrite",
        )
