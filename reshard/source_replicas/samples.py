"""Comparing samples: some KiB of some parameters on some ranks, up to a limit.

Parameters of each layout take turns. The first sample of a layout probes a whole group of replicas, until a sample is
not constant; other samples compare two ranks.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Optional, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import DamagedCheckpointError, RetryableError
from reshard.execute import ExecutionOptions
from reshard.execute.reader import BoxReader, in_order
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.layout import Box, volume_of
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.source_replicas.choice import Holder, HolderGroup, ParameterGroup, Replicated, number_of
from reshard.source_replicas.comparison import ReplicaComparison

_SAMPLE_BYTES = 4 << 10
MOST_PLACES = 4
"""Maximum places to try if all elements are equal."""

# Concurrent requests on remote storage.
_IN_FLIGHT = 16

Contents = dict[bytes, list[int]]
"""Ranks by the bytes of their samples, in the order of the holders."""


class Sample(NamedTuple):
    """A parameter, and a box in the slice of each of some ranks."""

    parameter: GlobalTensor
    holders: Sequence[Holder]
    boxes: Sequence[Box]


class ReplicaFiles:
    """The files of a step; thread-safe.

    Args:
        step: the step, or a checkpoint of another form.
        handles: open files.
        execution: storage, threads and memory.
        seconds: samples are read within this time.
    """

    def __init__(
        self,
        step: Union[SourceStep, Checkpoint],
        handles: FileHandles,
        execution: ExecutionOptions,
        seconds: float = 60.0,
    ) -> None:
        self._step = step
        self._remote = execution.storage.remote
        # No read-ahead: samples are small.
        options = execution._replace(io="pread", storage=execution.storage._replace(small=0))
        self._reader = BoxReader(handles, options, threads=max(execution.threads, _IN_FLIGHT))
        self._deadline = time.monotonic() + seconds
        self.requests = 0
        """Samples that were requested."""

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._deadline

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

    def contents(self, samples: Iterable[Sample]) -> Iterator[Contents]:
        """The contents of samples, in order: read concurrently on remote storage, else as they are taken.

        Ranks are left out whose file cannot be read, or not in time: the conversion reports it, if it needs the file.
        """
        samples = list(samples)
        calls = (
            [partial(self._sample, one.parameter, *each) for each in zip(one.holders, one.boxes)] for one in samples
        )
        results: Iterator[Iterable[Optional[bytes]]]
        if self._remote:
            results = (data for _, data in in_order(self._reader.pool, calls, list, 2 * _IN_FLIGHT, size=len))
        else:
            results = ((call() for call in some) for some in calls)
        for one, read in zip(samples, results):
            found: Contents = {}
            for holder, data in zip(one.holders, read):
                if data is not None:
                    found.setdefault(data, []).append(holder.rank)
            self.requests += len(one.holders)
            yield found

    def _sample(self, parameter: GlobalTensor, holder: Holder, box: Box) -> Optional[bytes]:
        """The bytes of a small box of a holder's slice; None if they are unreadable or late."""
        data = bytearray(volume_of(box) * parameter.item_size)
        with contextlib.suppress(DamagedCheckpointError, RetryableError):
            if not self.is_late:
                self.read(parameter, holder, box, memoryview(data))
                return bytes(data)
        return None

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


def own_sample(parameter: GlobalTensor, holders: Sequence[Holder], place: int) -> Sample:
    """A sample of each holder's slice; at the same place in slices of the same shape.

    Args:
        parameter: the parameter.
        holders: the holders.
        place: the number of the sample, below `MOST_PLACES`.
    """
    number = number_of(parameter.name, place)
    slices = (Replicated(one.box, (HolderGroup((one.rank,), (one.rank,), one.box),)) for one in holders)
    return Sample(parameter, holders, [_sample_box(one, parameter, number) for one in slices])


def _sample_box(replicated: Replicated, parameter: GlobalTensor, number: int) -> Box:
    """A box to sample in a replicated box of a parameter, at a different place for every number."""
    return replicated.run(max(1, _SAMPLE_BYTES // parameter.item_size), number)


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


class _Chosen(NamedTuple):
    """A parameter, a box of it that several ranks hold, and the ranks to compare."""

    kind: ParameterGroup
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]
    number: int
    is_probe: bool

    def at(self, place: int) -> Sample:
        box = _sample_box(self.replicated, self.parameter, number_of(self.number, place))
        return Sample(self.parameter, self.holders, [box] * len(self.holders))


def compare_samples(
    kinds: Sequence[ParameterGroup], files: ReplicaFiles, effort: SamplingEffort, comparison: ReplicaComparison
) -> None:
    """Compare samples until a limit is reached.

    Args:
        kinds: groups of parameters.
        files: the files.
        effort: the limits.
        comparison: collects the results.
    """
    kinds = [kind for kind in kinds if len(kind)]
    probed: set[object] = set()
    for turn in itertools.count():
        pending = [] if files.is_late else list(_chosen(kinds, turn, probed, files.requests, effort))
        if not pending:
            return
        for place in range(MOST_PLACES):
            constant = []
            for one, found in zip(pending, files.contents(one.at(place) for one in pending)):
                first, *others = found.values() if found else [[]]
                if not others and is_constant(next(iter(found), b""), one.parameter.item_size):
                    constant.append(one)
                elif others or len(first) > 1:
                    comparison.add(one.kind, one.parameter, (first[0], others[0][0]) if others else None)
                    if one.is_probe:
                        probed.add(one.kind.structure)
            pending = constant


def _chosen(
    kinds: Sequence[ParameterGroup], turn: int, probed: set[object], reads: int, effort: SamplingEffort
) -> Iterator[_Chosen]:
    """One sample of every group, until a limit is reached.

    Args:
        kinds: the groups.
        turn: the number of the sample.
        probed: structures of probed layouts.
        reads: requests so far.
        effort: the limits.
    """
    probed = set(probed)
    for kind in kinds:
        # At least once for each box, because two exchanged ranks differ in a few boxes only.
        if turn >= max(len(kind.parameters) * effort.turns, len(kind)):
            continue
        parameter = kind.parameters[turn % len(kind.parameters)]
        number = number_of(parameter.name, turn)
        replicated = kind.replicated((number_of(kind.parameters[0].name) + turn) % len(kind))
        is_probe = kind.structure not in probed and reads < effort.most_reads
        if is_probe:
            holders = replicated.probe()
            probed.add(kind.structure)
        elif reads < effort.reads:
            holders = replicated.pair(number)
        else:
            continue
        reads += len(holders)
        yield _Chosen(kind, parameter, replicated, holders, number, is_probe)


def is_constant(data: bytes, item_size: int) -> bool:
    """Whether all elements of a sample are the same."""
    return data == data[:item_size] * (len(data) // item_size)
