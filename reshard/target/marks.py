"""Which small files make a complete directory of a form what it is, by name, and which one says that it is not yet.

Loaders do not all wait for an index: MindSpore's takes the only ``.safetensors`` file of a directory for all there is,
MindFormers' and inference engines read every such file that they find. So while files are missing there is one among
them, of the same ending, that no loader can read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Optional

from reshard.checkpoints.checkpoint2.names import COMMON, METADATA, TRACKER
from reshard.checkpoints.forms import CHECKPOINT2, RANKS
from reshard.checkpoints.full import MAP_FILES
from reshard.target.resume_training import resume_files

STRATEGY_FILE = "reshard-strategy.json"
"""The strategy of ranks that are cut as the source was, where the source's own is of other names, or in no file."""


def marks_of(form: str, files: Sequence[str]) -> list[str]:
    """The names of these files, relative to the directory, in the order in which they are written.

    Args:
        form: the form.
        files: names of its files of tensors, relative to the directory.
    """
    if form == RANKS:
        return [STRATEGY_FILE, *(file.name for file in resume_files(files))]
    if form == CHECKPOINT2:
        iteration = files[0].rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]
    return [MAP_FILES[form]] if form in MAP_FILES else []


UNFINISHED = "reshard-unfinished.safetensors"
"""The file that makes loaders fail while others are missing."""

UNFINISHED_CONTENT = b"This checkpoint is not complete: reshard status tells what is missing, reshard resume goes on.\n"
"""What it holds: nothing that a loader takes for the header of a safetensors file, or a person for a checkpoint."""


def unfinished_mark(form: str, file: str) -> Optional[str]:
    """The name of `UNFINISHED`, relative to the directory; None for rank directories, of which a loader reads its own.

    Args:
        form: the form.
        file: name of any of its files of tensors, relative to the directory.
    """
    return None if form == RANKS else os.path.join(os.path.dirname(file), UNFINISHED)
