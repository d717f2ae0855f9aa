"""Errors for users.

Every error that a user can cause or solve is a `ReshardError`. Its message names file, rank and parameter, its ``hint``
suggests a solution, and its ``status`` is the exit status of the command line. Any other exception is a bug.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from reshard.text.messages import Message, as_pattern, block, full_text, joined, listing, quoted

# More hints would hide the problem.
_MAX_HINTS = 3

FORBIDDEN = (errno.EACCES, errno.EPERM)


class ReshardError(Exception):
    """Base of all errors for users.

    Attributes:
        message: the problem; lists of parameters are shortened.
        status: exit status of the command line (see the table in the README).
        file: path of the file, or None.
        rank: global rank, or None.
        parameter: name of the parameter, or None.
        hint: a solution, by default the class's ``usual_hint``; printed on a line of its own.
    """

    status = 3
    usual_hint: str | None = None

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        rank: int | None = None,
        parameter: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.file = file
        self.rank = rank
        self.parameter = parameter
        self.hint = hint or self.usual_hint

    def __str__(self) -> str:
        """The message, then the hint on a line of its own."""
        return f"{self.message}\n{self.hint}" if self.hint else self.message

    def add_hint(self, hint: str | None, first: bool = False) -> None:
        """Add lines below the hint, or above it; None adds nothing."""
        self.hint = joined("\n", filter(None, (hint, self.hint) if first else (self.hint, hint))) or None

    @property
    def full(self) -> str:
        """The same with the name of every parameter."""
        text = full_text(self.message)
        return f"{text}\n{full_text(self.hint)}" if self.hint else text


class UsageError(ReshardError):
    """Wrong usage: options, ranks out of range, SRC and DST overlapping."""

    status = 2


class InputError(ReshardError):
    """The input is wrong, missing, unreadable or incomplete; a retry will not help."""

    status = 3


class LayoutError(InputError):
    """A tensor layout contradicts itself or the shape of its tensor."""


class StrategyError(InputError):
    """A strategy file is damaged or of another kind, or contradicts itself or other stages."""


class NamesError(InputError):
    """Rules of names are invalid, or do not fit the checkpoint or its configuration."""


class CheckpointError(InputError):
    """A checkpoint file or directory does not fit the conversion."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint file is truncated or damaged; it counts as missing."""

    usual_hint = "take the file from a copy, or another step; of a rank tree, `reshard recover` makes it from replicas"


class EncryptedCheckpointError(CheckpointError):
    """A checkpoint file is encrypted, or its key is wrong."""


class IncompleteSourceError(InputError):
    """A slice that the target needs is on no readable rank."""


class TargetError(InputError):
    """The target directory contains files that must not be replaced."""


class ReplaceableError(TargetError):
    """The target directory contains files that --overwrite replaces."""


class RetryableError(ReshardError):
    """I/O failed, and a retry may help: a full disk, a missing source."""

    status = 1


class UnwritableError(RetryableError):
    """No file can be written any more: full disk, quota, too many open files, a worker process that died."""


class VerificationError(ReshardError):
    """A checkpoint differs from its source or record, and must not be used.

    Attributes:
        differences: the differences.
    """

    status = 4

    def __init__(self, message: str, differences: Sequence[object]) -> None:
        super().__init__(message)
        self.differences = differences


def one_error(problems: Sequence[InputError], headline: str) -> InputError:
    """One error for several problems; problems that differ only in the parameter share a line.

    Args:
        problems: at least one; each message contains its ``parameter`` as `quoted` writes it.
        headline: first line for several problems.
    """
    first = problems[0]
    if len(problems) == 1:
        return first
    alike: dict[tuple[str, str], list[InputError]] = {}
    for problem in problems:
        alike.setdefault((_without_name(problem, problem.message), _without_name(problem, problem.hint)), []).append(
            problem
        )
    lines: list[str] = []
    for group in alike.values():
        lines += group[0].message.split("\n")
        if len(group) > 1:
            names = [problem.parameter for problem in group if problem.parameter]
            lines.append(f"  likewise, {len(names)} in all: " + listing(names))
    hints = dict.fromkeys(group[0].hint for group in alike.values() if group[0].hint)
    shown = block(f"{headline}:", lines)
    full = joined("\n", [f"{headline}:", *(problem.message for problem in problems)]).full
    return type(first)(
        Message(shown, full, shown.shortened),
        file=first.file,
        rank=first.rank,
        parameter=first.parameter,
        hint="\n".join([*hints][:_MAX_HINTS]) or None,
    )


def is_read_only(error: OSError) -> bool:
    """Whether an error is about permissions or a read-only file system, which no retry changes."""
    return error.errno in (*FORBIDDEN, errno.EROFS)


def _without_name(problem: InputError, text: str | None) -> str:
    if problem.parameter is None or text is None:
        return text or ""
    return text.replace(quoted(problem.parameter), "").replace(as_pattern(problem.parameter), "")
