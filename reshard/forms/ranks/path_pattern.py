"""Paths with ``{rank}`` in them: which files and directories they match, and for which rank.

``{rank}`` stands for a whole number of digits; ``*``, ``?`` and ``[...]`` are wildcards within one
component of the path, as in a shell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from reshard.forms.ranks.steps import RANK_NUMBER, Pattern
from reshard.storage import is_directory, leads_to_directory, store_of
from reshard.text.globs import Glob

RANK = "{rank}"

_WILD = re.compile(r"[*?\[]")


class Match(NamedTuple):
    """A file or directory that a pattern matches.

    Attributes:
        rank: the number that ``{rank}`` stands for.
        naming: how it, or the directory that it is in, is named, relative to `fixed_directory`, in pieces, with
            None for the rank's number: what matches in two ways for one rank has two namings.
        path: where it is.
        name: of a file: its name, with `RANK_NUMBER` for the numbers that ``{rank}`` stands for.
    """

    rank: int
    naming: Pattern
    path: str
    name: str


def match_paths(pattern: str, unfinished: str) -> Iterator[Match]:
    """Everything that exists and matches. Directories whose names end in ``unfinished`` are passed over.

    Raises:
        OSError: a directory cannot be listed.
    """
    start = fixed_directory(pattern)
    if is_directory(start or os.curdir):
        yield from _descend(start, pattern[len(start) :].split(os.sep), -1, (), unfinished)


def fixed_directory(pattern: str) -> str:
    """The part of the pattern before its first component with {rank} or a wildcard."""
    parts = pattern.split(os.sep)
    fixed = next(place for place, part in enumerate(parts) if RANK in part or _WILD.search(part))
    return "".join(part + os.sep for part in parts[:fixed])


def _descend(directory: str, parts: list[str], rank: int, naming: Pattern, unfinished: str) -> Iterator[Match]:
    """Matches of the remaining parts below ``directory``; rank -1 is not known yet."""
    part, rest = parts[0], parts[1:]
    if not part:
        # A doubled or trailing separator.
        if rest:
            yield from _descend(directory, rest, rank, naming, unfinished)
        else:
            yield Match(rank, naming, directory, "")
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
        directory_there = leads_to_directory(entry)
        if directory_there and name.endswith(unfinished):
            continue
        found = numbers.pop() if numbers else -1
        blanked = _blanked(name, spans)
        # The file's own name belongs to its step and series, not to the naming of its directory.
        inner = (*naming, *_pieces(blanked), os.sep) if directory_there else naming
        if not rest:
            yield Match(found, inner, path, blanked)
        elif directory_there:
            yield from _descend(path + os.sep, rest, found, inner, unfinished)


def _pieces(blanked: str) -> Iterator[Optional[str]]:
    """A name in pieces, with None for each `RANK_NUMBER`."""
    for place, piece in enumerate(blanked.split(RANK_NUMBER)):
        if place:
            yield None
        yield piece


def _blanked(name: str, spans: Sequence[tuple[int, int]]) -> str:
    """The name with `RANK_NUMBER` for each number that stands for the rank."""
    for start, stop in reversed(spans):
        name = name[:start] + RANK_NUMBER + name[stop:]
    return name
