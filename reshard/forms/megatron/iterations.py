"""Iterations of Megatron-Core: which directories are some, of which kind, and which one a source names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from reshard.forms.megatron.keys import LEGACY, PLAIN, RANK_DIRECTORY, TORCH_DIST
from reshard.forms.pytorch.form import BACKEND, COMMON, DCP, ITERATIONS, kind_of_directory
from reshard.forms.tracker import TRACKER, Iteration
from reshard.storage import absolute, exists
from reshard.text.messages import Report


def kind_of_iteration(path: str, names: Sequence[str]) -> str | None:
    """The kind of a directory of one checkpoint, by the names in it; None where it is not Megatron's.

    Nothing in a plain one is Megatron's: the directory has the name of an iteration and lies in a root with a tracker.
    """
    if any(map(RANK_DIRECTORY.fullmatch, names)):
        return LEGACY
    kind = kind_of_directory(names)
    # Those of zarr have no metadata of torch: the reader refuses them.
    of_zarr = kind is None and {BACKEND, COMMON}.issubset(names)
    if of_zarr or (kind == DCP and (BACKEND in names or COMMON in names)):
        return TORCH_DIST
    if kind != DCP:
        return None
    parent, name = os.path.split(absolute(path))
    return PLAIN if ITERATIONS.number(name) is not None and exists(os.path.join(parent, TRACKER)) else None


def is_iteration(path: str, names: Sequence[str]) -> bool:
    return kind_of_iteration(path, names) is not None


def choose(src: str, step: str, report: Report) -> Iteration:
    """The directory of the requested step: the source, or one in a root."""
    return ITERATIONS.find(src, is_iteration, step, report)


def iterations(root: str, names: Sequence[str]) -> list[Iteration]:
    """The iterations that a root holds, oldest first, and one without a number."""
    return ITERATIONS.held(root, names, is_iteration)
