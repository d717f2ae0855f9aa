"""The fields behind the options that a message names, for callers in Python: ``Source.strategy (--src-strategy)``."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping

from reshard.asked import Conversion, Edits, Effort, Source, Target, fields_of
from reshard.errors import ReshardError


def fields_named(text: str) -> str | None:
    """A line with the field of every option in a text; None without one."""
    fields = [f"{_fields()[word]} ({word})" for word in dict.fromkeys(_words(text)) if word in _fields()]
    return f"in Python: {', '.join(fields)}" if fields else None


def in_python(text: str) -> str:
    """A text, with this line below it."""
    return "\n".join(filter(None, (text, fields_named(text))))


@contextlib.contextmanager
def errors_in_python() -> Iterator[None]:
    """Errors that leave this block name the fields of their options."""
    try:
        yield
    except ReshardError as error:
        error.add_hint(fields_named(str(error)))
        raise


def _words(text: str) -> list[str]:
    return re.findall(r"--[a-z-]*[a-z]", text)


@functools.cache
def _fields() -> Mapping[str, str]:
    """The group and field of every option."""
    groups = (Source, Target, Edits, Effort, Conversion)
    fields = {
        name: f"{group.__name__}.{field}"
        for group in groups
        for field, (option, _) in fields_of(group).items()
        for name in option.names
    }
    return {**fields, "--verify": "convert(verify=True)"}
