"""Planning at scale: which source ranks every target rank reads, from strategies alone."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from benchmarks.measure import Section, memory_backed, mib, reshard, run, times
from benchmarks.synthetic import Model, Scheme, write_strategy
from reshard.plan.replicas import ReplicaChoice
from reshard.strategies import read_strategy
from reshard.strategies.files import parse_protobuf, protobuf_bytes
from reshard.strategies.model import RecordedLayout
from tests.corpus import CORPUS

MODEL = Model(layers=48, matrices=42, rows=4096, columns=4096)
OLD = Scheme(stages=16, data=80, model=8, sharded=True)
NEW = Scheme(stages=12, data=80, model=8, sharded=True)
PANGU_ALPHA = CORPUS / "pangu_alpha_2.6B" / "strategy.ckpt"


def measure() -> Section:
    """Plan the synthetic model and, where it is at hand, a production strategy."""
    section = Section("How long does planning take?")
    section.say("Every target rank planned, then `rank-list` of one. Aims: 10 s, 300 MiB, 1 s for `rank-list`.")
    parameters = MODEL.layers * MODEL.matrices
    with memory_backed() as place:
        write_strategy(place / "old", MODEL, OLD)
        write_strategy(place / "new", MODEL, NEW)
        name = f"{OLD.ranks:,} to {NEW.ranks:,} ranks, {parameters:,} parameters"
        row(section, name, place / "old", place / "new", NEW.ranks // 2)
        if not PANGU_ALPHA.exists():
            section.say("Skipped: the PanGu-alpha strategy (512 devices, 1551 layouts), which is not on this machine.")
            return section
        for devices in (1, 384, 512):
            row(section, f"PanGu-alpha, 512 to {devices}", PANGU_ALPHA, resized(place, devices), devices // 2)
    return section


def row(section: Section, name: str, old: Path, new: Path | None, rank: int) -> None:
    target = new or "none"
    process = run([sys.executable, "-m", "benchmarks.planning", old, target])
    listing = times([reshard("rank-list", rank, "--src-strategy", old, "--dst-strategy", target)], 3)[0]
    section.row(
        {
            "strategies": name,
            "all ranks, s": round(process.seconds, 2),
            "memory, MiB": mib(process.anonymous),
            "resident, MiB": mib(process.resident),
            "rank-list, s": round(statistics.median(listing), 2),
        }
    )


def resized(place: Path, devices: int) -> Path | None:
    """The PanGu-alpha strategy for another number of devices: none for one, half the model parallelism for 512."""
    if devices == 1:
        return None
    file = parse_protobuf(PANGU_ALPHA.read_bytes(), str(PANGU_ALPHA))
    assert file is not None
    model = 8 if devices != 512 else 4

    def relaid(layout: RecordedLayout) -> RecordedLayout:
        assert layout.device_matrix == (64, 8)
        step = layout.shard_step and (model if layout.shard_step == 8 else layout.shard_step)
        return layout._replace(device_matrix=(devices // model, model), shard_step=step)

    layouts = {name: relaid(layout) for name, layout in file.layouts.items()}
    path = place / f"pangu_alpha_{devices}.ckpt"
    path.write_bytes(protobuf_bytes(file._replace(layouts=layouts)))
    return path


def plan_every_rank(old: str, new: str) -> None:
    """Find the source ranks of every target rank."""
    choice = ReplicaChoice(read_strategy(old), read_strategy(new))
    for rank in range(choice.target.device_count):
        choice.ranks(rank)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        plan_every_rank(*sys.argv[1:])
    else:
        measure()
