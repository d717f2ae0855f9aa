"""Files beside the weights of a Hugging Face directory, compared with those of the source."""

from __future__ import annotations

import os
from typing import Optional

from reshard.checkpoints import reading_error
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.full import FullWeights
from reshard.storage import UnfitError, is_regular_file, opened_regular, read_range, read_small
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.names import is_weight
from reshard.text.report import Report
from reshard.text.wording import some_names
from reshard.verification.difference import Difference
from reshard.verification.stored import Source

_CONFIG = "config.json"
_TYPES = ("torch_dtype", "dtype")
_LARGEST_CONFIG = 1 << 22
_BLOCK = 1 << 20


def compare_beside(
    source: Optional[Checkpoint], directory: str, written: Source, cast: bool, report: Report
) -> list[Difference]:
    """Which files beside the source's weights, such as a tokenizer, are not beside the target's.

    Args:
        source: what was converted; only Hugging Face directories have such files.
        directory: what was written.
        written: what its files hold.
        cast: whether weights were cast, so that the configuration may name another type.
        report: told which files are others than the source's.

    Raises:
        ReshardError: a file cannot be read.
    """
    if not isinstance(source, FullWeights):
        return []
    missing, different = [], []
    for name in source.others:
        here, there = os.path.join(source.place, name), os.path.join(directory, name)
        try:
            if not is_regular_file(there):
                missing.append(name)
            elif not (_fits(here, there, written) if cast and name == _CONFIG else _same(here, there)):
                different.append(name)
        except OSError as error:
            raise reading_error(there, error) from error
    if different:
        # Somebody's own stays where it was before the conversion.
        report.warn(f"{directory}: not as beside the source's weights: {some_names(different)}")
    return [Difference("file", None, (), f"is missing, and is in {source.place}", (name,)) for name in missing]


def _same(here: str, there: str) -> bool:
    """Whether two files, either of which may be an object in a store, hold the same.

    Raises:
        RetryableError: one became shorter.
        OSError: one cannot be read.
    """
    try:
        with opened_regular(here) as one, opened_regular(there) as other:
            size = one.size()
            if size != other.size():
                return False
            ranges = [(offset, min(_BLOCK, size - offset)) for offset in range(0, size, _BLOCK)]
            return all(read_range(one, *block) == read_range(other, *block) for block in ranges)
    except UnfitError:
        return False


def _fits(here: str, there: str, written: Source) -> bool:
    """Whether a configuration is the source's, but names the one type that all weights have after a cast.

    Raises:
        OSError: one cannot be read.
    """
    types = {
        tensor.dtype
        for name, tensor in written.tensors.items()
        if is_weight(name, written.tensors) and "Float" in tensor.dtype
    }
    try:
        before, after = (parse_json(read_small(path, _LARGEST_CONFIG)) for path in (here, there))
    except (UnfitError, JsonError):
        return _same(here, there)
    if not isinstance(before, dict) or len(types) != 1:
        return bool(before == after)
    named = types.pop().lower()
    return bool({key: named if key in _TYPES else value for key, value in before.items()} == after)
