"""Slices that lie in other files than metadata.json says.

Optimizer states: MindSpore's compiler knows which parameter a state belongs to by a few prefixes. States of
FusedAdamW (``exp_avg.``) are not among them: it lays out those of every pipeline stage over the ranks of the last
one, while they lie in the files of the stage of their parameter. MindFormers up to 2.0 may not list a state at
all. And where the files that are listed are gone, another rank's own file may hold the slice as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Optional

from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.placing import Placement, Placer
from reshard.forms.checkpoint2.ranks import ranks_of_files
from reshard.forms.checkpoint2.records import Chunks, Description, Metadata
from reshard.text.names import state_prefix


class Elsewhere:
    """Finds them.

    Args:
        metadata: what is said of all tensors.
        files: the files, their headers read.
        placer: places tensors.
    """

    def __init__(self, metadata: Metadata, files: IterationFiles, placer: Placer) -> None:
        self._metadata = metadata
        self._files = files
        self._placer = placer

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank that wrote a file, by holder number, of those of which it is known."""
        return ranks_of_files(self._metadata, self._files)

    def moved(self, name: str) -> Optional[Placement]:
        """Where a tensor lies that is in none of the files that are said to hold it.

        Returns:
            Its layout over the ranks of the parameter that it belongs to; None where it is no such state, or
            files of other ranks hold it as well.

        Raises:
            LayoutError: the layout does not fit these ranks.
        """
        said = self._metadata.tensors[name]
        owner = self._owner(name)
        if owner is None or owner.layout is None or said.layout is None:
            return None
        ranks = owner.layout.rank_list
        # A state of its parameter's shape is cut as the parameter is.
        alike = said.layout._replace(rank_list=ranks) == owner.layout
        if ranks == said.layout.rank_list or (owner.shape == said.shape and not alike):
            return None
        return self._placed(name, said._replace(layout=said.layout._replace(rank_list=ranks)), self._holders(name))

    def unlisted(self, name: str, holders: Sequence[int]) -> Optional[Placement]:
        """Where the slices of an optimizer state lie that metadata does not list.

        Returns:
            The layout of its parameter; None where it is no state, or its files are not those of such a layout.

        Raises:
            LayoutError: the layout of its parameter contradicts itself.
        """
        owner = self._owner(name) if state_prefix(name, self._metadata.tensors) else None
        if owner is None or owner.layout is None:
            return None
        placement = self._placed(name, Description("", owner.shape, None, owner.layout, Chunks((), ())), holders)
        if placement is None:
            return None
        shapes = {self._files.indexes[file].tensors[name].shape for file in holders}
        return placement if shapes == {placement.slice_shape} else None

    def replacements(self, name: str, placement: Placement) -> dict[int, list[int]]:
        """Files that hold a lost slice of a tensor though they are not listed for it, by its number."""
        found: dict[int, list[int]] = {}
        positions = {rank: position for position, rank in enumerate(placement.ranks)}
        for file in self._holders(name):
            position = positions.get(self.rank_of.get(file, -1))
            if position is not None:
                number = 0 if placement.layout is None else int(placement.layout.slice_of_rank[position])
                found.setdefault(number, []).append(file)
        return {number: found[number] for number in placement.lost if number in found}

    def _placed(self, name: str, said: Description, holders: Sequence[int]) -> Optional[Placement]:
        assert said.layout is not None
        ranks = [self.rank_of.get(file, -1) for file in holders]
        if not holders or not set(ranks) <= set(said.layout.rank_list):
            return None
        return self._placer.place_held(name, said, dict(zip(holders, ranks)))

    def _holders(self, name: str) -> list[int]:
        return [file for file, index in self._files.indexes.items() if name in index.tensors]

    def _owner(self, name: str) -> Optional[Description]:
        """What is said of the parameter that a state belongs to; None where there is none."""
        tensors = self._metadata.tensors
        return next((tensors[owner] for owner in _owners(name) if owner in tensors), None)


def _owners(name: str) -> Iterator[str]:
    """Names of parameters that a state may belong to, the longest first."""
    position = name.find(".")
    while position >= 0:
        yield name[position + 1 :]
        position = name.find(".", position + 1)
