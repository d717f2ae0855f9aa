"""Errors for checkpoints of other forms where a rank tree is required."""

from __future__ import annotations

import contextlib
import os
import re
from typing import Optional

from reshard.errors import CheckpointError, ReshardError
from reshard.storage import is_directory, leads_to, names_in, store_of
from reshard.text.name_order import natural_order

_ITERATION = re.compile(r"iteration_[0-9]+")
_ITERATION_FILE = re.compile(r".*-(?:model|opt)-[0-9]{7}-[0-9]{7}\.safetensors")
_UNIFIED_PART = re.compile(r"(?:part[0-9]+|hyper_param|model-[0-9]{5}-of-[0-9]{5})\.safetensors")
_UNIFIED_MAP = re.compile(r"param_name_map\.json|.+\.safetensors\.index\.json")

_CHECKPOINT_FILE = re.compile(
    r"\.metadata|.+\.distcp|model_world_size_[0-9]+_rank_[0-9]+\.pt|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors|"
    r"shard-[0-9]+-model-[0-9]+-of-[0-9]+\.safetensors|" + _UNIFIED_MAP.pattern
)
# Levels of directories that are searched, directories of one level, and those that a message names.
_MAX_LEVELS, _MAX_SEARCHED, _MAX_NAMED = 3, 16, 3

_VERSION_2 = "a Checkpoint 2.0 directory"
_UNIFIED = "unified (full) weights"


def refuse_other_forms(src: str) -> None:
    """Refuse Checkpoint 2.0 directories and unified weights.

    Args:
        src: an existing file or directory.

    Raises:
        CheckpointError: the source is of such a form.
        ReshardError: the directory cannot be listed.
    """
    form = _form_of_directory(names_in(src)) if is_directory(src) else _form_of_file(src)
    if form is not None:
        raise CheckpointError(
            f"{src}: is {form}, not a tree of ranks",
            file=src,
            hint="pass the whole directory to `reshard convert`, without --src-strategy",
        )


def _form_of_directory(names: list[str]) -> Optional[str]:
    if "latest_checkpointed_iteration.txt" in names or {"metadata.json", "common.json"} <= set(names):
        return _VERSION_2
    if any(_ITERATION.fullmatch(name) or _ITERATION_FILE.fullmatch(name) for name in names):
        return _VERSION_2
    if any(_UNIFIED_MAP.fullmatch(name) or _UNIFIED_PART.fullmatch(name) for name in names):
        return _UNIFIED
    return None


def _form_of_file(path: str) -> Optional[str]:
    name = os.path.basename(path)
    if _ITERATION_FILE.fullmatch(name):
        return "a file of " + _VERSION_2
    if _UNIFIED_MAP.fullmatch(name):
        return "the map of " + _UNIFIED
    if _UNIFIED_PART.fullmatch(name):
        return "a part of " + _UNIFIED
    return None


def hint_of_checkpoints_below(directory: str) -> Optional[str]:
    """The hint to use checkpoints of other forms, by names, in directories below one; those of the last steps first."""
    level = [directory]
    for _ in range(_MAX_LEVELS):
        level = [path for place in level for path in _subdirectories(place)][:_MAX_SEARCHED]
        held = [path for path in level if any(map(_CHECKPOINT_FILE.fullmatch, _names_in(path)))]
        if held:
            return f"did you mean {' or '.join(held[:_MAX_NAMED])}?"
    return None


def _subdirectories(directory: str) -> list[str]:
    # Unreadable directories are skipped: this is only advice.
    with contextlib.suppress(OSError, ReshardError):
        entries = store_of(directory).entries(directory)
        names = natural_order([each.name for each in entries if each.name[0] != "." and leads_to(each.is_dir)])
        numbered = [name for name in names if name[-1].isdigit()]
        return [os.path.join(directory, name) for name in dict.fromkeys([*numbered[::-1], *names])]
    return []


def _names_in(directory: str) -> list[str]:
    """Its files and directories; none of an unreadable one."""
    with contextlib.suppress(ReshardError):
        return names_in(directory)
    return []
