"""inspect: the contents of a checkpoint of any form, from headers and names alone."""

from __future__ import annotations

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.asked import Source
from reshard.cli import options
from reshard.cli.command import argument, command
from reshard.cli.output import echo_json, is_json, is_verbose, say, show_notes, shown_text, totals_words
from reshard.cli.tables import say_more, table
from reshard.errors import UsageError
from reshard.forms.registry import form_of
from reshard.storage import absolute, exists, is_directory
from reshard.text.messages import (
    byte_size,
    full_text,
    one_line,
    plural,
    some_names,
    stepped_ranges,
    stepped_rank_ranges,
)

if TYPE_CHECKING:
    from reshard.checkpoints import CheckpointIndex
    from reshard.inspection.checkpoint import Inspected, InspectedStep
    from reshard.inspection.contents import Finding, InspectedContents

T = TypeVar("T", bound=Any)

# Rows for a screen of 50 lines.
_MAX_ROWS = 20
_MAX_FINDINGS = 12


@command(
    "inspect",
    """
reshard inspect ckpt/
reshard inspect ckpt/ --strategy src_strategy.ckpt
reshard inspect ckpt/rank_0
reshard inspect iterations/ --step 1000
reshard inspect ckpt/rank_0/net-3_10.ckpt
""",
)
@argument("path")
@options.group(
    Source,
    *options.STORED,
    path="path",
    strategy={
        "names": ("--strategy", "--src-strategy"),
        "help": "Strategy that a tree was saved with; it decides which steps are complete.",
    },
)
@options.json_output
@options.verbose("Every name, step and finding, nothing abbreviated.")
@options.common
def inspect(source: Source) -> None:
    """Show the contents of the checkpoint at PATH: of any form, of one rank, or in one file.

    Only names, sizes and headers are read: of a rank tree, the headers of the newest step or of --step. With
    --strategy, steps are checked as a conversion checks them, from the newest to the first complete one, and
    missing slices are listed. Without it, the column "complete?" is a guess. Findings are problems that a
    conversion would refuse; the exit status is 0 all the same. Of other forms than rank trees, iterations, files,
    tensors, their layouts and missing parts are shown.
    """
    path, strategy, step = source.path, source.strategy, source.step
    by_rank = form_of(path).options.by_rank
    one_file = by_rank and "{rank}" not in path and exists(path) and not is_directory(path)
    if one_file:
        if source != Source(path):
            raise UsageError(
                f"{path} is one file; --strategy, --step and --file-suffix are for rank trees",
                hint="name the directory that holds rank_0/, rank_1/ ...",
            )
        _inspect_file(path)
        return
    from reshard.inspection.checkpoint import inspect as inspect_checkpoint
    from reshard.strategies import read_strategy

    judged_by = None if strategy is None else read_strategy(strategy)
    if judged_by is not None:
        show_notes(judged_by.notes)
    inspected = inspect_checkpoint(source, judged_by)
    if is_json():
        echo_json(_tree_json(inspected, step) if by_rank else _form_json(inspected))
    elif by_rank:
        _show_tree(inspected, step)
    else:
        _show_form(inspected)


def _file_json(path: str, index: CheckpointIndex, contents: InspectedContents) -> dict[str, object]:
    from reshard.inspection.contents import conversion_findings

    kinds = {item.name: item.kind for item in contents.stored}
    rows = [
        {"name": one.name, "dtype": one.dtype, "shape": one.shape, "bytes": one.nbytes, "records": len(one.extents)}
        for one in index.tensors.values()
    ]
    return {
        "file": path,
        "format": index.format,
        "bytes": index.size,
        "crc": index.crc,
        "metadata": index.metadata,
        "remove_redundancy": bool(contents.deduplicated),
        **_totals_json(contents),
        "findings": list(conversion_findings(contents)),
        "tensors": [{**row, "kind": kinds[str(row["name"])]} for row in rows],
    }


def _totals_json(contents: InspectedContents | None) -> dict[str, object]:
    by_dtype, by_kind = ({}, {}) if contents is None else (contents.by_dtype(), contents.by_kind())
    return {"dtypes": by_dtype, "kinds": by_kind}


def _tree_json(tree: Inspected, step: str) -> dict[str, object]:
    latest = None
    if tree.strategy is not None and step == "latest":
        latest = {"found": tree.latest is not None, "step": tree.latest.step if tree.latest is not None else None}
    return {
        "path": tree.path,
        "ranks": tree.ranks,
        "strategy": tree.strategy,
        "latest": latest,
        "findings": tree.findings,
        "steps": [_step_json(item) for item in tree.steps],
    }


def _step_json(step: InspectedStep) -> dict[str, object]:
    lost: dict[frozenset[int], list[str]] = defaultdict(list)
    for item in step.lost:
        lost[item.ranks].append(item.parameter)
    return {
        "step": step.step,
        "ranks": step.ranks,
        "files": [file.path for file in step.files],
        "bytes": step.nbytes,
        "absent_ranks": step.absent,
        "ambiguous": step.ambiguous,
        "saved_at": step.saved_at,
        "one_per_replica_group": step.one_per_group,
        "complete": step.complete,
        "reasons": step.missing,
        "lost": [{"parameters": names, "ranks": ranks} for ranks, names in lost.items()],
        "not_saved": step.not_saved,
        "damaged": [{"rank": rank, "reason": reason} for rank, reason in step.damaged.items()],
        "full_bytes": step.full_bytes,
        "contents": None if step.contents is None else _contents_json(step.contents),
    }


def _contents_json(contents: InspectedContents) -> dict[str, object]:
    return {
        "formats": contents.formats,
        "files_with_crc": contents.with_crc,
        "files_with_remove_redundancy": contents.deduplicated,
        **_totals_json(contents),
        "sets": [{"ranks": ranks, "names": names} for ranks, names in contents.sets],
        "tensors": contents.stored,
    }


def _form_json(form: Inspected) -> dict[str, object]:
    shown = form.shown
    return {
        "path": form.path,
        "form": form.form.name,
        "step": shown.step,
        "complete": shown.complete,
        "iterations": [
            {"iteration": number, "path": path, "finished": finished, "latest": latest}
            for number, path, finished, latest in form.iterations
        ],
        "files": [
            {"number": number, "file": path, "bytes": nbytes, "names": names}
            for number, path, nbytes, names, _ in shown.files
        ],
        "bytes": shown.nbytes,
        "full_bytes": shown.full_bytes or 0,
        **_totals_json(shown.contents),
        "tensors": form.tensors(),
        "values": [] if shown.checkpoint is None else list(shown.checkpoint.values()),
        "objects": form.objects,
        "others": [] if shown.checkpoint is None else shown.checkpoint.extra_files,
        "quantised": form.quantised,
        "findings": form.findings,
    }


def _inspect_file(path: str) -> None:
    from reshard.inspection.contents import contents_of, conversion_findings, inspect_file

    index = inspect_file(path)
    contents = contents_of({0: index})
    if is_json():
        echo_json(_file_json(path, index, contents))
        return
    crc = "no CRC" if index.crc is None else f"CRC {index.crc:08x}"
    say(f"{path}: {index.format}, {byte_size(index.size)}, {plural(len(index.tensors), 'tensor')}, {crc}")
    _show_totals(contents)
    marks = {key: value for key, value in index.metadata.items() if key not in index.tensors and key != "crc_num"}
    if marks:
        say("metadata: " + ", ".join(f"{one_line(key)}={one_line(value)}" for key, value in marks.items()))
    _show_findings([*conversion_findings(contents)])
    _show_tensors(contents, per_file=True)


def _show_totals(contents: InspectedContents) -> None:
    for title, totals in (("types", contents.by_dtype()), ("kinds", contents.by_kind())):
        if totals:
            say(f"{title}: {totals_words(totals)}")


def _by_pattern(items: Sequence[T], kind: Callable[[T], object]) -> list[tuple[str, int, T]]:
    """For each tensor its name and 1; if these are too many, for each pattern of names their number, and an example."""
    from reshard.text.names import name_patterns

    if is_verbose() or len(items) <= _MAX_ROWS:
        return [(item.name, 1, item) for item in items]
    groups: dict[object, list[T]] = defaultdict(list)
    for item in items:
        groups[kind(item)].append(item)
    all_names = {item.name for item in items}
    return [
        (pattern.text, pattern.size, group[0])
        for group in groups.values()
        for pattern in name_patterns([item.name for item in group], all_names)
    ]


def _first_rows(items: Sequence[T]) -> Sequence[T]:
    return items if is_verbose() else items[:_MAX_ROWS]


def _show_tensors(contents: InspectedContents, per_file: bool = False) -> None:
    """A row per tensor; if these are too many, a row per pattern of names of one type and shape."""
    plain = is_verbose() or len(contents.stored) <= _MAX_ROWS
    rows = _by_pattern(contents.stored, lambda item: (item.dtypes, item.shapes, item.files))
    columns = ["tensor", "dtype", "shape", "size"] if plain else ["tensors", "number", "dtype", "shape", "size each"]
    cells = []
    for name, count, item in _first_rows(rows):
        number = [] if plain else [str(count)]
        # With several shapes only a mean size exists.
        size = ("about " if len(item.shapes) > 1 else "") + byte_size(item.nbytes // item.files)
        files = [] if per_file else [str(item.files)]
        cells.append([name, *number, ",".join(item.dtypes), _shapes(item.shapes), size, *files])
    table("", columns if per_file else [*columns, "files"], cells)
    say_more(sum(count for _, count, _ in rows[len(cells) :]), "tensor")


def _shapes(shapes: Sequence[tuple[int, ...]]) -> str:
    return str(list(shapes[0])) + (f" and {len(shapes) - 1} more" if len(shapes) > 1 else "")


def _show_tree(tree: Inspected, step: str) -> None:
    size = byte_size(sum(item.nbytes for item in tree.steps))
    ranks = {rank for item in tree.steps for rank in item.ranks}
    of_whom = f"rank {tree.ranks[0]}" if tree.one_rank else plural(len(ranks), "rank")
    say(f"{tree.path}: {of_whom}, {plural(len(tree.steps), 'step')}, {size}")
    judged = tree.strategy is not None
    shown = _first_rows(tree.steps)
    rows = []
    for item in shown:
        cells = [item.step or "-", stepped_ranges(item.ranks), str(len(item.files)), byte_size(item.nbytes)]
        rows.append([*cells, _state(item, judged)])
    heads = ["step", "ranks", "files", "size", "complete" if judged else "complete?"]
    if tree.one_rank:
        # One rank does not show whether steps are complete.
        heads, rows = heads[:-1], [row[:-1] for row in rows]
    table("", heads, rows)
    if len(shown) < len(tree.steps):
        say(f"... and {plural(len(tree.steps) - len(shown), 'older step')}; -v shows all")
    for item in tree.steps:
        if item.complete is False:
            say(f"{_label(item)} is not complete:")
            _show_lines(item.missing)
    if judged and step == "latest":
        say("latest: no complete step" if tree.latest is None else f"latest takes {_label(tree.latest)}")
    elif tree.one_rank:
        root = shlex.quote(os.path.dirname(absolute(tree.path)))
        say(f"the directory of one rank; `reshard inspect {root}` shows all ranks and which steps are complete")
    elif not judged:
        say("to check which steps are complete: add --strategy FILE, DIR or none")
    _show_findings(tree.findings)
    # The chosen step; without one, the newest that was read.
    detailed = [item for item in tree.steps if item.contents is not None]
    for item in detailed if is_verbose() else [tree.shown] if detailed else []:
        _show_contents(item)


def _label(step: InspectedStep) -> str:
    return f"step {step.step}" if step.step is not None else "the checkpoint without a step in its name"


_SAVED_AT = {
    "breakpoint": "saved at a fault (_breakpoint)",
    "ttp": "saved at a fault (ttp)",
    "end of life": "saved at the end of a process's life",
}


def _state(step: InspectedStep, judged: bool) -> str:
    words = []
    if step.ambiguous:
        words.append("ambiguous")
    elif step.complete is not None:
        words.append("yes" if step.complete else "no")
    elif judged:
        words.append("not looked at")
    else:
        words.append(f"not on {stepped_rank_ranges(step.absent)}" if step.absent else "on all ranks")
        # Groups of replicas are of one size, nearly always.
        if step.absent and not (len(step.ranks) + len(step.absent)) % max(1, len(step.ranks)):
            words.append("torn or saved by one rank of each replica group")
    if step.one_per_group and step.complete is not False:
        words.append("one rank of each replica group, as at an end of life")
    elif step.absent and step.complete:
        words.append(f"without {stepped_rank_ranges(step.absent)}, but with their replicas")
    if step.damaged:
        words.append(f"{plural(len(step.damaged), 'file')} damaged")
    if step.saved_at is not None:
        words.append(_SAVED_AT[step.saved_at])
    return ", ".join(words)


def _show_findings(findings: Sequence[Finding]) -> None:
    """Findings as lines; errors of a conversion are marked."""
    shown = findings if is_verbose() else findings[:_MAX_FINDINGS]
    for finding in shown:
        first, *details = shown_text(finding.text).split("\n")
        of = "" if finding.step is None else f" of step {finding.step}"
        _show_lines([first], f"a conversion{of} refuses: " if finding.refuses else "note: ")
        _show_lines(details)
        _show_lines(finding.hint.split("\n") if finding.hint else [])
    if len(shown) < len(findings):
        say(f"... and {plural(len(findings) - len(shown), 'more finding')}; -v shows all")


def _show_lines(lines: Sequence[str], before: str = "  ") -> None:
    """Lines, limited to a screen."""
    for line in map(full_text, lines) if is_verbose() else lines[:_MAX_FINDINGS]:
        say(before + line)
    if not is_verbose() and len(lines) > _MAX_FINDINGS:
        say(f"{before}... and {len(lines) - _MAX_FINDINGS} more; -v shows all")


def _show_contents(step: InspectedStep) -> None:
    from reshard.text.names import pattern_lines

    contents = step.contents
    if contents is None:
        return
    files = sum(len(ranks) for ranks, _ in contents.sets)
    full_size = "" if step.full_bytes is None else f"; its parameters whole are {byte_size(step.full_bytes)}"
    counts = [plural(files, "file"), *contents.formats, f"{contents.with_crc} with CRC"]
    say(f"\nheaders of {_label(step)}: {', '.join(counts)}, {plural(len(contents.stored), 'name')}{full_size}")
    _show_totals(contents)
    sets = contents.sets
    if len(sets) == 1:
        say("all files hold the same names")
    elif sets:
        say(f"{len(sets)} sets of names (pipeline stages, a de-duplicated save, or files that lack something):")
        _show_lines([f"{stepped_rank_ranges(ranks)}: {plural(len(names), 'name')}" for ranks, names in sets])
    if step.not_saved:
        say(f"in the strategy but in no file: {plural(len(step.not_saved), 'parameter')}")
        all_names = {item.name for item in contents.stored}.union(step.not_saved)
        for line in step.not_saved if is_verbose() else pattern_lines(step.not_saved, all_names, 5):
            say(f"  {line}")
    _show_tensors(contents)


def _show_form(form: Inspected) -> None:
    shown = form.shown
    name = form.form.name
    tensors = 0 if shown.checkpoint is None else len(shown.checkpoint.tensors)
    title = name if shown.step is None else f"{name}, iteration {shown.step}"
    counts = f"{plural(len(shown.files), 'file')}, {byte_size(shown.nbytes)}, {plural(tensors, 'tensor')}"
    say(f"{form.path}: {title}: {counts}" + ("" if shown.complete else ", not complete"))
    _show_iterations(form)
    if shown.contents is not None:
        say(f"types: {totals_words(shown.contents.by_dtype())}")
        whole = byte_size(shown.full_bytes or 0)
        say(f"kinds: {totals_words(shown.contents.by_kind())}; its tensors whole are {whole}")
    for scheme, count in form.quantised.items():
        say(f"quantised: {plural(count, 'tensor')}, {scheme}; --dequantize BFloat16 writes numbers")
    lists = [] if shown.checkpoint is None else [("values", shown.checkpoint.values(), "")]
    lists.append(("objects", list(form.objects), "; --json shows their values"))
    lists += [] if shown.checkpoint is None else [("beside the weights", list(shown.checkpoint.extra_files), "")]
    for title, names, more in lists:
        if names:
            say(f"{title}: {one_line(', '.join(names) if is_verbose() else some_names(names))}{more}")
    _show_findings(form.findings)
    _show_files(form)
    _show_laid_out(form)


def _show_iterations(form: Inspected) -> None:
    if not form.iterations:
        return
    iterations = form.iterations if is_verbose() else form.iterations[-_MAX_ROWS:]
    states = {None: "unknown whether finished", False: "newer than the last finished iteration", True: "finished"}
    table(
        "",
        ["iteration", "state"],
        [
            [str(item.number), "latest: the last finished one" if item.latest else states[item.finished]]
            for item in reversed(iterations)
        ],
    )
    if len(iterations) < len(form.iterations):
        say(f"... and {plural(len(form.iterations) - len(iterations), 'older iteration')}; -v shows all")


def _show_files(form: Inspected) -> None:
    files = form.shown.files
    if not files:
        return
    shown = _first_rows(files)
    rows = [
        [
            "-" if file.number is None else str(file.number),
            one_line(os.path.basename(file.path or "")),
            byte_size(file.nbytes),
            "-" if file.names is None else str(file.names),
        ]
        for file in shown
    ]
    table("", ["number", "file", "size", "names"], rows)
    say_more(len(files) - len(shown), "file")


def _show_laid_out(form: Inspected) -> None:
    """A row per tensor; if these are too many, a row per pattern of names of one layout."""
    tensors = form.tensors()
    if not tensors:
        return
    rows = _by_pattern(tensors, lambda item: item._replace(name=""))
    cells = []
    for name, count, item in _first_rows(rows):
        cut = " x ".join(map(str, item.cuts)) if any(cuts > 1 for cuts in item.cuts) else "whole"
        over = "" if item.ranks is None else f" on {plural(item.ranks, 'rank')}"
        lost = f", {item.lost} lost" if item.lost else ""
        cells.append(
            [one_line(name), str(count), item.dtype, str(list(item.shape)), cut + over + lost, str(item.files)]
        )
    table("", ["tensors", "number", "dtype", "shape", "slices", "files"], cells)
    say_more(sum(count for _, count, _ in rows[len(cells) :]), "tensor")
