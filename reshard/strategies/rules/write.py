"""Writing a made strategy as a compile would, with a record of its origin."""

from __future__ import annotations

import glob
import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import TargetError, UsageError
from reshard.storage import (
    exists,
    is_directory,
    names_in,
    real,
    remove_file,
    store_of,
    write_whole,
    writing,
)
from reshard.strategies.model import StrategyFile
from reshard.strategies.one_file import (
    ENDINGS,
    RANK,
    parsed,
    read_bytes,
    record_path,
)
from reshard.strategies.rules.make import MadeStage
from reshard.strategies.written import FORMS, WRITERS, new_file, replaceable, unreadable_in_json, with_shape
from reshard.text.messages import listing, plural

_NAME = f"ckpt_strategy_rank_{RANK}.ckpt"


class WrittenStrategy(NamedTuple):
    """The files of a written strategy.

    Attributes:
        files: files of the strategy.
        notes: layouts that MindSpore cannot read.
    """

    files: list[str]
    notes: list[str]


def write_strategy(
    out: str, stages: Sequence[MadeStage], record: Mapping[str, Any], overwrite: bool, sources: Sequence[str] = ()
) -> WrittenStrategy:
    """Write a strategy, and the record of its origin.

    Files of several stages are read together, and a strategy without its first stage is refused. So the first
    stage's file is removed before any other is replaced, and written last: a part, or a mix of two strategies,
    can never be read as a whole one. Unchanged files are kept, so that the same command completes a killed one.

    Args:
        out: ``.ckpt`` or ``.json``: one file, of all stages; a path with ``{rank}`` in it, or a directory: a file per
            stage, named after the stage's first rank.
        stages: the strategy.
        record: its origin.
        overwrite: replace existing strategies.
        sources: files and directories that it was made from.

    Raises:
        UsageError: another ending.
        TargetError: an existing file must not be replaced, or would be read as a stage of the strategy.
        ReshardError: writing failed.
    """
    files = {path: _as_file(path, of, merged=len(of) > 1) for path, of in _files(out, stages).items()}
    contents = {path: WRITERS[file.form](file) for path, file in files.items()}
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
    return WrittenStrategy(list(files), [note for file in files.values() for note in unreadable_in_json(file)])


def _files(out: str, stages: Sequence[MadeStage]) -> dict[str, list[MadeStage]]:
    ending = os.path.splitext(out)[1]
    if RANK in out:
        if ending not in ENDINGS:
            raise UsageError(f"{out}: a strategy file is named .ckpt or .json", file=out)
        return {out.replace(RANK, str(stage.first_rank)): [stage] for stage in stages}
    if ending in ENDINGS and not is_directory(out):
        return {out: list(stages)}
    if ending and not exists(out) and not out.endswith(os.sep):
        raise UsageError(
            f"{out}: a strategy file is named .ckpt or .json; a directory for a file per stage ends in {os.sep}",
            file=out,
        )
    return {os.path.join(out, _NAME.replace(RANK, str(stage.first_rank))): [stage] for stage in stages}


def _is_there(path: str, data: bytes, overwrite: bool) -> bool:
    """Whether a file exists with the content to be written.

    Raises:
        TargetError: it has other content, and must not be replaced.
    """
    if not exists(path):
        return False
    current = read_bytes(path)
    if current == data:
        return True
    replaceable(path, current)
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
        if exists(path) and real(path) in _files_of(source):
            raise TargetError(
                f"{path} is a source of this strategy; it is not replaced",
                file=path,
                hint="choose another name for OUT",
            )


def _files_of(source: str) -> list[str]:
    files = [os.path.join(source, name) for name in names_in(source)] if is_directory(source) else [source]
    return list(map(real, files))


def _check_no_other_stages(out: str, files: Collection[str]) -> None:
    """Refuse existing files of other stages or ranks, which would be read together with the new ones."""
    if out in files:
        return
    if RANK in out:
        parts = out.split(RANK)
        expression = re.compile(re.escape(parts[0]) + "([0-9]+)" + r"\1".join(map(re.escape, parts[1:])))
        candidates = list(filter(expression.fullmatch, glob.glob("*".join(map(glob.escape, parts)))))
    else:
        names = names_in(out) if is_directory(out) else []
        candidates = [os.path.join(out, name) for name in names if name.endswith(ENDINGS)]
    other_stages = [path for path in sorted(candidates) if path not in files and _is_strategy(path)]
    if other_stages:
        raise TargetError(
            f"{out} has {plural(len(other_stages), 'strategy file')} that would be read as stages, too: "
            + listing(list(map(os.path.basename, other_stages))),
            file=other_stages[0],
            hint="remove them, or choose another name for OUT",
        )


def _is_strategy(path: str) -> bool:
    return isinstance(parsed(path, read_bytes(path)), StrategyFile)


def _as_file(path: str, stages: Sequence[MadeStage], merged: bool) -> StrategyFile:
    form = FORMS[os.path.splitext(path)[1]]
    layouts = {stage.number: stage.layouts for stage in stages}
    if form == "json":
        layouts = {
            stage.number: {name: with_shape(layout, stage.shapes[name]) for name, layout in stage.layouts.items()}
            for stage in stages
        }
    return new_file(path, form, "made", layouts, merged)
