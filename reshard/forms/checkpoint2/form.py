"""Checkpoint 2.0 as a form."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional, cast

from reshard.checkpoints import FileHandles, reading_error
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.edited import stored_checkpoint
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import InputError
from reshard.forms.checkpoint2 import Checkpoint2, find_iterations, recognise
from reshard.forms.checkpoint2.iterations import COMMON, METADATA, TRACKER, choose, parse_iteration, read_tracker
from reshard.forms.form import Description, Form, FormOptions, Layouts, Reading, SavedCut, SavedStep, Wanted
from reshard.forms.target import FinishingFile, TargetForm
from reshard.forms.writing import selected
from reshard.storage import caches_listings, is_directory, is_regular_file, read_range
from reshard.strategies import Strategy
from reshard.text.messages import listing
from reshard.text.names import is_weight
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, some_names

_INTEGERS = {"Int32": "<i", "Int64": "<q", "UInt32": "<I", "UInt64": "<Q"}


class Checkpoint2Form(Form):
    """Checkpoint 2.0."""

    name = "checkpoint2"
    options = FormOptions(title="Checkpoint 2.0", layouts=Layouts.RECORDED, steps=True)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By its tracker, or the names of an iteration's files."""
        return is_directory(src) and recognise(src, names)

    @caches_listings
    def read(self, reading: Reading) -> Checkpoint2:
        """The last finished iteration, or the requested one."""
        from reshard.forms.checkpoint2 import read_checkpoint2, read_iteration

        src, handles, report = reading.path, reading.handles, reading.report
        if not reading.complete:
            return read_iteration(choose(src, reading.step, report).iterations[0], handles, report)
        return read_checkpoint2(src, reading.step, handles, report, reading.damaged, reading.wanted)

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """As metadata.json describes the tensors."""
        from reshard.forms.checkpoint2 import strategy_of

        return strategy_of(cast(Checkpoint2, checkpoint))

    def saved_cut(self, checkpoint: Checkpoint, name: str) -> Optional[SavedCut]:
        """As metadata.json records it; without that file, as other sources do."""
        saved = cast(Checkpoint2, checkpoint)
        return saved.placements.get(name) if saved.listed is None or name in saved.listed else None

    def target(self, checkpoint: Checkpoint, wanted: Wanted) -> TargetForm:
        """One iteration, each slice once."""
        from reshard.forms.checkpoint2.written_files import Checkpoint2Files, common_json

        report = wanted.report
        tensors, values, _ = selected(checkpoint, wanted)
        said = _said_of_training(checkpoint, wanted.handles)
        if said.get("global_batch_size") is None:
            report.warn(
                f"{COMMON} has no global_batch_size, because the source does not record it: add it before "
                "training resumes"
            )
        known = checkpoint.names().union(wanted.target.parameters)
        unlisted = [name for name in values if is_weight(name, known)]
        if unlisted:
            report.warn(
                "not in metadata.json, so loaders do not find them, because their layouts are unknown: "
                + listing(unlisted)
            )
        prefix = "" if wanted.prefix in (None, DEFAULT_PREFIX) else str(wanted.prefix).rstrip("-") + "-"
        iteration = int((said.get("global_step") if checkpoint.form != self.name else checkpoint.step) or 0)
        if iteration < 0:
            report.warn(
                f"global_step is {iteration}, and Checkpoint 2.0 counts iterations from 0: iteration 0 is written"
            )
            iteration = 0
            said = {key: None if isinstance(value, int) and value < 0 else value for key, value in said.items()}
        common = FinishingFile(COMMON, lambda: [common_json(said)])
        return Checkpoint2Files(wanted.target, tensors, known, list(values), iteration, prefix, common)

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
            for name, placement in cast(Checkpoint2, checkpoint).placements.items()
            if placement.misnumbered or placement.outside or placement.said != placement.held
        ]
        if healed:
            told = some_names([quoted(name) for name in healed], 3)
            yield os.path.join(place, METADATA), f"lacks the files of {told}"

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
        found = cast(Checkpoint2, checkpoint)
        incomplete: Optional[InputError] = None
        try:
            found.check()
        except InputError as error:
            incomplete = error
        unplaced = None
        if found.unplaced:
            names = listing(sorted(found.unplaced))
            unplaced = f"{plural(len(found.unplaced), 'tensor')} of unknown layout left out: {names}"
        return Description(
            {name: len(placement.ranks) for name, placement in found.placements.items()},
            {name: lost.slices for name, lost in found.lost.items()},
            incomplete,
            unplaced,
        )


def _said_of_training(checkpoint: Checkpoint, handles: FileHandles) -> Mapping[str, Any]:
    """The state of the training that saved a checkpoint, as in common.json."""
    # Values may be excluded from the target; the source still contains the step.
    checkpoint = stored_checkpoint(checkpoint)
    if checkpoint.training:
        return checkpoint.training
    said: dict[str, Optional[int]] = {
        name: _integer(checkpoint, name, handles) for name in ("global_step", "epoch_num", "step_num")
    }
    epoch, _, step = (checkpoint.step or "").partition("_")
    if epoch.isdigit() and step.isdigit():
        said["epoch_num"] = said["epoch_num"] if said["epoch_num"] is not None else int(epoch)
        said["step_num"] = said["step_num"] if said["step_num"] is not None else int(step)
    if said["global_step"] is None:
        said["global_step"] = said["step_num"]
    if said["step_num"] is None:
        said["step_num"] = said["global_step"]
    return {**said, "loss_scale": None}


def _integer(checkpoint: Checkpoint, name: str, handles: FileHandles) -> Optional[int]:
    """A value of one integer; None if it does not exist."""
    for holder in checkpoint.holders(name)[:1]:
        tensor = checkpoint.indexes[holder].tensors[name]
        form = _INTEGERS.get(tensor.dtype)
        if form is None or tensor.nbytes != struct.calcsize(form) or len(tensor.extents) != 1:
            return None
        path = checkpoint.files[holder]
        try:
            with handles.borrow(path) as file:
                return int(struct.unpack(form, read_range(file, *tensor.extents[0]))[0])
        except OSError as error:
            raise reading_error(path, error) from error
    return None
