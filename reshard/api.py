"""`reshard.Conversion`: what is asked, with methods that plan, convert and verify."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from reshard import asked
from reshard.asked import Task
from reshard.convert import Summary, run
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

    def __repr__(self) -> str:
        return f"<Planned: {self.summary!r}, {self.buffers} bytes of buffers>"


class Conversion(asked.Conversion):
    """A conversion of a checkpoint to another layout, form, names or types.

    Warnings and notes go to the logger ``reshard``.

    Attributes:
        source: the checkpoint to read.
        target: the checkpoint to write.
        edits: the parameters that are converted, and their names, packing and types; by default all, unchanged.
        effort: how much of the machine is used, and what is checked.
        files: write only these target ranks, ``[0, 2]`` or ``"0-7,12"``; of forms without rank files, these files.
        shard: write only a share of the files: ``(0, 4)`` is the first of four.
    """

    def __post_init__(self) -> None:
        """Check that each part is in its place.

        Raises:
            UsageError: one is not of its class.
        """
        super().__post_init__()
        for name, group in asked.GROUPS.items():
            value = getattr(self, name)
            if not isinstance(value, group):
                hint = "pass them in this order: Conversion(Source(...), Target(...), Edits(...), Effort(...))"
                raise UsageError(f"{name}={value!r} is not a reshard.{group.__name__}", hint=hint)

    @errors_in_python()
    def plan(self) -> Planned:
        """Plan and check the conversion; nothing is written.

        Raises:
            ReshardError: the conversion would be refused.
        """
        report = logged(in_python)
        result = run(request_of(self, report, Task(dry_run=True)), report)
        moved = transfers_of(result.plan, [*result.sizes], result.budget)
        return Planned(result.summary, moved, result.budget.buffer_bytes, result.space)

    @errors_in_python()
    def convert(self, verify: bool = False) -> Summary:
        """Convert, or continue an interrupted conversion.

        Args:
            verify: compare the result with the source afterwards.

        Raises:
            VerificationError: the result differs from the source.
            ReshardError: the conversion cannot be made, or failed.
        """
        report = logged(in_python)
        request = request_of(self, report, Task(verify=verify))
        result = run(request, report)
        if verify:
            from reshard.convert.verifying import verify_written

            # Verification treats the files that the conversion found damaged as missing, too.
            request = request._replace(damaged=result.plan.request.damaged)
            _refuse(verify_written(request, result.summary, Progress()), request.dst)
        return result.summary

    @errors_in_python()
    def verify(self) -> None:
        """Compare the target with the source; strategies, step, names and types default to those in its records.

        Raises:
            VerificationError: they differ.
            ReshardError: a file is missing or cannot be read.
        """
        from reshard.convert.verifying import reading_sources, verify_with_source

        report = logged(in_python)
        with reading_sources(self.effort, Progress(), report) as means:
            differences = verify_with_source(self, means)
        _refuse(differences, self.target.path)


def _refuse(differences: Sequence[object], dst: str) -> None:
    if differences:
        raise VerificationError(block(f"{dst}: differs from its source:", [*map(str, differences)]), differences)
