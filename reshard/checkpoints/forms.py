"""Which form of checkpoint a source is, and reading those that say themselves how they are laid out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Callable

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.checkpoint2 import Checkpoint2, read_checkpoint2, recognise
from reshard.checkpoints.checkpoint2 import strategy_of as strategy_of_checkpoint2
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.full import HUGGINGFACE, UNIFIED, full_weights_form, read_huggingface, read_unified
from reshard.checkpoints.rank_tree.path_pattern import RANK
from reshard.checkpoints.rank_tree.tree import find_checkpoints
from reshard.errors import CheckpointError, UsageError
from reshard.storage import asks_once, exists, is_directory
from reshard.strategies import Strategy
from reshard.text.near_names import path_meant
from reshard.text.report import Report

RANKS, CHECKPOINT2 = "ranks", "checkpoint2"
FORMS = (RANKS, CHECKPOINT2, UNIFIED, HUGGINGFACE)
"""Forms of checkpoints, as --to names them."""


def counted_as(form: str) -> str:
    """What the numbers of a form's files count, in messages: ``rank`` or ``file``."""
    return "rank" if form == RANKS else "file"


@asks_once
def form_of(src: str) -> str:
    """The form of a source, by names alone; what is no other form is `RANKS`, be it there or not.

    Args:
        src: a directory, a file, or a path with ``{rank}`` in it.

    Raises:
        ReshardError: nobody can tell what is there.
    """
    if "\0" in src or RANK in src:
        return RANKS
    if is_directory(src) and recognise(src):
        return CHECKPOINT2
    return full_weights_form(src) or RANKS


def check_there(src: str) -> None:
    """Refuse a source that is not there.

    Args:
        src: a directory, a file, or a path with ``{rank}`` in it, which only its readers look for.

    Raises:
        CheckpointError: it is not there.
    """
    if RANK not in src and not exists(src):
        raise CheckpointError(f"{src}: does not exist", file=src, hint=path_meant(src))


def check_holds_ranks(src: str) -> None:
    """Refuse a source without rank files, before a strategy is asked for that only rank files need.

    Raises:
        CheckpointError: it is not there, or holds no checkpoint.
    """
    check_there(src)
    find_checkpoints(src)


def forms_among(directory: str, names: Sequence[str]) -> set[str]:
    """The forms, rank directories apart, that these entries of a directory are taken for by one reader or another.

    Raises:
        ReshardError: nobody can tell what is there.
    """
    full = full_weights_form(directory, names) if names else None
    return {form for form in (CHECKPOINT2 if recognise(directory, names) else None, full) if form is not None}


@asks_once
def read_checkpoint(
    form: str,
    src: str,
    step: str,
    handles: FileHandles,
    report: Report,
    damaged: Mapping[str, str],
    wanted: Callable[[str], bool],
) -> Checkpoint:
    """Read a source of any form but rank trees, from metadata and headers alone.

    Args:
        form: its form.
        src: the source.
        step: ``latest``, or the number of an iteration.
        handles: open files.
        report: told of what is passed over.
        damaged: files that count as absent, and why, by path.
        wanted: says of a name whether the tensor has to be there whole.

    Raises:
        UsageError: there are no steps in a source of this form.
        InputError: it is not complete, damaged, or contradicts itself.
        RetryableError: reading failed in a way that may pass.
    """
    if form == CHECKPOINT2:
        return read_checkpoint2(src, step, handles, report, damaged, wanted)
    if step != "latest":
        raise UsageError(f"{src}: is of the form {form}, which has no steps", hint="leave out --step")
    read = read_unified if form == UNIFIED else read_huggingface
    return read(src, handles, report, damaged)


def strategy_of(checkpoint: Checkpoint) -> Strategy:
    """The strategy that a source was saved with, where it tells.

    Raises:
        InputError: it does not, or not of every tensor.
    """
    if isinstance(checkpoint, Checkpoint2):
        return strategy_of_checkpoint2(checkpoint)
    raise CheckpointError(f"{checkpoint.place}: does not say how its tensors were laid out", file=checkpoint.place)
