"""The examples in the pages: typed in a fresh copy of the clone, and their output compared or written anew.

A fenced block of language ``sh`` is typed into bash, ``python`` into Python, one after the other in one
directory per page; ``console``, ``text`` and all others are only shown. An HTML comment in the line before a
fence says more:

``<!-- output -->``: what the block before printed, standard error included, timings aside; with ``...`` as its last
line, the first lines of that.
``<!-- file: NAME -->``: the block is written to this file instead of being typed.
``<!-- status: N -->``: the block ends with this exit status.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]

_MARK = re.compile(r"<!-- (output|file|status)(?:: (.*))? -->")
_FENCE = re.compile(r"```(\w*)")
_TYPED = {"sh": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
# OpenBLAS would start threads that no example uses.
ENVIRONMENT = {"LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1"}
# Where the reader's clone is, as the pages show it.
_HOME = "/home/you/reshard"
# What differs from run to run.
_VARYING = re.compile(
    r'in [0-9.]+ s \([^)]*/s\)|"seconds": [0-9.e-]+|memory +about .*|needed, .* free|'
    r"^(planning|checking|writing) .* s\n",
    re.MULTILINE,
)


class Block(NamedTuple):
    """A fenced block.

    Attributes:
        language: as the fence says.
        text: what is within.
        mark: the comment's word, or nothing.
        value: what follows it.
        start: number of its first line within the page, from 0.
        end: number of the line after its last.
    """

    language: str
    text: str
    mark: str
    value: str
    start: int
    end: int


class Printed(NamedTuple):
    """An output block of a page, and the actual output."""

    block: Block
    output: str

    @property
    def same(self) -> bool:
        """Whether they agree, timings aside."""
        return _VARYING.sub("", self.block.text) == _VARYING.sub("", self.output)


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a page in order."""
    entries = []
    lines = text.splitlines(keepends=True)
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if fence:
            mark = _MARK.fullmatch(lines[number - 1].strip()) if number else None
            start = number + 1
            number = next(place for place in range(start, len(lines)) if lines[place].startswith("```"))
            inside = "".join(lines[start:number])
            word, value = (mark[1], mark[2] or "") if mark else ("", "")
            entries.append(Block(fence[1], inside, word, value, start, number))
        number += 1
    return entries


def pages() -> list[Path]:
    """Every page with something to type, or with output."""
    entries = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [page for page in entries if typed_texts(page)]


def typed_texts(page: Path) -> list[str]:
    """The examples of a page that are typed."""
    return [block.text for block in blocks(page.read_text(encoding="utf-8")) if _is_typed(block)]


def _is_typed(block: Block) -> bool:
    return block.language in _TYPED or block.mark == "file"


@contextlib.contextmanager
def home() -> Iterator[Path]:
    """An empty directory whose path is as long as the one that pages show, as far as there is room for that.

    Tables and lists of names are cut to the width of a line, which paths in it take from them.
    """
    # tempfile adds eight characters of its own.
    filling = len(_HOME) - len(tempfile.gettempdir()) - len(os.sep) - 8
    with tempfile.TemporaryDirectory(prefix="x" * max(filling, 0)) as place:
        yield Path(place)


def type_page(page: Path, place: Path, commands: Path | None = None) -> list[Printed]:
    """Type a page's examples in a directory, which gets a copy of the fixtures.

    Args:
        page: the page.
        place: an empty directory.
        commands: a directory with another `reshard` command.

    Returns:
        Its output blocks with what was printed.

    Raises:
        AssertionError: a block ended with another exit status than it should.
    """
    shutil.copytree(ROOT / "fixtures", place / "fixtures", ignore=shutil.ignore_patterns("__pycache__"))
    directories = [*([] if commands is None else [str(commands)]), os.path.dirname(sys.executable), os.environ["PATH"]]
    environment = {**os.environ, **ENVIRONMENT, "PATH": os.pathsep.join(directories)}
    for variable in ("COLUMNS", "NO_COLOR"):
        environment.pop(variable, None)
    entries = []
    printed = ""
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.mark == "file":
            (place / block.value).write_text(block.text, encoding="utf-8")
        elif block.mark == "output":
            entries.append(Printed(block, _cut(printed, block)))
        elif block.language in _TYPED:
            done = subprocess.run(
                [*_TYPED[block.language], block.text],
                cwd=place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                encoding="utf-8",
                check=False,
            )
            printed = done.stdout.replace(str(place), _HOME)
            status = int(block.value) if block.mark == "status" else 0
            where = f"{page.name}, line {block.start + 1}"
            assert done.returncode == status, f"{where} gave {done.returncode}:\n{block.text}\n{printed}"
    return entries


def _cut(printed: str, block: Block) -> str:
    """What a block shows of an output: all, or with an ellipsis as many of the first lines as it has."""
    shown = block.text.splitlines()
    if shown[-1:] != ["..."]:
        return printed
    return "".join([*printed.splitlines(keepends=True)[: len(shown) - 1], "...\n"])


def rewrite(page: Path, entries: list[Printed]) -> None:
    """Write the outputs into a page's output blocks; blocks that differ only in timings are unchanged."""
    lines = page.read_text(encoding="utf-8").splitlines(keepends=True)
    for printed in reversed(entries):
        if not printed.same:
            lines[printed.block.start : printed.block.end] = printed.output.splitlines(keepends=True)
    page.write_text("".join(lines), encoding="utf-8")
