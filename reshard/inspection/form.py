"""What is in a checkpoint of any form but rank directories, from names, metadata and headers alone."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.checkpoint2 import Checkpoint2, find_iterations, read_iteration
from reshard.checkpoints.checkpoint2.iterations import choose, read_tracker
from reshard.checkpoints.forms import CHECKPOINT2, read_checkpoint
from reshard.checkpoints.full import FullWeights
from reshard.errors import InputError
from reshard.inspection.contents import Contents, Finding, contents_of, conversion_findings
from reshard.storage import asks_once, is_directory, names_in, status_at
from reshard.text.messages import listing
from reshard.text.names import kind_of
from reshard.text.report import Report
from reshard.text.wording import plural


class InspectedIteration(NamedTuple):
    """An iteration of a root of Checkpoint 2.0.

    Attributes:
        number: its number.
        path: its directory.
        finished: whether it is not newer than the last finished one; None where nothing tells which that is.
        latest: whether it is the last finished one.
    """

    number: int
    path: str
    finished: Optional[bool]
    latest: bool


class FormFile(NamedTuple):
    """A file of weights.

    Attributes:
        number: as `--ranks` counts it; None where the checkpoint cannot be read.
        path: the file.
        nbytes: its size.
        names: how many entries it has; None where that is not known.
    """

    number: Optional[int]
    path: str
    nbytes: int
    names: Optional[int]


class LaidOut(NamedTuple):
    """A tensor.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        shape: shape of the full tensor.
        kind: one of `reshard.text.names.KINDS`.
        cuts: slices per dimension.
        ranks: how many ranks it is laid out over; None where the form says nothing of ranks.
        files: how many files hold a slice of it.
        lost: how many slices are in no readable file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: str
    cuts: tuple[int, ...]
    ranks: Optional[int]
    files: int
    lost: int


@dataclass
class InspectedForm:
    """A checkpoint.

    Attributes:
        path: as it was named.
        form: its form.
        step: the iteration that is shown; None where there are none, or nothing tells.
        complete: whether everything in it can be read whole.
        iterations: all of a root, oldest first.
        files: its files of weights.
        tensors: what is laid out, in the order of the names.
        values: names of what is copied as it is.
        contents: what the files hold; None where none could be read.
        full_bytes: size of all tensors together, each whole and once.
        others: files beside the weights that belong to the model.
        findings: what a user should know.
    """

    path: str
    form: str
    step: Optional[str] = None
    complete: bool = False
    iterations: list[InspectedIteration] = field(default_factory=list)
    files: list[FormFile] = field(default_factory=list)
    tensors: list[LaidOut] = field(default_factory=list)
    values: tuple[str, ...] = ()
    contents: Optional[Contents] = None
    full_bytes: int = 0
    others: tuple[str, ...] = ()
    findings: list[Finding] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.nbytes for file in self.files)


@asks_once
def inspect_form(path: str, form: str, step: str = "latest") -> InspectedForm:
    """What is in a checkpoint.

    Args:
        path: a directory, or the index or map in one.
        form: its form.
        step: an iteration's number, or ``latest``.

    Raises:
        UsageError: ``step`` is no iteration, or there are none in this form.
        InputError: there is no such iteration, or nothing to look at.
        RetryableError: reading failed in a way that may pass.
    """
    found = InspectedForm(path, form)
    report = Report()
    with FileHandles() as handles:
        if form == CHECKPOINT2:
            found.iterations = _iterations(path)
        if form == CHECKPOINT2 and step != "latest":
            # An iteration that was asked for and is not there is no finding.
            choose(path, step, Report())
        try:
            if form == CHECKPOINT2:
                checkpoint: Checkpoint = read_iteration(choose(path, step, report).iterations[0], handles, report)
            else:
                checkpoint = read_checkpoint(form, path, step, handles, report, {}, lambda name: True)
        except InputError as error:
            found.files = _files_in(path)
            if not found.files and not found.iterations:
                # There is nothing to show.
                raise
            found.findings.append(Finding("unreadable", error.message, error.hint, refuses=True))
        else:
            _describe(found, checkpoint)
    found.findings += [Finding("warning", text) for text in report.warnings]
    return found


def _iterations(path: str) -> list[InspectedIteration]:
    iterations = find_iterations(path)
    if not iterations:
        return []
    try:
        tracked = read_tracker(path)
    except InputError:
        # Whoever chooses an iteration says so.
        tracked = None
    return [
        InspectedIteration(number, place, None if tracked is None else number <= tracked, number == tracked)
        for number, place in iterations
        if number is not None
    ]


def _describe(found: InspectedForm, checkpoint: Checkpoint) -> None:
    found.step = checkpoint.step
    found.complete = True
    found.files = [
        FormFile(number, path, checkpoint.indexes[number].size, len(checkpoint.indexes[number].tensors))
        for number, path in sorted(checkpoint.files.items())
    ]
    placements = checkpoint.placements if isinstance(checkpoint, Checkpoint2) else {}
    lost = checkpoint.lost if isinstance(checkpoint, Checkpoint2) else {}
    contents = found.contents = contents_of(checkpoint.indexes)
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        placement = placements.get(name)
        files = frozenset().union(*checkpoint.present(tensor))
        found.tensors.append(
            LaidOut(
                name,
                tensor.dtype,
                tensor.shape,
                kind_of(name, math.prod(tensor.shape), checkpoint.tensors),
                tensor.shardings[0].grid.cuts,
                None if placement is None else len(placement.ranks),
                len(files),
                lost[name].slices if name in lost else 0,
            )
        )
        found.full_bytes += math.prod(tensor.shape) * tensor.item_size
    found.values = tuple(checkpoint.values())
    if isinstance(checkpoint, FullWeights):
        found.others = checkpoint.others
    if isinstance(checkpoint, Checkpoint2):
        try:
            checkpoint.check()
        except InputError as error:
            found.complete = False
            found.findings.append(Finding("incomplete", error.message, error.hint, checkpoint.step, refuses=True))
        if checkpoint.unplaced:
            names = listing(sorted(checkpoint.unplaced))
            found.findings.append(
                Finding("unplaced", f"{plural(len(checkpoint.unplaced), 'tensor')} of unknown layout left out: {names}")
            )
    found.findings += conversion_findings(contents)


def _files_in(path: str) -> list[FormFile]:
    """Files of weights of a directory that cannot be read as a checkpoint."""
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    found = []
    for name in names_in(directory):
        place = os.path.join(directory, name)
        status = status_at(place) if name.endswith(".safetensors") else None
        if status is not None:
            found.append(FormFile(None, place, status.size, None))
    return found
