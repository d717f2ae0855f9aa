"""Which step of a source tree a checkpoint was converted from, where nothing says so.

The candidates are tried from the newest on in three scopes, the next one only where the one before finds nothing:

1. the newest step that is complete as a whole;
2. the newest that has all that the target's strategy lists;
3. the newest that has all that the target ranks asked for need.

Filters play no part.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Callable, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.errors import IncompleteSourceError, InputError
from reshard.forms.ranks import SourceTree, StepFiles
from reshard.strategies import Strategy
from reshard.text.messages import Message, block, joined
from reshard.text.report import Report
from reshard.text.wording import rank_ranges, step_words
from reshard.verification.completeness import CURE, Needs, lost, told, why_not_comparable
from reshard.verification.tree import Tree, read_tree

_MOST_LINES = 3


class _Passed(NamedTuple):
    """A step that is not complete.

    Attributes:
        candidate: its files.
        lacks: what is lost of it, in words.
        fits: per scope whether it has what is needed there.
    """

    candidate: StepFiles
    lacks: list[str]
    fits: list[bool]


def read_step(
    tree: SourceTree,
    source: Strategy,
    step: str,
    handles: FileHandles,
    report: Report,
    *,
    target: Optional[Strategy] = None,
    ranks: Optional[Sequence[int]] = None,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Tree:
    """Read the files of the step that is named, or else of the one that was converted.

    Whether a named step is complete is for the caller to judge.

    Args:
        tree: the source.
        source: its strategy.
        step: a step, such as ``3_10``, or ``latest``.
        handles: open files.
        report: told of steps that are passed over, and of files that count as absent.
        target: strategy of the converted checkpoint; where None, everything is needed.
        ranks: the target ranks asked for; all where None.
        damaged: files that are known to be damaged, and why, by path.

    Raises:
        IncompleteSourceError: no step was named, and none is complete.
        InputError: there is no such step, or files cannot be read.
        RetryableError: reading failed.
    """
    candidates = tree.candidates(step)

    def read(candidate: StepFiles) -> Tree:
        return read_tree(candidate.files, source, handles, damaged=damaged)

    if step != "latest":
        chosen = next(candidates)
        found = read(chosen)
    else:
        scopes = [Needs(Strategy.none())]
        if target is not None and not target.is_none:
            scopes += [Needs(target), *([] if ranks is None else [Needs(target, ranks)])]
        chosen, found = _newest_complete(tree, candidates, read, source, scopes, report)
    for note in chosen.notes:
        report.warn(note)
    label = step_words(chosen.step)
    for rank, damage in found.damaged.items():
        report.warn(f"{damage}; rank {rank} counts as absent at {label}")
    absent = set(range(source.device_count)).difference(found.indexes)
    if absent:
        there = rank_ranges(found.indexes) if found.indexes else "none"
        report.note(f"{label} has no readable file of {rank_ranges(absent)}; those of {there} are read")
    return found


def _newest_complete(
    tree: SourceTree,
    candidates: Iterator[StepFiles],
    read: Callable[[StepFiles], Tree],
    source: Strategy,
    scopes: Sequence[Needs],
    report: Report,
) -> tuple[StepFiles, Tree]:
    """The newest step that is complete in the widest scope in which one is."""
    passed: list[_Passed] = []
    refused: Optional[InputError] = None
    while True:
        try:
            candidate = next(candidates, None)
            if candidate is None:
                break
            found = read(candidate)
        except InputError as error:
            # It does not matter where a newer step will do.
            refused = error
            break
        problem = why_not_comparable(found, source)
        lacks = [problem] if problem is not None else told(lost(found, source, scopes[0]))
        if not lacks:
            _tell(passed, candidate, report)
            return candidate, found
        fits = [problem is None and not lost(found, source, needs) for needs in scopes]
        passed.append(_Passed(candidate, [*found.damaged.values(), *lacks], fits))
    for scope in range(1, len(scopes)):
        for number, (candidate, lacks, fits) in enumerate(passed):
            if fits[scope]:
                _tell(passed[:number], candidate, report)
                report.warn(
                    f"{step_words(candidate.step)} is not complete, but has what is compared: " + _some_lines(lacks)
                )
                return candidate, read(candidate)
    if refused is not None:
        raise refused
    lines = [f"{step_words(candidate.step)}: " + line for candidate, lacks, _ in passed for line in lacks]
    raise IncompleteSourceError(block(f"{tree.root}: no step is complete:", lines), file=tree.root, hint=CURE)


def _tell(passed: Sequence[_Passed], chosen: StepFiles, report: Report) -> None:
    for candidate, lacks, _ in passed:
        report.warn(f"{step_words(candidate.step)} is not complete and is passed over: " + _some_lines(lacks))
    if passed:
        report.note(f"{step_words(chosen.step)} is read")


def _some_lines(lines: Sequence[str]) -> Message:
    more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
    shown = joined("; ", [*lines[:_MOST_LINES], *more])
    return Message(shown, joined("; ", lines).full, shown.shortened or bool(more))
