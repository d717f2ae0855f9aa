"""Threads, processes and buffers of a run, from memory and costs of requests; and the progress that a run reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from reshard.asked import cpus_of
from reshard.defaults import MAX_MEMORY, usable_cpus
from reshard.errors import UsageError
from reshard.execute.runs import largest_transposed
from reshard.plan.pieces import MAX_GROUP, ONE_FILE, GroupLimits
from reshard.processes import BASE_OF_PROCESSES, MIN_MEMORY_PER_CPU, may_fork, private_bytes, process_count
from reshard.storage import costs_of, store_of
from reshard.storage.store import LOCAL, Costs, busy_cpus

if TYPE_CHECKING:
    from reshard.plan.plan import Plan

# Larger blocks make nothing faster.
MAX_BLOCK_BYTES = 8 << 20
MIN_BLOCK_BYTES = 4 << 10
MIN_DECODING_BYTES = 4 << 10
"""Minimum memory in which a thread decodes quantised elements."""
# Minimum bytes of pieces that the kernel copies to their places; NumPy gathers shorter ones. A read of 1 MiB to places
# of 256 B, 512 B, 1, 2, 4 and 16 KiB takes 0.32, 0.26, 0.25, 0.22, 0.18 and 0.18 ns per byte; a read and a gather
# take 0.22 ns, and 0.24 to 0.28 ns in blocks of 8 MiB. Without NumPy, a process starts 0.04 s earlier.
MIN_PIECE = 1 << 10
# The more columns of a large matrix are read before they are transposed, the fewer times its rows are read.
_MAX_SCRATCH_BYTES = 32 << 20
# Maximum memory in which a thread decodes quantised elements: more does not fit the cache next to a core.
_MAX_DECODING_BYTES = 768 << 10
# Memory of a place in a block to which a piece is read: a view, and a pointer in a list that grows ahead. Only local
# files are read to several places.
_BYTES_PER_PLACE = 200
_MAX_IN_FLIGHT = 64
# Threads of one process: with more, waits for the interpreter's lock cost more than the threads bring.
_MAX_THREADS = 8
# A CPU's memory is at least this fraction of a matrix that it transposes. Columns of it are read together, as many as
# fit about a third of this memory, and each time most of the matrix is read.
_MAX_SHARES_OF_MATRIX = 4
# Minimum number of requests in flight per CPU on remote storage.
_MIN_IN_FLIGHT_PER_CPU = 4
# Writers per file from which maps are faster than writes: the kernel lets one write at a time.
MIN_WRITERS_FOR_MAPS = 4
# Memory for windows where several files are joined and each window costs a round trip.
_WINDOW_BYTES = 256 << 10
# Groups of target files written at a time where the store's upload buffers limit memory.
_GROUPS = 8
# Files that may be written at a time: this many, one for each CPU, or this part of all.
_MIN_FILES = 2
_MAX_PART_OF_FILES = 0.1
_SMALL_FILE = 32 << 20


class Budget(NamedTuple):
    """Threads, processes and buffers of a run; they do not change the bytes that are written.

    Attributes:
        cpus: CPUs to keep busy.
        processes: processes that share the work; 1 for threads of this process.
        threads: threads of all processes; more than CPUs where requests take a round trip, because most threads wait.
        block_bytes: of a thread's block, and minimum of its scratch buffer.
        scratch_bytes: of a thread's scratch buffer; more than a block where transposed tensors can use it.
        window_bytes: of a thread's windows for small reads.
        decoding_bytes: of memory in which a thread decodes quantised elements; 0 where none are.
        uploads: parts that are sent at a time, by other threads; 0 if the target's store takes whole files.
        part_bytes: bytes of a file that the target's store buffers for one request; 0 for none.
        buffer_bytes: of all buffers together, at most ``max_memory`` unless that is too little for any work.
        max_memory: as requested.
        costs: of requests to the source files.
        remote: whether requests to source or target take a round trip.
        io: the way in which sources are read, and why; see `choose_io`.
        through_maps: whether target files are written through maps: many processes write to each.
        limits: of the number of files that are written at a time.
    """

    cpus: int
    processes: int
    threads: int
    block_bytes: int
    scratch_bytes: int
    window_bytes: int
    decoding_bytes: int
    uploads: int
    part_bytes: int
    buffer_bytes: int
    max_memory: int
    costs: Costs
    remote: bool
    io: tuple[str, str]
    through_maps: bool
    limits: GroupLimits

    @property
    def mapped(self) -> bool:
        """Whether sources are read through memory maps; only on request."""
        return self.io[0] == "mmap"

    @classmethod
    def of(
        cls,
        jobs: int,
        max_memory: int = MAX_MEMORY,
        costs: Costs = LOCAL,
        *,
        io: str = "auto",
        target: Costs = LOCAL,
        part_bytes: int = 0,
        limits: GroupLimits = ONE_FILE,
        decoded: bool = False,
        transposed: int = 0,
        work: tuple[int, int] | None = None,
    ) -> Budget:
        """The budget of some CPUs and bytes of memory.

        Args:
            costs: of requests to the source files.
            target: of requests to the target files.
            transposed: bytes of the largest matrix that is transposed; 0 for none.
            work: number of target files and their bytes together, where worker processes may write them.
        """
        cpus = busy_cpus(jobs, costs, target)
        cpus = min(cpus, max(1, max_memory // max(MIN_MEMORY_PER_CPU, transposed // _MAX_SHARES_OF_MATRIX)))
        processes, beyond = 1, 0
        # Threads suffice for object stores: they wait for requests, and do not keep CPUs busy.
        if work is not None and costs.mappable and target.mappable and not part_bytes:
            files, nbytes = work
            private = private_bytes()
            count = process_count(cpus, nbytes, max_memory, private)
            # They also suffice where few CPUs write a single file: the kernel lets one of them write at a time.
            if count >= 2 and (files > 1 or count >= MIN_WRITERS_FOR_MAPS):
                processes = cpus = count
                beyond = max(0, count * private - BASE_OF_PROCESSES)
        memory = max_memory - beyond
        in_flight = [_in_flight(each, cpus) for each in (costs, target)]
        threads = max(cpus if processes > 1 else min(cpus, _MAX_THREADS), in_flight[0])
        # Two threads may meet in the middle of a part, so there may be two parts of each file.
        parts_held = limits.most * 2 * part_bytes
        held = costs.held + parts_held
        if part_bytes:
            # Other threads send the parts, within the rest of the memory. A few more threads than CPUs fill parts,
            # because they compete with many that send.
            fair_share = held + MIN_MEMORY_PER_CPU
            threads = max(threads, min(_MIN_IN_FLIGHT_PER_CPU * cpus, in_flight[1]))
            threads = min(threads, max(1, memory // 2 // fair_share))
            uploads = max(1, min(in_flight[1], (memory - threads * fair_share) // part_bytes))
        else:
            threads, uploads = max(threads, in_flight[1]), 0
        least = least_memory(costs, part_bytes, limits.most)
        share = max(least, memory - uploads * part_bytes) // threads
        own = max(0, share - parts_held)
        # Network disks need more of it for windows.
        windows = max(own // 8, min(_WINDOW_BYTES, own // 4)) if costs.remote and costs.mappable else own // 8
        decoding = max(MIN_DECODING_BYTES, min(_MAX_DECODING_BYTES, own // 8)) if decoded else 0
        rest = share - windows - decoding - held
        per_place = _bytes_per_place(costs)
        block = max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, rest * MIN_PIECE // (2 * MIN_PIECE + per_place)))
        places = block // MIN_PIECE * per_place
        scratch = max(block, min(_MAX_SCRATCH_BYTES, rest - block - places))
        return cls(
            cpus,
            processes,
            threads,
            block,
            scratch,
            windows,
            decoding,
            uploads,
            part_bytes,
            threads * (block + scratch + places + windows + decoding + held) + uploads * part_bytes,
            max_memory,
            costs,
            costs.remote or target.remote,
            choose_io(io, costs),
            # No more threads than CPUs write at a time.
            processes > 1 and work is not None and min(threads, usable_cpus()) >= MIN_WRITERS_FOR_MAPS * work[0],
            limits,
        )


def least_memory(costs: Costs, part_bytes: int = 0, together: int = 1) -> int:
    """Minimum bytes of the buffers of a thread that writes some files together."""
    places = MIN_BLOCK_BYTES // MIN_PIECE * _bytes_per_place(costs)
    return 2 * MIN_BLOCK_BYTES + places + costs.held + (2 * together + 1) * part_bytes


def _bytes_per_place(costs: Costs) -> int:
    return 0 if costs.remote else _BYTES_PER_PLACE


def _in_flight(costs: Costs, cpus: int) -> int:
    """The number of requests to have in flight; 0 where they take no round trip."""
    return min(_MAX_IN_FLIGHT, cpus * costs.in_flight) if costs.remote else 0


def choose_io(requested: str, costs: Costs) -> tuple[str, str]:
    """The way in which to read sources, ``pread`` or ``mmap``, and the reason, as the end of a sentence.

    On local disks maps take 0.8 to 1.1 of the time of explicit reads (`benchmarks/io.py`). Runs differ as much, so
    maps are not worth their risk: a file that becomes shorter ends the run.
    """
    if requested == "pread":
        return "pread", "as requested"
    if not costs.mappable:
        return "pread", "as nothing can be mapped in an object store"
    if requested == "mmap":
        return "mmap", "as requested"
    if costs.remote:
        return "pread", "as mmap would take a round trip for each page"
    return "pread", "as mmap is hardly quicker on a local disk"


def reading_budget(plan: Plan) -> Budget:
    """The budget for reading a plan's sources alone."""
    effort = plan.request.asked.effort
    return Budget.of(cpus_of(effort), effort.max_memory, source_costs(plan))


def writing_budget(plan: Plan, sizes: Mapping[int, int], max_open: int) -> Budget:
    """The budget for writing some target files of a plan.

    Args:
        plan: the plan.
        sizes: bytes of the files.
        max_open: maximum of open source files.

    Raises:
        UsageError: the parts of an object store need more memory.
    """
    store, costs = store_of(plan.request.dst), source_costs(plan)
    target, nbytes = store.costs(plan.request.dst), sum(sizes.values())
    effort, transposed = plan.request.asked.effort, largest_transposed(plan.checkpoint)
    part_bytes = max(map(store.part_bytes, sizes.values()), default=0)

    def budget_of(limits: GroupLimits, work: tuple[int, int] | None = None) -> Budget:
        return Budget.of(
            cpus_of(effort),
            effort.max_memory,
            costs,
            io=effort.io,
            target=target,
            part_bytes=part_bytes,
            limits=limits,
            decoded=plan.request.edits.quantisation is not None,
            transposed=transposed,
            work=work,
        )

    alone = budget_of(ONE_FILE)
    if part_bytes:
        together = effort.max_memory // (_GROUPS * 2 * part_bytes)
    else:
        # Each thread may open a whole group of targets and its sources: keep below the limit of open files.
        together = MAX_GROUP if len(sizes) <= max_open // 4 else max_open // 4 // alone.threads
    writers = alone.threads if nbytes < _SMALL_FILE * len(sizes) else alone.cpus
    beside = max(_MIN_FILES, writers, int(_MAX_PART_OF_FILES * len(sizes)))
    limits = GroupLimits(max(1, min(MAX_GROUP, together)), beside, costs.remote and not target.remote)
    most = max(map(len, plan.reading_groups([*sizes], limits)), default=1)
    needed = least_memory(costs, part_bytes, most)
    if part_bytes and effort.max_memory < needed:
        raise UsageError(
            f"--max-memory {effort.max_memory:,} bytes: too small for an object store's parts of {part_bytes:,} bytes, "
            "which stay in memory until uploaded",
            hint=f"pass at least --max-memory {-(-needed // (1 << 20))}M; some hundred MB are faster",
        )
    return budget_of(limits._replace(most=most), (len(sizes), nbytes) if may_fork() else None)


def source_costs(plan: Plan) -> Costs:
    """The costs of requests to a plan's sources; local without files."""
    example = next(iter(plan.checkpoint.files.values()), None)
    return LOCAL if example is None else costs_of(example)


class Progress:
    """Receives the progress of a run, and shows nothing of it. Called from several threads, one at a time.

    Attributes:
        written: the size of every file that has its final name, by number.
        overflows: elements of tensors that became infinite.
    """

    def __init__(self) -> None:
        self.written: dict[int, int] = {}
        self.overflows: Counter[str] = Counter()

    def begin(self, total: int, doing: str) -> None:
        """Work on ``total`` bytes begins; ``doing`` names it, such as ``writing``."""

    def wrote(self, count: int) -> None:
        """``count`` of these bytes are done."""

    def committed(self, rank: int, size: int) -> None:
        """The file of a target rank, of ``size`` bytes, has its final name."""
        self.written[rank] = size

    def overflowed(self, name: str, count: int) -> None:
        """``count`` elements of a target tensor became infinite when they were cast."""
        self.overflows[name] += count

    def end(self) -> None:
        """The work is done."""
