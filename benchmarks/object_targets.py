"""Targets in an object store with latency: conversions against uploads of the same files."""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from urllib.request import urlopen

from benchmarks.measure import MIB, Section, memory_backed, remove, reshard, run
from benchmarks.object_store import DELAYS, MEMORY, MODEL, PAIRS, served, told
from benchmarks.synthetic import wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare
from reshard.storage.s3.objects import MIN_PART_BYTES

# Bytes a second of the link.
RATE = 200e6


def measure() -> Section:
    """Measure targets in a store: conversions against uploads of the same existing files."""
    section = Section("Object stores as targets")
    section.say(
        f"The same server, over a link of {RATE / 1e6:.0f} MB/s: client and server share two cores, which limit "
        f"uploads to some 250 MB/s. {MODEL.nbytes / 1e9:.2f} GB, from memory to there, with "
        f"`--max-memory {MEMORY}`. *Upload* is the time of boto3's own transfers for the same files, from memory, with "
        "parts of the same size and number. *Bytes* is the time of the conversion. The server measures both from the "
        "beginning of the first upload to the end of the last. Start-up and records add some 30 round trips for "
        "files of any size. *Processor* is the processor time of the whole conversion over that of the uploads. "
        f"Medians of {PAIRS} runs in turns."
    )
    columns = ("whole", "bytes", "upload", "upload over bytes", "processor", "anonymous")
    section.table("kind", "delay", "parts at a time", *columns)
    for claim in (SHARDS, COLUMNS_CUT):
        for delay in DELAYS:
            with memory_backed() as place:
                options = prepare(place, MODEL, claim)
                (place / "bucket").mkdir()
                with served(place / "bucket", delay, RATE) as endpoint:
                    section.row(claim.name, f"{delay} ms", *uploaded(place, endpoint, options, claim))
    return section


def uploaded(place: Path, endpoint: str, options: list[object], claim: Claim) -> list[str]:
    """A conversion to a store against an upload of its output."""
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
    seconds = [f"{measured:.2f} s" for measured in (median(whole), ours, upload)]
    compared = [f"{upload / ours:.2f}", f"{median(processor):.2f}", f"{anonymous / MIB:.0f} MiB"]
    return [str(threads), *seconds, *compared]


def seconds_of(endpoint: str) -> float:
    """Seconds from the first upload that was begun to the last that was completed, as the server saw them."""
    with urlopen(f"{endpoint}/seconds") as answer:
        return float(answer.read())
