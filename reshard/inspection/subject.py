"""A checkpoint of any form for `view` and `suggest`: its files, tensors and problems, from headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import UsageError
from reshard.forms.form import Form
from reshard.forms.registry import form_named, form_of
from reshard.inspection.contents import Finding, InspectedContents
from reshard.inspection.form import UNDECODED, inspect_form, quantised_in
from reshard.inspection.tree import InspectedStep, inspect_tree
from reshard.storage import exists, is_directory, listings_cached
from reshard.strategies import Strategy
from reshard.text.messages import rank_ranges, step_words


class ShownFile(NamedTuple):
    """A file of the shown step.

    Attributes:
        number: its rank, or its number in a form without ranks; None where the checkpoint cannot be read.
        path: the file; None for a rank without a file.
        nbytes: its size.
        state: ``ok``, ``damaged`` or ``missing``.
    """

    number: Optional[int]
    path: Optional[str]
    nbytes: int
    state: str = "ok"


class ShownStep(NamedTuple):
    """A step, in the terms of its form.

    Attributes:
        step: its name; None for files without a step in their names.
        nbytes: bytes of its files; None where sizes were not read.
        state: whether it is complete, as text.
        shown: whether it is the shown step.
    """

    step: Optional[str]
    nbytes: Optional[int]
    state: str
    shown: bool


class Problem(NamedTuple):
    """A line at the top of the page.

    Attributes:
        level: 0 where a conversion refuses or something is lost, 1 for what could not be checked, 2 for notes.
        text: one or more lines.
        hint: the remedy; None without one.
    """

    level: int
    text: str
    hint: Optional[str] = None


@dataclass
class Subject:
    """A checkpoint.

    Attributes:
        path: as typed.
        form: its form.
        step: the step that is shown; None where there are none.
        complete: whether everything in it can be read; None where that was not checked.
        checkpoint: its tensors and who holds them; None where it is not known how they are cut.
        contents: the entries of the files; None if none could be read.
        files: the files of the step, by number.
        steps: all steps, newest first.
        problems: the most severe first.
        quantised: number of quantised tensors, by scheme.
        undecoded: tensors are quantised, but not in a scheme that can be recognised here; a problem gives the reason.
        one_rank: the path is the directory of one rank.
    """

    path: str
    form: Form
    step: Optional[str] = None
    complete: Optional[bool] = None
    checkpoint: Optional[Checkpoint] = None
    contents: Optional[InspectedContents] = None
    files: Sequence[ShownFile] = ()
    steps: Sequence[ShownStep] = ()
    problems: list[Problem] = field(default_factory=list)
    quantised: Mapping[str, int] = field(default_factory=dict)
    undecoded: bool = False
    one_rank: bool = False

    def add(self, level: int, text: str, hint: Optional[str] = None) -> None:
        """Add a problem, in the order of levels."""
        self.problems.append(Problem(level, str(text), None if hint is None else str(hint)))
        self.problems.sort(key=lambda problem: problem.level)

    @property
    def unit(self) -> str:
        """The unit of file numbers: ``rank`` or ``file``."""
        return self.form.options.unit


def subject_of(
    path: str,
    strategy: Optional[Strategy],
    step: str = "latest",
    file_suffix: Optional[str] = None,
) -> Subject:
    """Inspect a checkpoint.

    Args:
        path: a checkpoint of any form.
        strategy: its source strategy; None where its form records layouts, or it is unknown.
        step: the step, or ``latest``.
        file_suffix: only files of ranks whose stem has this ending.

    Raises:
        UsageError: an option does not suit the form.
        InputError: the checkpoint or the step is missing.
        RetryableError: reading failed; a retry may help.
    """
    with listings_cached():
        form = form_named(form_of(path))
        one_file = exists(path) and not is_directory(path)
    if form.options.by_rank:
        return _of_tree(path, form, Strategy.none() if strategy is None and one_file else strategy, step, file_suffix)
    if strategy is not None or file_suffix is not None:
        raise UsageError(
            f"{path} is of the form {form.name}; --src-strategy and --file-suffix go with rank files",
            hint="remove these options",
        )
    inspected = inspect_form(path, form.name, step)
    subject = Subject(path, form, inspected.step, inspected.complete, inspected.checkpoint, inspected.contents)
    subject.quantised = inspected.quantised
    subject.files = [ShownFile(file.number, file.path, file.nbytes) for file in inspected.files]
    states = {None: "unknown whether it is finished", False: "not finished", True: "finished"}
    subject.steps = [
        ShownStep(str(each.number), None, states[each.finished], str(each.number) == inspected.step)
        for each in reversed(inspected.iterations)
    ]
    _add_findings(subject, inspected.findings)
    return subject


def _of_tree(
    path: str,
    form: Form,
    strategy: Optional[Strategy],
    step: str,
    file_suffix: Optional[str],
) -> Subject:
    tree = inspect_tree(path, step, file_suffix, strategy)
    subject = Subject(path, form, one_rank=tree.one_rank)
    readable = [each for each in tree.steps if each.contents is not None]
    fallback = readable[0] if readable else None
    shown = tree.latest or next((each for each in readable if each.checkpoint is not None), fallback)
    _add_findings(subject, tree.findings)
    for each in tree.steps:
        if each.complete is False:
            subject.add(0, f"{step_words(each.step)} is not complete:\n" + "\n".join(map(str, each.missing)))
    subject.steps = [ShownStep(each.step, each.nbytes, _state(each), each is shown) for each in tree.steps]
    if strategy is None:
        subject.add(
            1,
            "how parameters are cut, and whether steps are complete, was not checked: rank files do not record it",
            f"add --src-strategy FILE or --src-strategy DIR: reshard view {path} --src-strategy FILE",
        )
    if shown is None:
        return subject
    subject.step, subject.complete = shown.step, shown.complete
    subject.checkpoint, subject.contents = shown.checkpoint, shown.contents
    if shown.checkpoint is not None:
        subject.quantised, finding = quantised_in(shown.checkpoint)
        _add_findings(subject, [] if finding is None else [finding])
    subject.files = sorted(_files_of(shown), key=lambda file: (file.number or 0, file.path or ""))
    if shown.absent and shown.complete:
        subject.add(1, f"{rank_ranges(shown.absent)} left no file; replicas hold their slices", None)
    return subject


def _files_of(step: InspectedStep) -> Iterator[ShownFile]:
    for rank, path, size in step.files:
        yield ShownFile(rank, path, size, "damaged" if rank in step.damaged else "ok")
    for rank in step.absent:
        yield ShownFile(rank, None, 0, "missing")


def _state(step: InspectedStep) -> str:
    if step.ambiguous:
        return "ambiguous"
    if step.complete is not None:
        return "complete" if step.complete else "not complete"
    return "not checked"


def _add_findings(subject: Subject, findings: Sequence[Finding]) -> None:
    subject.undecoded = any(finding.kind == UNDECODED for finding in findings)
    for finding in findings:
        of = "" if finding.step is None or finding.step == subject.step else f"{step_words(finding.step)}: "
        level = 0 if finding.refuses or finding.kind in _SEVERE else 2
        subject.add(level, of + finding.text, finding.hint)


# Kinds of findings that are shown first, although a conversion may succeed.
_SEVERE = frozenset(["damaged", "gap", "empty_rank", "empty_file", "lacking", "vanished", "warning", UNDECODED])
