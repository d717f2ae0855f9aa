"""The page's data on a conversion: bytes and requests between every source and every target."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from typing import Any

from reshard.checkpoints import FileHandles
from reshard.convert.transfers import Transfers, transfers_of
from reshard.execute.budget import reading_budget
from reshard.forms.request import Means, Request
from reshard.plan.planner import make_plan
from reshard.text.messages import Report, byte_size, plural
from reshard.view.page import Table, cluster_of, repeats

MAX_NUMBERS = 1_000_000
"""Maximum number of integers for pairs in a page; beyond it, neighbouring ranks are added up."""

Pair = tuple[int, int]
"""Bytes and requests."""

Rows = dict[int, dict[int, Pair]]
"""By target and source."""


def moves_data(request: Request, report: Report) -> dict[str, Any]:
    """The page's data on a conversion.

    Raises:
        ReshardError: the conversion is refused.
    """
    with FileHandles() as handles:
        plan = make_plan(request, Means(handles, report))
        moved = transfers_of(plan, plan.requested, reading_budget(plan))
        sizes = plan.file_bytes(plan.requested)
    read: Counter[int] = Counter()
    for (source, _), nbytes in moved.taken.items():
        read[source] += nbytes
    sources = Counter(target for _, target in moved.taken)
    by_rank = request.form.options.by_rank
    count = request.source.device_count if by_rank else max(plan.checkpoint.files, default=-1) + 1
    targets = plan.form.count
    nouns, totals = [request.form.options.unit, request.to.options.unit], [count, targets]
    clusters = [cluster_of(plan.request.source), cluster_of(plan.request.target)]
    pairs = pairs_data(moved, targets)
    ends = [plural(total, noun) for total, noun in zip(totals, nouns)]
    line = " → ".join(f"{each['words']}, {end}" if each and each["words"] else end for each, end in zip(clusters, ends))
    if pairs["together"] > 1:
        line += f"; a group is {pairs['together']} neighbours, because there are too many numbers"
    data = {
        "source_cluster": clusters[0],
        "target_cluster": clusters[1],
        "source_noun": nouns[0],
        "target_noun": nouns[1],
        "sources": count,
        "targets": targets,
        "bytes": repeats(sizes[number] for number in plan.requested),
        "taken": sum(moved.taken.values()),
        "requests": sum(moved.requests.values()),
        "busiest": max(read.items(), key=lambda each: (each[1], -each[0]), default=(0, 0)),
        "fans": [min(sources.values(), default=0), max(sources.values(), default=0)],
        "line": line,
        **pairs,
    }
    return {**data, "facts": _facts(data, max(sizes.values(), default=0))}


def _facts(data: dict[str, Any], largest: int) -> list[list[str]]:
    """Figures: what each is, the figure and its unit, a line below, and `warn` if it is worth a look."""
    taken, requests, (busiest, most), sources = data["taken"], data["requests"], data["busiest"], data["sources"]
    noun, (least_sources, most_sources) = data["source_noun"], data["fans"]
    file = f"target files of at most {byte_size(largest)}"
    facts = [
        ["Moved", *byte_size(taken).split(), file, ""],
        ["Requests", f"{requests:,}", "", f"{byte_size(taken // max(1, requests))} each on average", ""],
    ]
    if most:
        times = most * sources / taken
        fans = f"{least_sources}" if least_sources == most_sources else f"{least_sources}–{most_sources}"
        mean = f"the mean: {noun} {busiest}, {byte_size(most)}"
        facts.append(["Sources of a target", fans, "", f"of {plural(sources, noun)}", ""])
        facts.append(["Busiest source", f"{times:.2f} ×", "", mean, "warn" if times >= 2 else ""])
    return facts


def pairs_data(moved: Transfers, targets: int, most: int = MAX_NUMBERS) -> dict[str, Any]:
    """Bytes and requests of every pair, in patterns that targets share.

    Values such as global_step come from one source for all targets, so they have patterns of their own: patterns are
    relative to a target's first source. Beyond ``most`` integers, 2, 4, 8 ... neighbouring sources and targets are one.
    """
    together = 1
    rows = [_rows(moved, copied=False), _rows(moved, copied=True)]
    while True:
        values, patterns = Table(), Table()
        parameters, copied = (
            _by_target(each, -(-targets // together), values, patterns, most if together < targets else None)
            for each in rows
        )
        if parameters is not None and copied is not None:
            tables = {"together": together, "values": values.values, "patterns": patterns.values}
            return {**tables, "parameters": parameters, "copied": copied}
        together *= 2
        rows = list(map(_halved, rows))


def _rows(moved: Transfers, copied: bool) -> Rows:
    """Bytes and requests by target and source, of copied values or of all other tensors."""
    rows: Rows = defaultdict(dict)
    for pair, moved_bytes in moved.taken.items():
        source, target = pair
        of_values, each = moved.copied.get(pair, 0), moved.value_requests.get(pair, 0)
        nbytes, requests = (of_values, each) if copied else (moved_bytes - of_values, moved.requests[pair] - each)
        if nbytes or requests:
            rows[target][source] = (nbytes, requests)
    return rows


def _halved(rows: Rows) -> Rows:
    """The same with every two neighbours added up."""
    halved_rows: Rows = defaultdict(dict)
    for target, row in rows.items():
        halved = halved_rows[target // 2]
        for source, (nbytes, requests) in row.items():
            before = halved.get(source // 2, (0, 0))
            halved[source // 2] = (before[0] + nbytes, before[1] + requests)
    return halved_rows


def _by_target(rows: Rows, targets: int, values: Table, patterns: Table, most: int | None) -> dict[str, Any] | None:
    """Per target its first source and the number of its pattern, -1 for none; None if tables get too large.

    A pattern is distances between neighbouring sources, each after the value of the first of both: ``[value, distance,
    value, distance, value]``.
    """
    first, used = [], []
    numbered, size = len(patterns.values), sum(map(len, patterns.values))
    for target in range(targets):
        row = sorted(rows.get(target, {}).items())
        if not row:
            first.append(0)
            used.append(-1)
            continue
        pattern = [values.number(row[0][1])]
        for (before, _), (source, value) in itertools.pairwise(row):
            pattern += [source - before, values.number(value)]
        first.append(row[0][0])
        used.append(patterns.number(tuple(pattern)))
        if used[-1] == numbered:
            numbered += 1
            size += len(pattern)
        if most is not None and size + 2 * len(values.values) > most:
            return None
    return {"first": first, "pattern": repeats(used)}
