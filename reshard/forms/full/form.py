"""The two forms of full weights, and their directories by file names."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.forms.form import Form, FormOptions, Side, check_latest
from reshard.forms.ranks.naming import VLLM_FILE, check_inside
from reshard.forms.ranks.tree import find_rank
from reshard.forms.request import Means, Request
from reshard.forms.target import UNFINISHED
from reshard.storage import UnfitError, is_directory, is_regular_file, names_in, read_json, read_small, reading, real
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.messages import Report, as_glob, listing, one_line, plural, quoted, some_names
from reshard.text.names import is_value, is_weight, natural_order, training_globs

if TYPE_CHECKING:
    from reshard.forms.target import FinishingFile, TargetForm
    from reshard.forms.writing import Selected


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

OF_VERL = "huggingface"
"""The directory in which verl saves the files beside the weights."""

CONFIG = "config.json"
_MODULES = "modules.json"
# A name and its file take some hundred bytes; the largest models have some hundred thousand.
_LARGEST = 128 << 20
_WEIGHTS = "weight_map"
_FROM_A_COPY = "take it from a copy"


def read_weight_map(path: str) -> dict[str, str]:
    """The file of every tensor that a map lists, relative to its directory."""
    content = read_json(path, _LARGEST, DamagedCheckpointError, _FROM_A_COPY)
    if content is None:
        raise CheckpointError(f"{path}: does not exist", file=path, hint=_FROM_A_COPY)
    with reading(path, DamagedCheckpointError, _FROM_A_COPY):
        return _weights_of(content, flat=os.path.basename(path) == UNIFIED_MAP)


def _weights_of(content: dict[str, Any], flat: bool) -> dict[str, str]:
    """The inner object, checked; with ``flat``, it may be the outer object."""
    weights = content.get(_WEIGHTS)
    if not isinstance(weights, dict):
        if not flat or (weights is not None and not isinstance(weights, str)):
            raise JsonError(f"its {_WEIGHTS} is missing, or not an object")
        weights = content
    if not weights:
        raise JsonError("it lists no tensors")
    # Shares texts: memory grows with files and names, not with tensors times files.
    file_of: dict[str, str] = {}
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
        file_of[sys.intern(name)] = sound.setdefault(file, file)
    return file_of


SINGLE = "model" + WEIGHTS_ENDING
"""Hugging Face's name of a single file."""

PART = re.compile(r"part[0-9]+\.safetensors")
NUMBERED = re.compile(r"model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
_MODEL_FILE = re.compile(r"model.*\.safetensors", re.DOTALL)
# Files of Checkpoint 2.0 saved without a prefix, whose numbers have seven digits, and slices.
_OTHER_FILE = re.compile(rf"(?:.*-)?(?:model|opt)-[0-9]{{7}}-[0-9]{{7}}\.safetensors|{VLLM_FILE}", re.DOTALL)
_OTHER_WEIGHTS = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".ggml", ".h5", ".msgpack", ".onnx"),
    *(".npz", ".tflite", ".pkl"),
)
# State that trainers save beside the weights.
_OF_TRAINING = re.compile(r"optimizer|scheduler|sampler|scaler|random_states|rng_state|training_args")
# Hidden files and reshard's records are not part of a model.
_NOT_OF_THE_MODEL = (".", "reshard-")

ONE_COPY = "every tensor is in one file only: copy or download the directory again"
_MOST_FILES = 8


def file_names(names: Sequence[str]) -> str:
    return some_names([one_line(name) for name in names], _MOST_FILES)


def full_weights_form(path: str, names: Sequence[str]) -> str | None:
    """``unified`` or ``huggingface`` for a directory with these names, a map or index, or its one file; else None."""
    if not names:
        name = os.path.basename(path)
        single = name == SINGLE and _is_of_a_model(os.path.dirname(path))
        return UNIFIED if name == UNIFIED_MAP else HUGGINGFACE if single or name.endswith(INDEX_ENDING) else None
    if UNIFIED_MAP in names or HYPER_PARAMETERS in names or any(map(PART.fullmatch, names)):
        return UNIFIED
    if any(name.endswith(INDEX_ENDING) for name in names) or any(map(_is_model_file, names)):
        return HUGGINGFACE
    return None


def _is_of_a_model(directory: str) -> bool:
    """Whether a single file there holds full weights: files of ranks may have its name, but no config.json beside."""
    return is_regular_file(os.path.join(directory, CONFIG)) and find_rank(directory) is None


def index_in(directory: str, names: Sequence[str]) -> str | None:
    """The index of a directory, or None."""
    indexes = [name for name in names if name.endswith(INDEX_ENDING)]
    if len(indexes) > 1 and HUGGINGFACE_INDEX not in indexes:
        raise CheckpointError(
            f"{directory}: holds several models: {file_names(indexes)}",
            file=directory,
            hint=f"pass one of them as SRC, for example {os.path.join(directory, indexes[0])}",
        )
    if not indexes:
        return None
    return os.path.join(directory, HUGGINGFACE_INDEX if HUGGINGFACE_INDEX in indexes else indexes[0])


def files_without_index(directory: str, names: Sequence[str], report: Report) -> list[str]:
    """The files of a model whose directory has no index."""
    check_finished(directory, names)
    files = natural_order(filter(_is_model_file, names))
    if len(files) == 1 and not NUMBERED.fullmatch(files[0]):
        return files
    numbers = [match for match in map(NUMBERED.fullmatch, files) if match is not None]
    counts = {int(match[2]) for match in numbers}
    if len(numbers) < len(files) or len(counts) != 1:
        raise CheckpointError(
            f"{directory}: has no {HUGGINGFACE_INDEX}, and its files may be of several models: {file_names(files)}",
            file=directory,
            hint=f"bring {HUGGINGFACE_INDEX}, or give one file alone as SRC",
        )
    count = counts.pop()
    if len(numbers) != count or any(int(match[1]) != place for place, match in enumerate(numbers, start=1)):
        raise CheckpointError(
            f"{directory}: has {plural(len(files), 'file')} of the {count} in their names, and no {HUGGINGFACE_INDEX}",
            file=directory,
            hint=ONE_COPY,
        )
    report.note(f"{directory}: has no {HUGGINGFACE_INDEX}; its {plural(count, 'file')} are read; none is missing")
    return files


def check_finished(directory: str, names: Sequence[str]) -> None:
    """Refuse a directory without a map or index that a conversion is writing, or did not finish."""
    if UNFINISHED in names:
        raise CheckpointError(
            f"{directory}: is not complete: the conversion that writes it has not ended",
            file=directory,
            hint=f"if it was interrupted: reshard resume {shlex.quote(directory)}",
        )


def _is_model_file(name: str) -> bool:
    return _MODEL_FILE.fullmatch(name) is not None and _OTHER_FILE.fullmatch(name) is None


def report_unread(
    directory: str,
    names: Iterable[str],
    files: Iterable[str],
    usual: re.Pattern[str],
    place: str | None,
    report: Report,
) -> None:
    """Note unread weights; warn if their names are like those of read files."""
    used = {*files, HYPER_PARAMETERS}
    unread = [
        name for name in names if name not in used and _are_weights(name) and name != os.path.basename(place or "")
    ]
    alike = [name for name in unread if usual.fullmatch(name)]
    state = [name for name in unread if _OF_TRAINING.match(name)]
    unrelated = [name for name in unread if name not in alike and name not in state]
    if state:
        report.note(f"{directory}: optimizer and other state of the training is not read: {file_names(state)}")
    if alike:
        report.warn(
            f"{directory}: not read, because {os.path.basename(place or '')} does not name them: "
            f"{file_names(alike)}; they may be left from another save"
        )
    if unrelated:
        report.note(f"{directory}: other weights are not read: {file_names(unrelated)}")


def _are_weights(name: str) -> bool:
    return name.endswith(_OTHER_WEIGHTS) and not name.startswith(_NOT_OF_THE_MODEL)


def extra_files_in(directory: str, names: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    passed = {*files, UNIFIED_MAP}
    own = [
        name
        for name in names
        if name not in passed
        and not name.startswith(_NOT_OF_THE_MODEL)
        and not _are_weights(name)
        and is_regular_file(os.path.join(directory, name))
    ]
    inner = [_files_below(directory, module) for module in _modules(directory)] if _MODULES in own else []
    return tuple(dict.fromkeys([*own, *itertools.chain.from_iterable(inner)]))


def _modules(directory: str) -> Iterator[str]:
    """The directories that modules.json of sentence-transformers names; the first module is the model itself."""
    path = os.path.join(directory, _MODULES)
    with reading(path):
        modules = parse_json(read_small(path, _LARGEST))
        for module in modules if isinstance(modules, list) else ():
            name = module.get("path") if isinstance(module, dict) else None
            if isinstance(name, str) and name:
                check_inside(name)
                yield name


def _files_below(directory: str, below: str) -> Iterator[str]:
    """The files of a directory and of those in it, relative; links lead to files only."""
    place = os.path.join(directory, below)
    if is_directory(place) and real(place) == os.path.join(real(directory), below):
        for name in names_in(place):
            path = os.path.join(below, name)
            if is_regular_file(os.path.join(directory, path)):
                yield path
            else:
                yield from _files_below(directory, path)


class _FullForm(Form):
    """The common part of both forms."""

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return full_weights_form(src, names) == self.name

    def read(self, request: Request, means: Means) -> Checkpoint:
        from reshard.forms.full.contents import read_huggingface, read_unified

        check_latest(self, request)
        return read_unified(request, means) if self.name == UNIFIED else read_huggingface(request, means)

    def marks(self, files: Sequence[str]) -> list[str]:
        return [MAP_FILES[self.name]]

    def check_written(self, directory: str, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
        name = MAP_FILES[self.name]
        file_of: dict[str, str] = {}
        for number, path in checkpoint.files.items():
            file = os.path.relpath(path, directory)
            if self.name != UNIFIED or file != HYPER_PARAMETERS:
                file_of.update(dict.fromkeys(checkpoint.indexes[number].tensors, file))
        path = os.path.join(directory, name)
        if not is_regular_file(path):
            if self.name == UNIFIED or len(checkpoint.files) > 1:
                yield name, "is missing: the files of tensors are not recorded"
            return
        weight_map = read_weight_map(path)
        wrong = [tensor for tensor, file in file_of.items() if weight_map.get(tensor) != file]
        if wrong:
            examples = some_names([quoted(tensor) for tensor in wrong], 3)
            yield name, f"lacks the files of {plural(len(wrong), 'tensor')}: {examples}"


class UnifiedForm(_FullForm):
    """MindSpore's unified safetensors."""

    name = "unified"
    options = FormOptions(title="MindSpore unified weights", shard_size=True)

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.full.written_files import FullDirectory
        from reshard.forms.writing import note_uncopied_files, selected

        chosen = selected(checkpoint, request.filters.admit)
        note_uncopied_files(checkpoint, means.report)
        # Readers skip weights among the values, which may be slices. Loaders cut every tensor of a part, and
        # cannot cut shape []: such weights stay values.
        weights = [
            name
            for name in chosen.values
            if request.source.is_none
            and not is_value(name, 1)
            and checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name].shape
        ]
        return FullDirectory(
            self.name, chosen.tensors, chosen.values, request.asked.target.max_shard_size, (), chosen.names, weights
        )


# Names in models of Megatron and MindFormers that no model of Hugging Face has.
_OTHER_NAMES = re.compile(r"embedding\.word_embeddings\.|model\.tok_embeddings\.|decoder\.layers\..*self_attention\.")


class HuggingFaceForm(_FullForm):
    """Hugging Face's directories."""

    name = "huggingface"
    options = FormOptions(title="Hugging Face", shard_size=True, mindspore=False, side=Side.HUGGINGFACE)

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.full.beside import files_beside
        from reshard.forms.full.written_files import FullDirectory
        from reshard.forms.writing import selected

        chosen = selected(checkpoint, request.filters.admit)
        _warn_of_training(chosen, checkpoint, means.report)
        extra_files = files_beside(checkpoint, chosen.tensors, request, means)
        _check_names(chosen, extra_files, means.report)
        return FullDirectory(
            self.name, chosen.tensors, chosen.values, request.asked.target.max_shard_size, extra_files, chosen.names
        )


def _check_names(chosen: Selected, extra_files: Sequence[FinishingFile], report: Report) -> None:
    """Report names that loaders of the model do not expect."""
    # Loaded only here: most conversions have no rules.
    from reshard.names import is_foreign

    if any(map(_OTHER_NAMES.match, chosen.tensors)):
        report.warn(
            "names and packing stay those of Megatron or MindFormers, which loaders of Hugging Face models do not "
            "expect; to change them: --names TABLE, with the family that `reshard suggest` names"
        )
        return
    config: object = None
    for file in extra_files:
        if file.name == CONFIG:
            with contextlib.suppress(UnfitError):
                config = parse_json(b"".join(file.make()))
    if not isinstance(config, dict):
        return
    if is_foreign(config, chosen.tensors):
        report.warn(
            f"names fit no weight of model_type {config['model_type']} in {CONFIG}, so transformers loads none of "
            f"them: {listing([*chosen.tensors])}; save them under its names where they were trained, or rename them: "
            "--names FILE, --rename"
        )


def _warn_of_training(chosen: Selected, checkpoint: Checkpoint, report: Report) -> None:
    """Advice on skipping optimizer state, gradients and counters."""
    names, parameters = [*chosen.tensors, *chosen.values], checkpoint.names()

    def is_integer(name: str) -> bool:
        """Parameters of one element, such as logit_scale, are no integers."""
        stored = chosen.tensors.get(name) or checkpoint.indexes[checkpoint.holders(name)[0]].tensors[name]
        return math.prod(stored.shape) == 1 and "Int" in stored.dtype

    counters = [name for name in names if is_value(name, 1) and is_integer(name)]
    unexpected = {*counters, *(name for name in names if not is_weight(name, parameters))}
    if unexpected:
        globs = [*training_globs(names, parameters), *map(as_glob, counters)]
        report.warn(
            f"optimizer state and values of the training are written too ({plural(len(unexpected), 'tensor')}), and "
            "loaders of Hugging Face models do not expect them; leave them out with "
            + " ".join(f"--exclude '{glob}'" for glob in dict.fromkeys(globs))
        )
