"""Messages with parameters of Python in the place of options: ``Source(strategy=FILE)`` for ``--src-strategy FILE``."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping

from reshard.asked import FLAG, NUMBER, RANKS, Conversion, Edits, Effort, Kind, Source, Target, fields_of
from reshard.errors import ReshardError
from reshard.text.messages import Message, full_text, is_shortened

# A command to paste keeps its options.
_COMMAND = r"`reshard [^`]*`|\breshard [a-z][a-z-]* [^\n]*"
_CHOICE = "all|checkpoint2|ckpt|crc32|huggingface|keep|never|none|pread|ranks|same|safetensors|unified"
_VALUE = rf"'[^'\n]*'|[/.]\S+|[A-Z]+\b(?:=[A-Z]+\b)?|(?:{_CHOICE})\b|\d\w*|\w+(?:,\w+=\w+)+"
_WORDS = re.compile(rf"{_COMMAND}|--(?P<name>[a-z][a-z-]*[a-z])(?: (?P<value>{_VALUE}))?")


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


@functools.cache
def _fields() -> Mapping[str, tuple[str, str, Kind]]:
    """The group, the field and the kind of every option."""
    groups = (Source, Target, Edits, Effort, Conversion)
    return {
        name: (group.__name__, field, option.kind)
        for group in groups
        for field, (option, _) in fields_of(group).items()
        for name in option.names
    }


def _written(match: re.Match[str]) -> str:
    if match["name"] is None:
        return match[0]
    value = match["value"]
    if match["name"] == "verify":
        return "verify=True" + (f" {value}" if value else "")
    group, field, kind = _fields().get(f"--{match['name']}", ("", match["name"].replace("-", "_"), NUMBER))
    if kind is FLAG:
        return f"{group}({field}={not match['name'].startswith('no-')})" + (f" {value}" if value else "")
    if not value:
        return field if group in ("", "Conversion") else f"{group}.{field}"
    if kind is RANKS and value.isdigit():
        value = f"[{value}]"
    elif not (value.isdigit() or value[0] == "'" or value[0].isupper()):
        value = f"'{value}'"
    return f"{field}={value}" if group in ("", "Conversion") else f"{group}({field}={value})"
