"""The part that forms share whose files and metadata record all of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

from reshard.checkpoints import CheckpointIndex
from reshard.checkpoints.checkpoint import FileSharding, GlobalTensor, StoredObject, TiedTensors, order_in_files
from reshard.errors import InputError, one_error
from reshard.text.messages import step_words


@dataclass
class RecordedCheckpoint:
    """A checkpoint whose files and metadata record all of it; see `Checkpoint` for the other attributes.

    Attributes:
        plain: names without a layout, such as ``global_step``.
        without_layouts: names of weights without a layout, each whole in every file that holds it.
        faults: by name of an unreadable tensor, the error.
    """

    form: str
    place: str
    files: Mapping[int, str]
    indexes: Mapping[int, CheckpointIndex]
    tensors: Mapping[str, GlobalTensor]
    plain: Collection[str] = ()
    extra_files: Sequence[str] = ()
    step: Optional[str] = None
    label: str = step_words(None)
    without_layouts: Collection[str] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    faults: Mapping[str, InputError] = field(default_factory=dict)
    objects: Mapping[str, StoredObject] = field(default_factory=dict)

    @property
    def laid_out(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    @property
    def unseen(self) -> Collection[str]:
        """None: a missing file is an error."""
        return ()

    def order(self) -> list[str]:
        """Names of all tensors, in the order of the files."""
        return order_in_files(self)

    def tied_tensors(self) -> Sequence[TiedTensors]:
        """None: no tied tensors."""
        return ()

    def names(self) -> set[str]:
        """Names of all tensors and values."""
        return {*self.tensors, *self.plain}

    def values(self) -> Sequence[str]:
        """Names of values, sorted."""
        return sorted(self.plain)

    def without_layout(self) -> Sequence[str]:
        """Names of weights without a layout, sorted."""
        return sorted(self.without_layouts)

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending."""
        is_in: dict[int, bool] = {}
        files = []
        for file, index in self.indexes.items():
            contents = id(index.tensors)
            if contents not in is_in:
                is_in[contents] = name in index.tensors
            if is_in[contents]:
                files.append(file)
        return sorted(files)

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """Per sharding of a tensor, the existing files that hold it."""
        return tuple(sharding.present for sharding in tensor.shardings if isinstance(sharding, FileSharding))

    def check(self, required: Optional[Callable[[str], bool]] = None) -> None:
        """Check that every required tensor can be read.

        Args:
            required: whether a tensor is required, by name; by default all.

        Raises:
            InputError: some tensors cannot be read; names all of them.
        """
        faults = [error for name, error in self.faults.items() if required is None or required(name)]
        if faults:
            raise one_error(faults, f"{self.label} in {self.place} contradicts itself")
