"""Which small files make a complete directory of a form what it is, by name."""

from __future__ import annotations

from reshard.checkpoints.checkpoint2.names import COMMON, METADATA, TRACKER
from reshard.checkpoints.forms import CHECKPOINT2
from reshard.checkpoints.full import HUGGINGFACE, HUGGINGFACE_INDEX, UNIFIED, UNIFIED_MAP


def marks_of(form: str, first_file: str) -> list[str]:
    """The names of these files, relative to the directory, in the order in which they are written.

    Args:
        form: the form.
        first_file: name of the first of its files of tensors.
    """
    if form == CHECKPOINT2:
        iteration = first_file.rpartition("/")[0]
        return [f"{iteration}/{METADATA}", f"{iteration}/{COMMON}", TRACKER]
    return {UNIFIED: [UNIFIED_MAP], HUGGINGFACE: [HUGGINGFACE_INDEX]}.get(form, [])
