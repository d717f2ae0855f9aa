"""Reading tensors block by block, in several threads and bounded memory: to compare their bytes, or to sum them."""

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
from reshard.checkpoints.files import FileVersion
from reshard.processes import MIN_BYTES_PER_PROCESS, Crew, Notify, may_fork, private_bytes, process_count
from reshard.storage import storage_of
from reshard.verification.boxes import Box, shape_of, volume_of, whole_box, within
from reshard.verification.products import Sum
from reshard.verification.rounding import same_nans
from reshard.verification.rules import MadeTensor
from reshard.verification.stored import Content, Rooms, StoredTensor, Way, Words, read_box
from reshard.verification.sums import PRIME, Workspace

# Small blocks stay in the cache; large ones have longer runs where dimensions are transposed.
_MIN_BLOCK, _MAX_BLOCK, _MAX_BLOCK_MADE = 256 << 10, 1 << 20, 4 << 20
# Blocks that a thread holds at a time: the expected one, a part of it, a copy, and intermediate results.
_COPIES, _COPIES_MADE = 4, 12
# A thread takes this many blocks, or bytes, at a time.
_TAKEN_BLOCKS, _TAKEN_BYTES = 64, 1 << 20
_K = TypeVar("_K")
# If the first blocks are this small, one thread is faster than several, unless reads wait for a network.
_PEEKED, _TINY = 64, 8 << 10


MAX_SLICES = 1 << 14
"""Slices that are held in memory at a time: some MB."""


class Progress(Protocol):
    """Counts the bytes that are read; called from several threads, one at a time."""

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
        progress: counts the bytes that are read.
        read: files whose contents were read so far.
    """

    handles: FileHandles
    jobs: int
    max_memory: int
    progress: Progress
    read: set[str] = field(default_factory=set)

    def check_unchanged(self) -> None:
        """Raise if a file changed after its contents were read: only one version of each may be compared.

        Raises:
            RetryableError: a file changed.
        """
        self.handles.check_unchanged(sorted(self.read))


class Comparison(NamedTuple):
    """A tensor, and the copies of its slices that have to be equal to it.

    Attributes:
        content: the tensor.
        copies: the files that hold a slice, by its box.
        indexes: the headers of these files.
        place: a key for the differences, such as the stage.
    """

    content: Content
    copies: Way
    indexes: Mapping[int, CheckpointIndex]
    place: object = None

    @property
    def regions(self) -> list[Box]:
        """The boxes of the tensor that are read: all of it, or the slices alone if they do not cover it."""
        boxes = [box for box, files in self.copies.held.items() if files and volume_of(box)]
        whole = whole_box(self.content.shape)
        return [whole] if sum(map(volume_of, boxes)) >= volume_of(whole) > 0 else boxes

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor and of the copies."""
        copies = sum(volume_of(box) * len(files) for box, files in self.copies.held.items())
        return self.content.item_size * (sum(map(volume_of, self.regions)) + copies)


class Wrong:
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

    def take(self) -> tuple[dict[tuple[object, str], set[int]], set[str]]:
        """What was found until now, which is forgotten here."""
        found = dict(self.files), set(self.stages)
        self.files.clear()
        self.stages.clear()
        return found

    def add(self, found: tuple[dict[tuple[object, str], set[int]], set[str]]) -> None:
        """What another has taken."""
        files, stages = found
        with self._lock:
            for place, wrong in files.items():
                self.files[place] |= wrong
            self.stages |= stages


class _Task(NamedTuple):
    """Work for one thread, and the bytes that it reads."""

    nbytes: int
    run: Callable[[], None]


def compare(comparisons: Iterable[Comparison], means: Means, counted: bool = True) -> Wrong:
    """Compare copies with their tensors, byte by byte.

    Args:
        comparisons: the comparisons; evaluated as threads take them.
        means: files, threads and memory.
        counted: whether to count bytes in the progress, which the caller begins and ends.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    wrong, rooms = Wrong(), Rooms()

    def tasks() -> Iterator[_Task]:
        for one in comparisons:
            means.read.update(one.content.paths())
            means.read.update(one.indexes[file].path for files in one.copies.held.values() for file in files)
            for region in one.regions:
                for block in _blocks(one.content, region, means):
                    yield _task(one, block, means, rooms, wrong)

    _carry_out(tasks(), means, wrong, counted=counted)
    return wrong


def _task(one: Comparison, block: Box, means: Means, rooms: Rooms, wrong: Wrong) -> _Task:
    meeting = [*one.copies.meeting(block)]
    count = volume_of(block) + sum(volume_of(both) * len(files) for _, both, files in meeting)
    return _Task(one.content.item_size * count, lambda: _compare_block(one, block, meeting, means, rooms, wrong))


def _compare_block(
    one: Comparison,
    block: Box,
    meeting: Sequence[tuple[Box, Box, tuple[int, ...]]],
    means: Means,
    rooms: Rooms,
    wrong: Wrong,
) -> None:
    content, name, handles = one.content, one.content.name, means.handles
    expected = (
        content.read(block, handles, rooms.room) if isinstance(content, StoredTensor) else content.read(block, handles)
    )
    if isinstance(content, StoredTensor) and len(content.ways) > 1:
        for way in content.whole_ways()[1:]:
            if not _same(expected, content.read_ways([way], block, handles)):
                wrong.add_stages(name)
    if content.cast:
        same_nans(expected, content.dtype)
    for held, both, files in meeting:
        part = expected[within(both, block)]
        found = rooms.room("copy", shape_of(both), content.item_size)
        for file in files:
            read_box(one.indexes[file], name, held, both, found, handles)
            if isinstance(content, Sum):
                right = content.fits(part, found, both, handles)
            else:
                if content.cast:
                    same_nans(found, content.dtype)
                right = _same(part, found)
            if not right:
                wrong.add_file(one.place, name, file)


def _same(one: Words, other: Words) -> bool:
    """Whether two arrays of the same shape hold the same bytes."""
    if one.dtype.kind == "V" or (one.flags.c_contiguous and other.flags.c_contiguous):
        # Eight bytes at a time: the array of comparisons takes an eighth of the memory.
        mine, theirs = (np.ascontiguousarray(each).reshape(-1).view(np.uint8) for each in (one, other))
        many = len(mine) // 8 * 8
        return np.array_equal(mine[:many].view("<u8"), theirs[:many].view("<u8")) and np.array_equal(
            mine[many:], theirs[many:]
        )
    return np.array_equal(one, other)


def sums(parts: Iterable[tuple[_K, Content, Box]], means: Means) -> Iterator[tuple[_K, int]]:
    """Sum boxes of tensors (see `sums`), several at a time.

    Args:
        parts: per part a key, the tensor and the box; evaluated as threads take them.
        means: files, threads and memory; the caller begins and ends the progress.

    Yields:
        The key of each part, and its sum, in order.

    Raises:
        ReshardError: a file cannot be read, or was cut short meanwhile.
    """
    parts = iter(parts)
    while some := [*itertools.islice(parts, MAX_SLICES)]:
        yield from zip((key for key, _, _ in some), _sums([(content, box) for _, content, box in some], means))


def _sums(parts: Sequence[tuple[Content, Box]], means: Means) -> list[int]:
    totals, rooms = _Totals(), threading.local()

    def add(number: int, content: Content, block: Box) -> None:
        if not hasattr(rooms, "space"):
            rooms.space = Workspace(Workspace.LEAST_MEMORY)
        words = content.read(block, means.handles)
        if content.cast:
            same_nans(words, content.dtype)
        held = words.reshape(-1).view(np.uint8).data

        def give(offset: int, out: memoryview) -> None:
            out[:] = held[offset : offset + len(out)]

        totals.add({number: rooms.space.sum(content.shape, content.item_size, block, give)})

    def tasks() -> Iterator[_Task]:
        for number, (content, box) in enumerate(parts):
            means.read.update(content.paths())
            for block in _blocks(content, box, means) if volume_of(box) else ():
                nbytes = volume_of(block) * content.item_size
                yield _Task(nbytes, lambda number=number, content=content, block=block: add(number, content, block))  # type: ignore[misc]

    _carry_out(tasks(), means, totals, Workspace.LEAST_MEMORY)
    return [totals.sums[number] for number in range(len(parts))]


def _threads(means: Means) -> int:
    """Number of threads that may read at a time."""
    storage = storage_of(next(iter(means.read), "."))
    return max(1, min(means.jobs * storage.in_flight, means.max_memory // (_MIN_BLOCK * _COPIES)))


class _Totals:
    """Sums of parts by their numbers, modulo `PRIME`."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = defaultdict(int)
        self._lock = threading.Lock()

    def take(self) -> dict[int, int]:
        """The sums until now, which begin anew here."""
        found, self.sums = self.sums, defaultdict(int)
        return dict(found)

    def add(self, sums: dict[int, int]) -> None:
        """Sums that another has taken."""
        with self._lock:
            for number, total in sums.items():
                self.sums[number] = (self.sums[number] + total) % PRIME


class _Results(Protocol):
    """What tasks find, in this process and in its copies."""

    def take(self) -> Any:
        """What was found until now, which is forgotten here."""

    def add(self, found: Any) -> None:
        """What another process has taken."""


def _carry_out(tasks: Iterator[_Task], means: Means, results: _Results, least: int = 1, counted: bool = True) -> None:
    """Run tasks, made as they are taken, in threads or in worker processes, which make the same tasks again.

    Args:
        tasks: the tasks.
        means: files, CPUs and memory.
        results: what the tasks find.
        least: bytes of memory that each needs at least.
        counted: whether what is read counts in the progress.
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
        alone = contextlib.nullcontext(lambda number, taken: [task.run() for task in taken])
        _take_turns(tasks, means, threads, lambda: alone, counted)
        return
    theirs, turn = tasks, itertools.count()

    def serve(wanted: int, _: Sequence[int], tell: Notify) -> tuple[Any, dict[str, FileVersion]]:
        known = means.handles.seen
        taken = next(taken for taken in iter(lambda: [*_taken(theirs)], None) if next(turn) == wanted)
        for task in taken:
            task.run()
        return results.take(), means.handles.seen_after(known)

    @contextlib.contextmanager
    def elsewhere() -> Iterator[_CarryOut]:
        # One worker for all numbers of a thread: they ascend, and a worker cannot go back to tasks that it has passed.
        with crew.seat() as seat:

            def call(number: int, taken: Sequence[_Task]) -> None:
                found, seen = seat.call(number)
                results.add(found)
                means.handles.see(seen)

            yield call

    with Crew(processes, 1, serve) as crew:
        _take_turns(tasks, means, processes, elsewhere, counted)


_CarryOut = Callable[[int, Sequence[_Task]], object]


def _take_turns(
    tasks: Iterator[_Task],
    means: Means,
    threads: int,
    beginning: Callable[[], AbstractContextManager[_CarryOut]],
    counted: bool,
) -> None:
    """Have threads take some tasks at a time, by number, until there are no more; each begins by itself."""
    lock, stop, turn = threading.Lock(), threading.Event(), itertools.count()

    def work() -> None:
        with beginning() as carry_out:
            while not stop.is_set():
                with lock:
                    number, taken = next(turn), [*_taken(tasks)]
                if not taken:
                    return
                carry_out(number, taken)
                if counted:
                    with lock:
                        means.progress.wrote(sum(task.nbytes for task in taken))

    with ThreadPoolExecutor(threads) as pool:
        try:
            for done in as_completed([pool.submit(work) for _ in range(threads)]):
                done.result()
        except BaseException:
            # Also Ctrl-C: threads stop after the block that they read.
            stop.set()
            raise


def _taken(tasks: Iterator[_Task]) -> Iterator[_Task]:
    """The next tasks for one thread; none when all are taken."""
    nbytes = 0
    for task in itertools.islice(tasks, _TAKEN_BLOCKS):
        yield task
        nbytes += task.nbytes
        if nbytes >= _TAKEN_BYTES:
            return


def _blocks(content: Content, box: Box, means: Means) -> Iterator[Box]:
    """A box in blocks, a few of which fit into the memory of a thread."""
    copies, largest = (_COPIES_MADE, _MAX_BLOCK_MADE) if isinstance(content, MadeTensor) else (_COPIES, _MAX_BLOCK)
    most = max(_MIN_BLOCK, min(means.max_memory // _threads(means) // copies, largest)) // content.item_size
    most = max(1, most)
    if isinstance(content, Sum):
        return content.tiles(box)
    if isinstance(content, MadeTensor) and any(operation.kind == "transpose" for operation in content.operations):
        return _halves(box, most)
    return _rows(box, most)


def _rows(box: Box, most: int, at: int = 0) -> Iterator[Box]:
    """A box in boxes of at most so many elements, each of which lies in one piece if all of it does."""
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
    """Likewise, with sides of similar length, because dimensions are transposed."""
    if volume_of(box) <= most:
        yield box
        return
    at = max(range(len(box)), key=lambda dimension: box[dimension][1] - box[dimension][0])
    start, stop = box[at]
    middle = (start + stop) // 2
    for interval in ((start, middle), (middle, stop)):
        yield from _halves((*box[:at], interval, *box[at + 1 :]), most)
