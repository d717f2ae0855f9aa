"""A converted checkpoint of any form but rank directories, as its own form's reader finds it.

Such readers forgive what others' checkpoints are known for. Nothing of that is in what was converted here, so that
whatever had to be forgiven is a difference.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from typing import Optional

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint2 import Checkpoint2
from reshard.checkpoints.checkpoint2.iterations import read_tracker
from reshard.checkpoints.checkpoint2.names import COMMON, METADATA, TRACKER, parse_iteration
from reshard.checkpoints.forms import read_checkpoint
from reshard.checkpoints.full import HYPER_PARAMETERS, MAP_FILES, UNIFIED, FullWeights
from reshard.checkpoints.full.weight_map import read_weight_map
from reshard.errors import InputError
from reshard.storage import is_regular_file
from reshard.strategies import Strategy
from reshard.text.report import Report
from reshard.text.wording import plural, quoted, some_names
from reshard.verification.difference import Difference
from reshard.verification.library import library_differences
from reshard.verification.stored import Source


def read_written(
    directory: str, form: str, handles: FileHandles, files: Optional[Collection[str]] = None
) -> tuple[Optional[Source], list[Difference]]:
    """Read a converted checkpoint.

    Args:
        directory: where it is.
        form: its form.
        handles: open files.
        files: its files, relative to the directory; whatever its form's reader finds where None.

    Returns:
        The checkpoint, or None where its form's reader refuses it, and what is wrong with what finishes it.

    Raises:
        RetryableError: reading failed in a way that may pass.
    """
    try:
        checkpoint = read_checkpoint(form, directory, "latest", handles, Report(), {}, lambda name: True)
        written = Source(checkpoint, Strategy.none())
        problems = _problems_of_iteration if isinstance(checkpoint, Checkpoint2) else _problems_of_map
        found = [Difference("file", None, (), text, (name,)) for name, text in problems(directory, written)]
    except InputError as error:
        return None, [Difference("file", None, (), error.message)]
    for index in checkpoint.indexes.values():
        name = os.path.relpath(index.path, directory)
        found += [Difference("file", None, (), text, (name,)) for text in library_differences(index)]
    read = {os.path.relpath(path, directory) for path in checkpoint.files.values()}
    if files is not None:
        unread, foreign = sorted(set(files) - read), sorted(read.difference(files))
        if unread:
            found.append(
                Difference("file", None, (), "no reader of this directory takes it for a part of it", (*unread,))
            )
        if foreign:
            found.append(Difference("file", None, (), "is read, but is not of this conversion", (*foreign,)))
    return written, found


def _problems_of_map(directory: str, written: Source) -> Iterator[tuple[str, str]]:
    """In what a map of full weights does not say what the files hold: the map's name, and what is wrong."""
    checkpoint = written.checkpoint
    assert isinstance(checkpoint, FullWeights)
    name = MAP_FILES[checkpoint.form]
    held: dict[str, str] = {}
    for number, path in checkpoint.files.items():
        file = os.path.relpath(path, directory)
        if checkpoint.form != UNIFIED or file != HYPER_PARAMETERS:
            held.update(dict.fromkeys(checkpoint.indexes[number].tensors, file))
    path = os.path.join(directory, name)
    if not is_regular_file(path):
        if checkpoint.form == UNIFIED or len(checkpoint.files) > 1:
            yield name, "is missing: nothing says which tensor is in which file"
        return
    listed = read_weight_map(path)
    wrong = [tensor for tensor, file in held.items() if listed.get(tensor) != file]
    if wrong:
        told = some_names([quoted(tensor) for tensor in wrong], 3)
        yield name, f"does not say in which file {plural(len(wrong), 'tensor')} are: {told}"


def _problems_of_iteration(directory: str, written: Source) -> Iterator[tuple[str, str]]:
    """In what an iteration's files say something else than what is there: the file's name, and what is wrong."""
    checkpoint = written.checkpoint
    assert isinstance(checkpoint, Checkpoint2)
    place = os.path.relpath(checkpoint.place, directory)
    number = parse_iteration(place)
    tracked = read_tracker(directory)
    if tracked is None:
        yield TRACKER, "is missing: nothing says that the iteration is complete"
    elif tracked != number:
        yield TRACKER, f"names iteration {tracked}, not {number}"
    if not is_regular_file(os.path.join(checkpoint.place, COMMON)):
        yield os.path.join(place, COMMON), "is missing"
    healed = [
        name
        for name, placement in checkpoint.placements.items()
        if placement.misnumbered or placement.outside or placement.said != placement.held
    ]
    if healed:
        told = some_names([quoted(name) for name in healed], 3)
        yield os.path.join(place, METADATA), f"does not say in which files {told} are"
