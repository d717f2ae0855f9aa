"""How bytes are moved, and who is told of it: CPUs, memory, and what files lie on."""

from __future__ import annotations

from dataclasses import dataclass, replace

from reshard.defaults import MAX_MEMORY
from reshard.execute.reading import ChosenIo, choose_io
from reshard.processes import BASE_OF_PROCESSES, process_count
from reshard.storage.costs import LOCAL, Storage

# Larger blocks than this make nothing faster.
MOST_BLOCK_BYTES = 8 << 20
LEAST_BLOCK_BYTES = 4 << 10
# Of smaller ones there are more requests and calls.
_FAIR_BLOCK_BYTES = 1 << 20
_MOST_WAITING = 64
# Threads of one process: more pass the interpreter's lock to and fro for longer than they gain.
_MAX_THREADS = 8
# Requests under way per CPU, of whatever size.
_FEW = 4
# What windows of small reads need where several files are joined and each window costs a round trip.
_WINDOW_BYTES = 256 << 10


@dataclass(frozen=True)
class ExecutionOptions:
    """How bytes are moved; none of this changes what is written.

    Attributes:
        jobs: CPUs to keep busy.
        max_memory: bytes that all buffers together may take.
        io: what was asked for: ``auto``, ``mmap`` or ``pread``.
        storage: what the source files lie on.
        checksum: compute a CRC-32 of every target file.
        target: what the target files lie on.
        together: target files that are written together at the most.
        part_bytes: bytes that the target's store holds of a file until they are written together; 0 for none.
        files: target files in all.
        nbytes: bytes of them together.
        processes: processes that share the work; 1 for threads of this one alone.
    """

    jobs: int
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    storage: Storage = LOCAL
    checksum: bool = False
    target: Storage = LOCAL
    together: int = 1
    part_bytes: int = 0
    files: int = 1
    nbytes: int = 0
    processes: int = 1

    def shared(self, private: int) -> ExecutionOptions:
        """The same in as many processes as are worth having, or unchanged where that is one.

        Object stores keep threads waiting and not CPUs busy, so threads suffice for them.

        Args:
            private: bytes that each process comes to hold beside its buffers. What the processes hold together beyond
                what the base allows is taken off the buffers, up to half of them.
        """
        if not (self.storage.mappable and self.target.mappable) or self.part_bytes:
            return self
        count = process_count(self.jobs, self.nbytes, self.max_memory, private)
        if count < 2:
            return self
        beyond = max(0, count * private - BASE_OF_PROCESSES)
        return replace(self, jobs=count, processes=count, max_memory=self.max_memory - beyond)

    @property
    def threads(self) -> int:
        """Threads of all processes; where requests take a round trip there are more of them than CPUs, as most wait."""
        # In one process, more would pass the interpreter's lock to and fro.
        jobs = self.jobs if self.processes > 1 else min(self.jobs, _MAX_THREADS)
        wanted = max(jobs, self._under_way(self.storage))
        if not self.part_bytes:
            return max(wanted, self._under_way(self.target))
        # Parts are sent by threads of their own, which get the memory that these leave. A few more threads than CPUs
        # keep them busy: a thread that fills parts competes with many that send.
        wanted = max(wanted, min(_FEW * self.jobs, self._under_way(self.target)))
        return min(wanted, max(1, self.max_memory // 2 // self._least_share))

    @property
    def uploads(self) -> int:
        """Parts that are sent at a time, by threads of their own; 0 where the target's store takes files whole."""
        if not self.part_bytes:
            return 0
        room = self.max_memory - self.threads * self._least_share
        return max(1, min(self._under_way(self.target), room // self.part_bytes))

    @property
    def _buffer_memory(self) -> int:
        """Bytes that are not held by parts on their way."""
        return max(self.least_memory, self.max_memory - self.uploads * self.part_bytes)

    def _under_way(self, storage: Storage) -> int:
        """Requests to storage worth having under way."""
        most = _MOST_WAITING
        if storage.large:
            # What they bring together has its bound in memory: more requests are smaller ones.
            most = min(most, max(self.jobs * _FEW, self.max_memory // (2 * storage.large)))
        return min(most, self.jobs * storage.in_flight)

    @property
    def least_memory(self) -> int:
        """Bytes that the buffers take at least."""
        return 2 * LEAST_BLOCK_BYTES + self._held_bytes + self.part_bytes

    @property
    def _held_bytes(self) -> int:
        return self.storage.held + self._held_by_target

    @property
    def _held_by_target(self) -> int:
        # Threads meet in the middle of a part, so there may be two of each file.
        return self.together * 2 * self.part_bytes

    @property
    def _least_share(self) -> int:
        """Bytes of a thread with blocks that are large enough to be quick."""
        return self._held_bytes + 2 * _FAIR_BLOCK_BYTES

    @property
    def chosen_io(self) -> ChosenIo:
        """How sources are read, and why."""
        return choose_io(self.io, self.storage)

    @property
    def mapped(self) -> bool:
        """Whether sources are looked at through memory maps; never unasked, see `reading`."""
        return self.chosen_io.way == "mmap"

    @property
    def window_bytes(self) -> int:
        """Bytes of a thread's windows for small reads: an eighth of its share, or more of it on network disks."""
        share = max(0, self._buffer_memory // self.threads - self._held_by_target)
        return max(share // 8, min(_WINDOW_BYTES, share // 4)) if self.storage.large else share // 8

    @property
    def block_bytes(self) -> int:
        """Bytes of each of the two buffers of a thread."""
        share = (self._buffer_memory // self.threads - self.window_bytes - self._held_bytes) // 2
        return max(LEAST_BLOCK_BYTES, min(MOST_BLOCK_BYTES, share))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of all threads together."""
        buffers = self.threads * (2 * self.block_bytes + self.window_bytes + self._held_bytes)
        return buffers + self.uploads * self.part_bytes


class Progress:
    """Told what has been done; does nothing by itself. Called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """``total`` bytes are to be done; ``doing`` is the word for it, such as ``writing``."""

    def wrote(self, count: int) -> None:
        """So many of these bytes are done."""

    def copied(self, count: int) -> None:
        """So many of the bytes that are done were copied by the file system."""

    def committed(self, rank: int, size: int) -> None:
        """The file of a target rank, of so many bytes, has its final name."""

    def overflowed(self, name: str, count: int) -> None:
        """So many elements of a target tensor became infinite when they were cast."""

    def end(self) -> None:
        """Nothing more will come."""
