"""How Checkpoint 2.0 names things: directories, files, and the keys of stored slices."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

TRACKER = "latest_checkpointed_iteration.txt"
METADATA = "metadata.json"
COMMON = "common.json"
ADAPTER = "mindformers_adapter_config.json"

MODEL, OPTIMIZER = "model", "opt"

_ITERATION = re.compile(r"iteration_([0-9]{8,18})")
_FILE = re.compile(r"(?:(.+)-)?(model|opt)-([0-9]{7})-([0-9]{7})\.safetensors", re.DOTALL)
# What Python's repr of a tuple of a name and a tuple of one number looks like.
_KEY = re.compile(r"""\((?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)"), \((0|[1-9][0-9]{0,17}),\)\)""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:([\\'\"nrt])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|.)", re.DOTALL)
_SINGLE = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}
_LARGEST_CHARACTER = 0x10FFFF


class FileName(NamedTuple):
    """What the name of a tensor file says.

    Attributes:
        prefix: what the run is called; None where the name has none.
        kind: `MODEL` or `OPTIMIZER`.
        number: of the rank that wrote it, or, in a de-duplicated save, of the file.
        total: files of this kind.
    """

    prefix: Optional[str]
    kind: str
    number: int
    total: int

    @property
    def series(self) -> tuple[Optional[str], int]:
        """What the files of one kind and one save have in common."""
        return self.prefix, self.total


def parse_file_name(name: str) -> Optional[FileName]:
    """What a file's name says; None where it is not that of a tensor file of Checkpoint 2.0."""
    match = _FILE.fullmatch(name)
    return None if match is None else FileName(match[1], match[2], int(match[3]), int(match[4]))


def file_order(name: str) -> tuple[bool, str]:
    """Sorts model files first, then optimizer files, each by name."""
    said = parse_file_name(name)
    return said is not None and said.kind == OPTIMIZER, name


def iteration_name(number: int) -> str:
    """The directory of an iteration."""
    return f"iteration_{number:08d}"


def parse_iteration(name: str) -> Optional[int]:
    """The number of an iteration's directory; None where it is none that MindFormers would find."""
    match = _ITERATION.fullmatch(name)
    if match is None or iteration_name(int(match[1])) != name:
        return None
    return int(match[1])


def parse_key(key: str) -> Optional[tuple[str, int]]:
    """Name and slice number of a key such as ``('layers.0.weight', (1,))``.

    The text is read as data; None where it is anything but the repr of such a tuple.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    name = match[1] if match[1] is not None else match[2]
    if "\\" in name:
        unescaped = _unescaped(name)
        if unescaped is None:
            return None
        name = unescaped
    return name, int(match[3])


def _unescaped(body: str) -> Optional[str]:
    pieces = []
    position = 0
    for match in _ESCAPE.finditer(body):
        digits = match[2] or match[3] or match[4]
        if match[1] is not None:
            character = _SINGLE[match[1]]
        elif digits is not None and int(digits, 16) <= _LARGEST_CHARACTER:
            character = chr(int(digits, 16))
        else:
            return None
        pieces += [body[position : match.start()], character]
        position = match.end()
    name = "".join([*pieces, body[position:]])
    try:
        name.encode()
    except UnicodeEncodeError:
        # Half of a surrogate pair is no text.
        return None
    return name
