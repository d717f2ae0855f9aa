"""Origins of each target rank's copies of values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property

from reshard.checkpoints import CheckpointIndex
from reshard.strategies import Strategy
from reshard.text.names import belongs_to_rank


class ExpectedValues:
    """The values that a conversion copies: entries without a layout in the source.

    Args:
        indexes: the headers of the source's files.
        files: the converted values, with their files, ascending.
        tensors: names of the converted tensors.
        target: the target's strategy.

    Attributes:
        keeps_files: whether a target file may be a copy of the source's, which may omit empty slices.
    """

    keeps_files = False

    def __init__(
        self,
        indexes: Mapping[int, CheckpointIndex],
        files: Mapping[str, tuple[int, ...]],
        tensors: Collection[str],
        target: Strategy,
    ) -> None:
        self._indexes, self._files, self._tensors, self._target = indexes, files, tensors, target
        everywhere = frozenset(stage.number for stage in target.stages)
        self._stages = {
            name: frozenset(stage.number for stage in target.stages if name in stage.layouts) or everywhere
            for name in files
        }

    @property
    def names(self) -> list[str]:
        """All values."""
        return list(self._files)

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """The source ranks whose copy a target rank may hold; none if it gets no copy."""
        if self._target.stage_of(rank).number not in self._stages.get(name, ()):
            return ()
        holders = self._files[name]
        return (rank if belongs_to_rank(name) and rank in holders else holders[0],)

    def is_needed(self, name: str, rank: int) -> bool:
        """Whether a target rank that has origins for a value must hold it."""
        return True

    def metadata(self, rank: int) -> Mapping[str, str]:
        """Metadata that a target rank's file may have in any case."""
        return {}


class RecoveryValues(ExpectedValues):
    """The entries that a recovery copies.

    A complete file of the source is copied unchanged: with entries that other ranks lack, and without entries that they
    have. The file of a lost rank gets every value, and the entries of ranks of its stage that the strategy
    lists for other stages only. Any copy of these may be the one that the lost file held.
    """

    keeps_files = True

    @property
    def names(self) -> list[str]:
        """All values, and entries that the strategy lists for other stages only."""
        return [*self._files, *sorted(set().union(*self._unlisted.values()))]

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """See `ExpectedValues`."""
        own = self._holds(rank, name)
        stage = self._target.stage_of(rank)
        if name in self._files:
            return (rank,) if own else super().origins(name, rank)
        if name not in self._unlisted[stage.number]:
            return ()
        return (rank,) if own else tuple(other for other in stage.ranks if self._holds(other, name))

    def is_needed(self, name: str, rank: int) -> bool:
        """See `ExpectedValues`."""
        if rank in self._indexes:
            return self._holds(rank, name)
        ranks = self._target.stage_of(rank).ranks
        return name in self._files or all(self._holds(other, name) for other in ranks if other in self._indexes)

    def metadata(self, rank: int) -> Mapping[str, str]:
        """See `ExpectedValues`."""
        return self._indexes[rank].metadata if rank in self._indexes else {}

    def _holds(self, rank: int, name: str) -> bool:
        return rank in self._indexes and name in self._indexes[rank].tensors

    @cached_property
    def _unlisted(self) -> dict[int, set[str]]:
        """Per stage the entries in files of its ranks that the strategy lists for other stages only."""
        entries: dict[int, set[str]] = {stage.number: set() for stage in self._target.stages}
        if self._target.is_none:
            return entries
        seen: set[tuple[int, int]] = set()
        for rank, index in self._indexes.items():
            stage = self._target.stage_of(rank)
            if (stage.number, id(index.tensors)) not in seen:
                seen.add((stage.number, id(index.tensors)))
                entries[stage.number] |= (index.tensors.keys() - stage.layouts.keys()).intersection(self._tensors)
        return entries
