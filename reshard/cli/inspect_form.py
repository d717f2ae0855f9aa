"""What `inspect` prints of checkpoints whose files are no ranks."""

from __future__ import annotations

import os
from collections import defaultdict
from typing import TYPE_CHECKING

from reshard.cli.inspect import findings_json, show_findings
from reshard.cli.output import say, totals_json, totals_words
from reshard.cli.tables import table
from reshard.text.wording import byte_size, one_line, plural, some_names

if TYPE_CHECKING:
    from reshard.inspection.form import InspectedForm, LaidOut

_MOST_ROWS = 20


def form_json(found: InspectedForm) -> dict[str, object]:
    """As `--json` prints it."""
    contents = found.contents
    return {
        "path": found.path,
        "form": found.form,
        "step": found.step,
        "complete": found.complete,
        "iterations": [
            {"iteration": number, "path": path, "finished": finished, "latest": latest}
            for number, path, finished, latest in found.iterations
        ],
        "files": [
            {"number": number, "file": path, "bytes": nbytes, "names": names}
            for number, path, nbytes, names in found.files
        ],
        "bytes": found.nbytes,
        "full_bytes": found.full_bytes,
        "dtypes": totals_json({} if contents is None else contents.by_dtype()),
        "kinds": totals_json({} if contents is None else contents.by_kind()),
        "tensors": [{**item._asdict(), "shape": list(item.shape), "cuts": list(item.cuts)} for item in found.tensors],
        "values": list(found.values),
        "objects": dict(found.objects),
        "others": list(found.others),
        "findings": findings_json(found.findings),
    }


def show_form(found: InspectedForm, verbose: bool) -> None:
    """For people.

    Args:
        found: what to show.
        verbose: every iteration, file, name and finding.
    """
    what = found.form if found.step is None else f"{found.form}, iteration {found.step}"
    counts = f"{plural(len(found.files), 'file')}, {byte_size(found.nbytes)}, {plural(len(found.tensors), 'tensor')}"
    say(f"{found.path}: {what}: {counts}" + ("" if found.complete else ", not complete"))
    _show_iterations(found, verbose)
    if found.contents is not None:
        say(f"types: {totals_words(found.contents.by_dtype())}")
        say(f"kinds: {totals_words(found.contents.by_kind())}; its tensors whole are {byte_size(found.full_bytes)}")
    if found.values:
        say(f"values: {one_line(', '.join(found.values) if verbose else some_names(found.values))}")
    if found.objects:
        names = list(found.objects)
        say(f"objects: {one_line(', '.join(names) if verbose else some_names(names))}; --json shows their values")
    if found.others:
        say(f"beside the weights: {one_line(', '.join(found.others) if verbose else some_names(found.others))}")
    show_findings(found.findings, verbose)
    _show_files(found, verbose)
    _show_tensors(found, verbose)


def _show_iterations(found: InspectedForm, verbose: bool) -> None:
    if not found.iterations:
        return
    iterations = found.iterations if verbose else found.iterations[-_MOST_ROWS:]
    states = {None: "nothing tells whether it is finished", False: "newer than the last finished one", True: "finished"}
    table(
        "",
        ["iteration", "state"],
        [
            [str(item.number), "latest: the last finished one" if item.latest else states[item.finished]]
            for item in reversed(iterations)
        ],
    )
    if len(iterations) < len(found.iterations):
        say(f"... and {plural(len(found.iterations) - len(iterations), 'older iteration')}; -v shows all")


def _show_files(found: InspectedForm, verbose: bool) -> None:
    if not found.files:
        return
    shown = found.files if verbose else found.files[:_MOST_ROWS]
    rows = [
        [
            "-" if file.number is None else str(file.number),
            one_line(os.path.basename(file.path)),
            byte_size(file.nbytes),
            "-" if file.names is None else str(file.names),
        ]
        for file in shown
    ]
    table("", ["number", "file", "size", "names"], rows)
    if len(shown) < len(found.files):
        say(f"... and {plural(len(found.files) - len(shown), 'file')} more; -v shows all")


def _show_tensors(found: InspectedForm, verbose: bool) -> None:
    """A row per tensor; where these are too many, a row per pattern of names that are alike."""
    from reshard.text.name_patterns import name_patterns

    if not found.tensors:
        return
    rows: list[tuple[str, int, LaidOut]] = [(item.name, 1, item) for item in found.tensors]
    if not verbose and len(rows) > _MOST_ROWS:
        alike: dict[object, list[LaidOut]] = defaultdict(list)
        for item in found.tensors:
            alike[item._replace(name="")].append(item)
        known = {item.name for item in found.tensors}
        rows = [
            (pattern.text, pattern.size, items[0])
            for items in alike.values()
            for pattern in name_patterns([item.name for item in items], known)
        ]
    shown = rows if verbose else rows[:_MOST_ROWS]
    cells = []
    for name, count, item in shown:
        cut = " x ".join(map(str, item.cuts)) if any(cuts > 1 for cuts in item.cuts) else "whole"
        over = "" if item.ranks is None else f" on {plural(item.ranks, 'rank')}"
        lost = f", {item.lost} lost" if item.lost else ""
        cells.append(
            [one_line(name), str(count), item.dtype, str(list(item.shape)), cut + over + lost, str(item.files)]
        )
    table("", ["tensors", "number", "dtype", "shape", "slices", "files"], cells)
    if len(rows) > len(shown):
        left = sum(count for _, count, _ in rows[len(shown) :])
        say(f"... and {plural(left, 'tensor')} more; -v shows all")
