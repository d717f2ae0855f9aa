"""Comparing replicas: samples of them, or everything.

Constant values, such as zeros of an optimizer before its first step or a norm's ones, test nothing: a sample then moves
to another place, and constant boxes do not count. Accumulated gradients may differ between data-parallel ranks until
they are reduced: only a full comparison includes them, and reports them separately.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from reshard.asked import Source, words_of
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, FileSharding, GlobalTensor
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.execute import Budget, Progress
from reshard.execute.reader import BoxReader, in_order
from reshard.layout import Box, Grid, boxes_of_range, placed, shape_of, volume_of
from reshard.plan.pieces import Piece, StoredSlice, TargetTensor
from reshard.processes import reuse_memory
from reshard.source_replicas.choice import (
    Holder,
    ParameterGroup,
    Replicated,
    group_parameters,
    is_gradient,
    number_of,
    run_in,
    runs_in,
)
from reshard.text.messages import Message, joined, listing, plural, quoted
from reshard.text.names import is_weight

_MOST_EXAMPLES = 2
_SAMPLE_BYTES = 4 << 10
MOST_PLACES = 4
"""Maximum places to try if all elements are equal."""

# Concurrent requests on remote storage.
_IN_FLIGHT = 16
# Full comparison: bytes of a tensor per part, files that a thread compares with the first, and parts per thread that
# are in work or wait for an earlier part.
_PART_BYTES = 64 << 20
_MOST_FILES = 64
_AHEAD = 4

Contents = dict[bytes, list[int]]
"""Ranks by the bytes of their samples, in the order of the holders."""


class ReplicaCheck(NamedTuple):
    """The extent of a test of a source strategy against the files.

    Attributes:
        compared: ``samples``, ``everything``, or ``nothing`` if disabled.
        samples: compared boxes of parameters, without constant boxes.
        parameters: number of their parameters.
        untested: number of parameters without two readable replicas.
        tested: whether cut parameters were compared, if there are any.
    """

    compared: str
    samples: int = 0
    parameters: int = 0
    untested: int = 0
    tested: bool = False

    def __str__(self) -> str:
        """The result, for messages."""
        if self.compared == "nothing":
            return "replicas were not compared (--check-replicas never)"
        if not self.samples:
            return "no parameter has replicas to compare, so only shapes were checked"
        extent = "" if self.compared == "everything" else f" in {plural(self.samples, 'sample')}"
        agree = f"no difference between replicas{extent} of {plural(self.parameters, 'parameter')}"
        if self.untested:
            return f"{agree}; {plural(self.untested, 'other')} without replicas, checked by shape only"
        return agree if self.tested else f"{agree}; cut parameters were checked by shape only"


class Differing(NamedTuple):
    """A box of a parameter with different values on ranks, or files, that should be replicas.

    Attributes:
        parameter: its name.
        box: the box, in elements of the full tensor.
        groups: the compared ranks by content.
        files: the files of two ranks that differ.
    """

    parameter: str
    box: Box
    groups: list[list[int]]
    files: tuple[str, str]

    @property
    def ranks(self) -> tuple[int, int]:
        """Two ranks that should hold equal bytes."""
        return self.groups[0][0], self.groups[1][0]


class ReplicaComparison:
    """The compared boxes, and those that differ.

    Attributes:
        differences: all boxes that differ.
    """

    def __init__(self, groups: Sequence[ParameterGroup], source: Checkpoint, compared: str) -> None:
        self.differences: list[Differing] = []
        self._groups = groups
        self._source = source
        self._extent = compared
        self._samples = 0
        self._compared: dict[int, set[str]] = defaultdict(set)

    def add(self, group: ParameterGroup, parameter: GlobalTensor) -> None:
        """Count a compared box that is not constant."""
        self._samples += 1
        self._compared[id(group)].add(parameter.name)

    def add_difference(self, parameter: str, box: Box, ranks_by_content: list[list[int]]) -> None:
        """Add a box whose replicas differ."""
        (first, *_), (other, *_), *_ = ranks_by_content
        paths = self._source.indexes[first].path, self._source.indexes[other].path
        self.differences.append(Differing(parameter, box, ranks_by_content, paths))

    @property
    def check(self) -> ReplicaCheck:
        """The extent of the test, without gradients."""
        groups = [group for group in self._groups if not is_gradient(group.parameters[0].name)]
        return ReplicaCheck(
            compared=self._extent,
            samples=self._samples,
            parameters=sum(len(self._compared[id(group)]) for group in groups),
            untested=sum(len(group.parameters) for group in groups if not len(group)),
            tested=any(self._compared[id(group)] for group in [group for group in groups if group.is_cut] or groups),
        )

    @property
    def alone(self) -> int:
        """The number of parameters of which no two files hold the same slice."""
        return sum(len(group.parameters) for group in self._groups if not len(group))

    @property
    def differing(self) -> list[Differing]:
        """The first difference of each parameter, weights first; without gradients."""
        names = {parameter.name for group in self._groups for parameter in group.parameters}
        return sorted(self._first(False), key=lambda item: (not is_weight(item.parameter, names), item.parameter))

    @property
    def gradients(self) -> list[Differing]:
        """The first difference of each accumulated gradient, by name."""
        return sorted(self._first(True))

    def _first(self, gradients: bool) -> list[Differing]:
        first: dict[str, Differing] = {}
        for item in self.differences:
            if is_gradient(item.parameter) == gradients:
                first.setdefault(item.parameter, item)
        return list(first.values())

    def lines(self) -> list[str]:
        """The differing parameters, in a few lines."""
        differing = self.differing
        lines: list[str] = []
        for item in differing[:_MOST_EXAMPLES]:
            (first, other), files = item.ranks, item.files
            lines.append(
                f"{quoted(item.parameter)} differs between rank {first} and rank {other} ({files[0]} and {files[1]})"
            )
        if len(differing) > _MOST_EXAMPLES:
            names = listing([item.parameter for item in differing])
            lines.append(f"in all {plural(len(differing), 'parameter')}: " + names)
        return lines

    def gradient_warning(self) -> Message:
        """The warning about differing accumulated gradients."""
        names = [item.parameter for item in self.gradients]
        return (
            f"{plural(len(names), 'parameter')} of accumulated gradients differ between ranks that should hold the "
            "same: "
            + listing(names)
            + "; data-parallel ranks have not reduced them yet, and one rank's copy stands for all"
        )

    def error(self, strategy: str, source: Source) -> CheckpointError:
        """The error about ranks of a source that differ, by the strategy at a path."""
        place, words = source.path, words_of(source, ("step", "file_suffix"))
        check = shlex.join(["reshard", "strategy", "check", strategy, place, *words])
        verify = shlex.join(["reshard", "verify", place, "--replicas", "--strategy", strategy, *words])
        differing, compared = self.differing, self.check
        first = differing[0]
        count = f"{len(differing)} of {compared.parameters} "
        count += "compared parameters" if compared.compared == "everything" else "sampled parameters"
        headline = (
            f"the source strategy ({strategy}) does not fit this checkpoint, or replicas have diverged: {count} differ "
            "between ranks that should hold the same slice"
        )
        return CheckpointError(
            joined("\n", [headline, *("  " + line for line in self.lines())]),
            file=first.files[1],
            rank=first.ranks[1],
            parameter=first.parameter,
            hint=f"`{check}` compares everything, and `{verify}` lists every difference\n"
            f"to leave out a rank whose file is wrong: --without-ranks {first.ranks[0]} or --without-ranks "
            f"{first.ranks[1]}\n"
            "if replicas have diverged, such as norms that data-parallel ranks do not synchronise: "
            "--check-replicas never",
        )

    def error_of_copies(self, place: str) -> CheckpointError:
        """The error about files that differ by the metadata at a path."""
        first = self.differing[0]
        return CheckpointError(
            f"{first.files[1]}: {quoted(first.parameter)} differs from that in {first.files[0]}, and both are the box "
            f"{[list(interval) for interval in first.box]} by the metadata of {place}",
            file=first.files[1],
            parameter=first.parameter,
            hint="the metadata or a file is damaged: take them from a copy, or another step; if the ranks that wrote "
            "them have diverged: --check-replicas never",
        )


# Reading samples.


Sample = tuple[GlobalTensor, Sequence[tuple[Holder, Box]]]
"""A parameter, and a box in the slice of each of some ranks."""


class ReplicaFiles:
    """The files of a step; thread-safe. Samples are read within some seconds."""

    def __init__(
        self,
        source: Checkpoint,
        handles: FileHandles,
        budget: Budget,
        seconds: float = 60.0,
    ) -> None:
        self._source = source
        self._remote = budget.costs.remote
        # No read-ahead: samples are small.
        # Without windows: samples lie far apart.
        alone = budget._replace(io=("pread", ""), costs=budget.costs._replace(small=0))
        self._reader = BoxReader(handles, alone, threads=max(budget.threads, _IN_FLIGHT))
        self._deadline = time.monotonic() + seconds
        self.requests = 0
        """Samples that were requested."""

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def read(self, parameter: GlobalTensor, holder: Holder, box: Box, out: memoryview) -> None:
        """Fill ``out`` with a box of a holder's slice.

        Raises:
            RetryableError: the file cannot be read.
        """
        rank, stored = holder
        index = self._source.indexes[rank]
        source = StoredSlice(index.path, rank, index.tensors[parameter.name].extents, stored)
        tensor = TargetTensor(parameter.name, parameter.item_size, stored, (Piece(source, stored),))
        inside = tuple((low - start, high - start) for (low, high), (start, _) in zip(box, stored))
        self._reader.read_alone(tensor, inside, out)

    def contents(self, samples: Iterable[Sample]) -> Iterator[Contents]:
        """The contents of samples, in order: read concurrently on remote storage, else as they are taken.

        Ranks are left out whose file cannot be read, or not in time: the conversion reports it, if it needs the file.
        """
        samples = list(samples)
        calls = ([partial(self._sample, parameter, *each) for each in boxes] for parameter, boxes in samples)
        results: Iterator[Iterable[bytes | None]]
        if self._remote:
            results = (data for _, data in in_order(self._reader.pool, calls, list, 2 * _IN_FLIGHT, size=len))
        else:
            results = ((call() for call in some) for some in calls)
        for (_, boxes), read in zip(samples, results):
            by_content: Contents = {}
            for ((rank, _), _), data in zip(boxes, read):
                if data is not None:
                    by_content.setdefault(data, []).append(rank)
            self.requests += len(boxes)
            yield by_content

    def _sample(self, parameter: GlobalTensor, holder: Holder, box: Box) -> bytes | None:
        data = bytearray(volume_of(box) * parameter.item_size)
        with contextlib.suppress(DamagedCheckpointError, RetryableError):
            if not self.is_late:
                self.read(parameter, holder, box, memoryview(data))
                return bytes(data)
        return None

    def close(self) -> None:
        """End the threads."""
        self._reader.close()


def sample_box(parameter: GlobalTensor, box: Box, slices: Sequence[Box], number: int) -> Box:
    """A box to sample in a box that holders' slices of a parameter contain, at a different place for every number."""
    return run_in(box, slices, max(1, _SAMPLE_BYTES // parameter.item_size), number)


def is_constant(data: bytes | bytearray, item_size: int) -> bool:
    """Whether all elements are the same."""
    return data == data[:item_size] * (len(data) // item_size)


def compare_replicas(
    parameters: Iterable[GlobalTensor],
    source: Checkpoint,
    handles: FileHandles,
    budget: Budget,
    progress: Progress,
    effort: str,
    ranks: frozenset[int] | None = None,
) -> ReplicaComparison:
    """Compare slices that several ranks hold by the strategy, or several files by the checkpoint's own metadata.

    Args:
        parameters: the parameters, as read from the files.
        source: the files.
        handles: open files.
        budget: costs of requests, threads and memory.
        progress: counts bytes of full comparisons.
        effort: ``auto``, some KiB of some parameters; ``more``, samples of every parameter; ``all``, everything.
        ranks: with ``all``, compare only slices that one of these ranks should hold; None for all.

    Raises:
        RetryableError: with ``all``, a file cannot be read; samples skip unreadable files. Or ranks differ, and their
            files are being written.
    """
    everything = effort == "all"
    groups = group_parameters([one for one in parameters if everything or not is_gradient(one.name)], source)
    comparison = ReplicaComparison(groups, source, "everything" if everything else "samples")
    turns, most_reads, seconds = _LIMITS["more" if everything else effort]
    with contextlib.closing(ReplicaFiles(source, handles, budget, seconds)) as files:
        if everything:
            _compare_everything(groups, ranks, files, budget, progress, comparison)
        else:
            _compare_samples(groups, files, turns, most_reads, comparison)
    if comparison.differing:
        # With the right strategy, too, files differ while another process overwrites them.
        handles.check_unchanged(index.path for index in source.indexes.values())
    return comparison


def entries_as_tensors(names: Iterable[str], source: Checkpoint) -> tuple[list[GlobalTensor], list[str]]:
    """Entries without a layout, as tensors that each of their files holds whole; and names whose types differ."""
    tensors, different = [], []
    for name in names:
        files = source.holders(name)
        first, *others = (source.indexes[file].tensors[name] for file in files)
        if any(other.header != first.header for other in others):
            different.append(name)
            continue
        # Text has no elements: its bytes are compared.
        shape, item_size = ((first.nbytes,), 1) if first.dtype in NO_ARRAYS else (first.shape, first.item_size)
        sharding = FileSharding(Grid.whole(shape), (tuple(files),))
        tensors.append(GlobalTensor(name, first.dtype, item_size, shape, (sharding,)))
    return tensors, different


def check_copies(
    checkpoint: Checkpoint, names: Iterable[str], handles: FileHandles, budget: Budget, effort: str
) -> None:
    """Compare slices that several files hold by the checkpoint's own metadata; see `compare_replicas`.

    Damaged metadata can place a slice where others are; then nothing is missing, and one of them is read.

    Raises:
        CheckpointError: copies differ.
    """
    parameters = [checkpoint.tensors[name] for name in names]
    comparison = compare_replicas(parameters, checkpoint, handles, budget, Progress(), effort)
    if comparison.differing:
        raise comparison.error_of_copies(checkpoint.place)


# Samples of replicas.


# Per effort: samples of a parameter, requests (twice as many for probes), and seconds.
_LIMITS = {"auto": (1, 256, 1.0), "more": (4, 1 << 15, 60.0)}


class _Chosen(NamedTuple):
    """A parameter, a box of it that several ranks hold, and the ranks to compare."""

    group: ParameterGroup
    parameter: GlobalTensor
    replicated: Replicated
    holders: list[Holder]
    number: int
    is_probe: bool

    def at(self, place: int) -> Sample:
        replicated, number = self.replicated, number_of(self.number, place)
        box = sample_box(self.parameter, replicated.box, replicated.slices, number)
        return self.parameter, [(holder, box) for holder in self.holders]


def _compare_samples(
    groups: Sequence[ParameterGroup],
    files: ReplicaFiles,
    turns: int,
    most_reads: int,
    comparison: ReplicaComparison,
) -> None:
    """Compare samples until a limit is reached.

    Parameters of each group take turns. The first sample of a structure probes a whole group of replicas, until a
    sample is not constant; other samples compare two ranks.
    """
    groups = [group for group in groups if len(group)]
    probed: set[object] = set()
    for turn in itertools.count():
        pending = [] if files.is_late else list(_chosen(groups, turn, turns, probed, most_reads, files.requests))
        if not pending:
            return
        for place in range(MOST_PLACES):
            constant = []
            for one, by_content in zip(pending, files.contents(one.at(place) for one in pending)):
                first = next(iter(by_content), b"")
                if len(by_content) < 2 and is_constant(first, one.parameter.item_size):
                    constant.append(one)
                elif len(by_content) > 1 or len(by_content[first]) > 1:
                    comparison.add(one.group, one.parameter)
                    if one.is_probe:
                        probed.add(one.group.structure)
                    if len(by_content) > 1:
                        comparison.add_difference(one.parameter.name, one.replicated.box, list(by_content.values()))
            pending = constant


def _chosen(
    groups: Sequence[ParameterGroup], turn: int, turns: int, probed: set[object], most_reads: int, reads: int
) -> Iterator[_Chosen]:
    """One sample of every group, until a limit is reached."""
    chosen: set[object] = set()
    for group in groups:
        # At least once for each box, because two exchanged ranks differ in a few boxes only.
        if turn >= max(len(group.parameters) * turns, len(group)):
            continue
        is_probe = group.structure not in probed | chosen
        if reads >= most_reads * (1 + is_probe):
            continue
        parameter = group.parameters[turn % len(group.parameters)]
        number = number_of(parameter.name, turn)
        replicated = group.replicated((number_of(group.parameters[0].name) + turn) % len(group))
        holders = replicated.probe() if is_probe else replicated.pair(number)
        chosen.add(group.structure)
        reads += len(holders)
        yield _Chosen(group, parameter, replicated, holders, number, is_probe)


# Everything, in several threads and bounded memory.


class _Part(NamedTuple):
    """Work for one thread: a piece of a parameter's box, compared between one rank and some others."""

    group: ParameterGroup
    parameter: GlobalTensor
    box: Replicated
    piece: Replicated
    holders: list[Holder]


def _compare_everything(
    groups: Sequence[ParameterGroup],
    ranks: frozenset[int] | None,
    files: ReplicaFiles,
    budget: Budget,
    progress: Progress,
    comparison: ReplicaComparison,
) -> None:
    """Compare all slices that several ranks hold, or those that one of ``ranks`` should hold.

    Raises:
        RetryableError: a file cannot be read.
    """
    from concurrent.futures import ThreadPoolExecutor

    reuse_memory(budget.block_bytes)
    lock, stop = threading.Lock(), threading.Event()

    def compare(part: _Part) -> tuple[bool, dict[int, bytes]]:
        """Whether the first rank's bytes vary, and a hash of the bytes of each rank that differs from it."""
        parameter, (first, *others) = part.parameter, part.holders
        hashes: dict[int, hashlib.blake2b] = defaultdict(hashlib.blake2b)
        varied = False
        most = max(1, budget.block_bytes // parameter.item_size)
        for number, box in enumerate(runs_in(part.piece.box, part.piece.slices, most)):
            if stop.is_set():
                break
            first_bytes = bytearray(volume_of(box) * parameter.item_size)
            other_bytes = bytearray(len(first_bytes))
            files.read(parameter, first, box, memoryview(first_bytes))
            for holder in others:
                files.read(parameter, holder, box, memoryview(other_bytes))
                if first_bytes != other_bytes:
                    hashes[holder[0]].update(b"%d:" % number + other_bytes)
            varied = varied or not is_constant(first_bytes, parameter.item_size)
            with lock:
                progress.wrote(len(first_bytes) * len(part.holders))
        return varied, {rank: hashed.digest() for rank, hashed in hashes.items()}

    chosen = [
        (group, [box for box in map(group.replicated, range(len(group))) if _concerns(box, ranks)]) for group in groups
    ]
    progress.begin(sum(itertools.starmap(_nbytes, chosen)), "comparing replicas")
    try:
        with ThreadPoolExecutor(budget.threads) as pool:
            parts = itertools.chain.from_iterable(itertools.starmap(_parts, chosen))
            ahead = _AHEAD * budget.threads
            results = in_order(pool, parts, lambda part: [partial(compare, part)], ahead, stop=stop)
            for box, of_box in itertools.groupby(results, lambda result: result[0].box):
                others: dict[str, dict[int, list[tuple[Box, bytes]]]] = defaultdict(lambda: defaultdict(list))
                for part, ((varied, hashes),) in of_box:
                    if varied or hashes:
                        comparison.add(part.group, part.parameter)
                    for rank, hashed in hashes.items():
                        others[part.parameter.name][rank].append((part.piece.box, hashed))
                for name, hashes_of in others.items():
                    by_content: dict[object, list[int]] = defaultdict(list)
                    for rank, _ in box.holders:
                        by_content[tuple(hashes_of.get(rank, ()))].append(rank)
                    comparison.add_difference(name, box.box, list(by_content.values()))
    finally:
        progress.end()


def _concerns(box: Replicated, ranks: frozenset[int] | None) -> bool:
    return ranks is None or not all(ranks.isdisjoint(group.ranks) for group in box.groups)


def _nbytes(group: ParameterGroup, boxes: Sequence[Replicated]) -> int:
    """Bytes to read of boxes of a group; the first holder is read once per batch of others."""
    elements = 0
    for box in boxes:
        others = len(box.holders) - 1
        elements += volume_of(box.box) * (others + -(-others // _MOST_FILES))
    return elements * group.parameters[0].item_size * len(group.parameters)


def _parts(group: ParameterGroup, boxes: Sequence[Replicated]) -> Iterator[_Part]:
    """The parts of boxes of a group, in an order that reads few files at a time."""
    for box in boxes:
        first, *others = box.holders
        for start in range(0, len(others), _MOST_FILES):
            holders = [first, *others[start : start + _MOST_FILES]]
            for parameter in group.parameters:
                for piece in _pieces(box, parameter.item_size):
                    yield _Part(group, parameter, box, piece, holders)


def _pieces(box: Replicated, item_size: int) -> Iterator[Replicated]:
    """A large box in several parts, for several threads."""
    most = max(1, _PART_BYTES // item_size)
    if volume_of(box.box) <= most:
        yield box
        return
    for piece in boxes_of_range(shape_of(box.box), 0, volume_of(box.box), most):
        yield box._replace(box=placed(piece, box.box))
