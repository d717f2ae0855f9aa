"""Inspection of a checkpoint of any form but rank directories, from names, metadata and headers alone."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.pickles import NotPlain
from reshard.errors import InputError
from reshard.forms.form import Description, ReadRequest, SavedStep
from reshard.forms.objects import shown_object
from reshard.forms.registry import form_named
from reshard.inspection.contents import Finding, InspectedContents, contents_of, conversion_findings
from reshard.storage import caches_listings, is_directory, names_in, status_of_each
from reshard.text.messages import Report
from reshard.text.names import kind_of


class FormFile(NamedTuple):
    """A file of weights.

    Attributes:
        number: its number in `--ranks`; None if the checkpoint cannot be read.
        path: the file.
        nbytes: its size.
        names: number of its entries; None if unknown.
    """

    number: Optional[int]
    path: str
    nbytes: int
    names: Optional[int]


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
    ranks: Optional[int]
    files: int
    lost: int


@dataclass
class InspectedForm:
    """A checkpoint.

    Attributes:
        path: as typed.
        form: its form.
        step: the shown iteration; None if there are none, or it is unknown.
        complete: whether all of it can be read.
        iterations: all of a root, oldest first.
        files: its files of weights.
        tensors: tensors with a layout, sorted by name.
        values: names of entries that are copied unchanged.
        contents: the entries of the files; None if none could be read.
        full_bytes: size of all tensors together, each whole and once.
        objects: pickled objects by name: the value as JSON, or None where JSON has no equivalent.
        others: other files of the model.
        quantised: number of quantised tensors, by scheme.
        findings: notes and problems.
        checkpoint: the checkpoint; None where it cannot be read.
    """

    path: str
    form: str
    step: Optional[str] = None
    complete: bool = False
    iterations: list[SavedStep] = field(default_factory=list)
    files: list[FormFile] = field(default_factory=list)
    tensors: list[InspectedLayout] = field(default_factory=list)
    values: tuple[str, ...] = ()
    objects: Mapping[str, Any] = field(default_factory=dict)
    contents: Optional[InspectedContents] = None
    full_bytes: int = 0
    others: tuple[str, ...] = ()
    quantised: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    checkpoint: Optional[Checkpoint] = None

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(file.nbytes for file in self.files)


@caches_listings
def inspect_form(path: str, form: str, step: str = "latest") -> InspectedForm:
    """Inspect a checkpoint.

    Args:
        path: a directory, or the index or map in one.
        form: its form.
        step: an iteration's number, or ``latest``.

    Raises:
        UsageError: ``step`` is not an iteration, or the form has none.
        InputError: the iteration or the checkpoint is missing.
        RetryableError: reading failed; a retry may help.
    """
    inspected = InspectedForm(path, form)
    reader = form_named(form)
    report = Report()
    with FileHandles() as handles:
        inspected.iterations = reader.steps(path)
        # A missing step that was requested is an error, not a finding.
        reader.check_step(path, step)
        try:
            checkpoint = reader.read(ReadRequest(path, handles, report, step, complete=False))
        except InputError as error:
            inspected.files = _files_in(path)
            if not inspected.files and not inspected.iterations:
                # Nothing to show.
                raise
            inspected.findings.append(Finding("unreadable", error.message, error.hint, refuses=True))
        else:
            _describe(inspected, checkpoint, reader.describe(checkpoint))
            inspected.objects = {name: _shown(handles, stored) for name, stored in sorted(checkpoint.objects.items())}
    inspected.findings += [Finding("warning", text) for text in report.warnings]
    return inspected


def _describe(inspected: InspectedForm, checkpoint: Checkpoint, description: Description) -> None:
    inspected.checkpoint = checkpoint
    inspected.step = checkpoint.step
    inspected.complete = True
    files_by_path: dict[str, FormFile] = {}
    for number, path in sorted(checkpoint.files.items()):
        # A file may have several numbers, each with some of its entries.
        index, earlier = checkpoint.indexes[number], files_by_path.get(path)
        names = len(index.tensors) + (earlier.names or 0 if earlier else 0)
        files_by_path[path] = FormFile(earlier.number if earlier else number, path, index.size, names)
    inspected.files = [*files_by_path.values()]
    contents = inspected.contents = contents_of(checkpoint.indexes)
    for name in sorted(checkpoint.tensors):
        tensor = checkpoint.tensors[name]
        # A file may have several numbers, one for each piece of a tensor.
        files = {checkpoint.files[number] for number in frozenset().union(*checkpoint.present(tensor))}
        inspected.tensors.append(
            InspectedLayout(
                name,
                tensor.dtype,
                tensor.shape,
                kind_of(name, math.prod(tensor.shape), checkpoint.tensors),
                tensor.shardings[0].grid.cuts,
                description.ranks.get(name),
                len(files),
                description.lost.get(name, 0),
            )
        )
        inspected.full_bytes += math.prod(tensor.shape) * tensor.item_size
    inspected.values = tuple(checkpoint.values())
    inspected.others = tuple(checkpoint.extra_files)
    inspected.quantised, finding = quantised_in(checkpoint)
    inspected.findings += [] if finding is None else [finding]
    if description.incomplete is not None:
        error = description.incomplete
        inspected.complete = False
        inspected.findings.append(Finding("incomplete", error.message, error.hint, checkpoint.step, refuses=True))
    if description.unplaced is not None:
        inspected.findings.append(Finding("unplaced", description.unplaced))
    inspected.findings += conversion_findings(contents)


def _shown(handles: FileHandles, stored: StoredObject) -> Any:
    try:
        return shown_object(handles, stored)
    except NotPlain:
        return None


UNDECODED = "quantised"
"""Kind of the finding that tensors are quantised and cannot be dequantised."""


def quantised_in(checkpoint: Checkpoint) -> tuple[dict[str, int], Optional[Finding]]:
    """The number of quantised tensors by scheme, and a finding if a scheme is unknown."""
    # Loaded only here: most checkpoints are not quantised.
    from reshard.quantised import describe, looks_quantised, quantisation_of, recognise, stored_tensors

    tensors = stored_tensors(checkpoint)
    if not looks_quantised(tensors):
        return {}, None
    try:
        source = quantisation_of(checkpoint.place, "BFloat16")
        return describe(recognise(tensors, source.config, source.description, source.place)), None
    except InputError as error:
        return {}, Finding(UNDECODED, error.message, error.hint)


def _files_in(path: str) -> list[FormFile]:
    """Files of weights of a directory that cannot be read as a checkpoint."""
    directory = path if is_directory(path) else os.path.dirname(path) or os.curdir
    paths = [os.path.join(directory, name) for name in names_in(directory) if name.endswith(".safetensors")]
    statuses = zip(paths, status_of_each(paths))
    return [FormFile(None, path, status.size, None) for path, status in statuses if status is not None]
