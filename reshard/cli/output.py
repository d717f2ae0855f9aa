"""What people and scripts get to see: progress, messages, JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Callable, NoReturn, Optional

import click

from reshard.execute import Progress

if TYPE_CHECKING:
    from tqdm import tqdm


def echo_json(value: object) -> None:
    """Print JSON to standard output, alone there."""
    click.echo(json.dumps(value, ensure_ascii=False))


def listener(quiet: bool) -> Callable[[str, str], None]:
    """Shows warnings always and notes unless quiet, on standard error."""

    def show(kind: str, text: str) -> None:
        if kind == "warning":
            click.echo(_styled(f"warning: {text}", "yellow"), err=True)
        elif not quiet:
            click.echo(f"note: {text}", err=True)

    return show


def progress_bar(quiet: bool) -> Progress:
    """Progress by bytes on a terminal, silence elsewhere."""
    return Progress() if quiet or not sys.stderr.isatty() else _Bar()


class _Bar(Progress):
    def __init__(self) -> None:
        self._bar: Optional[tqdm[NoReturn]] = None

    def begin(self, total: int) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, unit="B", unit_scale=True, unit_divisor=1024, file=sys.stderr, leave=False)

    def wrote(self, count: int) -> None:
        if self._bar is not None:
            self._bar.update(count)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.close()


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
        shown.add_row(*(cell.replace("[", "\\[") for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(shown)
