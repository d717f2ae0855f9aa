"""Comparing replicas in full."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple, Optional

import numpy as np
import numpy.typing as npt

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions, Progress
from reshard.execute.reader import in_order
from reshard.layout import boxes_of_range, placed, shape_of, volume_of
from reshard.source_replicas.choice import Holder, ParameterGroup, Replicated
from reshard.source_replicas.outcome import Tally
from reshard.source_replicas.samples import ReplicaFiles
from reshard.threads import thread_pool

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


class Everything:
    """Compares all slices that several ranks hold.

    Args:
        kinds: groups of parameters.
        files: the files.
        execution: threads and memory.
        progress: counts bytes.
        tally: collects the results.
    """

    def __init__(
        self,
        kinds: Sequence[ParameterGroup],
        files: ReplicaFiles,
        execution: ExecutionOptions,
        progress: Progress,
        tally: Tally,
    ) -> None:
        self._kinds = kinds
        self._files = files
        self._execution = execution
        self._progress = progress
        self._tally = tally
        self._lock = threading.Lock()
        self._stop = threading.Event()
        # Buffers of each thread.
        self._own = threading.local()

    def run(self) -> None:
        """Compare all slices.

        Raises:
            RetryableError: a file cannot be read.
        """
        threads = self._execution.threads
        self._progress.begin(self._nbytes(), "comparing replicas")
        try:
            with thread_pool(threads) as pool:
                results = in_order(
                    pool, self._parts(), lambda part: [partial(self._compare, part)], _AHEAD * threads, stop=self._stop
                )
                for part, ((varied, ranks),) in results:
                    if varied:
                        self._tally.add(part.kind, part.parameter, ranks)
        finally:
            self._progress.end()

    def _nbytes(self) -> int:
        total = 0
        for kind in self._kinds:
            boxes = map(kind.replicated, range(len(kind)))
            elements = sum(volume_of(replicated.box) * _reads(len(replicated.holders)) for replicated in boxes)
            total += elements * kind.parameters[0].item_size * len(kind.parameters)
        return total

    def _parts(self) -> Iterator[_ComparedPart]:
        """All parts, in an order that reads few files at a time."""
        for kind in self._kinds:
            for replicated in map(kind.replicated, range(len(kind))):
                first, *other_holders = replicated.holders
                for start in range(0, len(other_holders), _MOST_FILES):
                    holders = [first, *other_holders[start : start + _MOST_FILES]]
                    for parameter in kind.parameters:
                        for piece in _pieces(replicated, parameter.item_size):
                            yield _ComparedPart(kind, parameter, piece, holders)

    def _compare(self, part: _ComparedPart) -> tuple[bool, Optional[tuple[int, int]]]:
        """Whether the compared bytes are not constant, and the first two ranks that differ, if any."""
        if not hasattr(self._own, "buffers"):
            self._own.buffers = np.empty((2, self._execution.block_bytes), np.uint8)
        first_buffer, other_buffer = self._own.buffers
        parameter, (first, *other_holders) = part.parameter, part.holders
        varied = False
        for box in part.replicated.runs(max(1, len(first_buffer) // parameter.item_size)):
            if self._stop.is_set():
                break
            first_bytes = first_buffer[: volume_of(box) * parameter.item_size]
            other_bytes = other_buffer[: len(first_bytes)]
            self._files.read(parameter, first, box, first_bytes.data)
            for holder in other_holders:
                self._files.read(parameter, holder, box, other_bytes.data)
                if not np.array_equal(first_bytes, other_bytes):
                    return True, (first.rank, holder.rank)
            varied = varied or not _is_constant(first_bytes, parameter.item_size)
            with self._lock:
                self._progress.wrote(len(first_bytes) * len(part.holders))
        return varied, None


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


def _is_constant(data: npt.NDArray[np.uint8], item_size: int) -> bool:
    """Whether all elements are equal."""
    elements = data.reshape(-1, item_size)
    return bool((elements == elements[0]).all())
