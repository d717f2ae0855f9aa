"""Which ranks saved an iteration: the rank of a file, and the ranks of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.forms.checkpoint2.files import IterationFiles
from reshard.forms.checkpoint2.names import parse_file_name
from reshard.forms.checkpoint2.records import Metadata

RankList = tuple[int, ...]


def disjoint(lists: Iterable[RankList]) -> list[RankList]:
    """Of lists of ranks the largest that share no rank with another that is taken; by their lowest ranks."""
    taken: set[int] = set()
    found = []
    for ranks in sorted(set(lists), key=lambda ranks: (-len(ranks), ranks)):
        if taken.isdisjoint(ranks):
            found.append(ranks)
            taken.update(ranks)
    return sorted(found, key=min)


def ranks_of_files(metadata: Metadata, files: IterationFiles) -> dict[int, int]:
    """The rank that wrote a file, by holder number, of those files of which it is known.

    A file that nothing is listed in tells its rank by its name where all others do.
    """
    said: dict[int, set[int]] = {}
    world: set[int] = set()
    for place in metadata.places:
        world.update(place.ranks)
        for file, rank in place.entries:
            said.setdefault(files.numbers[metadata.files[file]], set()).add(rank)
            world.add(rank)
    for ranks in rank_lists(metadata):
        world.update(ranks)
    found = {file: min(ranks) for file, ranks in said.items() if len(ranks) == 1}
    numbers: dict[int, int] = {}
    for file, name in enumerate(files.names):
        parsed = parse_file_name(name)
        # De-duplicated files are numbered by rank only where every rank has one.
        if parsed is None or parsed.total != len(world) or said.get(file, {parsed.number}) != {parsed.number}:
            return found
        numbers[file] = parsed.number
    return numbers


def rank_lists(metadata: Metadata) -> set[RankList]:
    """The lists of ranks that tensors are laid out over."""
    return {said.layout.rank_list for said in metadata.tensors.values() if said.layout is not None}
