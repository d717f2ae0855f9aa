"""Optimizer states that metadata.json looks for in the files of another pipeline stage.

MindSpore's compiler knows which parameter a state belongs to by a few prefixes. States of FusedAdamW
(``exp_avg.``) are not among them: it lays out those of every stage over the ranks of the last one, while
they lie in the files of the stage of their parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Optional

from reshard.checkpoints.checkpoint2.files import IterationFiles
from reshard.checkpoints.checkpoint2.metadata import Metadata
from reshard.checkpoints.checkpoint2.names import parse_file_name
from reshard.checkpoints.checkpoint2.placing import Placement, Placer


class MovedStates:
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

    def find(self, name: str) -> Optional[Placement]:
        """Where a tensor lies that is in none of the files that are said to hold it.

        Returns:
            Its layout over the ranks of the parameter that it belongs to; None where it is no such state, or
            the files that hold it are not those of these ranks.

        Raises:
            LayoutError: the layout does not fit these ranks.
        """
        tensors = self._metadata.tensors
        said = tensors[name]
        owner = next((tensors[base] for base in _owners(name) if base in tensors), None)
        if owner is None or owner.layout is None or said.layout is None:
            return None
        ranks = owner.layout.rank_list
        # A state of its parameter's shape is cut as the parameter is.
        alike = said.layout._replace(rank_list=ranks) == owner.layout
        if ranks == said.layout.rank_list or (owner.shape == said.shape and not alike):
            return None
        held: dict[int, int] = {}
        for file, index in self._files.indexes.items():
            if name in index.tensors:
                rank = self._rank_of.get(file)
                if rank not in ranks:
                    return None
                held[file] = rank
        return self._placer.place_moved(name, ranks, held) if held else None

    @cached_property
    def _rank_of(self) -> dict[int, int]:
        """The rank that wrote a file, by holder number, of those of which it is known."""
        said: dict[int, set[int]] = {}
        world: set[int] = set()
        for place in self._metadata.places:
            world.update(place.ranks)
            for file, rank in place.entries:
                said.setdefault(self._files.numbers[self._metadata.files[file]], set()).add(rank)
                world.add(rank)
        for description in self._metadata.tensors.values():
            world.update(description.layout.rank_list if description.layout else ())
        found = {file: min(ranks) for file, ranks in said.items() if len(ranks) == 1}
        # Files are numbered by rank where all that are listed are, and there are as many as ranks.
        parsed = {file: parse_file_name(name) for file, name in enumerate(self._files.names)}
        totals = {name.total for name in parsed.values() if name is not None}
        by_rank = all(
            name is not None and said.get(file, {name.number}) == {name.number} for file, name in parsed.items()
        )
        if by_rank and totals == {len(world)}:
            found.update({file: name.number for file, name in parsed.items() if name is not None})
        return found


def _owners(name: str) -> Iterator[str]:
    """Names of parameters that a state may belong to, the longest first."""
    position = name.find(".")
    while position >= 0:
        yield name[position + 1 :]
        position = name.find(".", position + 1)
