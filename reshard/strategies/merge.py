"""Merging the strategy files of a pipeline's stages into one file, as MindSpore's own merge does.

1. Find the stages in the directory, by the rules for reading it, leaving out the file to be written.
2. Take each stage from a file of the target's form where there is one, since protobuf has no tensor
   shapes and JSON has no nested maps that MindSpore could read.
3. Name every layout ``<stage>-<parameter>``, stages in order, and write under a temporary name.
"""

from __future__ import annotations

import os
from dataclasses import replace

from reshard.errors import StrategyError, TargetError, UsageError
from reshard.storage import exists, is_directory, make_directory, real, write_whole, writing_error
from reshard.strategies import json_file, protobuf_file
from reshard.strategies.directory import find_stages
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem
from reshard.strategies.one_file import OtherFile, parse, read_bytes
from reshard.strategies.stages import StageRecord, preferred, records_of
from reshard.strategies.written import unreadable_in_json
from reshard.text.wording import quoted

_WRITERS = {"protobuf": protobuf_file.serialize_strategy, "json": json_file.serialize_strategy}


def merge_pipeline(directory: str, target_file: str) -> list[str]:
    """Merge the stages' strategy files of a directory into one file.

    Args:
        directory: holds the files of all stages; only read.
        target_file: ``.ckpt`` or ``.json``; its directory is made, and a merged file already there
            is replaced at once.

    Returns:
        What the user should know: files passed over, and what MindSpore cannot read.

    Raises:
        UsageError: another ending.
        StrategyError: no stages, stages missing, copies that disagree, damaged files, or a layout
            that the target's form cannot express.
        TargetError: ``target_file`` is something that must not be replaced.
        RetryableError: writing failed.
    """
    form = _form_of(target_file)
    if not is_directory(directory):
        raise StrategyError(
            f"{directory} is not a directory",
            file=directory,
            hint="pass the directory that holds the strategy files of all stages",
        )
    # A link is written through, so that the rename does not replace the link itself.
    target = real(target_file)
    _check_replaceable(target)
    found = find_stages(directory, leave_out=target)
    items: list[StrategyItem] = []
    layouts: dict[str, RecordedLayout] = {}
    for number in sorted(found.records):
        record = preferred(found.records[number], form)
        items.extend(record.items)
        for name, recorded in record.recorded.items():
            layouts[f"{number}-{name}"] = _expressed(recorded, form, record, name)
    file = StrategyFile(target_file, form, tuple(items), layouts)
    _write_at_once(target, _WRITERS[form](file))
    return [*found.notes, *unreadable_in_json(file)]


def _form_of(target_file: str) -> str:
    if target_file.endswith(".ckpt"):
        return "protobuf"
    if target_file.endswith(".json"):
        return "json"
    raise UsageError(f"{target_file}: a merged strategy file is named .ckpt or .json", file=target_file)


def _check_replaceable(target: str) -> None:
    if not exists(target):
        return
    data = read_bytes(target)
    found = data if isinstance(data, OtherFile) else parse(target, data) if data else None
    if isinstance(found, OtherFile):
        kind = found.kind or "not a strategy file"
        raise TargetError(
            f"{target} is there already and is {kind}; it is not replaced",
            file=target,
            hint="remove it, or give the merged file another name",
        )
    if found is not None and not records_of(found).merged:
        raise TargetError(
            f"{target} is there already and is the strategy of one stage; it is not replaced",
            file=target,
            hint="give the merged file another name",
        )


def _expressed(recorded: RecordedLayout, form: str, record: StageRecord, name: str) -> RecordedLayout:
    """The layout as the target's form can say it, without a loss that matters or a false statement."""
    if record.file.form == form:
        return recorded
    if form == "protobuf":
        if recorded.joins:
            entries = list(recorded.tensor_maps[0])
            raise StrategyError(
                f"{record.file.path}: parameter {quoted(name)}: tensor map {entries} may have one entry per device "
                "axis instead of one per dimension, which a .ckpt file cannot say",
                file=record.file.path,
                parameter=name,
                hint="merge to a .json file, or from the stages' .ckpt files",
            )
        return replace(recorded, tensor_shape=None)
    if recorded.nested and all(len(axes) <= 1 for axes in recorded.dimensions):
        # Needs no nesting, and MindSpore reads it from JSON when flat.
        flat: list[int] = [axes[0] if axes else -1 for axes in recorded.dimensions]
        return replace(recorded, tensor_maps=(tuple(flat),), nested=False)
    return recorded


def _write_at_once(target: str, data: bytes) -> None:
    try:
        make_directory(os.path.dirname(target))
        write_whole(target, data)
    except OSError as error:
        raise writing_error(target, error) from error
