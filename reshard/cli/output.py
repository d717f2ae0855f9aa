"""What people and scripts get to see: progress, messages, JSON."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from typing import Callable

import click

from reshard.errors import UnwritableError
from reshard.text.messages import full_text
from reshard.text.names import Total
from reshard.text.wording import byte_size, one_line, printable

# Rows of a table that rich draws in well below a second.
_MOST_DRAWN = 1000

# Columns, where there is no terminal; the longest names that MindSpore makes have about 120.
_WIDEST = 400


def echo_json(value: object) -> None:
    """Print JSON to standard output, alone there; valid UTF-8 whatever the terminal's encoding.

    A path that is no UTF-8 is escaped as JSON can: Python's ``os.fsencode`` makes its bytes of what was loaded.
    """
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
        plain = codecs.lookup(sys.stdout.encoding or "utf-8").name == "utf-8"
    except UnicodeEncodeError:
        plain = False
    click.echo(text if plain else json.dumps(value))


def totals_json(totals: Mapping[str, Total]) -> dict[str, dict[str, int]]:
    """Names and bytes per kind, or per type, as JSON has them."""
    return {key: {"tensors": total.names, "bytes": total.nbytes} for key, total in totals.items()}


def totals_words(totals: Mapping[str, Total]) -> str:
    """``weights 68 (332.6 KiB), optimizer state 136 (665.2 KiB)``."""
    return ", ".join(f"{key} {total.names} ({byte_size(total.nbytes)})" for key, total in totals.items())


def listener() -> Callable[[str, str], None]:
    """Shows warnings always and notes unless -q was given, on standard error; -v names every parameter in them."""
    # Asked here, because threads that have something to tell know no context.
    quiet, verbose = is_quiet(), is_verbose()

    def show(kind: str, text: str) -> None:
        text = printable(full_text(text) if verbose else text)
        if kind == "warning":
            _echo_aside(_styled(f"warning: {text}", "yellow"))
        elif not quiet:
            _echo_aside(f"note: {text}")

    return show


def is_verbose() -> bool:
    """Whether -v was given: everything is named, and nothing shortened."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().meta.get("reshard.verbose"))


def is_quiet() -> bool:
    """Whether -q was given: only results, warnings and errors are shown."""
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().meta.get("reshard.quiet"))


def show_notes(notes: Iterable[str]) -> None:
    """Show what was noted, on standard error, unless -q was given."""
    show = listener()
    for note in notes:
        show("note", note)


def say(text: str, to_standard_error: bool = False) -> None:
    """Print a line or lines for people, whatever names of files and parameters they hold."""
    click.echo(printable(text), err=to_standard_error)


def _echo_aside(line: str) -> None:
    """Print a line to standard error; a progress bar, if there is one, makes room for it."""
    tqdm = sys.modules.get("tqdm")
    with tqdm.tqdm.external_write_mode(file=sys.stderr) if tqdm else contextlib.nullcontext():
        click.echo(line, err=True)


def alarming(text: str) -> str:
    """An error's text, red on a terminal."""
    return _styled(text, "red")


def _styled(text: str, colour: str) -> str:
    # click takes colours away again where the stream is no terminal.
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour)


def paint(text: str, colour: int) -> str:
    """Text in one of a few colours that are told apart, and legible on black and on white."""
    return _styled(text, ("cyan", "magenta", "green", "red")[colour % 4])


def terminal_width() -> int:
    """Columns to write for: those of the terminal, many where the output goes elsewhere."""
    if not _on_terminal():
        return 160
    from shutil import get_terminal_size

    return get_terminal_size().columns


def write_picture(path: str, picture: bytes) -> None:
    """Write an SVG file whole, in place of an older one, and say so unless -q was given; makes its directory.

    Raises:
        UnwritableError: it cannot be written.
    """
    from reshard.storage import make_directory, write_whole

    try:
        make_directory(os.path.dirname(path) or ".")
        write_whole(path, picture)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written: {error.strerror or error}", file=path) from error
    listener()("note", f"drew {path}")


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to standard output; no name is folded or cut off, so that it can be copied and found.

    Where it is too wide, for the terminal or for anybody, every row is two lines or more. Of many rows rich
    would take minutes: they are printed without it.
    """
    lines = padded(columns, rows)
    # Rich puts a column more on each side of every column.
    needed = max(map(len, lines)) + len(columns) + 2
    if needed > (terminal_width() if _on_terminal() else _WIDEST):
        click.echo("\n".join([title, *_listed(columns, rows)]))
        return
    if len(rows) > _MOST_DRAWN:
        click.echo("\n".join([title, *lines]))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(_cell(text).replace("[", "\\[") for text in row))
    console = Console(width=max(needed, terminal_width()), highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(shown)
    click.echo("\n".join(line.rstrip() for line in printed.get().splitlines()))


def _listed(columns: list[str], rows: list[list[str]]) -> Iterable[str]:
    """A table's rows below each other: the first cell on a line of its own, then the others with their heads."""
    width = terminal_width() - 4
    for first, *others in rows:
        yield _cell(first)
        told = (f"{head} {_cell(text)}" for head, text in zip(columns[1:], others))
        yield textwrap.fill(
            ", ".join(told), width, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )


def padded(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cells, heads included."""
    lines = [columns, *([_cell(text) for text in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines]


def _cell(text: str) -> str:
    """Text on one line as it will be seen, for columns that are aligned."""
    encoding = sys.stdout.encoding or "utf-8"
    return one_line(text).encode(encoding, "backslashreplace").decode(encoding)
