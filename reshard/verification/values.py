"""Origins of each target rank's copies of values."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from reshard.checkpoints import CheckpointIndex, files_alike
from reshard.strategies import Strategy
from reshard.text.names import belongs_to_rank
from reshard.threads import cached_property


class ExpectedValues:
    """The values that a conversion copies: entries without a layout in the source.

    Args:
        indexes: the headers of the source's files.
        files: the converted values, with their files, ascending.
        tensors: names of the converted tensors.
        target: the target's strategy.

    Attributes:
        keeps_files: a target file may be a copy of the source's, which may omit empty slices.
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
        """The source ranks whose copy a target rank may hold; empty if it gets no copy."""
        if self._target.stage_of(rank).number not in self._stages.get(name, ()):
            return ()
        if self._target.is_as_cut:
            return (rank,) if rank in self._indexes and name in self._indexes[rank].tensors else ()
        holders = self._files[name]
        return (rank if belongs_to_rank(name) and rank in holders else holders[0],)

    def is_needed(self, name: str, rank: int) -> bool:
        """Whether a target rank that has origins for a value must hold it."""
        return True

    def metadata(self, rank: int) -> Mapping[str, str]:
        """Metadata that a target rank's file may always have."""
        return self._indexes[rank].metadata if self._target.is_as_cut and rank in self._indexes else {}


class RecoveryValues(ExpectedValues):
    """The entries that a recovery copies.

    A complete file of the source is copied unchanged, even if its entries differ from other ranks'. The file of a lost
    rank gets every value, and the entries of its stage's ranks that the strategy lists only for other stages. Any
    copy of these may have been in the lost file.
    """

    keeps_files = True

    @property
    def names(self) -> list[str]:
        """All values, and entries that the strategy lists only for other stages."""
        return [*self._files, *sorted(set().union(*self._unlisted.values()))]

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """See `ExpectedValues`."""
        has_copy = self._holds(rank, name)
        stage = self._target.stage_of(rank)
        if name in self._files:
            return (rank,) if has_copy else super().origins(name, rank)
        if name not in self._unlisted[stage.number]:
            return ()
        return (rank,) if has_copy else tuple(candidate for candidate in stage.ranks if self._holds(candidate, name))

    def is_needed(self, name: str, rank: int) -> bool:
        """See `ExpectedValues`."""
        if rank in self._indexes:
            return self._holds(rank, name)
        ranks = self._target.stage_of(rank).ranks
        return name in self._files or all(
            self._holds(candidate, name) for candidate in ranks if candidate in self._indexes
        )

    def metadata(self, rank: int) -> Mapping[str, str]:
        """See `ExpectedValues`."""
        return self._indexes[rank].metadata if rank in self._indexes else {}

    def _holds(self, rank: int, name: str) -> bool:
        return rank in self._indexes and name in self._indexes[rank].tensors

    @cached_property
    def _unlisted(self) -> dict[int, set[str]]:
        """Per stage the entries in files of its ranks that the strategy lists only for other stages."""
        entries: dict[int, set[str]] = {stage.number: set() for stage in self._target.stages}
        if self._target.is_none:
            return entries
        for ranks in files_alike(self._indexes):
            names = self._indexes[ranks[0]].tensors.keys()
            for stage in {stage.number: stage for stage in map(self._target.stage_of, ranks)}.values():
                entries[stage.number] |= (names - stage.layouts.keys()).intersection(self._tensors)
        return entries
