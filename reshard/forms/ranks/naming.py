"""Names of the files of a tree: a template, and exceptions.

A template is a path relative to the tree, without the ending of the format. ``{rank}`` stands for the number of
the rank, ``{rank:03}`` for the number in at least three digits, ``{{`` and ``}}`` for braces:
``rank_{rank}/llama_rank_{rank}-1_200``.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Optional

from reshard.defaults import MAX_DEVICES
from reshard.errors import CheckpointError, UsageError
from reshard.forms.ranks.steps import RANK, Pattern, Step, parse_stem
from reshard.storage.json_text import Fields, JsonError
from reshard.text.messages import quoted

_FIELD = re.compile(r"\{\{|\}\}|\{rank(?::0([0-9]{1,3}))?\}")
# Fields of --prefix; any other brace is an error.
_PREFIX_FIELD = re.compile(_FIELD.pattern + r"|\{(epoch|step)\}|[{}]")
_LONGEST_NAME = 255
_LONGEST_STEM = _LONGEST_NAME - len(".safetensors")
_DIRECTORY = "rank_{rank}/"
# Ranks whose files must have the same step.
_SEVERAL_RANKS = (0, 1, MAX_DEVICES)


class FileNames(NamedTuple):
    """Names of the files of a tree.

    Attributes:
        template: for all ranks without an entry in ``own``.
        own: by rank, the path of a file whose name does not follow the template.
    """

    template: str
    own: Mapping[int, str] = {}

    def __hash__(self) -> int:
        # Identities of conversions are keys; a mapping has no hash.
        return hash(self.template)

    @classmethod
    def of_prefix(cls, prefix: str, step: Optional[Step] = None) -> FileNames:
        """``rank_{rank}/{prefix}{rank}``, the names of converted checkpoints.

        Args:
            prefix: the beginning of the files' names. With fields, it is the whole name: ``{rank}``,
                or ``{rank:03}``, stands for the rank's number, ``{epoch}`` and ``{step}`` for the
                converted step; ``{{`` and ``}}`` are braces.
            step: the converted step, if known.

        Raises:
            UsageError: the names are impossible, or `find_checkpoints` would read them otherwise.
            CheckpointError: the step is unknown.
        """
        fields = check_prefix(prefix)
        if fields & {"epoch", "step"} and step is None:
            raise CheckpointError(
                f"--prefix {quoted(prefix)} holds {{epoch}} or {{step}}, but no name in the source contains them",
                hint="type the numbers, as in --prefix 'llama_rank_{rank}-3_10'",
            )
        return cls(_filled_prefix(prefix, step, complete=bool(fields)))

    @classmethod
    def from_fields(cls, record: Fields) -> FileNames:
        """The names from their JSON record.

        Raises:
            JsonError: it is not such a record, or a name leads out of the tree.
        """
        own = [Fields(file, "own") for file in record.entries("own")]
        own_names = {file.integer("rank", 0, MAX_DEVICES): file.text("name") for file in own}
        if len(own_names) < len(own):
            raise JsonError("own lists a rank twice")
        names = cls(record.text("template"), own_names)
        for name in (names.of(0), *own_names.values()):
            check_inside(name)
        return names

    def to_fields(self) -> dict[str, object]:
        """The JSON record, which `from_fields` reads."""
        return {"template": self.template, "own": [{"rank": rank, "name": name} for rank, name in self.own.items()]}

    @property
    def prefix(self) -> Optional[str]:
        """The prefix for which `of_prefix` returns these names, for every step; None without one."""
        stem = self.template[len(_DIRECTORY) :]
        if self.own or not self.template.startswith(_DIRECTORY) or parse_stem(stem)[1] is not None:
            return None
        for prefix in (stem[: -len(RANK)] if stem.endswith(RANK) else stem, stem):
            with contextlib.suppress(UsageError, CheckpointError):
                if prefix and self.of_prefix(prefix) == self:
                    return prefix
        return None

    def of(self, rank: int) -> str:
        """The path of a rank's file relative to the tree, without its ending."""
        return self.own.get(rank) or _FIELD.sub(lambda match: _filled(match, rank), self.template)


def check_prefix(prefix: str) -> frozenset[str]:
    """The fields of a prefix: ``rank``, ``epoch``, ``step``.

    Raises:
        UsageError: the names are impossible, or `find_checkpoints` would read them otherwise.
    """
    fields = set()
    for match in _PREFIX_FIELD.finditer(prefix):
        if match[0] in ("{", "}"):
            raise UsageError(
                f"--prefix {quoted(prefix)} contains an unknown field",
                hint="{rank}, {epoch} and {step} stand for numbers, {{ and }} for braces",
            )
        if match[0] not in ("{{", "}}"):
            fields.add(match[2] or "rank")
    # The last of these ranks has the longest name.
    names = FileNames(_filled_prefix(prefix, Step(1, 1), complete=bool(fields)))
    stems = [names.of(rank)[len(_DIRECTORY.format(rank=rank)) :] for rank in _SEVERAL_RANKS]
    if "/" in prefix or "\0" in prefix or prefix.startswith(".") or len(os.fsencode(stems[-1])) > _LONGEST_STEM:
        raise UsageError(
            f"--prefix {quoted(prefix)} is not the beginning of a file name: it must not hold a '/', begin with a '.', "
            f"or be too long for names of {_LONGEST_NAME} bytes"
        )
    if len({parse_stem(stem)[1] for stem in stems}) > 1:
        raise UsageError(
            f"--prefix {quoted(prefix)} makes names with the rank's number in the place of a step",
            hint="put {rank} elsewhere, as in --prefix 'net_{rank}-{epoch}_{step}'",
        )
    return frozenset(fields)


def as_prefix(text: str) -> str:
    """A prefix that stands for a text, with its braces escaped."""
    return text.replace("{", "{{").replace("}", "}}")


def _filled_prefix(prefix: str, step: Optional[Step], complete: bool) -> str:
    """The template for a prefix with the numbers of a step; a complete prefix gets no rank after it."""
    numbers = {} if step is None else {"{epoch}": str(step.epoch), "{step}": str(step.step)}
    stem = _PREFIX_FIELD.sub(lambda match: numbers.get(match[0], match[0]), prefix)
    return _DIRECTORY + (stem if complete else stem + RANK)


def check_inside(name: str) -> None:
    """Refuse a name that leads out of the tree, or that no file can have.

    Raises:
        JsonError: it is refused.
    """
    parts = name.split("/")
    if "\0" in name or not {"", ".", ".."}.isdisjoint(parts) or len(max(parts, key=len)) > _LONGEST_NAME:
        raise JsonError(f"{quoted(name)} is no name of a file in a tree")


def names_of(files: Iterable[tuple[int, str, Pattern]]) -> FileNames:
    """The names of files: the pattern of most of them, of equals that of the lowest rank, and exceptions.

    Args:
        files: at least one; its rank, its path without its ending, and that name in pieces, with None for
            the rank's number.
    """
    ordered = sorted(files)
    alike: dict[Pattern, list[tuple[int, str]]] = {}
    for rank, name, pattern in ordered:
        alike.setdefault(pattern, []).append((rank, name))
    pattern = max(alike, key=lambda pattern: len(alike[pattern]))
    names = FileNames(_template(pattern, alike[pattern]))
    return names._replace(own={rank: name for rank, name, _ in ordered if names.of(rank) != name})


def _template(pattern: Pattern, files: Iterable[tuple[int, str]]) -> str:
    """The template of files of one pattern; its width of numbers is that of numbers with leading zeros."""
    widths = [0] * len(pattern)
    for _, name in files:
        position = 0
        for place, piece in enumerate(pattern):
            if piece is None:
                digits = re.match("[0-9]+", name[position:])
                piece = digits[0] if digits else ""
                if piece.startswith("0") and len(piece) > 1:
                    widths[place] = max(widths[place], len(piece))
            position += len(piece)
    fields = (f"{{rank:0{width}}}" if width else "{rank}" for width in widths)
    return "".join(field if piece is None else as_prefix(piece) for piece, field in zip(pattern, fields))


def _filled(match: re.Match[str], rank: int) -> str:
    if match[0] in ("{{", "}}"):
        return match[0][0]
    return f"{rank:0{int(match[1] or 0)}}"
