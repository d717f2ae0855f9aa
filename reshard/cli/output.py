"""What people and scripts get to see: progress, messages, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable
from typing import Callable

import click

from reshard.errors import UnwritableError
from reshard.wording import one_line, printable

# Rows of a table that take well below a second to fold.
_MOST_FOLDED = 1000


def echo_json(value: object) -> None:
    """Print JSON to standard output, alone there."""
    click.echo(json.dumps(value, ensure_ascii=False))


def listener(quiet: bool) -> Callable[[str, str], None]:
    """Shows warnings always and notes unless quiet, on standard error."""

    def show(kind: str, text: str) -> None:
        text = printable(text)
        if kind == "warning":
            _echo_aside(_styled(f"warning: {text}", "yellow"))
        elif not quiet:
            _echo_aside(f"note: {text}")

    return show


def show_notes(notes: Iterable[str]) -> None:
    """Show what was noted, on standard error, for commands that cannot be quiet."""
    show = listener(quiet=False)
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


def write_picture(path: str, picture: bytes, quiet: bool = False) -> None:
    """Write an SVG file whole, in place of an older one, and say so unless quiet.

    Raises:
        UnwritableError: it cannot be written.
    """
    from reshard.temporary import write_whole

    try:
        write_whole(path, picture)
    except OSError as error:
        raise UnwritableError(f"{path}: cannot be written: {error.strerror or error}", file=path) from error
    listener(quiet)("note", f"drew {path}")


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to standard output; wide cells fold, nothing is cut off.

    Of many rows rich would take minutes: they are printed without folding.
    """
    if len(rows) > _MOST_FOLDED:
        click.echo("\n".join([title, *padded(columns, rows)]))
        return
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(printable(cell).replace("[", "\\[") for cell in row))
    console = Console(width=terminal_width(), highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(shown)
    text = printed.get()
    click.echo(text if _on_terminal() else "\n".join(line.rstrip() for line in text.splitlines()))


def padded(columns: list[str], rows: list[list[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cells, heads included."""
    lines = [columns, *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines]
