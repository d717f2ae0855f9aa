"""Sources in an object store with latency: conversions against reading the same bytes in large ranges."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from benchmarks.measure import MIB, Compared, Section, memory_backed, pairs, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare

DELAYS = (20, 50, 100)
MODEL = Model(layers=10, matrices=8, rows=2304, columns=2304)
MEMORY = "512M"
PAIRS = 3
# Such files say in their beginning where everything is.
SAFETENSORS = Claim("4 ranks of .safetensors, rows", 0.0, Scheme(model=4), Scheme(model=2), "safetensors")
KINDS = [SHARDS, SAFETENSORS, COLUMNS_CUT]


def measure() -> Section:
    """Measure all kinds at all delays."""
    section = Section("Object stores")
    section.say(
        f"A server process on the loopback interface that waits before every answer; {MODEL.nbytes / 1e9:.2f} GB, from "
        f"there to memory, with `--max-memory {MEMORY}`. *Ranges* is what reading all of the source's bytes in large "
        "ranges takes, as many at a time as the conversion has under way and of the same size, into one file. "
        f"Over {PAIRS} alternating pairs; server and client share the machine."
    )
    section.table("kind", "delay", "requests", "conversion", "ranges", "conversion over ranges", "anonymous")
    for claim in KINDS:
        with memory_backed() as place:
            options = prepare(place, MODEL, claim)
            if claim is SAFETENSORS:
                _as_safetensors(place, claim)
            for delay in DELAYS:
                with served(place / "src", delay) as endpoint:
                    at_a_time, found = compared(place, endpoint, options, claim)
                section.row(
                    claim.name,
                    f"{delay} ms",
                    str(at_a_time),
                    f"{found.ours:.2f} s",
                    f"{found.theirs:.2f} s",
                    f"{found.ratio:.2f}",
                    f"{found.anonymous / MIB:.0f} MiB",
                )
    return section


def compared(place: Path, endpoint: str, options: list[object], claim: Claim) -> tuple[int, Compared]:
    """A conversion against reading in large ranges; and how many requests both have under way."""
    made, raw = place / "made", place / "raw"
    words = ["s3://bench", made, *options, "--endpoint-url", endpoint, "--max-memory", MEMORY]
    # Without -q, which says nothing at all.
    told = subprocess.run(
        [str(word) for word in reshard("plan", *words, "--json")], check=True, capture_output=True, text=True
    )
    requests = json.loads(told.stdout)["requests"]
    at_a_time, size = requests["at_a_time"], requests["most_bytes"]

    def ours() -> object:
        remove(made)
        return run(reshard("convert", *words))

    def theirs() -> object:
        raw.unlink(missing_ok=True)
        return run([sys.executable, "-m", "benchmarks.object_reads", endpoint, at_a_time, size, place / "src", raw])

    found = pairs(ours, theirs, PAIRS)  # type: ignore[arg-type]
    assert wrong_slices(made, MODEL, claim.new, claim.ending) == 0
    return at_a_time, found


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
def served(directory: Path, delay: int) -> Iterator[str]:
    """The endpoint of a server process that has a directory as a bucket; credentials are in the environment."""
    os.environ.update(AWS_ACCESS_KEY_ID="none", AWS_SECRET_ACCESS_KEY="none", AWS_EC2_METADATA_DISABLED="true")
    command = [sys.executable, "-m", "benchmarks.object_server", str(directory), str(delay)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        process.communicate("")


if __name__ == "__main__":
    measure()
