"""Directories of full weights to be written: MindSpore's unified safetensors and Hugging Face's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.full import HUGGINGFACE, HUGGINGFACE_INDEX, HYPER_PARAMETERS, UNIFIED, UNIFIED_MAP
from reshard.forms.full.written_files import (
    HUGGINGFACE_FORMAT,
    MAX_SHARD_SIZE,
    UNIFIED_FORMAT,
    FullFile,
    Sizes,
    huggingface_files,
    huggingface_index,
    unified_files,
    unified_map,
)
from reshard.forms.ranks import FileNames
from reshard.forms.ranks.naming import NamedFile
from reshard.forms.target import FinishingFile, Section, TargetForm, WholeLayouts

_ENDING = ".safetensors"


class FullDirectory(TargetForm):
    """The files of a directory of full weights; see `TargetForm`.

    Args:
        name: ``unified`` or ``huggingface``.
        tensors: what is written, in this order.
        values: bytes of every value beside them, by name.
        max_shard_size: bytes of tensors in a file; by default as the form's own writer takes.
        others: files of the source that belong to the model, by name; copied where the form is its own.
        found: the tensors' names in the order in which the source holds them, which decides between unified files of
            equal size; by default that of ``tensors``.
    """

    by_rank = False
    takes_everything = True
    format = "safetensors"

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, GlobalTensor],
        values: Mapping[str, int],
        max_shard_size: Optional[int] = None,
        others: Sequence[FinishingFile] = (),
        found: Optional[Sequence[str]] = None,
    ) -> None:
        self.name = name
        self._others = others
        self._sizes: Sizes = [(tensor.name, math.prod(tensor.shape) * tensor.item_size) for tensor in tensors.values()]
        if name == HUGGINGFACE:
            self.metadata: Optional[Mapping[str, str]] = {"format": HUGGINGFACE_FORMAT}
            self._sizes = [*self._sizes, *values.items()]
            self._files = huggingface_files(self._sizes, max_shard_size or MAX_SHARD_SIZE)
        else:
            self.metadata = {"format": UNIFIED_FORMAT}
            sizes = dict(self._sizes)
            shared_out = self._sizes if found is None else [(tensor, sizes[tensor]) for tensor in found]
            self._files = unified_files(shared_out, max_shard_size) if sizes else []
            # Without a tensor the map would list nothing, and no reader takes that.
            if values and self._files:
                self._files = [*self._files, FullFile(HYPER_PARAMETERS, [*values])]
        self._file_of_value = {
            value: number for number, file in enumerate(self._files) for value in file.tensors if value in values
        }
        names = [file.name[: -len(_ENDING)] for file in self._files]
        self.names = FileNames("file{rank}", tuple(NamedFile(number, file) for number, file in enumerate(names)))
        self.sections: Sequence[Section] = [
            Section(
                number,
                range(number, number + 1),
                WholeLayouts(tensors, frozenset(name for name in file.tensors if name not in values)),
                label=file.name,
            )
            for number, file in enumerate(self._files)
        ]

    @property
    def count(self) -> int:
        """Files of tensors."""
        return len(self._files)

    def section_of(self, file: int) -> Section:
        """Every file is a section."""
        return self.sections[file]

    def takes_value(self, name: str, file: int) -> bool:
        """Every value is in one file."""
        return self._file_of_value.get(name) == file

    def finishing(self) -> Sequence[FinishingFile]:
        """The files beside the weights, then the map or index."""
        if self.name == UNIFIED:
            files = [file for file in self._files if file.name != HYPER_PARAMETERS]
            return [FinishingFile(UNIFIED_MAP, lambda: [unified_map(files, self._sizes)])]
        index = huggingface_index(self._files, self._sizes)
        last = [] if index is None else [FinishingFile(HUGGINGFACE_INDEX, lambda: [index])]
        return [*self._others, *last]
