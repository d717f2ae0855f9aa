"""The file of a directory of full weights that says which tensor is in which file.

MindSpore calls it ``param_name_map.json``, Hugging Face ``model.safetensors.index.json``. Both are

    {"metadata": {"total_size": bytes, ...}, "weight_map": {name: file, ...}}

and MindSpore also takes the inner object alone. The sizes are not used: MindSpore 2.7.0 writes wrong ones.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from reshard.checkpoints.rank_tree.naming import check_inside
from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.storage import UnfitError, read_small
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.wording import quoted

UNIFIED_MAP = "param_name_map.json"
HYPER_PARAMETERS = "hyper_param.safetensors"
"""Where unified weights keep what is no part of the model; no map lists it."""

INDEX_ENDING = ".safetensors.index.json"
HUGGINGFACE_INDEX = "model" + INDEX_ENDING
WEIGHTS_ENDING = ".safetensors"

# A name and its file take some hundred bytes; the largest models have some hundred thousand.
_LARGEST = 128 << 20
_WEIGHTS = "weight_map"
_FROM_A_COPY = "take it from a copy"


def read_weight_map(path: str) -> dict[str, str]:
    """The file of every tensor that a map lists, relative to its directory.

    Args:
        path: the map.

    Raises:
        DamagedCheckpointError: it is none, or names a file outside its directory or that is no safetensors file.
        RetryableError: it cannot be read at this moment.
    """
    try:
        found = _weights_of(parse_json(read_small(path, _LARGEST)), flat=os.path.basename(path) == UNIFIED_MAP)
    except (UnfitError, FileNotFoundError) as error:
        what = str(error) if isinstance(error, UnfitError) else "does not exist"
        raise CheckpointError(f"{path}: {what}", file=path, hint=_FROM_A_COPY) from error
    except OSError as error:
        raise RetryableError(f"{path}: cannot be read: {error.strerror or error}", file=path) from error
    except JsonError as error:
        raise DamagedCheckpointError(f"{path}: is damaged: {error}", file=path, hint=_FROM_A_COPY) from None
    return found


def _weights_of(content: Any, flat: bool) -> dict[str, str]:
    """The inner object, checked; ``flat``: the whole may be it."""
    if not isinstance(content, dict):
        raise JsonError("it is not an object")
    weights = content.get(_WEIGHTS)
    if not isinstance(weights, dict):
        if not flat or (weights is not None and not isinstance(weights, str)):
            raise JsonError(f"its {_WEIGHTS} is missing, or not an object")
        weights = content
    if not weights:
        raise JsonError("it lists no tensors")
    # One text per file, not one per tensor; the files have the same names of tensors.
    found: dict[str, str] = {}
    sound: dict[str, str] = {}
    for name, file in weights.items():
        if not name:
            raise JsonError("it holds an empty name")
        if not isinstance(file, str):
            raise JsonError(f"the file of {quoted(name)} is not a text")
        if file not in sound:
            check_inside(file)
            if not file.endswith(WEIGHTS_ENDING):
                raise JsonError(f"the file of {quoted(name)}, {quoted(file)}, is no {WEIGHTS_ENDING} file")
        found[sys.intern(name)] = sound.setdefault(file, file)
    return found
