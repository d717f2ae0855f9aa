"""Recorded rules that a source does not need, because its tensors have the target's names already.

A checkpoint that went to other names and back is often compared with the one at the beginning. Its records tell the
last way alone, which leads from names that the beginning does not have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Optional

from reshard.checkpoints import FileHandles, read_index
from reshard.errors import CheckpointError, InputError
from reshard.forms.registry import RANKS, read_checkpoint
from reshard.text.names import WEIGHTS, is_weight, kind_of
from reshard.text.report import Report
from reshard.verification.edited import Casts, EditedSource, Edits
from reshard.verification.stored import Source


def weights_of(directory: str, form: str, files: Mapping[int, str], handles: FileHandles) -> set[str]:
    """Names of weights in a converted checkpoint; of rank directories those in one file.

    Args:
        directory: where it is.
        form: its form.
        files: the files of ranks.
        handles: open files.

    Returns:
        None at all where nothing can be read: what is wrong is found when everything is compared.

    Raises:
        RetryableError: reading failed in a way that may pass.
    """
    if form != RANKS:
        try:
            checkpoint = read_checkpoint(form, directory, "latest", handles, Report(), {}, lambda name: True)
        except InputError:
            return set()
        return {name for name in checkpoint.tensors if is_weight(name, checkpoint.tensors)}
    for path in files.values():
        try:
            tensors = read_index(handles, path).tensors
        except CheckpointError:
            continue
        return {name for name, tensor in tensors.items() if kind_of(name, math.prod(tensor.shape), tensors) == WEIGHTS}
    return set()


def without_rules(base: Source, edits: Edits, written: Iterable[str]) -> bool:
    """Whether a source has the names of what was written, and rules would give it others.

    Args:
        base: the source, complete.
        edits: what was asked when that was written, perhaps of another source.
        written: names of the weights that were.
    """
    names = set(written)
    if not names or not names <= base.names:
        return False
    ruled: Optional[EditedSource]
    try:
        ruled = EditedSource(base, edits, Report())
    except InputError:
        # They are of another naming than the source's.
        ruled = None
    return ruled is None or not names <= ruled.names


def casts_alone(edits: Edits) -> Optional[Edits]:
    """The same without rules; None where nothing is left."""
    return Casts(edits.casts) if edits.casts else None
