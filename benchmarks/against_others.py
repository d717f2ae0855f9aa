"""reshard, MindSpore and torch against `cp -r` of the same output, for the chart: a group is one run."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import against_mindspore, pytorch
from benchmarks.measure import MIB, Run, Section, compare, memory_backed, remove, reshard, run
from benchmarks.synthetic import wrong_slices
from benchmarks.throughput import MODEL, prepare
from reshard._version import __version__

RESULTS = Path(__file__).resolve().parent / "results" / "against_others.json"
"""What the chart is drawn from."""

PAIRS = 6

Commands = Mapping[str, Callable[[], Run]]


def measure() -> Section:
    """Measure the two groups, and write the numbers of the chart."""
    section = Section("Against other tools")
    section.say(
        f"Time over that of `cp -r` of the same output: geometric mean of {PAIRS} rounds, in each of which every tool "
        "and `cp` run once, and the spread of single rounds. Start-up counts. Memory is the anonymous peak of all "
        "processes."
    )
    section.table("kind", "tool", "time over `cp`", "spread", "seconds", "memory")
    groups = [group for group in (_ranks(), _dcp()) if group is not None]
    for group in groups:
        for tool in group["tools"]:
            section.row(
                group["title"],
                tool["name"],
                f"{tool['ratio']:.2f}",
                f"{tool['low']:.2f} to {tool['high']:.2f}",
                f"{tool['seconds']:.2f} s",
                f"{tool['memory'] / MIB:.0f} MiB",
            )
    about = {
        "date": str(datetime.date.today()),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "reshard": __version__,
        "storage": "files in memory",
        "rounds": PAIRS,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**about, "groups": groups}, indent=1) + "\n", encoding="utf-8")
    return section


def _ranks() -> dict[str, Any]:
    """Rank files of MindSpore, 8 ranks to 4."""
    claim, model = against_mindspore.CLAIM, against_mindspore.MODEL
    python = against_mindspore.mindspore_python()
    with memory_backed() as place:
        options = prepare(place, model, claim)
        words = reshard("transform-dir", place / "src", place / "made", *options)
        others = {}
        if python is not None:
            strategies = [place / name / "ckpt_strategy_rank_0.ckpt" for name in ("old", "new")]
            script = [python, "-c", against_mindspore.TRANSFORM, place / "src", place / "theirs", *strategies]
            others[f"MindSpore {_version(python, 'mindspore')}"] = script
        tools = _tools(place, words, others)
        assert wrong_slices(place / "made", model, claim.new) == 0
    return {"title": "8 ranks to 4, MindSpore files", "bytes": model.nbytes, "tools": tools}


def _dcp() -> dict[str, Any]:
    """A DCP directory of torch to Hugging Face's form."""
    python = pytorch.torch_python()
    with memory_backed() as place:
        words = pytorch.prepare(place, pytorch.DCP_TO_HF)
        others = {}
        if python is not None:
            torch = f"torch {_version(python, 'torch')}"
            for name, script in (
                ("load all, save_file", pytorch.TO_HUGGING_FACE),
                ("dcp_to_torch_save", pytorch.TO_TORCH_SAVE),
            ):
                others[f"{torch}: {name}"] = [python, "-c", script, place / "src", place / "theirs"]
        tools = _tools(place, words, others)
        assert pytorch.wrong(place, pytorch.DCP_TO_HF) == 0
    return {"title": "DCP to Hugging Face", "bytes": MODEL.nbytes, "tools": tools}


def _tools(place: Path, ours: list[object], others: Mapping[str, list[object]]) -> list[dict[str, Any]]:
    """Every tool in rounds with a copy of what ours makes, the order turning from round to round."""
    made, theirs, copied, pattern = (place / name for name in ("made", "theirs", "copied", "pattern"))
    run(ours)
    made.rename(pattern)
    commands: dict[str, tuple[list[object], Path]] = {
        "cp": (["cp", "-r", pattern, copied], copied),
        "reshard": (ours, made),
        **{name: (["sh", "-c", 'exec "$@" >/dev/null 2>&1', "sh", *words], theirs) for name, words in others.items()},
    }
    runs: dict[str, list[Run]] = {name: [] for name in commands}
    order = [*commands]
    for turn in range(PAIRS + 1):
        for name in (*order[turn % len(order) :], *order[: turn % len(order)]):
            words, target = commands[name]
            remove(target)
            runs[name].append(run(words))
            if name != "reshard":
                remove(target)
    rows = []
    # The first round warms up.
    copies = runs.pop("cp")[1:]
    for name, found in runs.items():
        compared = compare(found[1:], copies)
        rows.append(
            {
                "name": name,
                "ratio": round(compared.ratio, 3),
                "low": round(compared.low, 3),
                "high": round(compared.high, 3),
                "seconds": round(compared.ours, 3),
                "memory": compared.anonymous,
            }
        )
    return rows


def _version(python: str, package: str) -> str:
    words = [python, "-c", f"import {package}; print({package}.__version__)"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]
    return ".".join(text.partition("+")[0].split(".")[:2])


if __name__ == "__main__":
    measure()
