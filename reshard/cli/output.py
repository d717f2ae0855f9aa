"""What people and scripts get to see: progress, messages, JSON."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Callable

import click

from reshard.wording import printable


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


def _echo_aside(line: str) -> None:
    """Print a line to standard error; a progress bar, if there is one, makes room for it."""
    tqdm = sys.modules.get("tqdm")
    with tqdm.tqdm.external_write_mode(file=sys.stderr) if tqdm else contextlib.nullcontext():
        click.echo(line, err=True)


def _styled(text: str, colour: str) -> str:
    if os.environ.get("NO_COLOR"):
        return text
    return click.style(text, fg=colour)


def table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """Print a table to standard output; wide cells fold, nothing is cut off."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    shown = Table(title=title, title_justify="left", box=SIMPLE)
    for column in columns:
        shown.add_column(column, overflow="fold")
    for row in rows:
        shown.add_row(*(printable(cell).replace("[", "\\[") for cell in row))
    on_terminal = sys.stdout is not None and sys.stdout.isatty()
    console = Console(width=None if on_terminal else 160, highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(shown)
    text = printed.get()
    click.echo(text if on_terminal else "\n".join(line.rstrip() for line in text.splitlines()))
