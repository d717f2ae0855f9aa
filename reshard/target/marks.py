"""Which small files make a complete directory of a form what it is, by name."""

from __future__ import annotations

from collections.abc import Sequence

from reshard.checkpoints.checkpoint2.names import COMMON, METADATA, TRACKER
from reshard.checkpoints.forms import CHECKPOINT2, RANKS
from reshard.checkpoints.full import MAP_FILES
from reshard.target.resume_training import resume_files


def marks_of(form: str, files: Sequence[str]) -> list[str]:
    """The names of these files, relative to the directory, in the order in which they are written.

    Args:
        form: the form.
        files: names of its files of tensors, relative to the directory.
    """
    if form == RANKS:
        return [file.name for file in resume_files(files)]
    if form == CHECKPOINT2:
        iteration = files[0].rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]
    return [MAP_FILES[form]] if form in MAP_FILES else []
