"""What `--checksum crc32` costs: conversions with it against the same without."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.measure import Compared, Run, Section, directory_in, memory_backed, pairs, remove, reshard, run
from benchmarks.on_disk import BUILD
from benchmarks.synthetic import Model
from benchmarks.throughput import COLUMNS_CUT, COLUMNS_JOINED, COLUMNS_TO_FULL, SHARDS, Claim, prepare
from reshard.storage.local import file_system_of

PAIRS = 8
MODEL = Model(layers=8, matrices=8, rows=2304, columns=2304)


class Kind(NamedTuple):
    """A conversion, and whether only its last rank is converted."""

    claim: Claim
    by_rank: bool = False


KINDS = [Kind(SHARDS), Kind(COLUMNS_CUT), Kind(COLUMNS_TO_FULL), Kind(COLUMNS_JOINED), Kind(COLUMNS_JOINED, True)]


def cost(place: Path, kind: Kind) -> Compared:
    """Measure a conversion with checksums against one without."""
    target = place / "made"
    command = ["by-rank", kind.claim.new.ranks - 1] if kind.by_rank else ["transform-dir"]
    words = reshard(*command, place / "src", target, *prepare(place, MODEL, kind.claim), "--checksum")

    def convert(checksum: str) -> Run:
        remove(target)
        return run([*words, checksum])

    return pairs(lambda: convert("crc32"), lambda: convert("none"), PAIRS)


def measure() -> Section:
    """Measure in memory and on a disk."""
    section = Section("What do checksums cost?")
    BUILD.mkdir(exist_ok=True)
    section.say(f"{MODEL.nbytes / 1e9:.1f} GB, `--checksum crc32` against `none`, {PAIRS} pairs.")
    for kind in KINDS:
        with memory_backed() as place:
            name = f"by-rank: {kind.claim.name}" if kind.by_rank else kind.claim.name
            section.row({"kind": name, **cost(place, kind).row("crc32", "none")})
    with directory_in(str(BUILD)) as place:
        name = f"{SHARDS.name}, on {file_system_of(str(BUILD)) or 'a disk'}"
        section.row({"kind": name, **cost(place, Kind(SHARDS)).row("crc32", "none")})
    return section
