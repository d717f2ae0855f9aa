"""Comparing everything that several ranks should hold alike, on all cores and in bounded memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import NamedTuple, Optional

import numpy as np

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.execute import ExecutionOptions, Progress
from reshard.execute.filling import boxes_of_range
from reshard.execute.reading import Bytes
from reshard.layout import shape_of, volume_of
from reshard.source_replicas.choice import Alike, Holder, Replicated
from reshard.source_replicas.files import ReplicaFiles
from reshard.source_replicas.tally import Tally

# Bytes of a tensor that a thread takes at a time, and files that it compares with one other.
_PART_BYTES = 64 << 20
_MOST_FILES = 64


class _Part(NamedTuple):
    """What a thread compares at a time: a box of a parameter, on one rank and on some others."""

    number: int
    kind: Alike
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]


class Everything:
    """Compares all of every slice that several ranks hold.

    Args:
        kinds: what can be compared.
        files: where it is read.
        execution: threads and memory.
        progress: told of bytes.
        tally: what is compared is counted there.
    """

    def __init__(
        self,
        kinds: Sequence[Alike],
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

    def run(self) -> None:
        """Compare it.

        Raises:
            RetryableError: a file cannot be read.
        """
        threads = self._execution.threads
        parts = self._parts()
        self._progress.begin(self._nbytes(), "comparing replicas")
        with ThreadPoolExecutor(threads) as pool:
            try:
                for done in as_completed([pool.submit(self._work, parts) for _ in range(threads)]):
                    done.result()
            except BaseException:
                # Also Ctrl-C: nobody waits for terabytes to be read.
                self._stop.set()
                raise
            finally:
                self._progress.end()

    def _nbytes(self) -> int:
        total = 0
        for kind in self._kinds:
            boxes = map(kind.replicated, range(len(kind)))
            elements = sum(volume_of(replicated.box) * _reads(len(replicated.holders)) for replicated in boxes)
            total += elements * kind.parameters[0].item_size * len(kind.parameters)
        return total

    def _parts(self) -> Iterator[_Part]:
        """Everything, in an order in which few files are read at a time."""
        number = 0
        for kind in self._kinds:
            for replicated in map(kind.replicated, range(len(kind))):
                first, *others = replicated.holders
                for start in range(0, len(others), _MOST_FILES):
                    holders = [first, *others[start : start + _MOST_FILES]]
                    for parameter in kind.parameters:
                        for piece in _pieces(replicated, parameter.item_size):
                            yield _Part(number, kind, parameter, piece, holders)
                            number += 1

    def _work(self, parts: Iterator[_Part]) -> None:
        size = self._execution.block_bytes
        buffers = np.empty(size, dtype=np.uint8), np.empty(size, dtype=np.uint8)
        while not self._stop.is_set():
            with self._lock:
                part = next(parts, None)
            if part is None:
                return
            telling, ranks = self._compare(part, *buffers)
            if telling:
                with self._lock:
                    self._tally.add(part.kind, part.parameter, ranks, part.number)

    def _compare(self, part: _Part, one: Bytes, other: Bytes) -> tuple[bool, Optional[tuple[int, int]]]:
        """Whether what was compared is not all of one value, and the first two ranks that differ, if any do."""
        parameter, (first, *others) = part.parameter, part.holders
        telling = False
        for box in part.replicated.runs(max(1, len(one) // parameter.item_size)):
            if self._stop.is_set():
                break
            mine = one[: volume_of(box) * parameter.item_size]
            theirs = other[: len(mine)]
            self._files.read(parameter, first, box, mine.data)
            for holder in others:
                self._files.read(parameter, holder, box, theirs.data)
                if not np.array_equal(mine, theirs):
                    return True, (first.rank, holder.rank)
            telling = telling or not _is_constant(mine, parameter.item_size)
            with self._lock:
                self._progress.wrote(len(mine) * len(part.holders))
        return telling, None


def _reads(holders: int) -> int:
    """How often a box is read that so many ranks hold: the first one's once for every batch of others."""
    return holders - 1 + -(-(holders - 1) // _MOST_FILES)


def _pieces(replicated: Replicated, item_size: int) -> Iterator[Replicated]:
    """A large box in several ones, so that several threads can take them."""
    most = max(1, _PART_BYTES // item_size)
    if volume_of(replicated.box) <= most:
        yield replicated
        return
    for piece in boxes_of_range(shape_of(replicated.box), 0, volume_of(replicated.box), most):
        box = tuple((start + low, start + high) for (start, _), (low, high) in zip(replicated.box, piece))
        yield replicated._replace(box=box)


def _is_constant(data: Bytes, item_size: int) -> bool:
    """Whether all elements are the same."""
    elements = data.reshape(-1, item_size)
    return bool((elements == elements[0]).all())
