"""Memory of several kinds, the time by `--max-memory`, and a tensor of 8 GiB."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.measure import MIB, Run, Section, directory_in, memory_backed, remove, reshard, run
from benchmarks.synthetic import Model, Scheme, write_strategy
from benchmarks.throughput import COLUMNS_CUT, COLUMNS_JOINED, COLUMNS_TO_FULL, SHARDS, Claim, prepare
from reshard.checkpoints import Data, OutputTensor, lay_out_ckpt
from reshard.defaults import MAX_MEMORY

MODEL = Model(layers=4, matrices=8, rows=2304, columns=2304)
BUDGETS = ("1M", "4M", "8M", "16M", "32M", "64M", "256M")
TURNS = 5
KINDS = [SHARDS, COLUMNS_JOINED, COLUMNS_CUT, COLUMNS_TO_FULL]
HUGE = Model(layers=1, matrices=1, rows=64 * 1024, columns=32 * 1024)


def measure() -> Section:
    """Measure all three."""
    section = Section("Memory")
    idle = run(reshard("transform-dir", "--help"))
    section.say(
        "Peaks of all processes together. Anonymous memory must stay under `--max-memory` plus 100 MiB; of it, "
        f"{idle.anonymous / MIB:.0f} MiB are Python and what it loads for `--help`."
    )
    section.say(
        f"Time by `--max-memory`: shortest of {TURNS} runs in turns, {MODEL.nbytes / 1e9:.1f} GB, and the most "
        f"anonymous and resident memory. The default is {MAX_MEMORY // MIB}M."
    )
    section.table("kind", *BUDGETS)
    for claim in KINDS:
        with memory_backed() as place:
            runs = sweep(place, claim)
            section.row(claim.name, *(f"{min(r.seconds for r in runs):.2f} s" for runs in runs.values()))
            for label, kind in (("anonymous", "anonymous"), ("resident", "resident")):
                peaks = [max(getattr(one, kind) for one in runs) for runs in runs.values()]
                section.row(f"... {label}", *(f"{peak / MIB:.0f} MiB" for peak in peaks))
    one_huge_tensor(section)
    return section


def sweep(place: Path, claim: Claim) -> dict[str, list[Run]]:
    """Runs per budget; in turns, so that a slow moment of the machine does not fall on one budget."""
    words = reshard("transform-dir", place / "src", place / "made", *prepare(place, MODEL, claim))
    measured: dict[str, list[Run]] = {budget: [] for budget in BUDGETS}
    for _ in range(TURNS):
        for budget, runs in measured.items():
            remove(place / "made")
            runs.append(run([*words, "--max-memory", budget]))
    return measured


def one_huge_tensor(section: Section) -> None:
    """A single tensor of 8 GiB to two ranks, from a sparse file, so that only the result takes room."""
    section.say(
        f"One tensor of {HUGE.nbytes / 2**30:.0f} GiB, from a sparse file on disk to memory-backed files; the first "
        "run also brings it into the cache:"
    )
    build = Path(__file__).resolve().parent.parent / "build"
    build.mkdir(exist_ok=True)
    with directory_in(str(build)) as disk, memory_backed() as place:
        if shutil.disk_usage(place).free < HUGE.nbytes * 5 // 4:
            section.say("Skipped: there is not enough room for the result.")
            return
        (name,) = HUGE.names(Scheme(), 0)
        layout = lay_out_ckpt([OutputTensor(name, "Float32", (HUGE.rows, HUGE.columns), HUGE.nbytes)])
        with open(disk / "full.ckpt", "wb") as file:
            file.truncate(layout.size)
            for segment in layout.segments():
                if not isinstance(segment, Data):
                    os.pwrite(file.fileno(), segment.data, segment.offset)
        section.table("kind", "time", "anonymous", "resident")
        for kind, new in (("to 2 row slices", Scheme(model=2)), ("to 2 column slices", Scheme(model=2, cut=1))):
            write_strategy(place / "new", HUGE, new)
            options = ["--src-strategy", "none", "--dst-strategy", place / "new", "--quiet"]
            measured = run(reshard("transform-dir", disk / "full.ckpt", place / "made", *options))
            written = sum(path.stat().st_size for path in (place / "made").glob("rank_*/*"))
            assert written >= HUGE.nbytes
            remove(place / "made")
            section.row(
                kind,
                f"{measured.seconds:.1f} s",
                f"{measured.anonymous / MIB:.0f} MiB",
                f"{measured.resident / MIB:.0f} MiB",
            )


if __name__ == "__main__":
    measure()
