"""Measuring whole commands in alternating pairs, and their memory."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, NamedTuple


class Row(NamedTuple):
    """One line of the results.

    Attributes:
        claim: what was measured.
        ratio: geometric mean of time over time of what it is compared with.
        spread: smallest and largest ratio of a pair.
        seconds: shortest time.
        other: what it is compared with, and its shortest time.
        anonymous: most anonymous memory seen, in bytes.
    """

    claim: str
    ratio: float
    spread: tuple[float, float]
    seconds: float
    other: str
    anonymous: int

    def markdown(self) -> str:
        low, high = self.spread
        return (
            f"| {self.claim} | {self.ratio:.2f} | {low:.2f} to {high:.2f} | {self.seconds:.2f} s | {self.other} "
            f"| {self.anonymous / 2**20:.0f} MiB |"
        )


HEADER = "| what | ratio | spread | shortest | against | anonymous memory |\n| --- | --- | --- | --- | --- | --- |"


@contextmanager
def memory_backed() -> Iterator[Path]:
    """A directory in memory where there is one, removed afterwards."""
    base = "/dev/shm" if Path("/dev/shm").is_dir() else None
    place = Path(tempfile.mkdtemp(prefix="reshard-bench-", dir=base))
    try:
        yield place
    finally:
        shutil.rmtree(place)


def run(command: Sequence[object]) -> tuple[float, int]:
    """Seconds that a command took, and the most anonymous memory it was seen with, in bytes."""
    peak = 0
    started = time.perf_counter()
    with subprocess.Popen(list(map(str, command))) as process:
        while process.poll() is None:
            status = Path(f"/proc/{process.pid}/status").read_text()
            found = [line for line in status.splitlines() if line.startswith("RssAnon")]
            peak = max(peak, *(int(line.split()[1]) * 1024 for line in found), 0)
            time.sleep(0.01)
    if process.returncode:
        raise RuntimeError(f"{command} ended with status {process.returncode}")
    return time.perf_counter() - started, peak


def reshard(*words: object) -> list[object]:
    """A command line of the program under test."""
    return [sys.executable, "-m", "reshard", *words]


def pairs(claim: str, ours: Callable[[], tuple[float, int]], other: Callable[[], float], name: str, count: int) -> Row:
    """Measure in pairs, the order alternating, because the second of a pair pays for fresh pages."""
    measured = []
    peak = 0
    for number in range(count + 1):
        if number % 2:
            theirs = other()
            mine, memory = ours()
        else:
            mine, memory = ours()
            theirs = other()
        peak = max(peak, memory)
        # The first pair warms up.
        if number:
            measured.append((mine, theirs))
    ratios = [mine / theirs for mine, theirs in measured]
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    shortest = min(mine for mine, _ in measured)
    against = f"{name}, {min(theirs for _, theirs in measured):.2f} s"
    return Row(claim, mean, (min(ratios), max(ratios)), shortest, against, peak)
