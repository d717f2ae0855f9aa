"""Layouts as a strategy file records them, and a strategy as one file of all its stages."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Optional

from reshard.errors import LayoutError
from reshard.layout import Layout
from reshard.strategies.json_file import serialize_strategy
from reshard.strategies.model import RecordedLayout, Strategy, StrategyFile, StrategyItem
from reshard.text.messages import listing


def merged_json(strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], maker: str, path: str) -> bytes:
    """A strategy as one JSON file, as MindSpore merges the stages of a pipeline.

    Args:
        strategy: every stage lists some parameter.
        shapes: full shapes by name, as far as they are known.
        maker: what the operators are called that tell the stages.
        path: where it will be, for messages.
    """
    layouts = {
        f"{stage.number}-{name}": recorded(layout, shapes.get(name))
        for stage in strategy.stages
        for name, layout in stage.layouts.items()
    }
    items = tuple(StrategyItem(f"{maker}/stage-{stage.number}", stage.number) for stage in strategy.stages)
    return serialize_strategy(StrategyFile(path, "json", items, layouts))


def recorded(layout: Layout, shape: Optional[tuple[int, ...]]) -> RecordedLayout:
    """What a JSON file says of a layout.

    Args:
        layout: of one parameter.
        shape: the parameter's; None where it is not known.
    """
    if shape is not None:
        # Where the file it was read from leaves open which entries are one dimension, the shape tells.
        grouped = (each for each in layout.regroupings() if each.recorded_shape in (None, shape))
        layout = next((each for each in grouped if len(each.tensor_map) == len(shape)), layout)
    nested = any(len(axes) > 1 for axes in layout.tensor_map)
    flat = tuple(axes[0] if axes else -1 for axes in layout.tensor_map)
    uneven = layout.uneven or ()
    found = RecordedLayout(
        layout.device_matrix,
        tuple(axes or (-1,) for axes in layout.tensor_map) if nested else (flat,),
        nested,
        shard_step=layout.shard_step,
        shard_size=layout.shard_size,
        split_sizes=uneven,
        split_offsets=tuple(itertools.accumulate(uneven, initial=0))[:-1] if uneven else (),
    )
    return found if shape is None or uneven else with_shape(found, shape)


def with_shape(recorded: RecordedLayout, shape: tuple[int, ...]) -> RecordedLayout:
    """As MindSpore's JSON has it: with the full shape, and an entry per axis where a dimension has several.

    Where readers could group these entries to another tensor of as many dimensions, the map stays nested: MindSpore
    cannot read it then, but no reader takes the slices for those of the other tensor.
    """
    if not recorded.nested:
        return _unless_ambiguous(replace(recorded, tensor_shape=shape), recorded, shape)
    sizes = recorded.device_matrix[::-1]
    entries: list[int] = []
    expanded: list[int] = []
    for axes, size in zip(recorded.dimensions, shape):
        entries += axes or (-1,)
        for axis in axes[:-1]:
            expanded.append(sizes[axis])
            size //= sizes[axis]
        expanded.append(size)
    flat = replace(recorded, tensor_maps=(tuple(entries),), nested=False, tensor_shape=tuple(expanded))
    return _unless_ambiguous(flat, recorded, shape)


def unreadable_in_json(file: StrategyFile) -> list[str]:
    """A note where MindSpore cannot read the tensor maps of a file."""
    nested = [name for name, recorded in file.layouts.items() if recorded.nested]
    if file.form != "json" or not nested:
        return []
    return [
        f"{file.path}: MindSpore cannot read the tensor maps of " + listing(nested) + " in JSON; "
        "write a .ckpt file if it has to"
    ]


def _unless_ambiguous(flat: RecordedLayout, recorded: RecordedLayout, shape: tuple[int, ...]) -> RecordedLayout:
    """The flat record, or the nested one where the flat one has other readings of as many dimensions, or too many."""
    try:
        readings = [each for each in flat.layout().without_shards().regroupings() if len(each.tensor_map) == len(shape)]
        if len(readings) == 1:
            return flat
    except LayoutError:
        # More entries may be joined than readers try.
        pass
    maps = tuple(axes or (-1,) for axes in recorded.dimensions)
    return replace(recorded, tensor_maps=maps, nested=True, tensor_shape=shape)
