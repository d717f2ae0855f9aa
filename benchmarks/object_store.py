"""Sources in an object store with latency: conversions against reading the same bytes in large ranges."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import Cell, Section, memory_backed, mib, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare

DELAYS = (50, 100)
MODEL = Model(layers=10, matrices=8, rows=2304, columns=2304)
MEMORY = "512M"
# Bytes a second of the link: what a few cores can take, so that it is what bounds both.
RATE = 400e6
PAIRS = 3
# Such files say in their beginning where everything is.
SAFETENSORS = Claim("4 ranks of .safetensors, rows", 0.0, Scheme(model=4), Scheme(model=2), "safetensors")
KINDS = [SHARDS, SAFETENSORS, COLUMNS_CUT]


def measure() -> Section:
    """Measure all kinds at all delays."""
    section = Section("How fast from an object store?")
    section.say(
        f"A server on the same machine, {RATE / 1e6:.0f} MB/s, waits before every answer. "
        f"{MODEL.nbytes / 1e9:.2f} GB, `--max-memory {MEMORY}`, medians of {PAIRS}. *Ranges*: the same "
        "bytes read by boto3; *bytes*: the same work in the conversion."
    )
    for claim in KINDS:
        with memory_backed() as place:
            options = prepare(place, MODEL, claim)
            if claim is SAFETENSORS:
                _as_safetensors(place, claim)
            for delay in DELAYS:
                with served(place / "src", delay) as endpoint:
                    record: dict[str, Cell] = {"kind": claim.name, "delay, ms": delay}
                    section.row({**record, **compared(place, endpoint, options, claim)})
    return section


def compared(place: Path, endpoint: str, options: list[object], claim: Claim) -> dict[str, Cell]:
    """A conversion against reading in large ranges, as a part of a row."""
    target, raw = place / "made", place / "raw"
    words = ["s3://bench", target, *options, "--endpoint-url", endpoint, "--max-memory", MEMORY, "--json"]
    requests = told(reshard("plan", *words))["requests"]
    at_a_time, size = requests["at_a_time"], requests["most_bytes"]
    whole, part, theirs, anonymous = [], [], [], 0
    for _ in range(PAIRS):
        remove(target)
        raw.unlink(missing_ok=True)
        result = run([sys.executable, "-m", "benchmarks.object_store", place / "told", *reshard("convert", *words)])
        whole.append(result.seconds)
        anonymous = max(anonymous, result.anonymous)
        part.append(json.loads((place / "told").read_text())["phases"]["writing"])
        command: list[object] = [
            sys.executable,
            "-m",
            "benchmarks.object_reads",
            endpoint,
            at_a_time,
            size,
            place / "src",
            raw,
        ]
        theirs.append(told(command))
    assert wrong_slices(target, MODEL, claim.new, claim.ending) == 0
    ours, ranges = median(part), median(theirs)
    return {
        "requests": at_a_time,
        "whole, s": round(median(whole), 2),
        "bytes, s": round(ours, 2),
        "ranges, s": round(ranges, 2),
        "ranges over bytes": round(ranges / ours, 2),
        "memory, MiB": mib(anonymous),
    }


def told(command: Sequence[object]) -> Any:
    """What a command prints, as JSON."""
    return json.loads(subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True).stdout)


def _as_safetensors(place: Path, claim: Claim) -> None:
    """Put .safetensors of the same tensors in place of the source."""
    same = ["--src-strategy", place / "old", "--dst-strategy", "same", "--format", "safetensors", "--quiet"]
    run(reshard("convert", place / "src", place / "other", *same))
    remove(place / "src")
    (place / "other").rename(place / "src")
    for path in place.glob("src/.reshard*"):
        remove(path)
    for path in place.glob("src/reshard-*"):
        path.unlink()


@contextlib.contextmanager
def served(directory: Path, delay: int, rate: float = RATE) -> Iterator[str]:
    """The endpoint of a server process that has a directory as a bucket; credentials are in the environment."""
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_EC2_METADATA_DISABLED="true")
    command = [sys.executable, "-m", "benchmarks.object_server", str(directory), str(delay), str(rate)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate("")


if __name__ == "__main__":
    # A command whose output is kept, so that it can be measured as others are.
    with open(sys.argv[1], "w", encoding="utf-8") as kept:
        sys.exit(subprocess.run(sys.argv[2:], stdout=kept, check=False).returncode)
