"""Groups of target files that are written together, and shares of several runs.

Where the target cuts a tensor's inner dimensions more finely than the source, several target files
contain columns of the same rows. Written one by one, each reads all of these rows; written together, they
read them once. Files that share rows of a tensor are linked; groups are linked files.

A kill loses the files that are being written. So groups are small, unless it costs too much to read shared rows again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from reshard.forms.target import Cut, Section
from reshard.layout import Overlap

# Every file of a group is open and has a share of the buffers.
MAX_GROUP = 16
# Bytes that are read again for smaller groups, of all bytes that are moved.
_MAX_READ_AGAIN = 0.2


class GroupLimits(NamedTuple):
    """Limits of the number of files that are written at a time.

    Attributes:
        most: of the files of a group.
        in_flight: wanted maximum of files that are written at a time.
        reads_only: whether the time is that of reading, as from a store to a local disk.
    """

    most: int = MAX_GROUP
    in_flight: int = MAX_GROUP
    reads_only: bool = False

    def together(self, files: int, shared: int, nbytes: int) -> int:
        """The number of linked files to write together."""
        allowed = _MAX_READ_AGAIN * nbytes * (1 if self.reads_only else 2)
        passes = 1 + int(allowed / shared) if shared else files
        return min(self.most, max(self.in_flight, -(-files // passes)))


ALL_LINKED = GroupLimits()
ONE_FILE = GroupLimits(1, 1)


def linked_files(files: Sequence[int], section: Section, cuts: Iterable[Cut]) -> list[list[int]]:
    """Target files that read the same rows, each ascending.

    Args:
        files: target files of one section, ascending.
        cuts: how its tensors are cut, each kind once.
    """
    leader = {file: file for file in files}

    def find(file: int) -> int:
        while leader[file] != file:
            leader[file] = leader[leader[file]]
            file = leader[file]
        return file

    for cut in cuts:
        if not splits_rows(cut):
            continue
        first_with: dict[object, int] = {}
        for file in files:
            first = first_with.setdefault(_rows_of(cut, section.position(file)), file)
            lower, higher = sorted((find(first), find(file)))
            leader[higher] = lower
    linked: dict[int, list[int]] = {}
    for file in files:
        linked.setdefault(find(file), []).append(file)
    return list(linked.values())


def splits_rows(cut: Cut) -> bool:
    """Whether some part of the source's inner dimensions goes to several target slices."""
    if not isinstance(cut.overlap, Overlap):
        # Packed tensors have rows of other lengths.
        return False
    for dimension in range(1, len(cut.target.cuts)):
        intervals = [cut.overlap.intervals(dimension, position) for position in range(cut.target.cuts[dimension])]
        if any(interval[1] > following[0] for interval, following in zip(intervals, intervals[1:])):
            return True
    return False


def _rows_of(cut: Cut, position: int) -> object:
    """A key; target files that contain parts of the same rows of the same source slices have equal keys."""
    assert isinstance(cut.overlap, Overlap)
    index = cut.target.slice_index(cut.slice_of(position))
    inner = (cut.overlap.intervals(dimension, index[dimension]) for dimension in range(1, len(index)))
    return index[0], tuple(inner)


def share_of(sizes: Mapping[int, int], index: int, count: int) -> tuple[int, ...]:
    """The ranks that one of ``count`` runs writes, ascending.

    Neighbouring ranks stay together, since they tend to read the same source files; so shares are only
    nearly equal in bytes. Every rank is in exactly one share.
    """
    total = sum(sizes.values())
    chosen = []
    before = 0
    for rank, size in sorted(sizes.items()):
        # The middle of a rank's bytes decides its share.
        middle = 2 * before + size
        if total:
            if min(count - 1, middle * count // (2 * total)) == index:
                chosen.append(rank)
        elif rank % count == index:
            chosen.append(rank)
        before += size
    return tuple(chosen)
