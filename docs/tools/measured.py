"""The page of measurements, from the files that `python -m benchmarks` wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from docs.tools import chart
from docs.tools.pages import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
SCRIPTS = (
    "against_others",
    "throughput",
    "forms",
    "pytorch",
    "megatron",
    "against_mindspore",
    "against_mindformers",
    "names",
    "dequantize",
    "memory",
    "cores",
    "growth",
    "many_ranks",
    "planning",
    "start_up",
    "reading",
    "checksums",
    "io",
    "on_disk",
    "slow_storage",
    "object_store",
    "object_targets",
)
"""The benchmarks, in the order of the page."""

# What only the files of results have, for a page of a screen per question.
_DETAILS = {
    *("aim", "touched, GB", "lowest", "highest", "ratio of medians", "CPU ratio", "anonymous, MiB", "resident, MiB"),
    *("cp, s", "none, s", "crc32, s", "mmap, s", "pread, s", "upload, s", "ranges, s", "opening, s"),
    *("its start-up, s", "CPU, s", "torch's CPU, s", "requests", "parts at a time", "writes per GB"),
    *("smaller, GB", "larger, GB", "smaller, s", "larger, s", "whole, GB/s", "-j 1, GB/s", "cp, GB/s"),
    *("lower quartile, ms", "upper quartile, ms", "CPU, s per GB"),
}

_HEAD = """# Benchmarks

Each section has the command that measures it again, and the date. The command writes this page and
`benchmarks/results/NAME.json`, which has more columns and tables. `make bench` runs all in half an hour.

{machine}.
Files are in memory unless a section states otherwise. A ratio is the time of `reshard` over the other time: below 1
is faster. It is the geometric mean of pairs of runs in alternating order. Where a machine has no free pages, `cp`
takes twice as long; sections of 2026-11-29 were measured with free pages. `cp` uses one core and `reshard` all. From
DCP, a third of the processor time is the check of its CRCs. Memory is the anonymous memory of all processes. All
output was checked. [Reasons, and what was dropped](../CONTRIBUTING.md#measured).
"""


def page() -> str:
    """The text of the page."""
    results = {
        name: json.loads(file.read_text("utf-8")) for name in SCRIPTS if (file := RESULTS / f"{name}.json").exists()
    }
    usual = Counter(map(_machine, results.values())).most_common(1)[0][0]
    sections = (_section(name, measured, usual) for name, measured in results.items())
    return "\n".join([_HEAD.format(machine=usual), *sections])


def cells(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """The shown columns of a table, and its rows; numbers of a column have equally many decimals."""
    columns = list(dict.fromkeys(column for row in rows for column in row if column not in _DETAILS))
    yield columns
    decimals = {}
    for column in columns:
        texts = (str(row[column]) for row in rows if isinstance(row.get(column), float))
        decimals[column] = max((len(text.partition(".")[2]) for text in texts), default=0)
    for row in rows:
        values = [(row.get(column, ""), decimals[column]) for column in columns]
        yield [value if isinstance(value, str) else f"{value:,.{places}f}" for value, places in values]


def _machine(measured: Mapping[str, Any]) -> str:
    return (
        f"{measured['system']}, {measured['cores']} cores, {measured['memory_gib']} GiB of memory, "
        f"Python {measured['python']}, NumPy {measured['numpy']}"
    )


def _section(name: str, measured: Mapping[str, Any], usual: str) -> str:
    stamp = f"`python -m benchmarks {name}`, {measured['date']}"
    # The benchmark before this one has kept all cores busy.
    if measured["load"] > measured["cores"] + 1:
        stamp += f", on a busy machine (load average {measured['load']})"
    if _machine(measured) != usual:
        stamp += f", {_machine(measured)}"
    lines = [f"## {measured['title']}", "", f"{stamp}.", ""]
    if name == "against_others":
        lines += [
            '<picture><source media="(prefers-color-scheme: dark)" srcset="pictures/benchmarks-dark.svg">'
            f'<img alt="{chart.TITLE}" src="pictures/benchmarks-light.svg"></picture>',
            "",
        ]
    for table in measured["tables"]:
        if table.get("detail"):
            continue
        lines += [table["about"], ""]
        if table["rows"]:
            columns, *rows = cells(table["rows"])
            lines += [" | ".join(row) for row in (columns, ["---"] * len(columns), *rows)]
            lines.append("")
    return "\n".join(lines)
