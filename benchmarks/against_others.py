"""reshard, MindSpore and torch against `cp -r` of the same output, for the chart: a group is one run."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path

from benchmarks import against_mindspore, pytorch
from benchmarks.measure import Cell, Run, Section, compare, memory_backed, mib, remove, reshard, run
from benchmarks.synthetic import wrong_slices
from benchmarks.throughput import prepare

PAIRS = 6


def measure() -> Section:
    """Measure the two groups."""
    section = Section("How does it compare with other tools?")
    section.say(
        f"Time over that of `cp -r` of the same output: geometric mean of {PAIRS} rounds, in each of which every tool "
        "and `cp` run once. Start-up counts."
    )
    for kind, rows in (("8 ranks to 4, MindSpore files", _ranks()), ("DCP to Hugging Face", _dcp())):
        for row in rows:
            section.row({"kind": kind, **row})
    return section


def _ranks() -> list[dict[str, Cell]]:
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
    return tools


def _dcp() -> list[dict[str, Cell]]:
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
    return tools


def _tools(place: Path, ours: list[object], others: Mapping[str, list[object]]) -> list[dict[str, Cell]]:
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
    rows: list[dict[str, Cell]] = []
    # The first round warms up.
    copies = runs.pop("cp")[1:]
    for name, found in runs.items():
        compared = compare(found[1:], copies)
        rows.append(
            {
                "tool": name,
                "ratio": round(compared.ratio, 2),
                "lowest": round(compared.low, 2),
                "highest": round(compared.high, 2),
                "whole, s": round(compared.ours, 2),
                "memory, MiB": mib(compared.anonymous),
            }
        )
    return rows


def _version(python: str, package: str) -> str:
    words = [python, "-c", f"import {package}; print({package}.__version__)"]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()[-1]
    return ".".join(text.partition("+")[0].split(".")[:2])
