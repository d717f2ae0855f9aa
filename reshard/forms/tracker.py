"""Roots with a directory for each iteration: those of Checkpoint 2.0 and of Megatron.

A root also holds a file with the number of the last finished iteration, the *tracker*. It is the only mark of
completeness: an unfinished asynchronous save may look complete.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from reshard.errors import CheckpointError, InputError, UsageError
from reshard.forms.form import SavedStep
from reshard.storage import UnfitError, absolute, is_directory, names_in, read_small, reading_error
from reshard.storage.store import OWN
from reshard.text.messages import Report, some_names

TRACKER = "latest_checkpointed_iteration.txt"
"""The name of the tracker."""

RELEASE = "release"
"""The directory of a root that holds weights without a number, as converters to Megatron write them."""

HOW_TO_CHOOSE = "name one with --step, or give its directory"
"""Hint where it is unknown which iteration to read."""

_LONGEST_TRACKER = 256
_NUMBER = re.compile(r"[0-9]{1,18}")


def target_above(directory: str) -> str:
    """The target of the conversion that wrote a directory: the root that holds its records, or itself."""
    root = os.path.dirname(absolute(directory))
    return root if is_directory(os.path.join(root, OWN)) else directory


class Iteration(NamedTuple):
    """The directory of one iteration; its number is None if the directory's name does not contain it.

    Attributes:
        released: it is the root's `RELEASE`.
    """

    number: int | None
    path: str
    released: bool = False

    @property
    def step(self) -> str | None:
        """What ``--step`` requests it with in its root; None for a directory without a number."""
        return RELEASE if self.released else None if self.number is None else str(self.number)

    @property
    def label(self) -> str:
        return "the checkpoint" if self.number is None else f"iteration {self.number}"


class IterationNames(NamedTuple):
    """Names of directories: a prefix, and the number in at least ``digits`` digits; or `RELEASE`."""

    prefix: str
    digits: int
    releases: bool = False

    def of(self, number: int | None) -> str:
        """The name of an iteration's directory, or of that without a number."""
        return RELEASE if number is None else f"{self.prefix}{number:0{self.digits}d}"

    def tracked_as(self, name: str) -> str:
        """What the tracker contains for a directory."""
        return name if name == RELEASE else str(self.number(name))

    def number(self, name: str) -> int | None:
        """The number in a name; None for a name that trainers do not find."""
        digits = name[len(self.prefix) :]
        return int(digits) if _NUMBER.fullmatch(digits) and self.of(int(digits)) == name else None

    def in_root(self, root: str, names: Iterable[str]) -> list[Iteration]:
        """The iterations among the names in a root, oldest first."""
        numbers = ((self.number(name), os.path.join(root, name)) for name in names)
        return sorted(Iteration(number, path) for number, path in numbers if number is not None)

    def held(self, root: str, names: Sequence[str], holds: Callable[[str, Sequence[str]], bool]) -> list[Iteration]:
        """The iterations among the names in a root that are checkpoints, oldest first, and last its `RELEASE`.

        Args:
            root: the root.
            names: the names in it.
            holds: whether a directory is that of one checkpoint, by its names.
        """
        found = [each for each in self.in_root(root, names) if holds(each.path, names_in(each.path))]
        release = os.path.join(root, RELEASE)
        if self.releases and RELEASE in names and is_directory(release) and holds(release, names_in(release)):
            found.append(Iteration(None, release, released=True))
        return found

    def find(self, src: str, holds: Callable[[str, Sequence[str]], bool], step: str, report: Report) -> Iteration:
        """The directory of the requested step: the source, or one of the directories in a root.

        Args:
            src: the source.
            holds: whether a directory is that of one checkpoint, by its names.
            step: ``latest``, a number, or `RELEASE`.
            report: receives warnings.
        """
        names = names_in(src)
        if holds(src, names):
            return self.of_directory(src, "latest" if step == RELEASE else step, report)
        held = self.held(src, names, holds)
        in_root = [each for each in held if not each.released]
        latest = step == "latest" and (not in_root or _text_of_tracker(src) == RELEASE)
        if len(held) > len(in_root) and (latest or step == RELEASE):
            return held[-1]
        chosen = self.choose(src, in_root, step, report)
        if chosen is not None:
            return chosen
        if not in_root:
            raise CheckpointError(
                f"{src}: holds no iteration",
                file=src,
                hint=f"give the directory that holds {TRACKER}, or one of its iterations",
            )
        if len(in_root) != 1:
            raise CheckpointError(
                f"{src}: {TRACKER} names no iteration, and there are {len(in_root)}", file=src, hint=HOW_TO_CHOOSE
            )
        return in_root[0]

    def of_directory(self, path: str, step: str, report: Report) -> Iteration:
        """The iteration of a source that is the directory of one.

        Raises:
            UsageError: ``step`` is not ``latest`` and not its number.
        """
        requested = parse_iteration_number(step)
        number = self.number(os.path.basename(absolute(path)))
        if requested is not None and requested != number:
            raise UsageError(
                f"--step {requested}: {path} is the directory of one checkpoint, and not named {self.of(requested)}",
                hint="leave out --step, or give the directory above",
            )
        iteration = Iteration(number, path)
        if number is not None:
            _warn_of_unfinished(iteration, self._tracked(os.path.dirname(absolute(path))), report)
        return iteration

    def choose(self, root: str, iterations: Sequence[Iteration], step: str, report: Report) -> Iteration | None:
        """The iteration that ``step`` requests; for ``latest`` that of the tracker, None without a tracker.

        Raises:
            UsageError: ``step`` is not a number.
            CheckpointError: the iteration does not exist.
        """
        requested, tracked = parse_iteration_number(step), self._tracked(root)
        number = tracked if requested is None else requested
        if number is None:
            return None
        chosen = next((iteration for iteration in iterations if iteration.number == number), None)
        if chosen is None:
            tracker = os.path.join(root, TRACKER)
            request = f"{tracker} names iteration {number}, but" if requested is None else f"--step {step}:"
            existing = some_names([str(iteration.number) for iteration in reversed(iterations)])
            raise CheckpointError(
                f"{request} {root} holds no {self.of(number)}",
                file=root,
                hint=f"{HOW_TO_CHOOSE}; its iterations: {existing or 'none with a number'}",
            )
        if requested is not None:
            _warn_of_unfinished(chosen, tracked, report)
        newer = [str(iteration.number) for iteration in iterations if (iteration.number or 0) > number]
        if requested is None and newer:
            noun = "iteration" if len(newer) == 1 else "iterations"
            report.warn(
                f"{root}: skipped {noun} {some_names(newer)}: newer than the last finished iteration, {number} "
                f"({TRACKER})"
            )
        return chosen

    def _tracked(self, root: str) -> int | None:
        return None if self.releases and _text_of_tracker(root) == RELEASE else read_tracker(root)


def parse_iteration_number(step: str) -> int | None:
    """The iteration that ``--step`` requests; None for ``latest``."""
    if step == "latest":
        return None
    if not _NUMBER.fullmatch(step):
        raise UsageError(
            f"--step {step}: is not the number of an iteration",
            hint="pass a number, for example --step 1000, or --step latest",
        )
    return int(step)


def read_tracker(root: str) -> int | None:
    """The iteration in the tracker of a root; None without a tracker."""
    text = _text_of_tracker(root)
    if text is None:
        return None
    if not _NUMBER.fullmatch(text):
        path = os.path.join(root, TRACKER)
        raise CheckpointError(f"{path}: names no iteration", file=path, hint=HOW_TO_CHOOSE)
    return int(text)


def _text_of_tracker(root: str) -> str | None:
    """The text of the tracker of a root; None without a tracker."""
    path = os.path.join(root, TRACKER)
    try:
        return read_small(path, _LONGEST_TRACKER).decode("ascii").strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise reading_error(path, error) from error
    except (UnicodeError, UnfitError):
        return ""


def _warn_of_unfinished(chosen: Iteration, tracked: int | None, report: Report) -> None:
    if tracked is not None and chosen.number is not None and chosen.number > tracked:
        report.warn(
            f"{chosen.path}: {TRACKER} beside it names iteration {tracked} as the last finished one: this one may have "
            "been cut short while it was saved"
        )


def saved_steps(root: str, iterations: Iterable[Iteration]) -> list[SavedStep]:
    """The iterations of a root, oldest first, as its tracker describes them."""
    try:
        tracked = read_tracker(root)
    except InputError:
        # The choice of an iteration reports this already.
        tracked = None
    return [
        SavedStep(number, path, None if tracked is None else number <= tracked, number == tracked)
        for number, path, _ in iterations
        if number is not None
    ]
