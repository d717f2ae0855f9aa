"""Roots with a directory for each iteration: those of Checkpoint 2.0 and of Megatron.

A root also holds a file with the number of the last finished iteration, the *tracker*. It is the only mark of
completeness: an unfinished asynchronous save may look complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Optional

from reshard.errors import CheckpointError, InputError, UsageError
from reshard.forms.form import SavedStep
from reshard.storage import UnfitError, read_small, reading_error
from reshard.text.messages import Report, some_names

TRACKER = "latest_checkpointed_iteration.txt"
"""The name of the tracker."""

HOW_TO_CHOOSE = "name one with --step, or give its directory"
"""Hint where it is unknown which iteration to read."""

_LONGEST_TRACKER = 256
_NUMBER = re.compile(r"[0-9]{1,18}")


def parse_iteration_number(step: str) -> Optional[int]:
    """The iteration that ``--step`` requests; None for ``latest``."""
    if step == "latest":
        return None
    if not _NUMBER.fullmatch(step):
        raise UsageError(
            f"--step {step}: is not the number of an iteration",
            hint="pass a number, for example --step 1000, or --step latest",
        )
    return int(step)


def read_tracker(root: str) -> Optional[int]:
    """The iteration in the tracker of a root; None without a tracker."""
    path = os.path.join(root, TRACKER)
    try:
        text = read_small(path, _LONGEST_TRACKER).decode("ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise reading_error(path, error) from error
    except (UnicodeError, UnfitError):
        text = ""
    if not _NUMBER.fullmatch(text):
        raise CheckpointError(f"{path}: names no iteration", file=path, hint=HOW_TO_CHOOSE)
    return int(text)


def saved_steps(root: str, iterations: Iterable[tuple[int, str]]) -> list[SavedStep]:
    """The iterations of a root, as its tracker describes them."""
    try:
        tracked = read_tracker(root)
    except InputError:
        # The choice of an iteration reports this already.
        tracked = None
    return [
        SavedStep(number, path, None if tracked is None else number <= tracked, number == tracked)
        for number, path in iterations
    ]


def warn_of_newer(root: str, numbers: Iterable[int], tracked: int, report: Report) -> None:
    """Warn of iterations that are not read because they are newer than the tracker's."""
    newer = [str(number) for number in numbers if number > tracked]
    if newer:
        noun = "iteration" if len(newer) == 1 else "iterations"
        report.warn(
            f"{root}: skipped {noun} {some_names(newer)}: newer than the last finished iteration, {tracked} ({TRACKER})"
        )
