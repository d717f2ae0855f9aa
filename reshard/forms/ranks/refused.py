"""Errors for checkpoints of other forms where a rank tree is required."""

from __future__ import annotations

import os
import re
from typing import Optional

from reshard.errors import CheckpointError
from reshard.storage import is_directory, names_in

_ITERATION = re.compile(r"iteration_[0-9]+")
_ITERATION_FILE = re.compile(r".*-(?:model|opt)-[0-9]{7}-[0-9]{7}\.safetensors")
_UNIFIED_PART = re.compile(r"(?:part[0-9]+|hyper_param|model-[0-9]{5}-of-[0-9]{5})\.safetensors")
_UNIFIED_MAP = re.compile(r"param_name_map\.json|.+\.safetensors\.index\.json")

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
