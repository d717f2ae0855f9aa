"""Comparing replicas in full, in several threads and bounded memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple, Optional

import numpy as np

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions, Progress
from reshard.execute.reader import in_order
from reshard.execute.tiles import Bytes
from reshard.layout import boxes_of_range, placed, shape_of, volume_of
from reshard.source_replicas.choice import Holder, ParameterGroup, Replicated
from reshard.source_replicas.comparison import ReplicaComparison
from reshard.source_replicas.samples import ReplicaFiles

# Bytes of a tensor per part, and files that a thread compares with the first.
_PART_BYTES = 64 << 20
_MOST_FILES = 64
# Parts per thread that are in work, or wait for an earlier part.
_AHEAD = 4


class _ComparedPart(NamedTuple):
    """Work for one thread: a box of a parameter, compared between one rank and some others."""

    kind: ParameterGroup
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]


def compare_everything(
    kinds: Sequence[ParameterGroup],
    ranks: Optional[frozenset[int]],
    files: ReplicaFiles,
    execution: ExecutionOptions,
    progress: Progress,
    comparison: ReplicaComparison,
) -> None:
    """Compare all slices that several ranks hold, or those that one of ``ranks`` should hold.

    Raises:
        RetryableError: a file cannot be read.
    """
    chosen = [(kind, _boxes_of(kind, ranks)) for kind in kinds]
    lock, stop, own = threading.Lock(), threading.Event(), threading.local()

    def compare(part: _ComparedPart) -> tuple[bool, Optional[tuple[int, int]]]:
        """Whether the compared bytes are not constant, and the first two ranks that differ, if any."""
        if not hasattr(own, "buffers"):
            own.buffers = np.empty((2, execution.block_bytes), np.uint8)
        first_buffer, other_buffer = own.buffers
        parameter, (first, *other_holders) = part.parameter, part.holders
        varied = False
        for box in part.replicated.runs(max(1, len(first_buffer) // parameter.item_size)):
            if stop.is_set():
                break
            first_bytes = first_buffer[: volume_of(box) * parameter.item_size]
            other_bytes = other_buffer[: len(first_bytes)]
            files.read(parameter, first, box, first_bytes.data)
            for holder in other_holders:
                files.read(parameter, holder, box, other_bytes.data)
                if not np.array_equal(first_bytes, other_bytes):
                    return True, (first.rank, holder.rank)
            varied = varied or not _is_constant(first_bytes, parameter.item_size)
            with lock:
                progress.wrote(len(first_bytes) * len(part.holders))
        return varied, None

    progress.begin(sum(itertools.starmap(_nbytes, chosen)), "comparing replicas")
    try:
        with ThreadPoolExecutor(execution.threads) as pool:
            parts, ahead = itertools.chain.from_iterable(itertools.starmap(_parts, chosen)), _AHEAD * execution.threads
            results = in_order(pool, parts, lambda part: [partial(compare, part)], ahead, stop=stop)
            for part, ((varied, differing),) in results:
                if varied:
                    comparison.add(part.kind, part.parameter, differing)
    finally:
        progress.end()


def _boxes_of(kind: ParameterGroup, ranks: Optional[frozenset[int]]) -> list[Replicated]:
    """The boxes of a kind that one of these ranks should hold; None for all."""
    boxes = map(kind.replicated, range(len(kind)))
    return [box for box in boxes if ranks is None or not all(ranks.isdisjoint(group.ranks) for group in box.groups)]


def _nbytes(kind: ParameterGroup, boxes: Sequence[Replicated]) -> int:
    """Bytes to read of boxes of a kind."""
    elements = sum(volume_of(replicated.box) * _reads(len(replicated.holders)) for replicated in boxes)
    return elements * kind.parameters[0].item_size * len(kind.parameters)


def _parts(kind: ParameterGroup, boxes: Sequence[Replicated]) -> Iterator[_ComparedPart]:
    """The parts of boxes of a kind, in an order that reads few files at a time."""
    for replicated in boxes:
        first, *other_holders = replicated.holders
        for start in range(0, len(other_holders), _MOST_FILES):
            holders = [first, *other_holders[start : start + _MOST_FILES]]
            for parameter in kind.parameters:
                for piece in _pieces(replicated, parameter.item_size):
                    yield _ComparedPart(kind, parameter, piece, holders)


def _reads(holders: int) -> int:
    """The number of reads of a box by its holders; the first holder is read once per batch of others."""
    return holders - 1 + -(-(holders - 1) // _MOST_FILES)


def _pieces(replicated: Replicated, item_size: int) -> Iterator[Replicated]:
    """A large box in several parts, for several threads."""
    most = max(1, _PART_BYTES // item_size)
    if volume_of(replicated.box) <= most:
        yield replicated
        return
    for piece in boxes_of_range(shape_of(replicated.box), 0, volume_of(replicated.box), most):
        box = placed(piece, replicated.box)
        yield replicated._replace(box=box)


def _is_constant(data: Bytes, item_size: int) -> bool:
    """Whether all elements are equal."""
    elements = data.reshape(-1, item_size)
    return bool((elements == elements[0]).all())
