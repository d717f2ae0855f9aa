"""How the files of a tree are named: a template, and the files that are named otherwise.

A template is a path relative to the tree, without the ending that tells the format. In it ``{rank}`` stands
for the number of the rank, ``{rank:03}`` for the same in at least three digits, ``{{`` and ``}}`` for braces:
``rank_{rank}/llama_rank_{rank}-1_200``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Optional

from reshard.checkpoints.steps import Pattern
from reshard.defaults import MOST_DEVICES
from reshard.storage.json_text import Fields, JsonError
from reshard.wording import quoted

_FIELD = re.compile(r"\{\{|\}\}|\{rank(?::0([0-9]{1,3}))?\}")
_LONGEST_NAME = 255
_DIGITS = re.compile("[0-9]+")
_NUMBERED = re.compile(r"rank_\{rank\}/([^/]*)\{rank\}", re.DOTALL)


@dataclass(frozen=True)
class NamedFile:
    """A file that is named otherwise than the others.

    Attributes:
        rank: whose it is.
        name: its path relative to the tree, without its ending.
    """

    rank: int
    name: str


@dataclass(frozen=True)
class FileNames:
    """How the files of a tree are named.

    Attributes:
        template: for all ranks but those of ``own``.
        own: files that are named otherwise, by rank.
    """

    template: str
    own: tuple[NamedFile, ...] = ()

    @classmethod
    def numbered(cls, prefix: str) -> FileNames:
        """``rank_{rank}/{prefix}{rank}``, as converted checkpoints are named."""
        return cls(f"rank_{{rank}}/{_escaped(prefix)}{{rank}}")

    @classmethod
    def from_fields(cls, said: Fields) -> FileNames:
        """What `dataclasses.asdict` made, after JSON.

        Raises:
            JsonError: it is something else, or a name leads out of the tree.
        """
        own = [Fields(file, "own") for file in said.entries("own")]
        found = cls(
            said.text("template"),
            tuple(NamedFile(file.integer("rank", 0, MOST_DEVICES), file.text("name")) for file in own),
        )
        for name in (found.of(0), *(file.name for file in found.own)):
            check_inside(name)
        return found

    @property
    def prefix(self) -> Optional[str]:
        """The prefix with which `numbered` gives these names; None: no prefix does."""
        match = _NUMBERED.fullmatch(self.template)
        if match is None or self.own:
            return None
        prefix = match[1].replace("{{", "{").replace("}}", "}")
        return prefix if self == self.numbered(prefix) else None

    def of(self, rank: int) -> str:
        """The path of a rank's file relative to the tree, without its ending."""
        return self._own.get(rank) or _FIELD.sub(lambda match: _filled(match, rank), self.template)

    @functools.cached_property
    def _own(self) -> dict[int, str]:
        return {file.rank: file.name for file in self.own}


def check_inside(name: str) -> None:
    """Refuse a name that is not one of a file in a tree.

    Raises:
        JsonError: it leads out of it, or no file can have it.
    """
    parts = name.split("/")
    if "\0" in name or not {"", ".", ".."}.isdisjoint(parts) or len(max(parts, key=len)) > _LONGEST_NAME:
        raise JsonError(f"{quoted(name)} is no name of a file in a tree")


def names_of(files: Iterable[tuple[int, str, Pattern]]) -> FileNames:
    """How files are named: as most of them are; of equals, as that of the lowest rank is.

    Args:
        files: at least one; its rank, its name as in `NamedFile`, and that name in pieces, with None where
            the number of the rank stands.
    """
    ordered = sorted(files)
    alike: dict[Pattern, list[tuple[int, str]]] = {}
    for rank, name, pattern in ordered:
        alike.setdefault(pattern, []).append((rank, name))
    pattern = max(alike, key=lambda pattern: len(alike[pattern]))
    names = FileNames(_template(pattern, alike[pattern]))
    own = tuple(NamedFile(rank, name) for rank, name, _ in ordered if names.of(rank) != name)
    return FileNames(names.template, own)


def _template(pattern: Pattern, files: Iterable[tuple[int, str]]) -> str:
    """The template of files of one pattern; a number gets as many digits as those that begin with a zero."""
    widths = [0] * len(pattern)
    for _, name in files:
        position = 0
        for place, piece in enumerate(pattern):
            if piece is None:
                digits = _DIGITS.match(name, position)
                piece = digits[0] if digits else ""
                if piece.startswith("0") and len(piece) > 1:
                    widths[place] = max(widths[place], len(piece))
            position += len(piece)
    fields = (f"{{rank:0{width}}}" if width else "{rank}" for width in widths)
    return "".join(field if piece is None else _escaped(piece) for piece, field in zip(pattern, fields))


def _escaped(text: str) -> str:
    return text.replace("{", "{{").replace("}", "}}")


def _filled(match: re.Match[str], rank: int) -> str:
    if match[0] in ("{{", "}}"):
        return match[0][0]
    return f"{rank:0{int(match[1] or 0)}}"
