"""Which target ranks are written together.

Where the target cuts a tensor's inner dimensions more finely than the source, several target ranks
take columns of the same rows. Written one by one, each would read all of these rows; together they
are read once. Ranks are linked that share the rows of some parameter so; groups are what is linked,
in pieces of bounded size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from reshard.plan.cuts import Cut
from reshard.strategies import Stage

# Every member has a file open and a share of the buffers.
MOST_MEMBERS = 16


def reading_groups(
    ranks: Sequence[int], stage: Stage, cuts: Iterable[Cut], most: int = MOST_MEMBERS
) -> Iterator[tuple[int, ...]]:
    """Groups of target ranks that read the same rows, each ascending.

    Args:
        ranks: target ranks of one stage, ascending.
        stage: that stage.
        cuts: how its parameters are cut, each kind once.
        most: members of a group at the most.
    """
    leader = {rank: rank for rank in ranks}

    def find(rank: int) -> int:
        while leader[rank] != rank:
            leader[rank] = leader[leader[rank]]
            rank = leader[rank]
        return rank

    for cut in cuts:
        if not _splits_rows(cut):
            continue
        first_with: dict[object, int] = {}
        for rank in ranks:
            other = first_with.setdefault(_rows_of(cut, rank - stage.first_rank), rank)
            one, two = sorted((find(other), find(rank)))
            leader[two] = one
    linked: dict[int, list[int]] = {}
    for rank in ranks:
        linked.setdefault(find(rank), []).append(rank)
    for members in linked.values():
        for start in range(0, len(members), most):
            yield tuple(members[start : start + most])


def _splits_rows(cut: Cut) -> bool:
    """Whether some part of the source's inner dimensions goes to several target slices."""
    for dimension in range(1, len(cut.target.cuts)):
        met = [cut.overlap.intervals(dimension, position) for position in range(cut.target.cuts[dimension])]
        if any(one[1] > other[0] for one, other in zip(met, met[1:])):
            return True
    return False


def _rows_of(cut: Cut, local_rank: int) -> object:
    """What targets must have in common to take parts of the same rows of the same source slices."""
    index = cut.target.slice_index(cut.slice_of(local_rank))
    inner = (cut.overlap.intervals(dimension, index[dimension]) for dimension in range(1, len(index)))
    return index[0], tuple(inner)
