"""The order of tensors in target files and the files' layout; files of the same tensors share both."""

from __future__ import annotations

import math
from array import array
from collections.abc import Collection, Sequence
from typing import Optional
from weakref import WeakValueDictionary

from reshard.checkpoints import OutputTensor, Tensor
from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.forms.target import TargetForm
from reshard.layout import Box, shape_of, whole_box
from reshard.plan.target_tensors import FileOrder, Kind


class Orders:
    """The orders of target files; files of the same tensors share one.

    Args:
        form: the target files.
    """

    def __init__(self, form: TargetForm) -> None:
        self._form = form
        self._format = form.format
        self._orders: WeakValueDictionary[object, FileOrder] = WeakValueDictionary()
        self._last: Optional[FileOrder] = None

    def of(
        self,
        section: int,
        kinds: Sequence[Kind],
        boxes: Sequence[Box],
        values: Sequence[Tensor],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        """The order and layout of a file of these tensors.

        Args:
            section: number of the file's section.
            kinds: the kinds of its tensors.
            boxes: the slice, per kind.
            values: its copied values.
            names: the kinds' tensors in this file; None for all.
        """
        value_types = tuple((value.name, value.dtype, value.dims, value.nbytes) for value in values)
        shapes = [shape_of(box) for box in boxes]
        differing = tuple(boxes) if self._form.boxed else tuple(shapes)
        key = (section, differing, value_types, None if names is None else frozenset(names))
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = self._make(kinds, boxes, shapes, values, names)
        # Other orders live as long as a file that is being written refers to them.
        self._last = order
        return order

    def _make(
        self,
        kinds: Sequence[Kind],
        boxes: Sequence[Box],
        shapes: Sequence[tuple[int, ...]],
        values: Sequence[Tensor],
        names: Optional[Collection[str]],
    ) -> FileOrder:
        entries = [
            (tensor.name, number)
            for number, kind in enumerate(kinds)
            for tensor in kind.tensors
            if names is None or tensor.name in names
        ]
        entries += ((stored.name, len(kinds) + number) for number, stored in enumerate(values))
        # The choice of source files must not change the order. In .safetensors wider
        # elements come first, which keeps every tensor aligned.
        if self._format not in ("ckpt", MEMORY):
            widths = [kind.item_size if math.prod(shape) else 0 for kind, shape in zip(kinds, shapes)]
            widths += (stored.item_size if stored.nbytes and math.prod(stored.shape) else 0 for stored in values)
            entries.sort(key=lambda entry: (-widths[entry[1]], entry[0]))
        else:
            entries.sort(key=lambda entry: entry[0])
        sizes = [math.prod(shape) * kind.item_size for kind, shape in zip(kinds, shapes)]
        outputs = []
        for name, number in entries:
            if number < len(kinds):
                # Tensors of one kind are of one type.
                dtype = kinds[number].tensors[0].dtype
                outputs.append(OutputTensor(name, dtype, shapes[number], sizes[number]))
            else:
                stored = values[number - len(kinds)]
                dims = stored.dims if self._format == "ckpt" else stored.shape
                outputs.append(OutputTensor(name, stored.dtype, dims, stored.nbytes))
        parts = [*boxes, *(whole_box(stored.shape) for stored in values)]
        layout = self._form.lay_out(outputs, [parts[number] for _, number in entries])
        return FileOrder([name for name, _ in entries], array("I", (number for _, number in entries)), layout)
