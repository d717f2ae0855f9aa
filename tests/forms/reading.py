"""Checkpoint 2.0 read through the package and assembled naively."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from reshard.asked import Conversion, Edits, Source, Target
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.checkpoint2.checkpoint import Checkpoint2, read_checkpoint2
from reshard.forms.checkpoint2.form import Checkpoint2Form
from reshard.forms.request import Means, Request
from reshard.strategies import Strategy
from reshard.text.messages import Report


def read(
    path: Path,
    step: str = "latest",
    report: Report | None = None,
    edits: Edits = Edits(),
    partial: bool = False,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Checkpoint2:
    """Read a checkpoint as a command would."""
    form, whole = Checkpoint2Form(), Strategy.none()
    conversion = Conversion(Source(str(path), step=step), Target("unwritten"), edits)
    request = Request(conversion, form, whole, form, whole, damaged=damaged, partial=partial)
    with FileHandles() as handles:
        return read_checkpoint2(request, Means(handles, report or Report()))


def full_bytes(checkpoint: Checkpoint, name: str) -> bytes:
    """A tensor put together naively; every copy of every slice has to be the same."""
    tensor = checkpoint.tensors[name]
    whole: npt.NDArray[np.void] | None = None
    for sharding in tensor.shardings:
        actual = np.zeros(tensor.shape, dtype=f"V{tensor.item_size}")
        for number in range(sharding.grid.slice_count):
            box = tuple(slice(*interval) for interval in sharding.grid.slice_box(number))
            holders = sharding.holders(number)
            assert holders, f"{name}: slice {number} has no holder"
            pieces = {content(checkpoint, name, holder) for holder in holders}
            assert len(pieces) == 1, f"{name}: copies of slice {number} differ"
            actual[box] = np.frombuffer(pieces.pop(), actual.dtype).reshape(actual[box].shape)
        assert whole is None or whole.tobytes() == actual.tobytes()
        whole = actual
    assert whole is not None
    return whole.tobytes()


def content(checkpoint: Checkpoint, name: str, holder: int) -> bytes:
    """What one file holds of a tensor."""
    data = Path(checkpoint.files[holder]).read_bytes()
    extents = checkpoint.indexes[holder].tensors[name].extents
    return b"".join(data[offset : offset + size] for offset, size in extents)
