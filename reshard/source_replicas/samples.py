"""Comparing samples: some KiB of some parameters on some ranks, and when that is enough.

Kinds of parameters take turns. The first sample of every layout probes a whole group of replicas, until one was of
values that tell something, and so do all others where something differs; the rest compare two ranks.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import DamagedCheckpointError, RetryableError
from reshard.layout import Box, volume_of
from reshard.source_replicas.choice import Alike, Holder, Replicated, number_of
from reshard.source_replicas.files import Each, ReplicaFiles, at_a_time
from reshard.source_replicas.tally import Tally

_SAMPLE_BYTES = 4 << 10
MOST_PLACES = 4
"""Places that are tried where all elements are the same."""


class Effort(NamedTuple):
    """How much is sampled.

    Attributes:
        turns: samples of a parameter.
        reads: requests after which no further sample is taken, but of layouts that have not been probed.
        most_reads: requests after which none is taken at all.
        seconds: time after which none is taken at all.
    """

    turns: int
    reads: int
    most_reads: int
    seconds: float


EFFORTS = {"auto": Effort(1, 256, 1024, 1.0), "more": Effort(4, 1 << 15, 1 << 16, 60.0)}
"""How much is sampled, by the word for it."""


class _Sample(NamedTuple):
    """A parameter, what of it several ranks hold, and which of them are compared."""

    kind: Alike
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]
    number: int
    is_probe: bool


class _Outcome(NamedTuple):
    """What came of a sample.

    Attributes:
        reads: requests that it took.
        telling: whether something was compared that is not all of one value.
        ranks: two ranks that differ, if any do.
    """

    reads: int
    telling: bool = False
    ranks: Optional[tuple[int, int]] = None


class Samples:
    """Compares samples until it is enough.

    Args:
        kinds: what can be compared.
        files: where it is read.
        remote: whether requests take a round trip.
        effort: how much is sampled.
        tally: what is compared is counted there.
    """

    def __init__(self, kinds: Sequence[Alike], files: ReplicaFiles, remote: bool, effort: Effort, tally: Tally) -> None:
        self._kinds = [kind for kind in kinds if len(kind)]
        self._files = files
        self._remote = remote
        self._effort = effort
        self._tally = tally
        self._reads = 0
        self._deadline = time.monotonic() + effort.seconds
        # Layouts by what of them makes replicas: those that were probed, and those of which some differ.
        self._probed: set[object] = set()
        self._doubtful: set[object] = set()

    def run(self) -> None:
        """Compare them."""
        with at_a_time(self._remote) as (compare_each, read_each):
            compare = functools.partial(self._compare, read_each)
            for turn in itertools.count():
                samples = list(self._samples(turn))
                if not samples:
                    return
                for sample, outcome in zip(samples, compare_each(compare, samples)):
                    self._reads += outcome.reads
                    if outcome.telling:
                        self._tally.add(sample.kind, sample.parameter, outcome.ranks)
                        if sample.is_probe:
                            self._probed.add(sample.kind.structure)
                        if outcome.ranks is not None:
                            self._doubtful.add(sample.kind.structure)

    def _samples(self, turn: int) -> Iterator[_Sample]:
        """One of every kind that has more, as long as it is not enough."""
        if time.monotonic() > self._deadline:
            return
        reads = self._reads
        probed = self._probed - self._doubtful
        for kind in self._kinds:
            if turn >= len(kind.parameters) * self._effort.turns:
                continue
            parameter = kind.parameters[turn % len(kind.parameters)]
            number = number_of(parameter.name, turn)
            replicated = kind.replicated(number % len(kind))
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

    def _compare(self, read_each: Each, sample: _Sample) -> _Outcome:
        if time.monotonic() > self._deadline:
            return _Outcome(0)
        parameter, (first, *others) = sample.parameter, sample.holders
        reads = 0
        try:
            for place in range(MOST_PLACES):
                box = sample_box(sample.replicated, parameter, number_of(sample.number, place))
                mine = self._read(parameter, box, first)
                reads += 1
                telling = mine != mine[: parameter.item_size] * (len(mine) // parameter.item_size)
                if telling or box == sample.replicated.box:
                    break
            for other, theirs in zip(others, read_each(functools.partial(self._read, parameter, box), others)):
                reads += 1
                if theirs != mine:
                    return _Outcome(reads, True, (first.rank, other.rank))
        except (DamagedCheckpointError, RetryableError):
            # Whoever needs this file will find out.
            return _Outcome(reads)
        return _Outcome(reads, telling)

    def _read(self, parameter: GlobalTensor, box: Box, holder: Holder) -> bytearray:
        data = bytearray(volume_of(box) * parameter.item_size)
        self._files.read(parameter, holder, box, memoryview(data))
        return data


def sample_box(replicated: Replicated, parameter: GlobalTensor, number: int) -> tuple[tuple[int, int], ...]:
    """A box to sample in what several ranks hold of a parameter, another place for every number."""
    return replicated.run(max(1, _SAMPLE_BYTES // parameter.item_size), number)
