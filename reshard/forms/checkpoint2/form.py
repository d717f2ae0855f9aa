"""Checkpoint 2.0 as a form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Optional, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import InputError
from reshard.forms.checkpoint2.iterations import COMMON, METADATA, choose, find_iterations, parse_iteration, recognise
from reshard.forms.form import Description, Form, FormOptions, Layouts, ReadRequest, SavedCut, SavedStep, WriteRequest
from reshard.forms.tracker import TRACKER, read_tracker, saved_steps
from reshard.storage import caches_listings, is_directory, is_regular_file
from reshard.strategies import Strategy
from reshard.text.messages import Report, listing, plural, quoted, some_names

if TYPE_CHECKING:
    from reshard.forms.checkpoint2.checkpoint import Checkpoint2
    from reshard.forms.target import TargetForm


class Checkpoint2Form(Form):
    """Checkpoint 2.0."""

    name = "checkpoint2"
    options = FormOptions(title="Checkpoint 2.0", layouts=Layouts.RECORDED, steps=True, prefix=True)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By its tracker, or the names of an iteration's files."""
        return is_directory(src) and recognise(src, names)

    @caches_listings
    def read(self, request: ReadRequest) -> Checkpoint2:
        """The last finished iteration, or the requested one."""
        from reshard.forms.checkpoint2.reading import read_checkpoint2

        return read_checkpoint2(request)

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
        from reshard.forms.checkpoint2.written_files import target_files

        return target_files(self.name, checkpoint, request)

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
        return saved_steps(src, ((number, path) for number, path in find_iterations(src) if number is not None))

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
