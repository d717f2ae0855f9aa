"""Planning, converting and verifying a `Conversion`, for its methods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard.asked import GROUPS, Conversion, Task
from reshard.convert import Summary, prepare
from reshard.convert.ends import request_of
from reshard.convert.transfers import Transfers, transfers_of
from reshard.errors import UsageError, VerificationError
from reshard.execute import Progress
from reshard.execute.destination import Space
from reshard.in_python import errors_in_python, in_python
from reshard.text.messages import block, logged


class Planned(NamedTuple):
    """The plan of a conversion.

    Attributes:
        summary: as after the conversion; ``bytes_written`` and ``ranks`` are expected values.
        transfers: bytes of every target file from every source file, and bytes read from each.
        buffers: bytes of all buffers.
        space: needed and free bytes of every file system below the target directory.
    """

    summary: Summary
    transfers: Transfers
    buffers: int
    space: list[Space]


@errors_in_python()
def plan(asked: Conversion) -> Planned:
    """See `Conversion.plan`."""
    _check_groups(asked)
    report = logged(in_python)
    with prepare(request_of(asked, report, Task(dry_run=True)), report) as prepared:
        summary = prepared.carry_out()
        state = prepared.state
        moved = transfers_of(state.plan, state.work, state.execution)
        return Planned(_in_python(summary), moved, state.execution.buffer_bytes, state.space)


@errors_in_python()
def convert(asked: Conversion, verify: bool) -> Summary:
    """See `Conversion.convert`."""
    _check_groups(asked)
    report = logged(in_python)
    request = request_of(asked, report, Task(verify=verify))
    with prepare(request, report) as prepared:
        summary = prepared.carry_out()
        # Verification treats the files that the conversion found damaged as missing, too.
        request = request._replace(damaged=prepared.plan.request.damaged)
    if verify:
        from reshard.convert.verifying import verify_written

        _refuse(verify_written(request, summary, Progress()), request.dst)
    return _in_python(summary)


@errors_in_python()
def verify(asked: Conversion) -> None:
    """See `Conversion.verify`."""
    _check_groups(asked)
    from reshard.convert.verifying import reading_sources, verify_with_source

    report = logged(in_python)
    with reading_sources(asked.effort, Progress(), report) as (means, crcs):
        differences = verify_with_source(asked, means, report, crcs)
    _refuse(differences, asked.target.path)


def _check_groups(asked: Conversion) -> None:
    for name, group in GROUPS.items():
        if not isinstance(getattr(asked, name), group):
            raise UsageError(f"{name}={getattr(asked, name)!r} is not a reshard.{group.__name__}")


def _refuse(differences: Sequence[object], dst: str) -> None:
    if differences:
        raise VerificationError(block(f"{dst}: differs from its source:", [*map(str, differences)]), differences)


def _in_python(summary: Summary) -> Summary:
    summary.warnings = [*map(in_python, summary.warnings)]
    summary.notes = [*map(in_python, summary.notes)]
    return summary
