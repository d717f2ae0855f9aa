"""Targets in an object store with latency: conversions against uploads of the same files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

from benchmarks.measure import MIB, Section, memory_backed, remove, reshard, run
from benchmarks.object_store import DELAYS, MEMORY, MODEL, PAIRS, served, told
from benchmarks.synthetic import wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare
from reshard.storage.s3.new_object import LEAST_PART_BYTES


def measure() -> Section:
    """Measure targets in a store: conversions against uploads of the same files, which are there already."""
    section = Section("Object stores as targets")
    section.say(
        f"The same server. {MODEL.nbytes / 1e9:.2f} GB, from memory to there, with `--max-memory {MEMORY}`. *Upload* "
        "is what boto3's own transfers take for the files that a conversion has written to memory before, with parts "
        f"of the same size and as many at a time. *Bytes* as above. Medians of {PAIRS} runs in turns."
    )
    section.table("kind", "delay", "parts at a time", "whole", "bytes", "upload", "upload over bytes", "anonymous")
    for claim in (SHARDS, COLUMNS_CUT):
        for delay in DELAYS:
            with memory_backed() as place:
                options = prepare(place, MODEL, claim)
                (place / "bucket").mkdir()
                with served(place / "bucket", delay) as endpoint:
                    section.row(claim.name, f"{delay} ms", *uploaded(place, endpoint, options, claim))
    return section


def uploaded(place: Path, endpoint: str, options: list[object], claim: Claim) -> list[str]:
    """A conversion to a store against an upload of what it writes."""
    local = place / "made"
    run(reshard("convert", place / "src", local, *options, "--quiet"))
    for path in local.glob("*reshard*"):
        remove(path)
    words = [place / "src", "s3://bench/made", *options, "--endpoint-url", endpoint, "--max-memory", MEMORY, "--json"]
    threads = told(reshard("plan", *words))["uploads"]["at_a_time"]
    whole, part, theirs, anonymous = [], [], [], 0
    for _ in range(PAIRS):
        remove(place / "bucket" / "made")
        found = run([sys.executable, "-m", "benchmarks.object_store", place / "told", *reshard("convert", *words)])
        whole.append(found.seconds)
        anonymous = max(anonymous, found.anonymous)
        part.append(json.loads((place / "told").read_text())["phases"]["writing"])
        remove(place / "bucket" / "raw")
        command = [sys.executable, "-m", "benchmarks.object_writes", endpoint, threads, LEAST_PART_BYTES, local]
        theirs.append(told(command))
    assert wrong_slices(place / "bucket" / "made", MODEL, claim.new, claim.ending) == 0
    ours, upload = median(part), median(theirs)
    seconds = [f"{found:.2f} s" for found in (median(whole), ours, upload)]
    return [str(threads), *seconds, f"{upload / ours:.2f}", f"{anonymous / MIB:.0f} MiB"]
