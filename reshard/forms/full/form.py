"""The two forms of full weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import UsageError
from reshard.forms.form import Form, FormOptions, Reading, Wanted
from reshard.forms.full.directory import HYPER_PARAMETERS, MAP_FILES, UNIFIED, full_weights_form, read_weight_map
from reshard.forms.target import TargetForm
from reshard.forms.writing import Selected, note_left_beside, selected
from reshard.storage import asks_once, is_regular_file
from reshard.text.names import is_weight, training_globs
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, some_names


class _FullForm(Form):
    """The common part of both forms."""

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By the map or index, or by names as the form gives them."""
        return full_weights_form(src, names) == self.name

    def marks(self, files: Sequence[str]) -> list[str]:
        """The map or index."""
        return [MAP_FILES[self.name]]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """Differences between the map or index and the files."""
        name = MAP_FILES[self.name]
        held: dict[str, str] = {}
        for number, path in checkpoint.files.items():
            file = os.path.relpath(path, directory)
            if self.name != UNIFIED or file != HYPER_PARAMETERS:
                held.update(dict.fromkeys(checkpoint.indexes[number].tensors, file))
        path = os.path.join(directory, name)
        if not is_regular_file(path):
            if self.name == UNIFIED or len(checkpoint.files) > 1:
                yield name, "is missing: the files of tensors are not recorded"
            return
        listed = read_weight_map(path)
        wrong = [tensor for tensor, file in held.items() if listed.get(tensor) != file]
        if wrong:
            told = some_names([quoted(tensor) for tensor in wrong], 3)
            yield name, f"lacks the files of {plural(len(wrong), 'tensor')}: {told}"


class UnifiedForm(_FullForm):
    """MindSpore's unified safetensors."""

    name = "unified"
    options = FormOptions(shard_size=True)

    @asks_once
    def read(self, reading: Reading) -> Checkpoint:
        """By its map."""
        from reshard.forms.full import read_unified

        check_latest(self, reading)
        return read_unified(reading.path, reading.handles, reading.report, reading.damaged)

    def target(self, checkpoint: Checkpoint, wanted: Wanted) -> TargetForm:
        """Parts of about the same size, and the map."""
        from reshard.forms.full.written_files import FullDirectory

        chosen = selected(checkpoint, wanted)
        note_left_beside(checkpoint, wanted.report)
        return FullDirectory(self.name, chosen.tensors, chosen.values, wanted.max_shard_size, (), chosen.names)


class HuggingFaceForm(_FullForm):
    """Hugging Face's directories."""

    name = "huggingface"
    options = FormOptions(shard_size=True, mindspore=False)

    @asks_once
    def read(self, reading: Reading) -> Checkpoint:
        """By its index, if it has one."""
        from reshard.forms.full import read_huggingface

        check_latest(self, reading)
        return read_huggingface(reading.path, reading.handles, reading.report, reading.damaged)

    def target(self, checkpoint: Checkpoint, wanted: Wanted) -> TargetForm:
        """Numbered files, the index, and further files of a Hugging Face source."""
        from reshard.forms.full.beside import files_beside
        from reshard.forms.full.written_files import FullDirectory

        chosen = selected(checkpoint, wanted)
        _warn_of_training(chosen, checkpoint.names(), wanted.report)
        others = files_beside(checkpoint, chosen.tensors, wanted)
        return FullDirectory(self.name, chosen.tensors, chosen.values, wanted.max_shard_size, others, chosen.names)

    def check_beside(
        self, directory: str, written: Checkpoint, source: Checkpoint, cast: bool, report: Report
    ) -> Iterator[tuple[str, str]]:
        """The configuration and tokenizer of a Hugging Face source."""
        from reshard.forms.full.beside import check_beside

        return check_beside(directory, written, source, cast, report)


def check_latest(form: Form, reading: Reading) -> None:
    """Refuse a step of a form that has none.

    Raises:
        UsageError: one is asked for.
    """
    if reading.step != "latest":
        raise UsageError(f"{reading.src}: is of the form {form.name}, which has no steps", hint="leave out --step")


def _warn_of_training(chosen: Selected, known: Collection[str], report: Report) -> None:
    """Advice on skipping optimizer state, gradients and counters."""
    names = [*chosen.tensors, *chosen.values]
    others = sum(not is_weight(name, known) for name in names)
    if others:
        report.warn(
            f"optimizer state and values of the training are written too ({plural(others, 'tensor')}), and loaders of "
            "Hugging Face models do not expect them; leave them out with "
            + " ".join(f"--exclude '{glob}'" for glob in training_globs(names, known))
        )
