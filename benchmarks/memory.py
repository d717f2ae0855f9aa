"""Memory of several kinds, the time by `--max-memory`, and a tensor of 8 GiB."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from benchmarks.measure import MIB, Run, Section, directory_in, memory_backed, mib, remove, reshard, run
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
    section = Section("How much memory does it need?")
    idle = run(reshard("transform-dir", "--help"))
    swept = {}
    for claim in KINDS:
        with memory_backed() as place:
            swept[claim.name] = sweep(place, claim)
    section.say(
        f"MiB by `--max-memory` (default {MAX_MEMORY // MIB}M), {MODEL.nbytes / 1e9:.1f} GB, all processes "
        f"together. The limit is `--max-memory` plus 100 MiB; `--help` takes {mib(idle.anonymous)} MiB."
    )
    anonymous = {
        name: {budget: mib(max(one.anonymous for one in runs)) for budget, runs in by_budget.items()}
        for name, by_budget in swept.items()
    }
    most = {budget: max(peaks[budget] for peaks in anonymous.values()) for budget in BUDGETS}
    section.row({"kind": "the most of four kinds", **most})
    section.say("The same by kind.", detail=True)
    for name, peaks in anonymous.items():
        section.row({"kind": name, **peaks})
    section.say(f"Seconds by `--max-memory`, shortest of {TURNS} runs.", detail=True)
    for name, by_budget in swept.items():
        section.row({"kind": name, **{b: round(min(one.seconds for one in runs), 2) for b, runs in by_budget.items()}})
    section.say("Resident memory in MiB, pages of mapped files included.", detail=True)
    for name, by_budget in swept.items():
        peaks = {budget: mib(max(one.resident for one in runs)) for budget, runs in by_budget.items()}
        section.row({"kind": name, **peaks})
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
    section.say(f"One tensor of {HUGE.nbytes / 2**30:.0f} GiB.")
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
        for kind, new in (("to 2 row slices", Scheme(model=2)), ("to 2 column slices", Scheme(model=2, cut=1))):
            write_strategy(place / "new", HUGE, new)
            options = ["--src-strategy", "none", "--dst-strategy", place / "new", "--quiet"]
            measured = run(reshard("transform-dir", disk / "full.ckpt", place / "made", *options))
            written = sum(path.stat().st_size for path in (place / "made").glob("rank_*/*"))
            assert written >= HUGE.nbytes
            remove(place / "made")
            section.row(
                {
                    "kind": kind,
                    "reshard, s": round(measured.seconds, 1),
                    "memory, MiB": mib(measured.anonymous),
                    "resident, MiB": mib(measured.resident),
                }
            )
