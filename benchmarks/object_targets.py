"""Targets in an object store with latency: conversions against uploads of the same files."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from urllib.request import urlopen

from benchmarks.measure import Cell, Section, memory_backed, mib, remove, reshard, run
from benchmarks.object_store import DELAYS, MEMORY, MODEL, PAIRS, served, told
from benchmarks.synthetic import wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare
from reshard.storage.s3.objects import MIN_PART_BYTES

# Bytes a second of the link.
RATE = 200e6


def measure() -> Section:
    """Measure targets in a store: conversions against uploads of the same existing files."""
    section = Section("How fast to an object store?")
    section.say(
        f"The same over {RATE / 1e6:.0f} MB/s. *Upload*: boto3's own transfers of the same files. Start-up "
        "and records add some 30 round trips."
    )
    for claim in (SHARDS, COLUMNS_CUT):
        for delay in DELAYS:
            with memory_backed() as place:
                options = prepare(place, MODEL, claim)
                (place / "bucket").mkdir()
                with served(place / "bucket", delay, RATE) as endpoint:
                    record: dict[str, Cell] = {"kind": claim.name, "delay, ms": delay}
                    section.row({**record, **uploaded(place, endpoint, options, claim)})
    return section


def uploaded(place: Path, endpoint: str, options: list[object], claim: Claim) -> dict[str, Cell]:
    """A conversion to a store against an upload of its output, as a part of a row."""
    local = place / "made"
    run(reshard("convert", place / "src", local, *options, "--quiet"))
    for path in local.glob("*reshard*"):
        remove(path)
    words = [place / "src", "s3://bench/made", *options, "--endpoint-url", endpoint, "--max-memory", MEMORY, "--json"]
    threads = told(reshard("plan", *words))["uploads"]["at_a_time"]
    whole, part, theirs, processor, anonymous = [], [], [], [], 0
    for _ in range(PAIRS):
        remove(place / "bucket" / "made")
        result = run([sys.executable, "-m", "benchmarks.object_store", place / "told", *reshard("convert", *words)])
        part.append(seconds_of(endpoint))
        whole.append(result.seconds)
        anonymous = max(anonymous, result.anonymous)
        remove(place / "bucket" / "raw")
        plain = run([sys.executable, "-m", "benchmarks.object_writes", endpoint, threads, MIN_PART_BYTES, local])
        theirs.append(seconds_of(endpoint))
        processor.append(result.cpu / plain.cpu)
    assert wrong_slices(place / "bucket" / "made", MODEL, claim.new, claim.ending) == 0
    ours, upload = median(part), median(theirs)
    return {
        "parts at a time": threads,
        "whole, s": round(median(whole), 2),
        "bytes, s": round(ours, 2),
        "upload, s": round(upload, 2),
        "upload over bytes": round(upload / ours, 2),
        "CPU ratio": round(median(processor), 2),
        "memory, MiB": mib(anonymous),
    }


def seconds_of(endpoint: str) -> float:
    """Seconds from the first upload that was begun to the last that was completed, as the server saw them."""
    with urlopen(f"{endpoint}/seconds") as answer:
        return float(answer.read())
