"""Writing strategies: merged as MindSpore merges the stages of a pipeline, or made from rules."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import LayoutError, StrategyError, TargetError, UsageError
from reshard.layout import Layout
from reshard.storage import exists, is_directory, names_in, real, remove_file, store_of, write_whole, writing
from reshard.strategies.files import ENDINGS, RECORD, OtherFile, json_bytes, parse, protobuf_bytes, read_content
from reshard.strategies.model import RecordedLayout, Strategy, StrategyFile, StrategyItem
from reshard.strategies.read import StageRecord, is_merged, preferred, read_records
from reshard.text.messages import listing, plural, quoted

if TYPE_CHECKING:
    from reshard.strategies.rules import MadeStage

_FORMS = {".ckpt": "protobuf", ".json": "json"}
_WRITERS = {"protobuf": protobuf_bytes, "json": json_bytes}


def merge_pipeline(directory: str, target_file: str) -> list[str]:
    """Merge the stages' strategy files of a directory into one file, as MindSpore does.

    Each stage is taken from a file of the target's form if possible: protobuf has no tensor shapes, and JSON has no
    nested maps that MindSpore could read. Every layout is named ``<stage>-<parameter>``, stages in order.

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
    form = _FORMS.get(os.path.splitext(target_file)[1])
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
    existing = _replaceable(target, read_content(target)) if exists(target) else None
    if existing is not None and not is_merged(existing):
        raise TargetError(
            f"{target} exists and is the strategy of one stage; it is not replaced",
            file=target,
            hint="choose another name for the merged file",
        )
    strategy, records = read_records(directory, leave_out=target)
    items: list[StrategyItem] = []
    layouts: dict[str, RecordedLayout] = {}
    for number in sorted(records):
        record = preferred(records[number], form)
        items += (item for item in record.file.items if item.stage == number)
        for name, recorded in record.recorded.items():
            layouts[f"{number}-{name}"] = _expressed(recorded, form, record, name)
    file = StrategyFile(target_file, form, tuple(items), layouts)
    with writing(target):
        store_of(target).make_directory(os.path.dirname(target))
        write_whole(target, _WRITERS[form](file))
    return [*strategy.notes, *_unreadable_in_json(file)]


def _replaceable(path: str, data: bytes | OtherFile) -> StrategyFile | None:
    """The strategy in an existing file that is to be replaced; None in an empty file."""
    if not data:
        return None
    file = data if isinstance(data, OtherFile) else parse(path, data)
    if isinstance(file, OtherFile):
        raise TargetError(
            f"{path} exists and is {file.kind or 'not a strategy file'}; it is not replaced",
            file=path,
            hint="choose another name for the strategy, or remove the file",
        )
    return file


def _expressed(recorded: RecordedLayout, form: str, record: StageRecord, name: str) -> RecordedLayout:
    """The layout in the target's form."""
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
    """A strategy as one JSON file, as MindSpore merges the stages of a pipeline."""
    stages = {
        stage.number: {name: _json_record(layout, shapes.get(name)) for name, layout in stage.layouts.items()}
        for stage in strategy.stages
    }
    return json_bytes(_new_file(path, maker, stages, merged=True))


def _new_file(path: str, maker: str, stages: Mapping[int, Mapping[str, RecordedLayout]], merged: bool) -> StrategyFile:
    layouts = {
        f"{number}-{name}" if merged else name: layout
        for number, by_name in stages.items()
        for name, layout in by_name.items()
    }
    items = tuple(StrategyItem(f"{maker}/stage-{number}", number) for number in stages)
    return StrategyFile(path, _FORMS.get(os.path.splitext(path)[1], "json"), items, layouts)


def _json_record(layout: Layout, shape: tuple[int, ...] | None) -> RecordedLayout:
    """The record of a layout in a JSON file; the shape is None if it is unknown."""
    if shape is not None:
        # The shape shows which entries are one dimension, if the source file leaves it open.
        grouped = (each for each in layout.regroupings() if each.recorded_shape in (None, shape))
        layout = next((each for each in grouped if len(each.tensor_map) == len(shape)), layout)
    record = RecordedLayout.of(layout)
    return record if shape is None or layout.uneven else _with_shape(record, shape)


def _with_shape(recorded: RecordedLayout, shape: tuple[int, ...]) -> RecordedLayout:
    """A record in the style of MindSpore's JSON: with the full shape, and an entry per axis of a dimension.

    If readers could group these entries to another tensor of as many dimensions, the map stays nested: MindSpore
    cannot read it then, but no reader mistakes the slices for those of the other tensor.
    """
    flat = recorded._replace(tensor_shape=shape)
    if recorded.nested:
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
    try:
        readings = [each for each in flat.layout().without_shards().regroupings() if len(each.tensor_map) == len(shape)]
        if len(readings) == 1:
            return flat
    except LayoutError:
        # It can be grouped in too many ways.
        pass
    maps = tuple(axes or (-1,) for axes in recorded.dimensions)
    return recorded._replace(tensor_maps=maps, nested=True, tensor_shape=shape)


def _unreadable_in_json(file: StrategyFile) -> list[str]:
    nested = [name for name, recorded in file.layouts.items() if recorded.nested]
    if file.form != "json" or not nested:
        return []
    return [
        f"{file.path}: MindSpore cannot read the tensor maps of " + listing(nested) + " in JSON; "
        "write a .ckpt file for MindSpore"
    ]


def write_strategy(
    out: str, stages: Sequence[MadeStage], record: Mapping[str, Any], overwrite: bool, sources: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Write a made strategy, and the record of its origin.

    Files of several stages are read together, and a strategy without its first stage is refused. So the first
    stage's file is removed before any other is replaced, and written last: a part, or a mix of two strategies,
    can never be read as a whole one. Unchanged files are kept, so that the same command completes a killed one.

    Args:
        out: ``.ckpt`` or ``.json``: one file, of all stages; or a directory: a file per stage, named after the
            stage's first rank.
        stages: the strategy.
        record: its origin.
        overwrite: replace existing strategies.
        sources: files and directories that it was made from.

    Returns:
        The files of the strategy; notes on layouts that MindSpore cannot read.

    Raises:
        UsageError: another ending.
        TargetError: an existing file must not be replaced, or would be read as a stage of the strategy.
        ReshardError: writing failed.
    """
    files = {path: _made_file(path, of) for path, of in _files(out, stages).items()}
    contents = {path: _WRITERS[file.form](file) for path, file in files.items()}
    for path in files:
        _check_no_source(path, sources)
    unfinished = [path for path, data in contents.items() if not _is_there(real(path), data, overwrite)]
    _check_no_other_stages(out, files)
    record_file = record_path(out)
    for directory in dict.fromkeys(os.path.dirname(real(path)) for path in (*files, record_file)):
        with writing(directory or os.curdir):
            store_of(directory).make_directory(directory)
            store_of(directory).remove_dead(directory)
    if unfinished:
        first, *later = files
        for path in (record_file, *(dict.fromkeys((first, *unfinished)) if later else ())):
            with writing(path):
                remove_file(real(path))
        for path in (*(path for path in reversed(later) if path in unfinished), first):
            with writing(path):
                write_whole(real(path), contents[path])
    with writing(record_file):
        text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
        write_whole(real(record_file), text.encode(errors="surrogateescape"))
    return list(files), [note for file in files.values() for note in _unreadable_in_json(file)]


def record_path(out: str) -> str:
    return out + RECORD if out.endswith(ENDINGS) else os.path.join(out, "strategy" + RECORD)


def _files(out: str, stages: Sequence[MadeStage]) -> dict[str, list[MadeStage]]:
    ending = os.path.splitext(out)[1]
    if "{rank}" in out or (ending not in ("", *ENDINGS) and not exists(out) and not out.endswith(os.sep)):
        raise UsageError(
            f"{out}: a strategy file is named .ckpt or .json; a directory for a file per stage ends in {os.sep}",
            file=out,
        )
    if ending in ENDINGS and not is_directory(out):
        return {out: list(stages)}
    return {os.path.join(out, f"ckpt_strategy_rank_{stage.first_rank}.ckpt"): [stage] for stage in stages}


def _made_file(path: str, stages: Sequence[MadeStage]) -> StrategyFile:
    layouts = {stage.number: stage.layouts for stage in stages}
    if path.endswith(".json"):
        layouts = {
            stage.number: {name: _with_shape(layout, stage.shapes[name]) for name, layout in stage.layouts.items()}
            for stage in stages
        }
    return _new_file(path, "made", layouts, merged=len(stages) > 1)


def _is_there(path: str, data: bytes, overwrite: bool) -> bool:
    """Whether a file exists with the content to be written."""
    if not exists(path):
        return False
    current = read_content(path)
    if current == data:
        return True
    _replaceable(path, current)
    if not overwrite:
        raise TargetError(
            f"{path} exists with other content",
            file=path,
            hint="add --overwrite to replace it, or choose another name for OUT",
        )
    return False


def _check_no_source(path: str, sources: Sequence[str]) -> None:
    """Refuse to replace a source: a compiled strategy cannot be restored without its cluster."""
    for source in sources:
        files = [os.path.join(source, name) for name in names_in(source)] if is_directory(source) else [source]
        if exists(path) and real(path) in map(real, files):
            raise TargetError(
                f"{path} is a source of this strategy; it is not replaced",
                file=path,
                hint="choose another name for OUT",
            )


def _check_no_other_stages(out: str, files: Collection[str]) -> None:
    """Refuse existing files of other stages or ranks, which would be read together with the new ones."""
    if out in files or not is_directory(out):
        return
    others = [os.path.join(out, name) for name in sorted(names_in(out)) if name.endswith(ENDINGS)]
    other_stages = [path for path in others if path not in files and _is_strategy(path)]
    if other_stages:
        raise TargetError(
            f"{out} has {plural(len(other_stages), 'strategy file')} that would be read as stages, too: "
            + listing(list(map(os.path.basename, other_stages))),
            file=other_stages[0],
            hint="remove them, or choose another name for OUT",
        )


def _is_strategy(path: str) -> bool:
    data = read_content(path)
    return bool(data) and not isinstance(data, OtherFile) and isinstance(parse(path, data), StrategyFile)
