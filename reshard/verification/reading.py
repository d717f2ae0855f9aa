"""Comparing tensors, block by block, in several threads or processes and bounded memory."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from reshard.checkpoints import CheckpointIndex, unchecked
from reshard.checkpoints.formats.crc import check_crcs
from reshard.forms.request import Means
from reshard.processes import MIN_BYTES_PER_PROCESS, Crew, Notify, may_fork, private_bytes, process_count, reuse_memory
from reshard.storage import FileStatus, costs_of
from reshard.storage.store import busy_cpus
from reshard.text.messages import one_line, quoted, rank_ranges, some_names
from reshard.verification.boxes import Box, shape_of, volume_of, whole_box, within
from reshard.verification.computed import Sum
from reshard.verification.operations import DerivedTensor, same_nans
from reshard.verification.stored import Buffers, Content, SliceSet, StoredTensor, Words, read_box

# Small blocks stay in the cache; large ones have longer runs where dimensions are transposed.
_MIN_BLOCK, _MAX_BLOCK, _MAX_BLOCK_DERIVED = 256 << 10, 1 << 20, 4 << 20
# Blocks in a thread's memory: the expected block, a part of it, a copy, and intermediate results.
_COPIES, _COPIES_DERIVED = 4, 12
# Limits of a batch for a thread.
_MAX_TASKS, _MAX_TASK_BYTES = 64, 1 << 20
# If the first blocks are this small, one thread is faster than several, except on a network.
_PEEKED, _TINY = 64, 8 << 10
_MIN_CRC_BLOCK, _MAX_CRC_BLOCK = 4 << 10, 8 << 20


class Difference(NamedTuple):
    """One difference.

    Attributes:
        kind: ``file`` (missing or damaged), ``missing``, ``extra``, ``type``, ``shape``, ``content``,
            ``replica`` (a minority of copies differs), ``replicas`` (copies differ without a majority), ``stages``
            (pipeline stages disagree) or ``strategy`` (files do not fit it).
        parameter: the parameter, or None for a whole file.
        ranks: the wrong ranks, ascending; all candidates if unknown. Empty for forms without ranks.
        detail: the problem; printed after the parameter's name, ranks and files.
        files: for forms without ranks, the wrong files, relative to the directory.
    """

    kind: str
    parameter: str | None
    ranks: tuple[int, ...]
    detail: str
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        """A line: parameter, ranks, problem."""
        return self.of("" if self.parameter is None else quoted(self.parameter))

    def of(self, names: str) -> str:
        """The line for several parameters with the same difference."""
        where = f" on {rank_ranges(self.ranks)}" if self.ranks else ""
        if self.files:
            files = some_names([one_line(name) for name in self.files], 3)
            where = f" in {files}" if names else files
        subject = f"{names}{where}".lstrip()
        return f"{subject}: {self.detail}" if subject else self.detail


class Progress(Protocol):
    """Counts the bytes read; called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """``total`` bytes will be read; ``doing`` names the work, such as ``verifying``."""

    def wrote(self, count: int) -> None:
        """``count`` more bytes were read."""

    def end(self) -> None:
        """The work is done."""


@dataclass(frozen=True)
class Reading(Means):
    """Files, report, threads and memory for reading contents.

    Attributes:
        jobs: CPUs to keep busy.
        max_memory: bytes for all buffers together.
        progress: counts the bytes read.
        crc: whether source files are compared with the CRCs that they record.
        read: files whose contents were read so far.
    """

    jobs: int
    max_memory: int
    progress: Progress
    crc: bool = True
    read: set[str] = field(default_factory=set)
    _checked: set[object] = field(default_factory=set, init=False)

    @contextlib.contextmanager
    def counting(self, total: int, doing: str) -> Iterator[None]:
        """Show the progress of a block that reads this many bytes; ``doing`` names the work."""
        self.progress.begin(total, doing)
        try:
            yield
        finally:
            self.progress.end()

    def damaged(self, indexes: Iterable[CheckpointIndex]) -> dict[str, str]:
        """The damage of files by their recorded CRCs, by path, for damaged files that were not checked before."""
        new = unchecked(indexes, self._checked)
        if not new:
            return {}
        threads = self.jobs * costs_of(new[0].path).in_flight
        block = max(_MIN_CRC_BLOCK, min(_MAX_CRC_BLOCK, self.max_memory // threads))
        with self.counting(sum(index.check_bytes for index in new), "checking CRCs"):
            checks = check_crcs(self.handles, new, threads, block, self.progress.wrote)
        for note in checks.notes():
            self.report.note(note)
        return {path: error.message for path, error in checks.damaged.items()}

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


class Mismatches(NamedTuple):
    """The differences of comparisons.

    Attributes:
        files: per place and name of a tensor, the files with wrong copies.
        stages: names of tensors with different values in the source's pipeline stages.
    """

    files: dict[tuple[object, str], set[int]]
    stages: set[str]


def compare(comparisons: Iterable[Comparison], means: Reading, counted: bool = True) -> Mismatches:
    """Compare copies with their tensors, byte by byte.

    Args:
        comparisons: the comparisons; consumed lazily.
        means: files, threads and memory.
        counted: whether to count bytes in the progress, which the caller begins and ends.
    """
    mismatches, buffers = Mismatches(defaultdict(set), set()), Buffers()

    def tasks() -> Iterator[Task]:
        for one in comparisons:
            means.read.update(one.content.paths())
            means.read.update(one.indexes[file].path for files in one.copies.files_of.values() for file in files)
            for region in one.regions:
                for block in blocks(one.content, region, means):
                    meeting = [*one.copies.overlapping(block)]
                    count = volume_of(block) + sum(volume_of(both) * len(files) for _, both, files in meeting)
                    yield Task(one.content.item_size * count, _compare_block, (one, block, meeting, means, buffers))

    def add(wrong: list[_Wrong]) -> None:
        for place, name, file in wrong:
            if file is None:
                mismatches.stages.add(name)
            else:
                mismatches.files[place, name].add(file)

    run_tasks(tasks(), means, add, counted=counted)
    return mismatches


_Wrong = tuple[object, str, int | None]
"""The place and name of a tensor, and a file with a wrong copy; None where pipeline stages differ."""


def _compare_block(
    one: Comparison,
    block: Box,
    meeting: Sequence[tuple[Box, Box, tuple[int, ...]]],
    means: Reading,
    buffers: Buffers,
) -> list[_Wrong]:
    content, name, handles = one.content, one.content.name, means.handles
    wrong: list[_Wrong] = []
    if isinstance(content, StoredTensor):
        expected = content.read(block, handles, buffers.buffer)
        for slices in content.whole_slice_sets()[1:]:
            if not _same(expected, content.read_slice_sets([slices], block, handles)):
                wrong.append((one.place, name, None))
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
                wrong.append((one.place, name, file))
    return wrong


class Pair(NamedTuple):
    """Tensors that have to be equal; kind and detail are those of a difference of the second."""

    first: Content
    second: Content
    kind: str
    detail: str


def unequal(pairs: Sequence[Pair], means: Reading) -> list[Difference]:
    """The differences of tensors that have to be equal; all NaN of cast ones are."""

    def differ(number: int, block: Box) -> int | None:
        both = [content.read(block, means.handles) for content in pairs[number][:2]]
        for words, content in zip(both, pairs[number][:2]):
            if content.cast:
                same_nans(words, content.dtype)
        return None if _same(*both) else number

    def tasks() -> Iterator[Task]:
        for number, (first, second) in alike:
            means.read.update({*first.paths(), *second.paths()})
            for block in blocks(first, whole_box(first.shape), means) if 0 not in first.shape else ():
                yield Task(2 * volume_of(block) * first.item_size, differ, (number, block))

    numbered = [*enumerate(pairs)]
    alike = [(at, (one, two)) for at, (one, two, *_) in numbered if (one.dtype, one.shape) == (two.dtype, two.shape)]
    found: set[int | None] = {*range(len(pairs))}.difference(at for at, _ in alike)
    run_tasks(tasks(), means, found.add, counted=False)
    differences = (
        Difference(each.kind, each.second.name, (), each.detail) for at, each in enumerate(pairs) if at in found
    )
    return [*dict.fromkeys(differences)]


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


class Task(NamedTuple):
    """Work for one thread, which reads ``nbytes``: a function and its arguments."""

    nbytes: int
    function: Callable[..., Any]
    arguments: tuple[Any, ...]

    def run(self) -> Any:
        return self.function(*self.arguments)


def run_tasks(
    tasks: Iterator[Task], means: Reading, add: Callable[[Any], None], least: int = 1, counted: bool = True
) -> None:
    """Run tasks in threads, or in forked worker processes, each with its own copy of the iterator of tasks.

    ``add`` gets the result of each task, one at a time. A task takes at least ``least`` bytes of memory.
    """
    first, nbytes = [], 0
    for task in itertools.islice(tasks, _PEEKED * max(1, means.jobs)):
        first.append(task)
        nbytes += task.nbytes
        if len(first) >= _PEEKED and nbytes >= means.jobs * MIN_BYTES_PER_PROCESS:
            break
    if not first:
        return
    reuse_memory(_MAX_BLOCK_DERIVED)
    threads = max(1, min(_threads(means), means.max_memory // least, len(first)))
    costs = costs_of(next(iter(means.read), "."))
    if not costs.remote and nbytes < len(first) * _TINY:
        threads = 1
    tasks = itertools.chain(first, tasks)
    processes = 1
    if threads > 1 and costs.mappable and may_fork():
        processes = min(threads, process_count(means.jobs, nbytes, means.max_memory, private_bytes()))
    if processes < 2:
        in_process = contextlib.nullcontext(lambda number, batch: [task.run() for task in batch])
        _run_in_threads(tasks, means, threads, lambda: in_process, add, counted)
        return
    worker_tasks, turn = tasks, itertools.count()

    def serve(batch_number: int, _: Sequence[int], notify: Notify) -> tuple[list[Any], dict[str, FileStatus]]:
        versions = means.handles.seen
        batch = next(batch for batch in iter(lambda: [*_next_tasks(worker_tasks)], None) if next(turn) == batch_number)
        return [task.run() for task in batch], means.handles.seen_after(versions)

    @contextlib.contextmanager
    def in_worker() -> Iterator[_RunTasks]:
        # One worker per thread: a worker cannot return to earlier tasks, and the numbers of one thread ascend.
        with crew.seat() as seat:

            def call(number: int, batch: Sequence[Task]) -> list[Any]:
                results: list[Any]
                results, new_versions = seat.call(number)
                means.handles.see(new_versions)
                return results

            yield call

    with Crew(processes, 1, serve) as crew:
        _run_in_threads(tasks, means, processes, in_worker, add, counted)


_RunTasks = Callable[[int, Sequence[Task]], list[Any]]
"""Runs a numbered batch of tasks; returns their results."""


def _run_in_threads(
    tasks: Iterator[Task],
    means: Reading,
    threads: int,
    new_runner: Callable[[], AbstractContextManager[_RunTasks]],
    add: Callable[[Any], None],
    counted: bool,
) -> None:
    lock, stop, turn = threading.Lock(), threading.Event(), itertools.count()

    def work() -> None:
        with new_runner() as run_batch:
            while not stop.is_set():
                with lock:
                    number, batch = next(turn), [*_next_tasks(tasks)]
                if not batch:
                    return
                results = run_batch(number, batch)
                with lock:
                    for result in results:
                        add(result)
                    if counted:
                        means.progress.wrote(sum(task.nbytes for task in batch))

    with ThreadPoolExecutor(threads) as pool:
        try:
            for finished in as_completed([pool.submit(work) for _ in range(threads)]):
                finished.result()
        except BaseException:
            # Also after Ctrl-C: threads stop after their current block.
            stop.set()
            raise


def _threads(means: Reading) -> int:
    """Number of threads that may read at a time."""
    costs = costs_of(next(iter(means.read), "."))
    cpus = busy_cpus(means.jobs, costs)
    return max(1, min(cpus * costs.in_flight, means.max_memory // (_MIN_BLOCK * _COPIES)))


def _next_tasks(tasks: Iterator[Task]) -> Iterator[Task]:
    """The next batch of tasks; empty at the end."""
    nbytes = 0
    for task in itertools.islice(tasks, _MAX_TASKS):
        yield task
        nbytes += task.nbytes
        if nbytes >= _MAX_TASK_BYTES:
            return


def blocks(content: Content, box: Box, means: Reading) -> Iterator[Box]:
    """The blocks of a box, small enough for the memory of a thread."""
    copies, largest = (
        (_COPIES_DERIVED, _MAX_BLOCK_DERIVED) if isinstance(content, DerivedTensor) else (_COPIES, _MAX_BLOCK)
    )
    most = max(_MIN_BLOCK, min(means.max_memory // _threads(means) // copies, largest)) // content.item_size
    most = max(1, most)
    if isinstance(content, Sum):
        return content.tiles(box)
    if isinstance(content, DerivedTensor) and content.transposes:
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
