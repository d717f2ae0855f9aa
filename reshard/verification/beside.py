"""Files beside the weights of a Hugging Face directory, compared with those that they are copies of."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from reshard.asked import Conversion
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError
from reshard.forms.full.form import CONFIG, OF_VERL
from reshard.storage import UnfitError, is_directory, is_regular_file, opened_regular, read_json, read_range, reading
from reshard.text.messages import Report, some_names
from reshard.text.names import is_weight
from reshard.verification.reading import Difference

_OF_QUANTISATION = ("quant_model_description.json", "hf_quant_config.json")
_MOST, _PART = 1 << 22, 1 << 20


def beside_differences(
    source: Checkpoint, target: Checkpoint, asked: Conversion, copied: bool, report: Report
) -> Iterator[Difference]:
    """Differences of files beside the weights, such as config.json; warns of files that the target may have had before.

    Args:
        source: the source.
        target: the written checkpoint.
        asked: the conversion.
        copied: config.json was written by this conversion.
        report: gets warnings.
    """
    directory, given, different = asked.target.path, asked.edits.config, []
    paths = {path[len(OF_VERL) + 1 :] if path.startswith(f"{OF_VERL}/") else path: path for path in source.extra_files}
    paths = {name: os.path.join(source.place, path) for name, path in paths.items()}
    if given is not None and copied:
        given = os.path.join(given, CONFIG) if is_directory(given) else given
        paths.update({CONFIG: given} if is_regular_file(given) else {})
    quantised = _are_quantised(target, asked)
    for name in () if quantised else _OF_QUANTISATION:
        paths.pop(name, None)
    for name, old in paths.items():
        new = os.path.join(directory, name)
        with reading(new):
            if not is_regular_file(new):
                yield Difference("file", None, (), f"is missing, and is in {os.path.dirname(old)}", (name,))
            elif _same_configuration(old, new, target, asked, quantised) if name == CONFIG else _same(old, new):
                continue
            elif name == CONFIG and copied:
                yield Difference("file", None, (), "is not the configuration that was to be copied", (name,))
            else:
                different.append(name)
    if different:
        # Only a warning: a conversion keeps files that the directory held before.
        report.warn(f"{directory}: differs from the file beside the source's weights: {some_names(different)}")


def _are_quantised(target: Checkpoint, asked: Conversion) -> bool:
    """Whether the weights of a written checkpoint are codes."""
    # Imported only here: most checkpoints have nothing beside the weights.
    from reshard.quantised import holds_codes

    types = {name: tensor.dtype for name, tensor in target.tensors.items()}
    return asked.edits.dequantize is None and holds_codes(types)


def _same(old: str, new: str) -> bool:
    """Whether two files have the same contents."""
    try:
        with opened_regular(old) as old_file, opened_regular(new) as new_file:
            size = old_file.size()
            ranges = [(offset, min(_PART, size - offset)) for offset in range(0, size, _PART)]
            return size == new_file.size() and all(
                read_range(old_file, *span) == read_range(new_file, *span) for span in ranges
            )
    except UnfitError:
        return False


def _same_configuration(old: str, new: str, target: Checkpoint, asked: Conversion, quantised: bool) -> bool:
    """Whether a configuration is a copy, of which a cast changes types, without keys for codes if there are none."""
    cast = bool(asked.edits.cast) or asked.edits.dequantize is not None
    if quantised and not cast:
        return _same(old, new)
    try:
        expected, found = (read_json(path, _MOST) or {} for path in (old, new))
    except CheckpointError:
        # Such a file is copied as it is.
        return _same(old, new)
    weights = (tensor.dtype.lower() for name, tensor in target.tensors.items() if is_weight(name, target.tensors))
    types = {dtype for dtype in weights if "float" in dtype}
    levels: list[Any] = [expected, expected.get("text_config")]
    unchanged = not cast
    for level in filter(lambda each: isinstance(each, dict), levels):
        if cast and len(types) == 1:
            level.update(dict.fromkeys(level.keys() & {"dtype", "torch_dtype"}, *types))
        for key in () if quantised else ("quantization_config", "compression_config"):
            unchanged = unchanged and key not in level
            level.pop(key, None)
    return _same(old, new) if unchanged else bool(expected == found)
