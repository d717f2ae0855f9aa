"""A form of checkpoint outside the package: one file per tensor, and a list of them.

It is one module, and one line in ``FORM_CLASSES``. CONTRIBUTING.md shows it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import Form, FormOptions
from reshard.forms.full.contents import Contents, FullWeights
from reshard.forms.ranks.naming import FileNames
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile, Section, TargetForm, WholeLayouts
from reshard.forms.writing import selected

LIST = "tensors.json"


class ToyForm(Form):
    """Directories of one ``.safetensors`` file per tensor, which ``tensors.json`` lists."""

    name = "toy"
    options = FormOptions(mindspore=False)

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        """By the list."""
        return LIST in names

    def read(self, request: Request, means: Means) -> Checkpoint:
        """What the list names."""
        files = json.loads(Path(request.src, LIST).read_text())
        contents = Contents.read(request.src, files, means.handles, request.damaged)
        tensors, values = contents.tensors(len(files))
        return FullWeights(self.name, request.src, contents.paths, contents.indexes, tensors, values)

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        """A file for every tensor and every value."""
        return _ToyFiles(checkpoint, request)

    def marks(self, files: Sequence[str]) -> list[str]:
        """The list."""
        return [LIST]


class _ToyFiles(TargetForm):
    name = "toy"
    by_rank = False
    takes_everything = True
    format = "safetensors"
    metadata = None

    def __init__(self, checkpoint: Checkpoint, request: Request) -> None:
        tensors, values, _ = selected(checkpoint, request.filters.admit)
        self._held = [*tensors, *values]
        names = [f"tensor-{number}" for number in range(len(self._held))]
        self.names = FileNames("file{rank}", dict(enumerate(names)))
        self.sections = [
            Section(
                number, range(number, number + 1), WholeLayouts(tensors, {name} & tensors.keys()), label=names[number]
            )
            for number, name in enumerate(self._held)
        ]

    @property
    def count(self) -> int:
        return len(self._held)

    def section_of(self, file: int) -> Section:
        return self.sections[file]

    def takes_value(self, name: str, file: int) -> bool:
        return self._held[file] == name

    def finishing(self) -> Sequence[FinishingFile]:
        files = [f"{os.path.basename(self.names.of(file))}.{self.format}" for file in range(self.count)]
        return [FinishingFile(LIST, lambda: [json.dumps(files).encode()])]
