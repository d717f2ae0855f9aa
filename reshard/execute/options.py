"""Options of the executor: CPUs, memory and storage; and the progress that it reports."""

from __future__ import annotations

from typing import NamedTuple

from reshard.defaults import MAX_MEMORY, usable_cpus
from reshard.execute.reading import MIN_DECODING_BYTES, MIN_PIECE, ChosenIo, choose_io
from reshard.plan.groups import GroupLimits
from reshard.processes import BASE_OF_PROCESSES, MIN_MEMORY_PER_CPU, process_count
from reshard.storage.costs import LOCAL, Storage, busy_cpus

# Larger blocks make nothing faster.
MAX_BLOCK_BYTES = 8 << 20
MIN_BLOCK_BYTES = 4 << 10
# The more columns of a large matrix are read before they are transposed, the fewer times its rows are read.
_MAX_SCRATCH_BYTES = 32 << 20
# Maximum memory in which a thread decodes quantised elements: more does not fit the cache next to a core.
_MAX_DECODING_BYTES = 768 << 10
# Memory of a place in a block to which a piece is read: a view, and a pointer in a list that grows ahead.
_BYTES_PER_PLACE = 200
_MAX_IN_FLIGHT = 64
# Threads of one process: with more, waits for the interpreter's lock cost more than the threads bring.
_MAX_THREADS = 8
# A CPU's memory is at least this fraction of a matrix that it transposes.
_MAX_SHARES_OF_MATRIX = 4
# Minimum number of requests in flight per CPU on remote storage.
_MIN_IN_FLIGHT_PER_CPU = 4
# Writers per file from which maps are faster than writes: the kernel lets one write at a time.
MIN_WRITERS_FOR_MAPS = 4
# Memory for windows where several files are joined and each window costs a round trip.
_WINDOW_BYTES = 256 << 10


class ExecutionOptions(NamedTuple):
    """CPUs, memory and storage of a run; they do not change the bytes that are written.

    Attributes:
        jobs: CPUs to keep busy.
        max_memory: maximum bytes of all buffers together.
        io: ``auto``, ``mmap`` or ``pread``, as requested.
        storage: storage of the source files.
        checksum: compute a CRC-32 of every target file, and those that files hold.
        target: storage of the target files.
        together: maximum number of target files of a group.
        in_flight: wanted maximum of target files that are written at a time.
        part_bytes: bytes of a file that the target's store buffers for one request; 0 for none.
        files: number of target files.
        nbytes: their bytes together.
        processes: processes that share the work; 1 for threads of this process.
        decoded: whether quantised tensors are decoded.
        transposed: bytes of the largest matrix that is transposed; 0 for none.
    """

    jobs: int
    max_memory: int = MAX_MEMORY
    io: str = "auto"
    storage: Storage = LOCAL
    checksum: bool = False
    target: Storage = LOCAL
    together: int = 1
    in_flight: int = 1
    part_bytes: int = 0
    files: int = 1
    nbytes: int = 0
    processes: int = 1
    decoded: bool = False
    transposed: int = 0

    def shared(self, private: int) -> ExecutionOptions:
        """The same options for worker processes, or unchanged if one process suffices.

        Threads suffice for object stores: they wait for requests, and do not keep CPUs busy. They also suffice where
        few CPUs write a single file, because the kernel lets one of them write at a time.

        Args:
            private: bytes of each process beside its buffers. All processes together may hold `BASE_OF_PROCESSES`
                beside buffers; more is subtracted from the buffers, at most half of them.
        """
        if not (self.storage.mappable and self.target.mappable) or self.part_bytes:
            return self
        count = process_count(self.cpus, self.nbytes, self.max_memory, private)
        if count < 2 or (count < MIN_WRITERS_FOR_MAPS and self.files == 1):
            return self
        beyond = max(0, count * private - BASE_OF_PROCESSES)
        return self._replace(jobs=count, processes=count, max_memory=self.max_memory - beyond)

    @property
    def threads(self) -> int:
        """Threads of all processes; more than CPUs where requests take a round trip, because most threads wait."""
        cpus = self.jobs if self.processes > 1 else min(self.cpus, _MAX_THREADS)
        count = max(cpus, self._in_flight(self.storage))
        if not self.part_bytes:
            return max(count, self._in_flight(self.target))
        # Other threads send the parts, within the rest of the memory. A few more threads than CPUs fill parts, because
        # they compete with many that send.
        count = max(count, min(_MIN_IN_FLIGHT_PER_CPU * self.cpus, self._in_flight(self.target)))
        return min(count, max(1, self.max_memory // 2 // self._min_share))

    @property
    def through_maps(self) -> bool:
        """Whether target files are written through maps: many processes write to each."""
        # No more threads than CPUs write at a time.
        return self.processes > 1 and min(self.threads, usable_cpus()) >= MIN_WRITERS_FOR_MAPS * self.files

    @property
    def group_limits(self) -> GroupLimits:
        """Limits of the number of files that are written at a time."""
        return GroupLimits(self.together, self.in_flight, self.storage.remote and not self.target.remote)

    @property
    def cpus(self) -> int:
        """CPUs to keep busy: fewer where each would have little memory.

        Columns of a large transposed matrix are read together, as many as fit about a third of a CPU's memory, and
        each time most of the matrix is read. So CPUs with little memory read it many times.
        """
        share = max(MIN_MEMORY_PER_CPU, self.transposed // _MAX_SHARES_OF_MATRIX)
        return min(busy_cpus(self.jobs, self.storage, self.target), max(1, self.max_memory // share))

    @property
    def uploads(self) -> int:
        """Parts that are sent at a time, by other threads; 0 if the target's store takes whole files."""
        if not self.part_bytes:
            return 0
        room = self.max_memory - self.threads * self._min_share
        return max(1, min(self._in_flight(self.target), room // self.part_bytes))

    @property
    def _buffer_memory(self) -> int:
        """Bytes of buffers, without parts that are being sent."""
        return max(self.least_memory, self.max_memory - self.uploads * self.part_bytes)

    def _in_flight(self, storage: Storage) -> int:
        """The number of requests to have in flight; 0 where they take no round trip."""
        if not storage.remote:
            return 0
        most = _MAX_IN_FLIGHT
        if storage.large:
            # Their bytes together have a bound in memory: more requests would be smaller ones.
            most = min(most, max(self.cpus * _MIN_IN_FLIGHT_PER_CPU, self.max_memory // (2 * storage.large)))
        return min(most, self.cpus * storage.in_flight)

    @property
    def least_memory(self) -> int:
        """Minimum bytes of the buffers."""
        places = MIN_BLOCK_BYTES // MIN_PIECE * self._bytes_per_place
        return 2 * MIN_BLOCK_BYTES + places + self._held_bytes + self.part_bytes

    @property
    def _held_bytes(self) -> int:
        return self.storage.held + self._held_by_target

    @property
    def _held_by_target(self) -> int:
        # Two threads may meet in the middle of a part, so there may be two parts of each file.
        return self.together * 2 * self.part_bytes

    @property
    def _min_share(self) -> int:
        """Bytes of a thread with blocks of a fair size."""
        return self._held_bytes + MIN_MEMORY_PER_CPU

    @property
    def chosen_io(self) -> ChosenIo:
        """The way in which sources are read, and the reason."""
        return choose_io(self.io, self.storage)

    @property
    def mapped(self) -> bool:
        """Whether sources are read through memory maps; only on request, see `reading`."""
        return self.chosen_io.way == "mmap"

    @property
    def window_bytes(self) -> int:
        """Bytes of a thread's windows for small reads: an eighth of its share, or more of it on network disks."""
        share = max(0, self._buffer_memory // self.threads - self._held_by_target)
        return max(share // 8, min(_WINDOW_BYTES, share // 4)) if self.storage.large else share // 8

    @property
    def decoding_bytes(self) -> int:
        """Bytes in which a thread decodes quantised elements."""
        if not self.decoded:
            return 0
        share = self._buffer_memory // self.threads - self._held_by_target
        return max(MIN_DECODING_BYTES, min(_MAX_DECODING_BYTES, share // 8))

    @property
    def block_bytes(self) -> int:
        """Bytes of a block, and minimum bytes of the scratch buffer of a thread."""
        share = self._memory_of_blocks * MIN_PIECE // (2 * MIN_PIECE + self._bytes_per_place)
        return max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, share))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the scratch buffer of a thread; more than a block where transposed tensors can use it."""
        rest = self._memory_of_blocks - self.block_bytes - self._bytes_of_places
        return max(self.block_bytes, min(_MAX_SCRATCH_BYTES, rest))

    @property
    def _bytes_of_places(self) -> int:
        """Bytes of the places in a block, which a thread keeps."""
        return self.block_bytes // MIN_PIECE * self._bytes_per_place

    @property
    def _bytes_per_place(self) -> int:
        # Only local files are read to several places.
        return 0 if self.storage.remote else _BYTES_PER_PLACE

    @property
    def _memory_of_blocks(self) -> int:
        return self._buffer_memory // self.threads - self._other_bytes

    @property
    def _other_bytes(self) -> int:
        return self.window_bytes + self.decoding_bytes + self._held_bytes

    @property
    def buffer_bytes(self) -> int:
        """Bytes of the buffers of all threads together."""
        buffers = self.threads * (self.block_bytes + self.scratch_bytes + self._bytes_of_places + self._other_bytes)
        return buffers + self.uploads * self.part_bytes


class Progress:
    """Receives the progress of a run, and ignores it. Called from several threads, one at a time."""

    def begin(self, total: int, doing: str) -> None:
        """Work on ``total`` bytes begins; ``doing`` names it, such as ``writing``."""

    def wrote(self, count: int) -> None:
        """``count`` of these bytes are done."""

    def copied(self, count: int) -> None:
        """``count`` of the bytes that are done were copied by the file system."""

    def committed(self, rank: int, size: int) -> None:
        """The file of a target rank, of ``size`` bytes, has its final name."""

    def overflowed(self, name: str, count: int) -> None:
        """``count`` elements of a target tensor became infinite when they were cast."""

    def end(self) -> None:
        """The work is done."""
