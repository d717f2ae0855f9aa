"""Comparing and summing tensors, block by block, in several threads or processes and bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Protocol, TypeVar

import numpy as np

from reshard.checkpoints import CheckpointIndex, FileHandles
from reshard.processes import MIN_BYTES_PER_PROCESS, Crew, Notify, may_fork, private_bytes, process_count
from reshard.storage import FileStatus, storage_of
from reshard.storage.costs import busy_cpus
from reshard.verification.boxes import Box, shape_of, volume_of, whole_box, within
from reshard.verification.products import Sum
from reshard.verification.rounding import same_nans
from reshard.verification.rules import DerivedTensor
from reshard.verification.stored import Buffers, Content, SliceSet, StoredTensor, Words, read_box
from reshard.verification.sums import PRIME, Workspace

# Small blocks stay in the cache; large ones have longer runs where dimensions are transposed.
_MIN_BLOCK, _MAX_BLOCK, _MAX_BLOCK_DERIVED = 256 << 10, 1 << 20, 4 << 20
# Blocks in a thread's memory: the expected block, a part of it, a copy, and intermediate results.
_COPIES, _COPIES_DERIVED = 4, 12
# Limits of a batch for a thread.
_MAX_TASKS, _MAX_TASK_BYTES = 64, 1 << 20
_K = TypeVar("_K")
# If the first blocks are this small, one thread is faster than several, except on a network.
_PEEKED, _TINY = 64, 8 << 10


MAX_SLICES = 1 << 14
"""Slices in memory at a time: some MB."""


class Progress(Protocol):
    """Counts the bytes read; called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """``total`` bytes will be read; ``doing`` names the work, such as ``verifying``."""

    def wrote(self, count: int) -> None:
        """``count`` more bytes were read."""

    def end(self) -> None:
        """The work is done."""


@dataclass(frozen=True)
class Means:
    """Files, threads and memory for reading.

    Attributes:
        handles: open files.
        jobs: CPUs to keep busy.
        max_memory: bytes for all buffers together.
        progress: counts the bytes read.
        read: files whose contents were read so far.
    """

    handles: FileHandles
    jobs: int
    max_memory: int
    progress: Progress
    read: set[str] = field(default_factory=set)

    @contextlib.contextmanager
    def counting(self, total: int, doing: str) -> Iterator[None]:
        """Show the progress of a block that reads this many bytes; ``doing`` names the work."""
        self.progress.begin(total, doing)
        try:
            yield
        finally:
            self.progress.end()

    def check_unchanged(self) -> None:
        """Raise if a file changed after its contents were read: only one version of each may be compared.

        Raises:
            RetryableError: a file changed.
        """
        self.handles.check_unchanged(sorted(self.read))


class Comparison(NamedTuple):
    """A tensor, and copies of its slices that must equal it.

    Attributes:
        content: the tensor.
        copies: the copies.
        indexes: the headers of these files.
        place: a key for the differences, such as the stage.
    """

    content: Content
    copies: SliceSet
    indexes: Mapping[int, CheckpointIndex]
    place: object = None

    @property
    def regions(self) -> list[Box]:
        """The boxes of the tensor to read: all of it, or only the slices if they do not cover it."""
        boxes = [box for box, files in self.copies.files_of.items() if files and volume_of(box)]
        everything = whole_box(self.content.shape)
        return [everything] if sum(map(volume_of, boxes)) >= volume_of(everything) > 0 else boxes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor and of the copies."""
        copies = sum(volume_of(box) * len(files) for box, files in self.copies.files_of.items())
        return self.content.item_size * (sum(map(volume_of, self.regions)) + copies)


class Mismatches:
    """The differences of comparisons.

    Attributes:
        files: per place and name of a tensor, the files with wrong copies.
        stages: names of tensors with different values in the source's pipeline stages.
    """

    def __init__(self) -> None:
        self.files: dict[tuple[object, str], set[int]] = defaultdict(set)
        self.stages: set[str] = set()
        self._lock = threading.Lock()

    def add_file(self, place: object, name: str, file: int) -> None:
        """Add a wrong copy."""
        with self._lock:
            self.files[place, name].add(file)

    def add_stages(self, name: str) -> None:
        """Add a tensor with different values in stages."""
        with self._lock:
            self.stages.add(name)

    def drain(self) -> tuple[dict[tuple[object, str], set[int]], set[str]]:
        """Remove and return all differences."""
        drained = dict(self.files), set(self.stages)
        self.files.clear()
        self.stages.clear()
        return drained

    def add(self, drained: tuple[dict[tuple[object, str], set[int]], set[str]]) -> None:
        """Add the drained differences of another process."""
        files, stages = drained
        with self._lock:
            for place, wrong in files.items():
                self.files[place] |= wrong
            self.stages |= stages


class _Task(NamedTuple):
    """Work for one thread, and the bytes that it reads."""

    nbytes: int
    run: Callable[[], None]


def compare(comparisons: Iterable[Comparison], means: Means, counted: bool = True) -> Mismatches:
    """Compare copies with their tensors, byte by byte.

    Args:
        comparisons: the comparisons; consumed lazily.
        means: files, threads and memory.
        counted: whether to count bytes in the progress, which the caller begins and ends.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    mismatches, buffers = Mismatches(), Buffers()

    def tasks() -> Iterator[_Task]:
        for one in comparisons:
            means.read.update(one.content.paths())
            means.read.update(one.indexes[file].path for files in one.copies.files_of.values() for file in files)
            for region in one.regions:
                for block in _blocks(one.content, region, means):
                    yield _task(one, block, means, buffers, mismatches)

    _run_tasks(tasks(), means, mismatches, counted=counted)
    return mismatches


def _task(one: Comparison, block: Box, means: Means, buffers: Buffers, mismatches: Mismatches) -> _Task:
    meeting = [*one.copies.overlapping(block)]
    count = volume_of(block) + sum(volume_of(both) * len(files) for _, both, files in meeting)
    return _Task(one.content.item_size * count, lambda: _compare_block(one, block, meeting, means, buffers, mismatches))


def _compare_block(
    one: Comparison,
    block: Box,
    meeting: Sequence[tuple[Box, Box, tuple[int, ...]]],
    means: Means,
    buffers: Buffers,
    mismatches: Mismatches,
) -> None:
    content, name, handles = one.content, one.content.name, means.handles
    if isinstance(content, StoredTensor):
        expected = content.read(block, handles, buffers.buffer)
        for slices in content.whole_slice_sets()[1:]:
            if not _same(expected, content.read_slice_sets([slices], block, handles)):
                mismatches.add_stages(name)
    else:
        expected = content.read(block, handles)
    if content.cast:
        same_nans(expected, content.dtype)
    for stored_box, both, files in meeting:
        part = expected[within(both, block)]
        copy = buffers.buffer("copy", shape_of(both), content.item_size)
        for file in files:
            read_box(one.indexes[file], name, stored_box, both, copy, handles)
            if isinstance(content, Sum):
                right = content.fits(part, copy, both, handles)
            else:
                if content.cast:
                    same_nans(copy, content.dtype)
                right = _same(part, copy)
            if not right:
                mismatches.add_file(one.place, name, file)


def _same(first: Words, second: Words) -> bool:
    """Whether two arrays of the same shape hold the same bytes."""
    if first.dtype.kind == "V" or (first.flags.c_contiguous and second.flags.c_contiguous):
        # Eight bytes at a time: the array of comparisons takes an eighth of the memory.
        first_bytes, second_bytes = (
            np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (first, second)
        )
        many = len(first_bytes) // 8 * 8
        return np.array_equal(first_bytes[:many].view("<u8"), second_bytes[:many].view("<u8")) and np.array_equal(
            first_bytes[many:], second_bytes[many:]
        )
    return np.array_equal(first, second)


def sums(parts: Iterable[tuple[_K, Content, Box]], means: Means, counted: bool = True) -> Iterator[tuple[_K, int]]:
    """Sum boxes of tensors (see `sums`), several at a time.

    Args:
        parts: per part a key, the tensor and the box; consumed lazily.
        means: files, threads and memory; the caller begins and ends the progress.
        counted: whether to count bytes in the progress.

    Yields:
        The key of each part, and its sum, in order.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    parts = iter(parts)
    while some := [*itertools.islice(parts, MAX_SLICES)]:
        yield from zip((key for key, _, _ in some), _sums([(content, box) for _, content, box in some], means, counted))


def _sums(parts: Sequence[tuple[Content, Box]], means: Means, counted: bool) -> list[int]:
    totals, buffers = _Totals(), threading.local()

    def add(number: int, content: Content, block: Box) -> None:
        if not hasattr(buffers, "space"):
            buffers.space = Workspace()
        words = content.read(block, means.handles)
        if content.cast:
            same_nans(words, content.dtype)
        content_bytes = words.reshape(-1).view(np.uint8)
        totals.add({number: buffers.space.sum(content.shape, content.item_size, block, content_bytes)})

    def tasks() -> Iterator[_Task]:
        for number, (content, box) in enumerate(parts):
            means.read.update(content.paths())
            for block in _blocks(content, box, means) if volume_of(box) else ():
                nbytes = volume_of(block) * content.item_size
                yield _Task(nbytes, lambda number=number, content=content, block=block: add(number, content, block))  # type: ignore[misc]

    _run_tasks(tasks(), means, totals, Workspace.LEAST_MEMORY, counted)
    return [totals.sums[number] for number in range(len(parts))]


def _threads(means: Means) -> int:
    """Number of threads that may read at a time."""
    storage = storage_of(next(iter(means.read), "."))
    cpus = busy_cpus(means.jobs, storage)
    return max(1, min(cpus * storage.in_flight, means.max_memory // (_MIN_BLOCK * _COPIES)))


class _Totals:
    """Sums of parts by their numbers, modulo `PRIME`."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def drain(self) -> dict[int, int]:
        """Remove and return all sums."""
        drained, self.sums = self.sums, defaultdict(int)
        return dict(drained)

    def add(self, sums: dict[int, int]) -> None:
        """Add the drained sums of another process."""
        with self._lock:
            for number, total in sums.items():
                self.sums[number] = (self.sums[number] + total) % PRIME


class _Results(Protocol):
    """Results of tasks, in this process and in its workers."""

    def drain(self) -> Any:
        """Remove and return all results."""

    def add(self, drained: Any) -> None:
        """Add the drained results of another process."""


def _run_tasks(tasks: Iterator[_Task], means: Means, results: _Results, least: int = 1, counted: bool = True) -> None:
    """Run tasks in threads, or in forked worker processes, each with its own copy of the iterator of tasks.

    Args:
        tasks: the tasks.
        means: files, CPUs and memory.
        results: the results of the tasks.
        least: smallest memory of a task in bytes.
        counted: whether to count bytes in the progress.
    """
    first, nbytes = [], 0
    for task in itertools.islice(tasks, _PEEKED * max(1, means.jobs)):
        first.append(task)
        nbytes += task.nbytes
        if len(first) >= _PEEKED and nbytes >= means.jobs * MIN_BYTES_PER_PROCESS:
            break
    if not first:
        return
    threads = max(1, min(_threads(means), means.max_memory // least, len(first)))
    storage = storage_of(next(iter(means.read), "."))
    if not storage.remote and nbytes < len(first) * _TINY:
        threads = 1
    tasks = itertools.chain(first, tasks)
    processes = 1
    if threads > 1 and storage.mappable and may_fork():
        processes = min(threads, process_count(means.jobs, nbytes, means.max_memory, private_bytes()))
    if processes < 2:
        in_process = contextlib.nullcontext(lambda number, batch: [task.run() for task in batch])
        _run_in_threads(tasks, means, threads, lambda: in_process, counted)
        return
    worker_tasks, turn = tasks, itertools.count()

    def serve(batch_number: int, _: Sequence[int], notify: Notify) -> tuple[Any, dict[str, FileStatus]]:
        versions = means.handles.seen
        batch = next(batch for batch in iter(lambda: [*_next_tasks(worker_tasks)], None) if next(turn) == batch_number)
        for task in batch:
            task.run()
        return results.drain(), means.handles.seen_after(versions)

    @contextlib.contextmanager
    def in_worker() -> Iterator[_RunTasks]:
        # One worker per thread: a worker cannot return to earlier tasks, and the numbers of one thread ascend.
        with crew.seat() as seat:

            def call(number: int, batch: Sequence[_Task]) -> None:
                drained, new_versions = seat.call(number)
                results.add(drained)
                means.handles.see(new_versions)

            yield call

    with Crew(processes, 1, serve) as crew:
        _run_in_threads(tasks, means, processes, in_worker, counted)


_RunTasks = Callable[[int, Sequence[_Task]], object]


def _run_in_threads(
    tasks: Iterator[_Task],
    means: Means,
    threads: int,
    new_runner: Callable[[], AbstractContextManager[_RunTasks]],
    counted: bool,
) -> None:
    """Run numbered batches of tasks in threads.

    Args:
        tasks: the tasks.
        means: gets the progress.
        threads: number of threads.
        new_runner: returns a context of a thread, with a function that runs a batch.
        counted: whether to count bytes in the progress.
    """
    lock, stop, turn = threading.Lock(), threading.Event(), itertools.count()

    def work() -> None:
        with new_runner() as run_tasks:
            while not stop.is_set():
                with lock:
                    number, batch = next(turn), [*_next_tasks(tasks)]
                if not batch:
                    return
                run_tasks(number, batch)
                if counted:
                    with lock:
                        means.progress.wrote(sum(task.nbytes for task in batch))

    with ThreadPoolExecutor(threads) as pool:
        try:
            for finished in as_completed([pool.submit(work) for _ in range(threads)]):
                finished.result()
        except BaseException:
            # Also after Ctrl-C: threads stop after their current block.
            stop.set()
            raise


def _next_tasks(tasks: Iterator[_Task]) -> Iterator[_Task]:
    """The next batch of tasks; empty at the end."""
    nbytes = 0
    for task in itertools.islice(tasks, _MAX_TASKS):
        yield task
        nbytes += task.nbytes
        if nbytes >= _MAX_TASK_BYTES:
            return


def _blocks(content: Content, box: Box, means: Means) -> Iterator[Box]:
    """The blocks of a box, small enough for the memory of a thread."""
    copies, largest = (
        (_COPIES_DERIVED, _MAX_BLOCK_DERIVED) if isinstance(content, DerivedTensor) else (_COPIES, _MAX_BLOCK)
    )
    most = max(_MIN_BLOCK, min(means.max_memory // _threads(means) // copies, largest)) // content.item_size
    most = max(1, most)
    if isinstance(content, Sum):
        return content.tiles(box)
    if isinstance(content, DerivedTensor) and any(operation.kind == "transpose" for operation in content.operations):
        return _halves(box, most)
    return _rows(box, most)


def _rows(box: Box, most: int, at: int = 0) -> Iterator[Box]:
    """The parts of a box, of at most ``most`` elements each; contiguous if the box is."""
    if volume_of(box) <= most or at == len(box):
        yield box
        return
    start, stop = box[at]
    inner = volume_of(box) // (stop - start)
    step = max(1, most // inner)
    for first in range(start, stop, step):
        part = (*box[:at], (first, min(first + step, stop)), *box[at + 1 :])
        yield from _rows(part, most, at + 1) if inner > most else [part]


def _halves(box: Box, most: int) -> Iterator[Box]:
    """Likewise, with sides of similar length, for transpositions."""
    if volume_of(box) <= most:
        yield box
        return
    at = max(range(len(box)), key=lambda dimension: box[dimension][1] - box[dimension][0])
    start, stop = box[at]
    middle = (start + stop) // 2
    for interval in ((start, middle), (middle, stop)):
        yield from _halves((*box[:at], interval, *box[at + 1 :]), most)
