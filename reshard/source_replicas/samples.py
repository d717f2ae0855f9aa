"""Comparing samples: some KiB of some parameters on some ranks, up to a limit.

Parameters of each layout take turns. The first sample of a layout probes a whole group of replicas, until a sample is
not constant. After a difference, all further samples of the layout probe; other samples compare two ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Callable, Optional, TypeVar, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import DamagedCheckpointError, RetryableError
from reshard.execute import ExecutionOptions
from reshard.execute.reader import BoxReader, in_order
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.layout import Box, volume_of
from reshard.named_tuple import NamedTuple
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.source_replicas.choice import Holder, HolderGroup, ParameterGroup, Replicated, number_of
from reshard.source_replicas.outcome import Tally

_R = TypeVar("_R")

_SAMPLE_BYTES = 4 << 10
MOST_PLACES = 4
"""Maximum places to try if all elements are equal."""

UNREADABLE = (DamagedCheckpointError, RetryableError)
"""Errors for which samples skip a file: the conversion reports them, if it needs the file."""

# Concurrent requests on remote storage.
_IN_FLIGHT = 16


class ReplicaFiles:
    """The files of a step; thread-safe.

    Args:
        step: the step, or a checkpoint of another form.
        handles: open files.
        execution: storage, threads and memory.
    """

    def __init__(self, step: Union[SourceStep, Checkpoint], handles: FileHandles, execution: ExecutionOptions) -> None:
        self._step = step
        self._remote = execution.storage.remote
        # No read-ahead: samples are small.
        options = execution._replace(io="pread", storage=execution.storage._replace(small=0))
        self._reader = BoxReader(handles, options, threads=max(execution.threads, _IN_FLIGHT))

    def read(self, parameter: GlobalTensor, holder: Holder, box: Box, out: memoryview) -> None:
        """Fill ``out`` with a box of a holder's slice.

        Raises:
            RetryableError: the file cannot be read.
        """
        index = self._step.indexes[holder.rank]
        source = StoredSlice(index.path, holder.rank, index.tensors[parameter.name].extents, holder.box)
        tensor = TargetTensor(parameter.name, parameter.item_size, holder.box, (Piece(source, holder.box),))
        inside = tuple((low - start, high - start) for (low, high), (start, _) in zip(box, holder.box))
        self._reader.read_alone(tensor, inside, out)

    def sample(self, parameter: GlobalTensor, holder: Holder, box: Box) -> bytes:
        """The bytes of a small box, likewise."""
        data = bytearray(volume_of(box) * parameter.item_size)
        self.read(parameter, holder, box, memoryview(data))
        return bytes(data)

    def own_sample(self, parameter: GlobalTensor, holder: Holder, place: int) -> bytes:
        """A sample of a holder's slice; at the same place in slices of the same shape.

        Args:
            parameter: the parameter.
            holder: the holder.
            place: the number of the sample, below `MOST_PLACES`.
        """
        replicated = Replicated(holder.box, (HolderGroup((holder.rank,), (holder.rank,), holder.box),))
        return self.sample(parameter, holder, sample_box(replicated, parameter, number_of(parameter.name, place)))

    def each(self, groups: Iterable[Sequence[Callable[[], _R]]]) -> Iterator[Iterable[_R]]:
        """The results of groups of calls, in order: made concurrently on remote storage, else as they are taken."""
        if not self._remote:
            return ((call() for call in calls) for calls in groups)
        return (results for _, results in in_order(self._reader.pool, groups, list, 2 * _IN_FLIGHT, size=len))

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


class SamplingEffort(NamedTuple):
    """Limits of sampling.

    Attributes:
        turns: samples of a parameter.
        reads: requests after which only unprobed layouts are sampled.
        most_reads: maximum number of requests.
        seconds: maximum time.
    """

    turns: int
    reads: int
    most_reads: int
    seconds: float


EFFORTS = {"auto": SamplingEffort(1, 256, 1024, 1.0), "more": SamplingEffort(4, 1 << 15, 1 << 16, 60.0)}
"""Limits of sampling, by the value of ``effort``."""


class _Sample(NamedTuple):
    """A parameter, a box of it that several ranks hold, and the ranks to compare."""

    kind: ParameterGroup
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]
    number: int
    is_probe: bool


class _First(NamedTuple):
    """The bytes of a sample's first holder.

    Attributes:
        reads: number of requests.
        box: the box.
        data: its bytes.
        varied: whether they are not constant.
    """

    reads: int
    box: Box
    data: bytes
    varied: bool


class Samples:
    """Compares samples until a limit is reached.

    Args:
        kinds: groups of parameters.
        files: the files.
        effort: the limits.
        tally: collects the results.
    """

    def __init__(
        self, kinds: Sequence[ParameterGroup], files: ReplicaFiles, effort: SamplingEffort, tally: Tally
    ) -> None:
        self._kinds = [kind for kind in kinds if len(kind)]
        self._files = files
        self._effort = effort
        self._tally = tally
        self._reads = 0
        self._deadline = time.monotonic() + effort.seconds
        # Structures of probed layouts, and of layouts with differences.
        self._probed: set[object] = set()
        self._doubtful: set[object] = set()

    def run(self) -> None:
        """Compare samples."""
        for turn in itertools.count():
            samples = list(self._samples(turn))
            if not samples:
                return
            firsts = [first for (first,) in self._files.each([partial(self._first, sample)] for sample in samples)]
            comparisons = (
                [] if first is None else [partial(self._same, sample, first, holder) for holder in sample.holders[1:]]
                for sample, first in zip(samples, firsts)
            )
            for sample, first, results in zip(samples, firsts, self._files.each(comparisons)):
                if first is None:
                    continue
                self._reads += first.reads
                ranks, is_equal = None, None
                for holder, is_equal in zip(sample.holders[1:], results):
                    self._reads += 1
                    if not is_equal:
                        ranks = sample.holders[0].rank, holder.rank
                        break
                if is_equal is not None and (first.varied or ranks is not None):
                    self._count(sample, ranks)

    def _count(self, sample: _Sample, ranks: Optional[tuple[int, int]]) -> None:
        self._tally.add(sample.kind, sample.parameter, ranks)
        if sample.is_probe:
            self._probed.add(sample.kind.structure)
        if ranks is not None:
            self._doubtful.add(sample.kind.structure)

    def _samples(self, turn: int) -> Iterator[_Sample]:
        """One sample of every group, until a limit is reached."""
        if time.monotonic() > self._deadline:
            return
        reads = self._reads
        probed = self._probed - self._doubtful
        for kind in self._kinds:
            # At least once for each box, because two exchanged ranks differ in a few boxes only.
            if turn >= max(len(kind.parameters) * self._effort.turns, len(kind)):
                continue
            parameter = kind.parameters[turn % len(kind.parameters)]
            number = number_of(parameter.name, turn)
            replicated = kind.replicated((number_of(kind.parameters[0].name) + turn) % len(kind))
            is_probe = kind.structure not in probed and reads < self._effort.most_reads
            if is_probe:
                holders = replicated.probe()
                if kind.structure not in self._doubtful:
                    probed.add(kind.structure)
            elif reads < self._effort.reads:
                holders = replicated.pair(number)
            else:
                continue
            reads += len(holders)
            yield _Sample(kind, parameter, replicated, holders, number, is_probe)

    def _first(self, sample: _Sample) -> Optional[_First]:
        """The first holder's bytes, at a place where they are not constant if possible; None if unreadable or late."""
        parameter = sample.parameter
        with contextlib.suppress(*UNREADABLE):
            for place in range(MOST_PLACES if time.monotonic() < self._deadline else 0):
                box = sample_box(sample.replicated, parameter, number_of(sample.number, place))
                data = self._files.sample(parameter, sample.holders[0], box)
                varied = not is_constant(data, parameter.item_size)
                if varied or box == sample.replicated.box or place == MOST_PLACES - 1:
                    return _First(place + 1, box, data, varied)
        return None

    def _same(self, sample: _Sample, first: _First, holder: Holder) -> Optional[bool]:
        """Whether another holder has the same bytes; None if unreadable or late."""
        with contextlib.suppress(*UNREADABLE):
            if time.monotonic() < self._deadline:
                return self._files.sample(sample.parameter, holder, first.box) == first.data
        return None


def sample_box(replicated: Replicated, parameter: GlobalTensor, number: int) -> tuple[tuple[int, int], ...]:
    """A box to sample in a replicated box of a parameter, at a different place for every number."""
    return replicated.run(max(1, _SAMPLE_BYTES // parameter.item_size), number)


def is_constant(data: bytes, item_size: int) -> bool:
    """Whether all elements of a sample are the same."""
    return data == data[:item_size] * (len(data) // item_size)
