"""A converted checkpoint of any form but rank directories, as its own form's reader finds it.

Such readers forgive what others' checkpoints are known for. Nothing of that is in what was converted here, so that
whatever had to be forgiven is a difference.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Optional

from reshard.checkpoints import FileHandles
from reshard.errors import InputError
from reshard.forms.registry import form_named, read_checkpoint
from reshard.strategies import Strategy
from reshard.text.report import Report
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
        problems = form_named(form).check_written(directory, checkpoint)
        found = [Difference("file", None, (), text, (name,)) for name, text in problems]
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
