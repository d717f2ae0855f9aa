"""Files beside the weights of a Hugging Face directory: the model's configuration, its tokenizer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError
from reshard.forms.full.form import CONFIG, OF_VERL, extra_files_in
from reshard.forms.request import EditRules, Means, Request
from reshard.forms.target import FinishingFile
from reshard.storage import for_each, is_directory, names_in, read_json, read_range, reading, real
from reshard.text.messages import Report, quoted, some_names
from reshard.text.names import is_weight

TYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the type in which loaders hold the weights, the newer first."""

QUANTISATION = frozenset(("quantization_config", "compression_config"))
"""Keys of config.json that describe how weights are quantised."""

QUANTISATION_FILES = frozenset(("quant_model_description.json", "hf_quant_config.json"))
"""Files that do the same."""

# The configuration of the language model in that of a multimodal one.
_TEXT = "text_config"
_LARGEST_CONFIG = 1 << 22
_PART = 1 << 20


def files_beside(
    checkpoint: Checkpoint, tensors: Mapping[str, GlobalTensor], request: Request, means: Means
) -> list[FinishingFile]:
    """Further files of a Hugging Face directory: copies from the source, and in their place those of --config.

    The files become sources: changes are detected from now on. Other runs into the target must have the same files from
    --config, and the same configuration.
    """
    handles, report = means.handles, means.report
    paths = {_name_beside(name): os.path.join(checkpoint.place, name) for name in checkpoint.extra_files}
    config, compared = request.edits.config_path, {CONFIG}
    if config is not None:
        given = {CONFIG: config}
        if is_directory(config):
            given = {name: os.path.join(config, name) for name in extra_files_in(config, names_in(config), ())}
        if CONFIG not in paths or real(given.get(CONFIG, config)) != real(paths[CONFIG]):
            paths.update(given)
            compared.update(given)
            report.note(f"copied from {config}: {some_names([*given])}")
    needless = sorted(QUANTISATION_FILES & paths.keys())
    if needless and not _are_quantised(tensors, request.edits):
        report.note(f"not copied, because the written weights are not quantised: {some_names(needless)}")
        paths = {name: path for name, path in paths.items() if name not in QUANTISATION_FILES}
    copied = for_each(lambda path: _copied(path, handles), [*paths.values()])
    files = {name: file._replace(name=name) for name, file in zip(paths, copied)}
    if CONFIG in paths:
        content = _of_other_types(paths[CONFIG], tensors, request.edits, report)
        if content is not None:
            files[CONFIG] = files[CONFIG]._replace(make=lambda: [content], size=len(content))
    return [file._replace(compared=name in compared) for name, file in files.items()]


def _are_quantised(tensors: Mapping[str, GlobalTensor], edits: EditRules) -> bool:
    """Whether weights are written as codes."""
    # Loaded only here: most models have nothing of quantisation beside them.
    from reshard.quantised import holds_codes

    return edits.quantisation is None and holds_codes({name: tensor.dtype for name, tensor in tensors.items()})


def _name_beside(path: str) -> str:
    """The name beside the target's weights of a file, relative to the source; that of verl has a directory of them."""
    return path[len(OF_VERL) + 1 :] if path.startswith(f"{OF_VERL}/") else path


def _copied(path: str, handles: FileHandles) -> FinishingFile:
    with reading(path), contextlib.closing(handles.open_file(path)) as file:
        status = file.status()
    if not status.regular:
        raise CheckpointError(f"{path}: is not a regular file", file=path, hint="remove it, or put the file there")

    def parts() -> Iterator[bytes]:
        handles.check_unchanged([path])
        with reading(path), contextlib.closing(handles.open_file(path)) as file:
            for offset in range(0, status.size, _PART):
                yield read_range(file, offset, min(_PART, status.size - offset))
        # Check for changes before the target gets its name.
        handles.check_unchanged([path])

    return FinishingFile(os.path.basename(path), parts, status.size, path)


def _of_other_types(path: str, tensors: Mapping[str, GlobalTensor], edits: EditRules, report: Report) -> bytes | None:
    """A configuration for weights that were cast or are not quantised; None to copy it byte for byte."""
    try:
        config = read_json(path, _LARGEST_CONFIG) or {}
    except CheckpointError as error:
        report.warn(f"{error.message}; it is copied unchanged: check that it names the type of the weights")
        return None
    types = _types_of_weights(tensors)
    recorded = [(key, level[key]) for level in _levels(config) for key in TYPE_KEYS if key in level]
    key, value = next(((key, value) for key, value in recorded if types != [value]), ("", None))
    dropped = {key for level in _levels(config) for key in QUANTISATION & level.keys()}
    if dropped and _are_quantised(tensors, edits):
        dropped = set()
    if dropped and edits.quantisation is None:
        left_out = " and ".join(sorted(dropped))
        report.note(f"{CONFIG}: {left_out} left out, because the written weights are not quantised")
    if not edits.casts and edits.quantisation is None:
        if types and key and value not in types:
            report.note(
                f"{path} has {key} {quoted(str(value))}, and the weights are {' and '.join(types)}: loaders cast them; "
                f"--cast DTYPE writes them in another type and corrects {CONFIG}"
            )
        return _encoded(_rewritten(config, dropped)) if dropped else None
    if key and len(types) == 1:
        report.note(f"{CONFIG}: {key} changed from {quoted(str(value))} to {types[0]}, the type of the weights")
    elif key and types and (edits.casts or value not in types):
        report.warn(
            f"{CONFIG} keeps {key} {quoted(str(value))}, because the weights have several types "
            f"({', '.join(types)}): check that it is the type to load them in"
        )
    rewritten = _rewritten(config, dropped, types[0] if len(types) == 1 else None)
    return None if rewritten == config else _encoded(rewritten)


def _encoded(config: Mapping[str, Any]) -> bytes:
    return (json.dumps(config, indent=2) + "\n").encode()


def _levels(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A configuration and, of a multimodal model, that of its language model."""
    text = config.get(_TEXT)
    return [config, text] if isinstance(text, dict) else [config]


def _rewritten(config: Mapping[str, Any], left_out: Collection[str] = (), dtype: str | None = None) -> dict[str, Any]:
    """A configuration without some keys, and with another type, at every level."""
    rewritten = {
        key: dtype if dtype is not None and key in TYPE_KEYS else value
        for key, value in config.items()
        if key not in left_out
    }
    if isinstance(config.get(_TEXT), dict):
        rewritten[_TEXT] = _rewritten(config[_TEXT], left_out, dtype)
    return rewritten


def _types_of_weights(tensors: Mapping[str, GlobalTensor]) -> list[str]:
    """The floating-point types of weights, as config.json spells them."""
    weights = (tensor for name, tensor in tensors.items() if is_weight(name, tensors))
    return sorted({tensor.dtype.lower() for tensor in weights if "Float" in tensor.dtype})
