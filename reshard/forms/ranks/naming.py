"""Names of files in a tree: step, rank and series of saves; templates.

MindSpore names files ``{prefix}-{epoch}_{step}.ckpt``. A second run into the same directory appends ``_1`` to the
prefix, so only steps of one prefix have an order. The prefix may hold the rank's number (``llama_rank_3-1_10.ckpt``);
then the prefixes of two ranks of one save differ.

In the path of a source, ``{rank}`` stands for a whole number of digits; ``*``, ``?`` and ``[...]`` are wildcards within
one component, as in a shell.

A template is a path relative to the tree, without the ending of the format. ``{rank}`` stands for the number of
the rank, ``{rank:03}`` for the number in at least three digits, ``{{`` and ``}}`` for braces:
``rank_{rank}/llama_rank_{rank}-1_200``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from reshard.defaults import MAX_DEVICES
from reshard.errors import CheckpointError, UsageError
from reshard.storage import is_directory, leads_to, store_of
from reshard.storage.json_text import Fields, JsonError
from reshard.text.globs import Glob
from reshard.text.messages import quoted

# Python refuses to read numbers of thousands of digits, which no file's name can hold.
_STEP = r"([0-9]{1,255})_([0-9]{1,255})"
# Saves at a fault carry a mark behind the step.
_STEM = re.compile(r"(?P<prefix>.*)-(?P<epoch>[0-9]+)_(?P<step>[0-9]+)(?:_breakpoint)?", re.DOTALL)
RANK_NUMBER = "\0"
"""Replaces the rank's number in a name; no file name can contain it."""

_NUMBERS = re.compile(r"([0-9]+|\0)")
# Endings before the number of the rank that saved a file.
_RANK = ("rank", "rank_", "rank-")

# A rank's number may stand in a prefix by chance (`net2_rank_2`): each of this many places is tried both ways;
# places further back count as the rank's number.
_MOST_PLACES = 6

Pattern = tuple[str | None, ...]


class Step(NamedTuple):
    """Epoch and step of a save, ordered as numbers: 1_10 is newer than 1_9."""

    epoch: int
    step: int

    def __str__(self) -> str:
        return f"{self.epoch}_{self.step}"

    @classmethod
    def parse(cls, text: str) -> Step:
        """The step of an option's text.

        Raises:
            UsageError: the text is not a step.
        """
        match = re.fullmatch(_STEP, text)
        if match is None:
            raise UsageError(
                f"--step {text}: is not a step", hint="pass epoch and step as in the files' names, for example 3_10"
            )
        return cls(int(match[1]), int(match[2]))


def parse_stem(stem: str) -> tuple[str, Step | None]:
    """Prefix and step of a file name without its ending; no step: the whole stem is the prefix."""
    match = _STEM.fullmatch(stem)
    if match is None:
        return stem, None
    return match["prefix"], Step(int(match["epoch"]), int(match["step"]))


def saved_at_fault(path: str) -> str | None:
    """The mark of a save at a fault in a file's name: ``"breakpoint"`` or ``"ttp"``; None without one."""
    directory, name = os.path.split(path)
    if os.path.splitext(name)[0].endswith("_breakpoint"):
        return "breakpoint"
    above = os.path.basename(os.path.dirname(directory))
    return "ttp" if name.startswith("ttp_rank_") or holds_fault_saves(above) else None


def holds_fault_saves(name: str) -> bool:
    """Whether a directory of this name is a finished save at a fault."""
    return re.fullmatch("(?:tft|ttp)_saved_checkpoints-step_[0-9]+", name) is not None


def name_families(prefixes: Iterable[tuple[int, str]]) -> dict[tuple[int, str], Pattern]:
    """Group prefixes that differ only in the number of their rank.

    A pattern is a prefix with blanks for some occurrences of the rank's number. A prefix belongs to the
    pattern that fits most ranks; of equals, to the pattern with fewest blanks. In a prefix that fits no other rank's,
    the rank's number stands behind ``rank``, or last.

    Args:
        prefixes: rank and prefix of each file, with `RANK_NUMBER` for known places of the rank's number.

    Returns:
        Per file the pattern of its family: the prefix in pieces, with None for a rank's number.
    """
    patterns = {item: _patterns(*item) for item in prefixes}
    fits = Counter(pattern for options in patterns.values() for pattern in options)

    def order(pattern: Pattern, usual: Pattern) -> tuple[int, bool, int, str]:
        return -fits[pattern], fits[pattern] == 1 and pattern != usual, pattern.count(None), str(pattern)

    return {item: min(options, key=lambda pattern: order(pattern, _usual(*item))) for item, options in patterns.items()}


def _usual(rank: int, prefix: str) -> Pattern:
    """The pattern of a prefix without evidence from other ranks' files."""
    split = _NUMBERS.split(prefix)
    pieces: list[str | None] = [None if piece == RANK_NUMBER else piece for piece in split]
    if None not in pieces:
        for place in range(1, len(split), 2):
            usual = split[place - 1].endswith(_RANK) or split[place + 1 :] == [""]
            if usual and int(split[place]) == rank:
                pieces[place] = None
    return tuple(pieces)


def _patterns(rank: int, prefix: str) -> frozenset[Pattern]:
    # Numbers are at odd indexes.
    pieces: list[str | None] = [None if piece == RANK_NUMBER else piece for piece in _NUMBERS.split(prefix)]
    places = [place for place, piece in enumerate(pieces) if place % 2 and piece is not None and int(piece) == rank]
    patterns: set[Pattern] = set()
    for blanks in itertools.product((True, False), repeat=min(len(places), _MOST_PLACES)):
        pattern = list(pieces)
        for place, blank in itertools.zip_longest(places, blanks, fillvalue=True):
            if blank:
                pattern[place] = None
        patterns.add(tuple(pattern))
    return frozenset(patterns)


RANK = "{rank}"
_WILD = "*?["


class PathMatch(NamedTuple):
    """A file or directory that a pattern matches.

    Attributes:
        rank: the number matched by ``{rank}``.
        naming: the name of the directory, or of the directory of the file, relative to `fixed_directory`, in pieces,
            with None for the rank's number: two ways to match one rank are two namings.
        path: its path.
        name: of a file: its name, with `RANK_NUMBER` for the numbers that ``{rank}`` matches.
    """

    rank: int
    naming: Pattern
    path: str
    name: str


def match_paths(pattern: str, unfinished: str) -> Iterator[PathMatch]:
    """Every matching file and directory. Directories whose names end in ``unfinished`` are skipped."""
    start = fixed_directory(pattern)
    if is_directory(start or os.curdir):
        yield from _descend(start, pattern[len(start) :].split(os.sep), -1, (), unfinished)


def fixed_directory(pattern: str) -> str:
    """The part of the pattern before its first component with {rank} or a wildcard."""
    parts = pattern.split(os.sep)
    fixed = next(place for place, part in enumerate(parts) if any(mark in part for mark in (RANK, *_WILD)))
    return "".join(part + os.sep for part in parts[:fixed])


def _descend(directory: str, parts: list[str], rank: int, naming: Pattern, unfinished: str) -> Iterator[PathMatch]:
    """Matches of the remaining parts below ``directory``; rank -1 is unknown."""
    part, inner_parts = parts[0], parts[1:]
    if not part:
        # A doubled or trailing separator.
        if inner_parts:
            yield from _descend(directory, inner_parts, rank, naming, unfinished)
        else:
            yield PathMatch(rank, naming, directory, "")
        return
    glob = Glob(part, RANK)
    for entry in sorted(store_of(directory).entries(directory or os.curdir), key=lambda entry: entry.name):
        name = entry.name
        spans = glob.numbers(name)
        if spans is None or (name.startswith(".") and not part.startswith(".")):
            continue
        numbers = {int(name[start:stop]) for start, stop in spans} | ({rank} if rank >= 0 else set())
        if len(numbers) > 1:
            continue
        path = directory + name
        enters_directory = leads_to(entry.is_dir)
        if enters_directory and name.endswith(unfinished):
            continue
        number = numbers.pop() if numbers else -1
        blanked = _blanked(name, spans)
        # The file's own name belongs to its step and series, not to the naming of its directory.
        inner = (*naming, *_pieces(blanked), os.sep) if enters_directory else naming
        if not inner_parts:
            yield PathMatch(number, inner, path, blanked)
        elif enters_directory:
            yield from _descend(path + os.sep, inner_parts, number, inner, unfinished)


def _pieces(blanked: str) -> Iterator[str | None]:
    for place, piece in enumerate(blanked.split(RANK_NUMBER)):
        if place:
            yield None
        yield piece


def _blanked(name: str, spans: Sequence[tuple[int, int]]) -> str:
    for start, stop in reversed(spans):
        name = name[:start] + RANK_NUMBER + name[stop:]
    return name


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

    @classmethod
    def of_prefix(cls, prefix: str, step: Step | None = None) -> FileNames:
        """``rank_{rank}/{prefix}{rank}``, the names of converted checkpoints.

        Args:
            prefix: the beginning of the files' names. With fields, it is the whole name: ``{rank}``,
                or ``{rank:03}``, stands for the rank's number, ``{epoch}`` and ``{step}`` for the
                converted step; ``{{`` and ``}}`` are braces.
            step: the converted step, if known.

        Raises:
            UsageError: see `check_prefix`.
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
        own = [Fields(file, "own") for file in record.entries("own")]
        own_names = {file.integer("rank", 0, MAX_DEVICES): file.text("name") for file in own}
        if len(own_names) < len(own):
            raise JsonError("own lists a rank twice")
        names = cls(record.text("template"), own_names)
        for name in (names.of(0), *own_names.values()):
            check_inside(name)
        return names

    def to_fields(self) -> dict[str, object]:
        return {"template": self.template, "own": [{"rank": rank, "name": name} for rank, name in self.own.items()]}

    @property
    def prefix(self) -> str | None:
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


def _filled_prefix(prefix: str, step: Step | None, complete: bool) -> str:
    """The template for a prefix with the numbers of a step; a complete prefix gets no rank after it."""
    numbers = {} if step is None else {"{epoch}": str(step.epoch), "{step}": str(step.step)}
    stem = _PREFIX_FIELD.sub(lambda match: numbers.get(match[0], match[0]), prefix)
    return _DIRECTORY + (stem if complete else stem + RANK)


def check_inside(name: str) -> None:
    """Refuse a name that leads out of the tree, or that no file can have."""
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
