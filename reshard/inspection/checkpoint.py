"""The contents of a path: a checkpoint of any form, its steps, files, tensors and problems, from headers alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from reshard.asked import Source
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.pickles import NotPlain
from reshard.errors import InputError
from reshard.forms.form import Description, Form, SavedStep
from reshard.forms.objects import shown_object
from reshard.forms.ranks.selection import LostParameter
from reshard.forms.registry import check_options, form_of
from reshard.forms.request import Means, Request
from reshard.inspection.contents import Finding, InspectedContents, contents_of, conversion_findings
from reshard.storage import exists, is_directory, names_in, status_of_each
from reshard.strategies import Strategy
from reshard.text.messages import Report, rank_ranges, step_words
from reshard.text.names import kind_of

UNDECODED = "quantised"
"""Kind of the finding that tensors are quantised and cannot be dequantised."""

# Kinds of findings that are shown first, although a conversion may succeed.
_SEVERE = frozenset(["damaged", "gap", "empty_rank", "empty_file", "vanished", "warning", UNDECODED])


class InspectedFile(NamedTuple):
    """A file of weights.

    Attributes:
        number: its rank, or its number in a form without ranks; None where the checkpoint cannot be read.
        path: the file; None for a rank without a file.
        nbytes: its size.
        names: number of its entries; None where its header was not read.
        state: ``ok``, ``damaged`` or ``missing``.
    """

    number: int | None
    path: str | None
    nbytes: int
    names: int | None = None
    state: str = "ok"


@dataclass
class InspectedStep:
    """One step, or the checkpoint of a form without steps.

    Attributes:
        step: its name; None where there is none.
        files: its files, by number.
        contents: the entries of the files, if headers were read.
        checkpoint: the checkpoint, complete or not; None if it is not known how it is cut.
        complete: whether a conversion would accept it; None if not checked.
        missing: the reasons if it is incomplete, a line each.
        full_bytes: size of all tensors together, each whole and once; None if unknown.
        absent: ranks of the tree, or of the strategy, without a file of it.
        ambiguous: whether a rank has several files of it.
        saved_at: ``"breakpoint"`` or ``"ttp"`` by the names, ``"end of life"`` by the headers.
        one_per_group: with a strategy, whether only one rank of each replica group has a file.
        damaged: the damage of files that count as absent, by rank, if headers were read.
        lost: parameters with a slice in no file.
        not_saved: parameters of the strategy in no file.
    """

    step: str | None
    files: list[InspectedFile] = field(default_factory=list)
    contents: InspectedContents | None = None
    checkpoint: Checkpoint | None = None
    complete: bool | None = None
    missing: Sequence[str] = ()
    full_bytes: int | None = None
    absent: tuple[int, ...] = ()
    ambiguous: bool = False
    saved_at: str | None = None
    one_per_group: bool | None = None
    damaged: Mapping[int, str] = field(default_factory=dict)
    lost: Sequence[LostParameter] = ()
    not_saved: Sequence[str] = ()

    @property
    def ranks(self) -> list[int]:
        """Numbers of its files, ascending."""
        return sorted({file.number for file in self.files if file.number is not None})

    @property
    def nbytes(self) -> int:
        return sum(file.nbytes for file in self.files)

    def with_missing(self) -> list[InspectedFile]:
        """Its files, and ranks without one, by number."""
        missing = [InspectedFile(rank, None, 0, state="missing") for rank in self.absent]
        return sorted([*self.files, *missing], key=lambda file: (file.number or 0, file.path or ""))


class InspectedLayout(NamedTuple):
    """A tensor with a layout.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        shape: shape of the full tensor.
        kind: one of `reshard.text.names.KINDS`.
        cuts: slices per dimension.
        ranks: number of ranks that it is laid out over; None if the form has no ranks.
        files: number of files that hold a slice of it.
        lost: number of slices that are in no readable file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    cuts: tuple[int, ...]
    ranks: int | None
    files: int
    lost: int


@dataclass
class Inspected:
    """A checkpoint.

    Attributes:
        path: as typed.
        form: its form.
        steps: of rank trees all steps, newest first, names without a step last; else the one that was read.
        shown: the step that is shown; without contents if nothing can be read.
        findings: notes and problems.
        quantised: number of quantised tensors of the shown step, by scheme.
        ranks: of rank trees, ranks that have a directory or a file, ascending.
        one_rank: whether it is the directory of one rank.
        strategy: the path of the strategy of a rank tree, ``none``, or None if none was named.
        latest: the step of a rank tree that ``latest`` selects; None if a step was requested or none is complete.
        iterations: of other forms, all of a root, oldest first.
        description: of other forms, what only some forms have.
        objects: pickled objects by name: the value as JSON, or None where JSON has no equivalent.
    """

    path: str
    form: Form
    steps: list[InspectedStep] = field(default_factory=list)
    shown: InspectedStep = field(default_factory=lambda: InspectedStep(None))
    findings: list[Finding] = field(default_factory=list)
    quantised: Mapping[str, int] = field(default_factory=dict)
    ranks: Sequence[int] = ()
    one_rank: bool = False
    strategy: str | None = None
    latest: InspectedStep | None = None
    iterations: Sequence[SavedStep] = ()
    description: Description = field(default_factory=Description)
    objects: Mapping[str, Any] = field(default_factory=dict)

    def tensors(self) -> list[InspectedLayout]:
        """The tensors of the shown step, sorted by name."""
        checkpoint, layouts = self.shown.checkpoint, []
        if checkpoint is None:
            return []
        for name in sorted(checkpoint.tensors):
            tensor = checkpoint.tensors[name]
            holding = {checkpoint.files[number] for number in frozenset().union(*checkpoint.present(tensor))}
            layouts.append(
                InspectedLayout(
                    name,
                    tensor.dtype,
                    tensor.shape,
                    kind_of(name, math.prod(tensor.shape), checkpoint.tensors),
                    tensor.shardings[0].grid.cuts,
                    self.description.ranks.get(name),
                    len(holding),
                    self.description.lost.get(name, 0),
                )
            )
        return layouts

    @property
    def undecoded(self) -> bool:
        """Whether tensors are quantised in a scheme that is not recognised; a finding gives the reason."""
        return any(finding.kind == UNDECODED for finding in self.findings)

    def find_quantised(self) -> None:
        """Count the quantised tensors of the shown step, or add a finding if their scheme is unknown."""
        # Loaded only here: most checkpoints are not quantised.
        from reshard.quantised import describe, looks_quantised, quantisation_of, recognise, stored_tensors

        checkpoint = self.shown.checkpoint
        tensors = {} if checkpoint is None else stored_tensors(checkpoint)
        if checkpoint is not None and looks_quantised(tensors):
            try:
                self.quantised = describe(recognise(tensors, quantisation_of(checkpoint.place, "BFloat16")))
            except InputError as error:
                self.findings.append(Finding(UNDECODED, error.message, error.hint))


class Problem(NamedTuple):
    """A line for people, with the remedy.

    Level 0: a conversion refuses, or something is lost; 1: something could not be checked; 2: a note.
    """

    level: int
    text: str
    hint: str | None = None


def problems_of(inspected: Inspected) -> list[Problem]:
    """The findings and what a strategy would check, the most severe first."""
    problems = []
    for finding in inspected.findings:
        of = "" if finding.step in (None, inspected.shown.step) else f"{step_words(finding.step)}: "
        level = 0 if finding.refuses or finding.kind in _SEVERE else 2
        problems.append(Problem(level, str(of + finding.text), finding.hint and str(finding.hint)))
    for step in inspected.steps if inspected.form.options.by_rank else ():
        if step.complete is False:
            reasons = "\n".join(map(str, step.missing))
            problems.append(Problem(0, f"{step_words(step.step)} is not complete:\n{reasons}"))
    if inspected.form.options.by_rank and inspected.strategy is None:
        problems.append(
            Problem(
                1,
                "how parameters are cut, and whether steps are complete, was not checked: rank files do not record it",
                f"add --src-strategy FILE or --src-strategy DIR: reshard view {inspected.path} --src-strategy FILE",
            )
        )
    if inspected.shown.absent and inspected.shown.complete:
        problems.append(Problem(1, f"{rank_ranges(inspected.shown.absent)} left no file; replicas hold their slices"))
    return sorted(problems, key=lambda problem: problem.level)


def inspect(read: Source, strategy: Strategy | None = None) -> Inspected:
    """Inspect a checkpoint.

    Args:
        read: a checkpoint of any form, or the directory of one rank; headers of its step are read.
        strategy: of a rank tree; it decides which steps are complete.

    Raises:
        UsageError: an option does not suit the form.
        InputError: the checkpoint or the step is missing.
        RetryableError: reading failed; a retry may help.
    """
    path = read.path
    form = form_of(path)
    one_file = exists(path) and not is_directory(path)
    if form.options.by_rank:
        from reshard.inspection.tree import inspect_tree

        if one_file and strategy is None:
            strategy = Strategy.none()
        inspected = inspect_tree(read, form, strategy)
        inspected.find_quantised()
        return inspected
    check_options(read, form)
    return _of_form(read, form)


def _of_form(read: Source, form: Form) -> Inspected:
    path = read.path
    inspected = Inspected(path, form, iterations=form.steps(path))
    # A missing step that was requested is an error, not a finding.
    form.check_step(path, read.step)
    report = Report()
    with FileHandles() as handles:
        try:
            checkpoint = form.read(Request.of_source(read, form)._replace(complete=False), Means(handles, report))
        except InputError as error:
            inspected.shown.files, inspected.shown.complete = _files_in(path), False
            if not inspected.shown.files and not inspected.iterations:
                # Nothing to show.
                raise
            inspected.findings.append(Finding("unreadable", error.message, error.hint, refuses=True))
        else:
            _describe(inspected, checkpoint)
            inspected.objects = {name: _shown(handles, stored) for name, stored in sorted(checkpoint.objects.items())}
    inspected.findings += [Finding("warning", text) for text in report.warnings]
    inspected.steps = [inspected.shown]
    return inspected


def _describe(inspected: Inspected, checkpoint: Checkpoint) -> None:
    cut = inspected.form.cut(checkpoint)
    description = inspected.description = Description() if cut is None else cut.describe()
    files: dict[str, InspectedFile] = {}
    for number, path in sorted(checkpoint.files.items()):
        # A file may have several numbers, each with some of its entries.
        index, earlier = checkpoint.indexes[number], files.get(path)
        names = len(index.tensors) + (earlier.names or 0 if earlier else 0)
        files[path] = InspectedFile(earlier.number if earlier else number, path, index.size, names)
    full_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    contents, error = contents_of(checkpoint.indexes), description.incomplete
    inspected.shown = InspectedStep(
        checkpoint.step, [*files.values()], contents, checkpoint, error is None, full_bytes=full_bytes
    )
    inspected.find_quantised()
    if error is not None:
        inspected.findings.append(Finding("incomplete", error.message, error.hint, checkpoint.step, refuses=True))
    if description.unplaced is not None:
        inspected.findings.append(Finding("unplaced", description.unplaced))
    inspected.findings += conversion_findings(contents)


def _shown(handles: FileHandles, stored: StoredObject) -> Any:
    try:
        return shown_object(handles, stored)
    except NotPlain:
        return None


def _files_in(path: str) -> list[InspectedFile]:
    """Files of weights of a directory that cannot be read as a checkpoint."""
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    paths = [os.path.join(directory, name) for name in names_in(directory) if name.endswith(".safetensors")]
    statuses = zip(paths, status_of_each(paths))
    return [InspectedFile(None, path, status.size) for path, status in statuses if status is not None]
