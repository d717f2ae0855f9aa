"""Which tensors belong on target ranks as they are, and whose copy each of them is."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from typing import Union

from reshard.strategies import Strategy
from reshard.text.names import belongs_to_rank
from reshard.verification.edited import EditedSource
from reshard.verification.stored import Source


class Values:
    """What a conversion copies: values that the source's strategy does not list.

    Args:
        source: the source.
        files: the names that were converted, with the files that have them, ascending.
        tensors: names of the parameters that were converted.
        target: the target's strategy.

    Attributes:
        keeps_files: whether files may be the source's own, which need not hold what has no elements.
    """

    keeps_files = False

    def __init__(
        self,
        source: Union[Source, EditedSource],
        files: Mapping[str, tuple[int, ...]],
        tensors: Collection[str],
        target: Strategy,
    ) -> None:
        self._source, self._files, self._tensors, self._target = source, files, tensors, target
        everywhere = frozenset(stage.number for stage in target.stages)
        self._stages = {
            name: frozenset(stage.number for stage in target.stages if name in stage.layouts) or everywhere
            for name in files
        }

    @property
    def names(self) -> list[str]:
        """All of them."""
        return list(self._files)

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """The source ranks of which a target rank gets one's copy, whichever; none where it gets nothing."""
        if self._target.stage_of(rank).number not in self._stages.get(name, ()):
            return ()
        holders = self._files[name]
        return (rank if belongs_to_rank(name) and rank in holders else holders[0],)

    def is_needed(self, name: str, rank: int) -> bool:
        """Whether a target rank must have it, of those that get it."""
        return True

    def metadata(self, rank: int) -> Mapping[str, str]:
        """What the metadata of a target rank's file may say whatever else is right."""
        return {}


class RecoveredValues(Values):
    """What a recovery gives back as it is.

    Files that hold all of their rank are there unchanged: with what other ranks have and they have not, and without
    what they have not. A rank whose file is lost gets every value, and what the ranks of its stage hold although the
    strategy lists it for other stages only: then any of their copies may be the one that it held.
    """

    keeps_files = True

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*self._files, *sorted(set().union(*self._unlisted.values()))]

    def origins(self, name: str, rank: int) -> tuple[int, ...]:
        """The source ranks of which a target rank gets one's copy, whichever; none where it gets nothing."""
        own = self._holds(rank, name)
        stage = self._target.stage_of(rank)
        if name in self._files:
            return (rank,) if own else super().origins(name, rank)
        if name not in self._unlisted[stage.number]:
            return ()
        return (rank,) if own else tuple(other for other in stage.ranks if self._holds(other, name))

    def is_needed(self, name: str, rank: int) -> bool:
        """Whether a target rank must have it, of those that get it."""
        if rank in self._source.indexes:
            return self._holds(rank, name)
        ranks = self._target.stage_of(rank).ranks
        return name in self._files or all(self._holds(other, name) for other in ranks if other in self._source.indexes)

    def metadata(self, rank: int) -> Mapping[str, str]:
        """What the metadata of a target rank's file may say whatever else is right."""
        own = self._source.indexes.get(rank)
        return {} if own is None else own.metadata

    def _holds(self, rank: int, name: str) -> bool:
        return rank in self._source.indexes and name in self._source.indexes[rank].tensors

    @cached_property
    def _unlisted(self) -> dict[int, set[str]]:
        """Per stage what files of its ranks hold and the strategy lists for other stages only."""
        found: dict[int, set[str]] = {stage.number: set() for stage in self._target.stages}
        if self._target.is_none:
            return found
        known: set[tuple[int, int]] = set()
        for rank, index in self._source.indexes.items():
            stage = self._target.stage_of(rank)
            if (stage.number, id(index.tensors)) not in known:
                known.add((stage.number, id(index.tensors)))
                found[stage.number] |= (index.tensors.keys() - stage.layouts.keys()).intersection(self._tensors)
        return found
