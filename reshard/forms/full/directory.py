"""Directories of full weights by their file names: form, files, further files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Optional

from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.forms.ranks.naming import check_inside
from reshard.storage import UnfitError, is_directory, is_regular_file, names_in, read_small
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.name_order import natural_order
from reshard.text.report import Report
from reshard.text.wording import one_line, plural, quoted, some_names

UNIFIED_MAP = "param_name_map.json"
HYPER_PARAMETERS = "hyper_param.safetensors"
"""The file of unified weights for values outside the model; no map lists it."""

INDEX_ENDING = ".safetensors.index.json"
HUGGINGFACE_INDEX = "model" + INDEX_ENDING
WEIGHTS_ENDING = ".safetensors"

UNIFIED, HUGGINGFACE = "unified", "huggingface"
"""The forms."""

MAP_FILES = {UNIFIED: UNIFIED_MAP, HUGGINGFACE: HUGGINGFACE_INDEX}
"""The map or index of each form."""

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
    """The inner object, checked; with ``flat``, it may be the whole."""
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


SINGLE = "model" + WEIGHTS_ENDING
"""Hugging Face's name of a single file."""

PART = re.compile(r"part[0-9]+\.safetensors")
NUMBERED = re.compile(r"model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
_MODEL_FILE = re.compile(r"model.*\.safetensors", re.DOTALL)
# Files of Checkpoint 2.0 saved without a prefix, whose numbers have seven digits.
_ITERATION_FILE = re.compile(r"(?:.*-)?(?:model|opt)-[0-9]{7}-[0-9]{7}\.safetensors", re.DOTALL)
_OTHER_WEIGHTS = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx"),
    *(".npz", ".tflite", ".pkl"),
)
# Hidden files and reshard's records are not part of a model.
_NOT_OF_THE_MODEL = (".", "reshard-")

ONE_COPY = "every tensor is in one file only: copy or download the directory again"
_MOST_FILES = 8


def file_names(names: Sequence[str]) -> str:
    """The first names of files and the count of the others."""
    return some_names([one_line(name) for name in names], _MOST_FILES)


def full_weights_form(path: str, names: Optional[Sequence[str]] = None) -> Optional[str]:
    """``unified`` or ``huggingface``, where a path is a directory of full weights or the map in one; else None.

    Args:
        path: a directory, or a file.
        names: the relevant names of the directory; by default all.

    Raises:
        ReshardError: the path cannot be listed.
    """
    if not is_directory(path):
        name = os.path.basename(path)
        return UNIFIED if name == UNIFIED_MAP else HUGGINGFACE if name.endswith(INDEX_ENDING) else None
    names = names_in(path) if names is None else names
    if UNIFIED_MAP in names or HYPER_PARAMETERS in names or any(map(PART.fullmatch, names)):
        return UNIFIED
    if any(name.endswith(INDEX_ENDING) for name in names) or any(map(_is_model_file, names)):
        return HUGGINGFACE
    return None


def index_in(directory: str, names: Sequence[str]) -> Optional[str]:
    """The index of a directory, or None.

    Raises:
        CheckpointError: it has several, and none of the usual name.
    """
    found = [name for name in names if name.endswith(INDEX_ENDING)]
    if len(found) > 1 and HUGGINGFACE_INDEX not in found:
        raise CheckpointError(
            f"{directory}: holds several models: {file_names(found)}",
            file=directory,
            hint=f"pass one of them as SRC, for example {os.path.join(directory, found[0])}",
        )
    if not found:
        return None
    return os.path.join(directory, HUGGINGFACE_INDEX if HUGGINGFACE_INDEX in found else found[0])


def files_without_index(directory: str, names: Sequence[str], report: Report) -> list[str]:
    """The files of a model whose directory has no index.

    Raises:
        CheckpointError: it is not clear which they are, or some are missing.
    """
    found = natural_order(filter(_is_model_file, names))
    if len(found) == 1 and not NUMBERED.fullmatch(found[0]):
        return found
    numbers = [match for match in map(NUMBERED.fullmatch, found) if match is not None]
    counts = {int(match[2]) for match in numbers}
    if len(numbers) < len(found) or len(counts) != 1:
        raise CheckpointError(
            f"{directory}: has no {HUGGINGFACE_INDEX}, and its files may be of several models: {file_names(found)}",
            file=directory,
            hint=f"bring {HUGGINGFACE_INDEX}, or give one file alone as SRC",
        )
    count = counts.pop()
    if len(numbers) != count or any(int(match[1]) != place for place, match in enumerate(numbers, start=1)):
        raise CheckpointError(
            f"{directory}: has {plural(len(found), 'file')} of the {count} in their names, and no {HUGGINGFACE_INDEX}",
            file=directory,
            hint=ONE_COPY,
        )
    report.note(f"{directory}: has no {HUGGINGFACE_INDEX}; its {plural(count, 'file')} are read; none is missing")
    return found


def _is_model_file(name: str) -> bool:
    return _MODEL_FILE.fullmatch(name) is not None and _ITERATION_FILE.fullmatch(name) is None


def say_unread(
    directory: str,
    names: Iterable[str],
    files: Iterable[str],
    usual: re.Pattern[str],
    place: Optional[str],
    report: Report,
) -> None:
    """Note weights that are not read; a warning if their names are alike."""
    read = {*files, HYPER_PARAMETERS}
    unread = [
        name for name in names if name not in read and _are_weights(name) and name != os.path.basename(place or "")
    ]
    alike = [name for name in unread if usual.fullmatch(name)]
    rest = [name for name in unread if name not in alike]
    if alike:
        report.warn(
            f"{directory}: not read, because {os.path.basename(place or '')} does not name them: "
            f"{file_names(alike)}; they may be left from another save"
        )
    if rest:
        report.note(f"{directory}: other weights there are not read: {file_names(rest)}")


def _are_weights(name: str) -> bool:
    return name.endswith(_OTHER_WEIGHTS) and not name.startswith(_NOT_OF_THE_MODEL)


def others_in(directory: str, names: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """Files that belong to the model and are no weights."""
    passed = {*files, UNIFIED_MAP}
    return tuple(
        name
        for name in names
        if name not in passed
        and not name.startswith(_NOT_OF_THE_MODEL)
        and not _are_weights(name)
        and is_regular_file(os.path.join(directory, name))
    )
