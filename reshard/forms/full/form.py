"""The two forms of full weights."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import Form, FormOptions, ReadRequest, WriteRequest, check_latest
from reshard.forms.full.directory import HYPER_PARAMETERS, MAP_FILES, UNIFIED, full_weights_form, read_weight_map
from reshard.storage import caches_listings, is_regular_file
from reshard.text.messages import Report, plural, quoted, some_names
from reshard.text.names import is_value, is_weight, training_globs

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm
    from reshard.forms.writing import Selected


class _FullForm(Form):
    """The common part of both forms."""

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By the map or index, or by the form's file names."""
        return full_weights_form(src, names) == self.name

    @caches_listings
    def read(self, request: ReadRequest) -> Checkpoint:
        """By the map, or by the index if there is one."""
        from reshard.forms.full.contents import read_huggingface, read_unified

        check_latest(self, request)
        return read_unified(request) if self.name == UNIFIED else read_huggingface(request)

    def marks(self, files: Sequence[str]) -> list[str]:
        """The map or index."""
        return [MAP_FILES[self.name]]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        """Differences between the map or index and the files."""
        name = MAP_FILES[self.name]
        file_of: dict[str, str] = {}
        for number, path in checkpoint.files.items():
            file = os.path.relpath(path, directory)
            if self.name != UNIFIED or file != HYPER_PARAMETERS:
                file_of.update(dict.fromkeys(checkpoint.indexes[number].tensors, file))
        path = os.path.join(directory, name)
        if not is_regular_file(path):
            if self.name == UNIFIED or len(checkpoint.files) > 1:
                yield name, "is missing: the files of tensors are not recorded"
            return
        weight_map = read_weight_map(path)
        wrong = [tensor for tensor, file in file_of.items() if weight_map.get(tensor) != file]
        if wrong:
            examples = some_names([quoted(tensor) for tensor in wrong], 3)
            yield name, f"lacks the files of {plural(len(wrong), 'tensor')}: {examples}"


class UnifiedForm(_FullForm):
    """MindSpore's unified safetensors."""

    name = "unified"
    options = FormOptions(shard_size=True)

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """Parts of about the same size, and the map."""
        from reshard.forms.full.written_files import FullDirectory
        from reshard.forms.writing import note_uncopied_files, selected

        chosen = selected(checkpoint, request)
        note_uncopied_files(checkpoint, request.report)
        # Readers skip weights among the values, which may be slices. Loaders cut every tensor of a part, and
        # cannot cut shape []: such weights stay values.
        weights = [
            name
            for name in chosen.values
            if request.source.is_none
            and not is_value(name, 1)
            and checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name].shape
        ]
        return FullDirectory(
            self.name, chosen.tensors, chosen.values, request.max_shard_size, (), chosen.names, weights
        )


# Beginnings of names in MindFormers' models that no model of Hugging Face has.
_MINDFORMERS = ("decoder.layers.", "embedding.word_embeddings.", "model.tok_embeddings.")


class HuggingFaceForm(_FullForm):
    """Hugging Face's directories."""

    name = "huggingface"
    options = FormOptions(shard_size=True, mindspore=False, huggingface=True)

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """Numbered files, the index, and further files of a Hugging Face source."""
        from reshard.forms.full.beside import files_beside
        from reshard.forms.full.written_files import FullDirectory
        from reshard.forms.writing import selected

        chosen = selected(checkpoint, request)
        _warn_of_training(chosen, checkpoint.names(), request.report)
        if any(name.startswith(_MINDFORMERS) for name in chosen.tensors):
            request.report.note(
                "names stay those of MindFormers, which loaders of Hugging Face models do not expect; to change them: "
                "--names TABLE (`reshard names list`)"
            )
        extra_files = files_beside(checkpoint, chosen.tensors, request)
        return FullDirectory(
            self.name, chosen.tensors, chosen.values, request.max_shard_size, extra_files, chosen.names
        )

    def check_beside(
        self, directory: str, target: Checkpoint, source: Checkpoint, cast: bool, report: Report
    ) -> Iterator[tuple[str, str]]:
        """The configuration and tokenizer of a Hugging Face source."""
        from reshard.forms.full.beside import check_beside

        return check_beside(directory, target, source, cast, report)


def _warn_of_training(chosen: Selected, parameters: Collection[str], report: Report) -> None:
    """Advice on skipping optimizer state, gradients and counters."""
    names = [*chosen.tensors, *chosen.values]
    unexpected = sum(not is_weight(name, parameters) for name in names)
    if unexpected:
        report.warn(
            f"optimizer state and values of the training are written too ({plural(unexpected, 'tensor')}), and loaders "
            "of Hugging Face models do not expect them; leave them out with "
            + " ".join(f"--exclude '{glob}'" for glob in training_globs(names, parameters))
        )
