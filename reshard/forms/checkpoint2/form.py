"""Checkpoint 2.0 as a form."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, cast

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.edited import stored_checkpoint
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import InputError
from reshard.forms.checkpoint2.iterations import (
    COMMON,
    METADATA,
    TRACKER,
    choose,
    find_iterations,
    parse_iteration,
    read_tracker,
    recognise,
)
from reshard.forms.form import Description, Form, FormOptions, Layouts, ReadRequest, SavedCut, SavedStep, WriteRequest
from reshard.forms.target import FinishingFile, TargetForm
from reshard.forms.writing import selected
from reshard.storage import caches_listings, is_directory, is_regular_file, read_range, reading
from reshard.strategies import Strategy
from reshard.text.messages import listing
from reshard.text.names import is_weight
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, some_names

if TYPE_CHECKING:
    from reshard.forms.checkpoint2.checkpoint import Checkpoint2

_INTEGERS = {"Int32": "<i", "Int64": "<q", "UInt32": "<I", "UInt64": "<Q"}


class Checkpoint2Form(Form):
    """Checkpoint 2.0."""

    name = "checkpoint2"
    options = FormOptions(title="Checkpoint 2.0", layouts=Layouts.RECORDED, steps=True)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By its tracker, or the names of an iteration's files."""
        return is_directory(src) and recognise(src, names)

    @caches_listings
    def read(self, request: ReadRequest) -> Checkpoint2:
        """The last finished iteration, or the requested one."""
        from reshard.forms.checkpoint2.reading import read_checkpoint2, read_iteration

        src, handles, report = request.path, request.handles, request.report
        if not request.complete:
            return read_iteration(choose(src, request.step, report).iterations[0], handles, report)
        return read_checkpoint2(src, request.step, handles, report, request.damaged, request.required)

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """As metadata.json describes the tensors."""
        from reshard.forms.checkpoint2.reading import strategy_of

        return strategy_of(cast("Checkpoint2", checkpoint))

    def saved_cut(self, checkpoint: Checkpoint, name: str) -> Optional[SavedCut]:
        """As metadata.json records it; without that file, by the placement of whole tensors."""
        saved = cast("Checkpoint2", checkpoint)
        return saved.placements.get(name) if saved.metadata_names is None or name in saved.metadata_names else None

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """One iteration, each slice once."""
        from reshard.forms.checkpoint2.written_files import Checkpoint2Files, common_json

        report = request.report
        tensors, values, _ = selected(checkpoint, request)
        training = _training_state(checkpoint, request.handles)
        if training.get("global_batch_size") is None:
            report.warn(
                f"{COMMON} has no global_batch_size, because the source does not record it: add it before "
                "training resumes"
            )
        parameters = checkpoint.names().union(request.target.parameters)
        unlisted = [name for name in values if is_weight(name, parameters)]
        if unlisted:
            report.warn(
                "not in metadata.json, so loaders do not find them, because their layouts are unknown: "
                + listing(unlisted)
            )
        prefix = "" if request.prefix in (None, DEFAULT_PREFIX) else str(request.prefix).rstrip("-") + "-"
        iteration = int((training.get("global_step") if checkpoint.form != self.name else checkpoint.step) or 0)
        if iteration < 0:
            report.warn(
                f"global_step is {iteration}, and Checkpoint 2.0 counts iterations from 0: iteration 0 is written"
            )
            iteration = 0
            training = {key: None if isinstance(value, int) and value < 0 else value for key, value in training.items()}
        common = FinishingFile(COMMON, lambda: [common_json(training)])
        return Checkpoint2Files(request.target, tensors, parameters, list(values), iteration, prefix, common)

    def marks(self, files: Sequence[str]) -> list[str]:
        """Metadata, common.json and the tracker."""
        iteration = files[0].rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """Differences between metadata, tracker and files."""
        place = os.path.relpath(checkpoint.place, directory)
        number = parse_iteration(place)
        tracked = read_tracker(directory)
        if tracked is None:
            yield TRACKER, "is missing: it marks the iteration as complete"
        elif tracked != number:
            yield TRACKER, f"names iteration {tracked}, not {number}"
        if not is_regular_file(os.path.join(checkpoint.place, COMMON)):
            yield os.path.join(place, COMMON), "is missing"
        healed = [
            name
            for name, placement in cast("Checkpoint2", checkpoint).placements.items()
            if placement.misnumbered or placement.outside or placement.recorded != placement.readable
        ]
        if healed:
            examples = some_names([quoted(name) for name in healed], 3)
            yield os.path.join(place, METADATA), f"lacks the files of {examples}"

    def check_step(self, src: str, step: str) -> None:
        """Refuse a number that no iteration has."""
        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        """All iterations of a root, oldest first."""
        iterations = find_iterations(src)
        if not iterations:
            return []
        try:
            tracked = read_tracker(src)
        except InputError:
            # The choice of an iteration reports this already.
            tracked = None
        return [
            SavedStep(number, place, None if tracked is None else number <= tracked, number == tracked)
            for number, place in iterations
            if number is not None
        ]

    def describe(self, checkpoint: Checkpoint) -> Description:
        """The ranks of tensors, and lost slices."""
        saved = cast("Checkpoint2", checkpoint)
        incomplete: Optional[InputError] = None
        try:
            saved.check()
        except InputError as error:
            incomplete = error
        unplaced = None
        if saved.unplaced:
            names = listing(sorted(saved.unplaced))
            unplaced = f"{plural(len(saved.unplaced), 'tensor')} of unknown layout left out: {names}"
        return Description(
            {name: len(placement.ranks) for name, placement in saved.placements.items()},
            {name: lost.slices for name, lost in saved.lost.items()},
            incomplete,
            unplaced,
        )


def _training_state(checkpoint: Checkpoint, handles: FileHandles) -> Mapping[str, Any]:
    """The members of common.json for a checkpoint."""
    # Values may be excluded from the target; the source still contains the step.
    checkpoint = stored_checkpoint(checkpoint)
    if checkpoint.training:
        return checkpoint.training
    state: dict[str, Optional[int]] = {
        name: _integer(checkpoint, name, handles) for name in ("global_step", "epoch_num", "step_num")
    }
    epoch, _, step = (checkpoint.step or "").partition("_")
    if epoch.isdigit() and step.isdigit():
        state["epoch_num"] = state["epoch_num"] if state["epoch_num"] is not None else int(epoch)
        state["step_num"] = state["step_num"] if state["step_num"] is not None else int(step)
    if state["global_step"] is None:
        state["global_step"] = state["step_num"]
    if state["step_num"] is None:
        state["step_num"] = state["global_step"]
    return {**state, "loss_scale": None}


def _integer(checkpoint: Checkpoint, name: str, handles: FileHandles) -> Optional[int]:
    """The integer of this name; None without one."""
    for holder in checkpoint.holders(name)[:1]:
        tensor = checkpoint.indexes[holder].tensors[name]
        form = _INTEGERS.get(tensor.dtype)
        if form is None or tensor.nbytes != struct.calcsize(form) or len(tensor.extents) != 1:
            return None
        path = checkpoint.files[holder]
        with reading(path), handles.borrow(path) as file:
            return int(struct.unpack(form, read_range(file, *tensor.extents[0]))[0])
    return None
