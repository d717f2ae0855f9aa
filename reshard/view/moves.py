"""What the page shows of a conversion: bytes and requests between every source and every target."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Optional

from reshard.checkpoints import Decryption, FileHandles
from reshard.convert.transfers import Transfers, transfers_of
from reshard.execute import ExecutionOptions
from reshard.forms.registry import counted_as, form_named
from reshard.plan.planner import make_plan
from reshard.plan.request import Request
from reshard.storage import storage_of
from reshard.storage.costs import LOCAL
from reshard.text.report import Report
from reshard.view.data import Table
from reshard.view.numbers import repeats

MAX_NUMBERS = 1_000_000
"""Numbers of pairs that a page holds; beyond, neighbouring ranks are added up."""

Pair = tuple[int, int]
"""A source and a target, by number."""


def moves_data(
    request: Request, jobs: int, max_memory: int, report: Report, decryption: Optional[Decryption] = None
) -> dict[str, Any]:
    """What the page shows of a conversion.

    Args:
        request: the conversion; nothing is written.
        jobs: CPUs, as requests depend on them.
        max_memory: bytes for buffers, likewise.
        report: gets warnings and notes.
        decryption: the key of encrypted files.

    Returns:
        Plain JSON.

    Raises:
        ReshardError: the conversion is refused.
    """
    with FileHandles(decryption=decryption) as handles:
        plan = make_plan(request, handles, report)
        example = next(iter(plan.checkpoint.files.values()), None)
        storage = LOCAL if example is None else storage_of(example)
        moved = transfers_of(plan, plan.asked, ExecutionOptions(jobs, max_memory, "auto", storage))
        sizes = plan.file_bytes(plan.asked)
    by_rank = form_named(request.form).options.by_rank
    sources = request.source.device_count if by_rank else max(plan.checkpoint.files, default=-1) + 1
    targets = plan.form.count
    return {
        "strategy": plan.request.target.path,
        "step": plan.checkpoint.step,
        "source_noun": counted_as(request.form),
        "target_noun": counted_as(request.to),
        "sources": sources,
        "targets": targets,
        "bytes": repeats(sizes[number] for number in plan.asked),
        "taken": sum(moved.taken.values()),
        "copied_bytes": sum(moved.copied.values()),
        "requests": sum(moved.requests.values()),
        **pairs_data(moved, targets),
    }


def pairs_data(moved: Transfers, targets: int, most: int = MAX_NUMBERS) -> dict[str, Any]:
    """Bytes and requests of every pair, in patterns that targets share.

    Values such as global_step come from one source, whichever target they go to, so they are listed by themselves: the
    patterns of the others are relative to a target's first source.

    Args:
        moved: by pair of source and target.
        targets: number of targets.
        most: numbers that the pairs may take; beyond, 2, 4, 8 ... neighbouring sources and targets are one.
    """
    together = 1
    while True:
        values, patterns = Table(), Table()
        found = {
            "parameters": _by_target(_added_up(moved, together, copied=False), targets, together, values, patterns),
            "copied": _by_target(_added_up(moved, together, copied=True), targets, together, values, patterns),
        }
        if sum(len(pattern) for pattern in patterns.values) + 2 * len(values.values) <= most:
            return {"together": together, "values": values.values, "patterns": patterns.values, **found}
        together *= 2


def _added_up(moved: Transfers, together: int, copied: bool) -> dict[int, dict[int, Pair]]:
    """Bytes and requests by target and source, of values that are copied or of all others."""
    found: dict[int, dict[int, Pair]] = defaultdict(dict)
    for (source, target), taken in moved.taken.items():
        pair = source, target
        of_values, each = moved.copied.get(pair, 0), moved.value_requests.get(pair, 0)
        nbytes, requests = (of_values, each) if copied else (taken - of_values, moved.requests[pair] - each)
        if nbytes or requests:
            row = found[target // together]
            before = row.get(source // together, (0, 0))
            row[source // together] = (before[0] + nbytes, before[1] + requests)
    return found


def _by_target(
    pairs: Mapping[int, Mapping[int, Pair]], targets: int, together: int, values: Table, patterns: Table
) -> dict[str, Any]:
    """Per target its first source and the number of its pattern, -1 for none.

    A pattern is distances between neighbouring sources, each after the value of the first of both: ``[value, distance,
    value, distance, value]``.
    """
    first, used = [], []
    for target in range(-(-targets // together)):
        row = sorted(pairs.get(target, {}).items())
        if not row:
            first.append(0)
            used.append(-1)
            continue
        pattern = [values.number(row[0][1])]
        for (before, _), (source, value) in zip(row, row[1:]):
            pattern += [source - before, values.number(value)]
        first.append(row[0][0])
        used.append(patterns.number(tuple(pattern)))
    return {"first": first, "pattern": repeats(used)}
