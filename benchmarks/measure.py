"""Running whole commands: how long they take, and the memory of all their processes together."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

MIB = 1 << 20
Cell = str | int | float
_SAMPLE_SECONDS = 0.01


class Run(NamedTuple):
    """What a command took.

    Attributes:
        seconds: from start to end.
        anonymous: most anonymous memory of all its processes together, in bytes, as sampled.
        resident: the resident peaks of its processes, mapped files included, added up.
        cpu: seconds of processor time.
        user: of these, seconds outside the kernel.
        reads: system calls of all its processes that read.
        writes: system calls of all its processes that write.
    """

    seconds: float
    anonymous: int
    resident: int
    cpu: float
    user: float
    reads: int = 0
    writes: int = 0


class Compared(NamedTuple):
    """Two commands measured in alternating pairs.

    Attributes:
        ratio: geometric mean of our time over theirs, pair by pair.
        low: smallest ratio of a pair.
        high: largest ratio of a pair.
        medians: median of our times over median of theirs.
        cpu: median of our processor time over median of theirs.
        ours: median of our times, in seconds.
        theirs: median of their times, in seconds.
        anonymous: most anonymous memory of ours, in bytes.
        resident: most resident memory of ours, in bytes.
    """

    ratio: float
    low: float
    high: float
    medians: float
    cpu: float
    ours: float
    theirs: float
    anonymous: int
    resident: int

    def row(self, ours: str = "reshard", theirs: str = "cp") -> dict[str, Cell]:
        """As a part of a row."""
        return {
            "ratio": round(self.ratio, 2),
            "lowest": round(self.low, 2),
            "highest": round(self.high, 2),
            "ratio of medians": round(self.medians, 2),
            "CPU ratio": round(self.cpu, 2),
            f"{ours}, s": round(self.ours, 2),
            f"{theirs}, s": round(self.theirs, 2),
            "anonymous, MiB": mib(self.anonymous),
            "resident, MiB": mib(self.resident),
        }


def mib(nbytes: float) -> int:
    return round(nbytes / MIB)


class Section:
    """What a script found, as its file in `benchmarks/results` has it; prints all as it is added."""

    def __init__(self, title: str) -> None:
        self.results: dict[str, Any] = {"title": title, "tables": []}
        print(title, flush=True)

    def say(self, text: str, detail: bool = False) -> None:
        """Begin a table, with what it shows; the page leaves out those of details."""
        self.results["tables"].append({"about": text, **({"detail": True} if detail else {}), "rows": []})
        print(f"\n{text}", flush=True)

    def row(self, cells: Mapping[str, Cell]) -> None:
        """Add a row: values by column, whose name ends with their unit."""
        self.results["tables"][-1]["rows"].append(dict(cells))
        print(*(f"{column}: {value}" for column, value in cells.items()), sep=" | ", flush=True)


@contextmanager
def memory_backed() -> Iterator[Path]:
    """A directory, in memory if possible, removed afterwards."""
    with directory_in("/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        yield place


@contextmanager
def directory_in(base: str | None) -> Iterator[Path]:
    """A directory that is removed afterwards."""
    place = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir=base))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def remove(*places: Path) -> None:
    """Remove directories or files if they exist."""
    for place in places:
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)


def reshard(*words: object) -> list[object]:
    """A command line of the program under test."""
    return [sys.executable, "-m", "reshard", *words]


def reshard_as_if(cpus: int, *words: object) -> list[object]:
    """As `reshard`, on a machine with ``cpus`` CPUs."""
    program = f"from reshard import defaults, entry; defaults.usable_cpus = lambda: {cpus}; entry.main()"
    return [sys.executable, "-c", program, *words]


def run(command: Sequence[object], sampled: bool = True) -> Run:
    """Run a command, which must succeed.

    Args:
        command: the command.
        sampled: whether to look at its memory, which takes the more processor time the more processes there are.

    Raises:
        RuntimeError: it failed.
    """
    # Without compiled modules every start would be measured with compiling them.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    reads, writes = _calls()
    started = perf_counter()
    process = subprocess.Popen(list(map(str, command)), env=environment, stdout=subprocess.DEVNULL)
    sampler = _Sampler(process.pid)
    with sampler if sampled else contextlib.nullcontext():
        _, status, used = os.wait4(process.pid, 0)
        seconds = perf_counter() - started
    process.returncode = status
    if status:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with status {os.WEXITSTATUS(status)}")
    calls = [after - before for after, before in zip(_calls(), (reads, writes))]
    return Run(seconds, sampler.anonymous, sampler.resident, used.ru_utime + used.ru_stime, used.ru_utime, *calls)


def _calls() -> tuple[int, int]:
    """System calls of this process and of the children it has waited for: reads and writes."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["syscr"]), int(counts["syscw"])


def times(commands: Sequence[Sequence[object]], count: int) -> list[list[float]]:
    """Seconds of each command, run in turns ``count`` times after a warm-up."""
    durations: list[list[float]] = [[] for _ in commands]
    for number in range(count + 1):
        for command, seconds_of_command in zip(commands, durations):
            seconds = run(command).seconds
            if number:
                seconds_of_command.append(seconds)
    return durations


def pairs(ours: Callable[[], Run], theirs: Callable[[], Run], count: int) -> Compared:
    """Measure in pairs, the order alternating, because the second of a pair pays for fresh pages.

    Args:
        ours: runs our command, all preparation done outside of what it measures.
        theirs: runs the other one.
        count: pairs, after one that warms up.
    """
    mine: list[Run] = []
    other: list[Run] = []
    for number in range(count + 1):
        order = [(ours, mine), (theirs, other)]
        for measure, durations in order if number % 2 else order[::-1]:
            durations.append(measure())
    return compare(mine[1:], other[1:])


def against_copy(words: Sequence[object], target: Path, count: int) -> Compared:
    """Measure a command against `cp -r` of the directory that it makes.

    Args:
        words: the command.
        target: the directory; it stays as the command made it last.
        count: pairs, after one that warms up.
    """
    copied, pattern = target.with_name("copied"), target.with_name("pattern")
    run(words)
    target.rename(pattern)

    def ours() -> Run:
        remove(target)
        return run(words)

    def copy() -> Run:
        remove(copied)
        return run(["cp", "-r", pattern, copied])

    return pairs(ours, copy, count)


def compare(ours: Sequence[Run], theirs: Sequence[Run]) -> Compared:
    """Summarise pairs of runs."""
    ratios = [mine.seconds / other.seconds for mine, other in zip(ours, theirs)]
    ours_median = statistics.median(run.seconds for run in ours)
    theirs_median = statistics.median(run.seconds for run in theirs)
    return Compared(
        ratio=math.exp(statistics.fmean(map(math.log, ratios))),
        low=min(ratios),
        high=max(ratios),
        medians=ours_median / theirs_median,
        cpu=statistics.median(run.cpu for run in ours) / statistics.median(run.cpu for run in theirs),
        ours=ours_median,
        theirs=theirs_median,
        anonymous=max(run.anonymous for run in ours),
        resident=max(run.resident for run in ours),
    )


class _Sampler:
    """Looks at the memory of a process and all its descendants every few milliseconds."""

    def __init__(self, pid: int) -> None:
        self.anonymous = 0
        self.resident = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> _Sampler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_SECONDS):
            anonymous = resident = 0
            for pid in _family(self._pid):
                # A process may end between being listed and being looked at.
                with contextlib.suppress(OSError):
                    # Pages that processes share count once.
                    anonymous += _field(Path(f"/proc/{pid}/smaps_rollup"), "Pss_Anon")
                    resident += _field(Path(f"/proc/{pid}/status"), "VmHWM")
            self.anonymous = max(self.anonymous, anonymous)
            self.resident = max(self.resident, resident)


def _field(path: Path, field: str) -> int:
    """Bytes, of a file of the kernel's with a number of KiB a line."""
    for line in path.read_text().splitlines():
        key, _, value = line.partition(":")
        if key == field:
            return int(value.split()[0]) * 1024
    return 0


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text().split():
                yield from _family(int(child))
