"""Storage with latency: a delay before every read, with requests as for local files and as for remote ones."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import forms
from benchmarks.measure import Cell, Run, Section, memory_backed, mib, remove, run
from benchmarks.synthetic import Model, Scheme, wrong_slices
from benchmarks.throughput import COLUMNS_CUT, SHARDS, Claim, prepare

DELAYS = (0, 1, 5, 20)
DELAYS_OF_FORMS = (5, 20)
LARGE = Model(layers=3, matrices=8, rows=2304, columns=2304)
SMALL = Model(layers=30, matrices=12, rows=64, columns=48)
PARAMETERS = SMALL.layers * SMALL.matrices
WIDE = Scheme(data=8, model=8, sharded=True)
KINDS: list[tuple[str, Model, Claim, list[object]]] = [
    (SHARDS.name, LARGE, SHARDS, ["transform-dir"]),
    (COLUMNS_CUT.name, LARGE, COLUMNS_CUT, ["transform-dir"]),
    (f"{COLUMNS_CUT.name}, one rank", LARGE, COLUMNS_CUT, ["by-rank", 3]),
    (
        f"{PARAMETERS} small ones, 64 ranks to 32",
        SMALL,
        Claim("", 1, WIDE, Scheme(data=4, model=8, sharded=True)),
        ["transform-dir"],
    ),
    (
        f"{PARAMETERS} small ones, 16 ranks to 2",
        SMALL,
        Claim("", 1, Scheme(data=8, model=2, sharded=True), Scheme(model=2)),
        ["transform-dir"],
    ),
]
FORMS = [
    forms.Claim("ranks to 2.0", 1, "ranks", SHARDS.old, "checkpoint2", Scheme(model=4)),
    forms.Claim("ranks to unified", 1, "ranks", SHARDS.old, "unified", Scheme()),
    forms.Claim("ranks to Hugging Face", 1, "ranks", SHARDS.old, "huggingface", Scheme()),
    forms.Claim("2.0 to ranks", 1, "checkpoint2", Scheme(model=8), "ranks", Scheme(model=4)),
    forms.Claim("2.0 to Hugging Face", 1, "checkpoint2", Scheme(model=8), "huggingface", Scheme()),
    forms.Claim("unified to ranks", 1, "unified", Scheme(), "ranks", Scheme(model=8, cut=1)),
    forms.Claim("unified to 2.0", 1, "unified", Scheme(), "checkpoint2", Scheme(model=4)),
    forms.Claim("Hugging Face to ranks", 1, "huggingface", Scheme(), "ranks", Scheme(model=8, cut=1)),
    forms.Claim("Hugging Face to unified", 1, "huggingface", Scheme(), "unified", Scheme()),
]


def measure() -> Section:
    """Measure all kinds at all delays, and all forms."""
    section = Section("Do larger requests help on network file systems?")
    section.say(
        "Time with requests for network file systems (more, larger) over that with those for local disks, "
        "by the delay before every read and open."
    )
    for name, model, claim, command in KINDS:
        with memory_backed() as place:
            options = prepare(place, model, claim)
            source, target = place / "src", place / "made"
            words = [source, target, *options, "--io", "pread"]
            section.row({"kind": name, **compared("", target, DELAYS, words, command)})
            assert command[0] != "transform-dir" or wrong_slices(target, model, claim.new, claim.ending) == 0
    section.say("The same between forms.", detail=True)
    for between in FORMS:
        ratios: dict[str, Cell] = {}
        for model, size in ((LARGE, "large"), (SMALL, f"{PARAMETERS} small")):
            with memory_backed() as place:
                words = forms.prepare(place, model, between)
                # Without what starts the program, and the name of the command.
                words = words[words.index("convert") + 1 :]
                ratios.update(compared(f"{size}, ", place / "made", DELAYS_OF_FORMS, words, ["convert"]))
                assert forms.FORMS[between.target].wrong(place / "made", model, between.new) == 0
        section.row({"kind": between.name, **ratios})
    return section


def compared(
    label: str, target: Path, delays: Sequence[int], words: Sequence[object], command: Sequence[object]
) -> dict[str, Cell]:
    """Remote over local by delay, as a part of a row; the output of the last run stays."""
    remove(target)
    ranks = ["--ranks", command[1]] if command[0] == "by-rank" else []
    plan = slowly(delays[0], "nfs", ["plan", *words, *ranks, "--json"])
    process = subprocess.run(plan, check=True, stdout=subprocess.PIPE)
    ratios: dict[str, Cell] = {f"{label}requests": json.loads(process.stdout)["requests"]["at_a_time"]}
    memory = 0
    for delay in delays:
        measured = [both(target, delay, [*command, *words]) for _ in range(2)]
        local, remote = (min(runs, key=lambda one: one.seconds) for runs in zip(*measured))
        ratios[f"{label}{delay} ms"] = round(remote.seconds / local.seconds, 2)
        memory = max(memory, remote.anonymous)
    return {**ratios, f"{label}memory, MiB": mib(memory)}


def both(target: Path, delay: int, words: Sequence[object]) -> list[Run]:
    """A run as for local files, and one as for remote ones."""
    measured = []
    for kind in ("ext4", "nfs"):
        remove(target)
        measured.append(run(slowly(delay, kind, words)))
    return measured


def slowly(delay: int, file_system: str, words: Sequence[object]) -> list[str]:
    """A command with a delay before every read."""
    return [str(word) for word in [sys.executable, "-m", "benchmarks.slow_reads", delay, file_system, *words]]
