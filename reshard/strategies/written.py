"""Layouts as strategy files record them; a strategy as one file of all its stages.

`merge_pipeline` follows MindSpore's own merge:

1. Find the stages in the directory, as for reading, without the file to be written.
2. Take each stage from a file of the target's form if possible: protobuf has no tensor shapes, and JSON has no
   nested maps that MindSpore could read.
3. Name every layout ``<stage>-<parameter>``, stages in order, and write under a temporary name.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Optional, Union

from reshard.errors import LayoutError, StrategyError, TargetError, UsageError
from reshard.layout import Layout
from reshard.storage import exists, is_directory, real, store_of, write_whole, writing
from reshard.strategies import json_file, protobuf_file
from reshard.strategies.model import RecordedLayout, Strategy, StrategyFile, StrategyItem
from reshard.strategies.one_file import OtherFile, parsed, read_bytes
from reshard.strategies.read import find_stages
from reshard.strategies.stages import StageRecord, preferred, records_of
from reshard.text.messages import listing, quoted

FORMS = {".ckpt": "protobuf", ".json": "json"}
"""Forms of strategy files, by ending."""

WRITERS = {"protobuf": protobuf_file.serialize_strategy, "json": json_file.serialize_strategy}
"""The bytes of a strategy file, by form."""


def merge_pipeline(directory: str, target_file: str) -> list[str]:
    """Merge the stages' strategy files of a directory into one file.

    Args:
        directory: holds the files of all stages; only read.
        target_file: ``.ckpt`` or ``.json``; its directory is made, and an existing merged file
            is replaced atomically.

    Returns:
        Notes for the user: skipped files, and layouts that MindSpore cannot read.

    Raises:
        UsageError: another ending.
        StrategyError: no stages, stages missing, copies that disagree, damaged files, or a layout
            that the target's form cannot express.
        TargetError: ``target_file`` exists and must not be replaced.
        RetryableError: writing failed.
    """
    form = FORMS.get(os.path.splitext(target_file)[1])
    if form is None:
        raise UsageError(f"{target_file}: a merged strategy file is named .ckpt or .json", file=target_file)
    if not is_directory(directory):
        raise StrategyError(
            f"{directory} is not a directory",
            file=directory,
            hint="pass the directory that holds the strategy files of all stages",
        )
    # Links are followed: the rename must not replace the link itself.
    target = real(target_file)
    existing = replaceable(target, read_bytes(target)) if exists(target) else None
    if existing is not None and not records_of(existing).merged:
        raise TargetError(
            f"{target} exists and is the strategy of one stage; it is not replaced",
            file=target,
            hint="choose another name for the merged file",
        )
    stages = find_stages(directory, leave_out=target)
    items: list[StrategyItem] = []
    layouts: dict[str, RecordedLayout] = {}
    for number in sorted(stages.records):
        record = preferred(stages.records[number], form)
        items.extend(record.items)
        for name, recorded in record.recorded.items():
            layouts[f"{number}-{name}"] = _expressed(recorded, form, record, name)
    file = StrategyFile(target_file, form, tuple(items), layouts)
    with writing(target):
        store_of(target).make_directory(os.path.dirname(target))
        write_whole(target, WRITERS[form](file))
    return [*stages.notes, *unreadable_in_json(file)]


def replaceable(path: str, data: Union[bytes, OtherFile]) -> Optional[StrategyFile]:
    """The strategy in an existing file that is to be replaced; None in an empty file.

    Args:
        path: the file.
        data: its content, from `read_bytes`.

    Raises:
        TargetError: it is of another kind.
        StrategyError: it is damaged.
    """
    file = parsed(path, data)
    if isinstance(file, OtherFile):
        raise TargetError(
            f"{path} exists and is {file.kind or 'not a strategy file'}; it is not replaced",
            file=path,
            hint="choose another name for the strategy, or remove the file",
        )
    return file


def _expressed(recorded: RecordedLayout, form: str, record: StageRecord, name: str) -> RecordedLayout:
    """The layout in the target's form.

    Raises:
        StrategyError: it cannot.
    """
    if record.file.form == form:
        return recorded
    if form == "protobuf":
        if recorded.joins:
            entries = list(recorded.tensor_maps[0])
            raise StrategyError(
                f"{record.file.path}: parameter {quoted(name)}: tensor map {entries} may have one entry per device "
                "axis instead of one per dimension, which a .ckpt file cannot express",
                file=record.file.path,
                parameter=name,
                hint="merge to a .json file, or from the stages' .ckpt files",
            )
        return recorded._replace(tensor_shape=None)
    if recorded.nested and all(len(axes) <= 1 for axes in recorded.dimensions):
        # It needs no nesting, and MindSpore reads it from JSON if flat.
        flat: list[int] = [axes[0] if axes else -1 for axes in recorded.dimensions]
        return recorded._replace(tensor_maps=(tuple(flat),), nested=False)
    return recorded


def merged_json(strategy: Strategy, shapes: Mapping[str, tuple[int, ...]], maker: str, path: str) -> bytes:
    """A strategy as one JSON file, as MindSpore merges the stages of a pipeline.

    Args:
        strategy: every stage lists some parameter.
        shapes: full shapes by name, as far as known.
        maker: a prefix of the operators' names, which give the stages.
        path: its later path, for messages.
    """
    stages = {
        stage.number: {name: recorded(layout, shapes.get(name)) for name, layout in stage.layouts.items()}
        for stage in strategy.stages
    }
    return json_file.serialize_strategy(new_file(path, "json", maker, stages, merged=True))


def new_file(
    path: str, form: str, maker: str, stages: Mapping[int, Mapping[str, RecordedLayout]], merged: bool
) -> StrategyFile:
    """A file of stages that no compiler wrote.

    Args:
        path: its later path.
        form: its form.
        maker: a prefix of the operators' names, which give the stages.
        stages: per stage the layouts by name.
        merged: whether names carry the stage.
    """
    layouts = {
        f"{number}-{name}" if merged else name: layout
        for number, by_name in stages.items()
        for name, layout in by_name.items()
    }
    items = tuple(StrategyItem(f"{maker}/stage-{number}", number) for number in stages)
    return StrategyFile(path, form, items, layouts)


def recorded(layout: Layout, shape: Optional[tuple[int, ...]]) -> RecordedLayout:
    """The record of a layout in a JSON file.

    Args:
        layout: the layout of one parameter.
        shape: the parameter's shape; None if unknown.
    """
    if shape is not None:
        # The shape shows which entries are one dimension, if the source file leaves it open.
        grouped = (each for each in layout.regroupings() if each.recorded_shape in (None, shape))
        layout = next((each for each in grouped if len(each.tensor_map) == len(shape)), layout)
    record = RecordedLayout.of(layout)
    return record if shape is None or layout.uneven else with_shape(record, shape)


def with_shape(recorded: RecordedLayout, shape: tuple[int, ...]) -> RecordedLayout:
    """A record in the style of MindSpore's JSON: with the full shape, and an entry per axis of a dimension.

    If readers could group these entries to another tensor of as many dimensions, the map stays nested: MindSpore
    cannot read it then, but no reader mistakes the slices for those of the other tensor.
    """
    if not recorded.nested:
        return _unless_ambiguous(recorded._replace(tensor_shape=shape), recorded, shape)
    sizes = recorded.device_matrix[::-1]
    entries: list[int] = []
    expanded: list[int] = []
    for axes, size in zip(recorded.dimensions, shape):
        entries += axes or (-1,)
        for axis in axes[:-1]:
            expanded.append(sizes[axis])
            size //= sizes[axis]
        expanded.append(size)
    flat = recorded._replace(tensor_maps=(tuple(entries),), nested=False, tensor_shape=tuple(expanded))
    return _unless_ambiguous(flat, recorded, shape)


def unreadable_in_json(file: StrategyFile) -> list[str]:
    """A note about tensor maps of a file that MindSpore cannot read."""
    nested = [name for name, recorded in file.layouts.items() if recorded.nested]
    if file.form != "json" or not nested:
        return []
    return [
        f"{file.path}: MindSpore cannot read the tensor maps of " + listing(nested) + " in JSON; "
        "write a .ckpt file for MindSpore"
    ]


def _unless_ambiguous(flat: RecordedLayout, recorded: RecordedLayout, shape: tuple[int, ...]) -> RecordedLayout:
    """The flat record; the nested one if the flat one has other readings of as many dimensions, or too many."""
    try:
        readings = [each for each in flat.layout().without_shards().regroupings() if len(each.tensor_map) == len(shape)]
        if len(readings) == 1:
            return flat
    except LayoutError:
        # `RecordedLayout.layout` limits the number of joins.
        pass
    maps = tuple(axes or (-1,) for axes in recorded.dimensions)
    return recorded._replace(tensor_maps=maps, nested=True, tensor_shape=shape)
