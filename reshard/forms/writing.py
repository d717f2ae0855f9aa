"""The selection from a checkpoint, for all target forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, TensorsInOrder
from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.checkpoints.name_order import layers_in_order
from reshard.forms.form import Wanted
from reshard.text.messages import listing
from reshard.text.report import Report
from reshard.text.wording import plural


class Selected(NamedTuple):
    """The selected part of a checkpoint.

    Attributes:
        tensors: by name, layers in natural order.
        values: bytes of every value beside them that safetensors can hold, by name.
        names: of the tensors, in the order in which the source's files hold them.
    """

    tensors: Mapping[str, GlobalTensor]
    values: Mapping[str, int]
    names: Sequence[str]


def selected(checkpoint: Checkpoint, wanted: Wanted) -> Selected:
    """The requested part of a checkpoint."""
    names = [name for name in checkpoint.order() if wanted.admit(name)]
    values = _sizes_of_values(checkpoint, [name for name in checkpoint.values() if wanted.admit(name)])
    return Selected(TensorsInOrder(checkpoint.tensors, layers_in_order(names)), values, names)


def note_left_beside(checkpoint: Checkpoint, report: Report) -> None:
    """Note further files of the source that the target form does not contain."""
    if checkpoint.others:
        report.note("files other than weights are not copied: " + ", ".join(checkpoint.others[:8]))


def note_objects_left(checkpoint: Checkpoint, admit: Callable[[str], bool], report: Report) -> None:
    """Name objects that the target has no place for."""
    left = sorted(filter(admit, checkpoint.objects))
    if left:
        report.note(
            f"{plural(len(left), 'object')} left out, because only dcp and hyper-parallel hold what is no tensor: "
            + listing(left)
        )


def _sizes_of_values(checkpoint: Checkpoint, names: Sequence[str]) -> dict[str, int]:
    """Bytes of every value that safetensors can hold."""
    found = {}
    for name in names:
        tensor = checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        if tensor.dtype not in NO_ARRAYS:
            found[name] = tensor.nbytes
    return found
