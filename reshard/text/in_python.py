"""Messages with parameters of Python in the place of options: ``src_strategy=FILE`` for ``--src-strategy FILE``."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from reshard.errors import ReshardError
from reshard.text.messages import Message, full_text, is_shortened

_FLAGS = ("overwrite", "reverse", "verify")
# Options whose parameter has another name or takes another value.
_OTHERS = {"--no-fallback": "fallback=False", "--optimizer keep": "optimizer=True", "--jobs N": "jobs=N"}
# A command to paste keeps its options.
_COMMAND = r"`reshard [^`]*`|\breshard [a-z][a-z-]* [^\n]*"
_CHOICE = "all|checkpoint2|ckpt|crc32|huggingface|never|none|pread|ranks|same|safetensors|unified"
_VALUE = rf"'[^'\n]*'|[/.]\S+|[A-Z]+\b(?:=[A-Z]+\b)?|(?:{_CHOICE})\b|\d\w*|\w+(?:,\w+=\w+)+"
_WORDS = re.compile(rf"{_COMMAND}|{'|'.join(_OTHERS)}|--(?P<name>[a-z][a-z-]*[a-z])(?: (?P<value>{_VALUE}))?")
_SHIFTS = {"K": 10, "M": 20, "G": 30, "T": 40}


def in_python(text: str) -> str:
    """A text with parameters in the place of options; commands stay."""
    if isinstance(text, Message):
        return Message(_WORDS.sub(_written, text), _WORDS.sub(_written, full_text(text)), is_shortened(text))
    return _WORDS.sub(_written, text)


@contextlib.contextmanager
def errors_in_python() -> Iterator[None]:
    """Errors that leave this block name parameters instead of options."""
    try:
        yield
    except ReshardError as error:
        error.message = in_python(error.message)
        error.hint = None if error.hint is None else in_python(error.hint)
        error.args = (error.message,)
        raise


def _written(match: re.Match[str]) -> str:
    if match["name"] is None:
        return _OTHERS.get(match[0], match[0])
    name, value = match["name"].replace("-", "_"), match["value"]
    if name in _FLAGS:
        return f"{name}=True" + (f" {value}" if value else "")
    if not value:
        return name
    if name in ("ranks", "without_ranks") and value.isdigit():
        return f"{name}=[{value}]"
    if value.isdigit() or value[0] == "'" or value[0].isupper():
        return f"{name}={value}"
    if value[:-1].isdigit() and value[-1] in _SHIFTS:
        return f"{name}={value[:-1]} << {_SHIFTS[value[-1]]}"
    return f"{name}='{value}'"
