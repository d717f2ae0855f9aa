"""Tables for people: numbers aligned on the right; on a terminal names are folded to its width."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator, Sequence
from unicodedata import east_asian_width

import click

from reshard.cli.output import alarming, is_verbose, on_terminal, say, terminal_width
from reshard.text.messages import one_line, plural, printable

# Rich draws this many rows in about a second.
_MAX_DRAWN = 1000
# A name is folded to no fewer columns while another column can be left out.
_MIN_NAME = 24
# Longer texts shift their own row alone; MindSpore's longest names have about 120 characters.
_MAX_ALIGNED = 120
_GAP = 2
_MAX_ALARMING = 20
_NUMBER = re.compile(r"-?|[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan)( ?([KMGTPE]i?)?B)?")

_Rows = Sequence[Sequence[str]]


def table(
    title: str, columns: Sequence[str], rows: _Rows, spare: Sequence[str] = (), alarming_rows: Collection[int] = ()
) -> None:
    """Print a table to standard output.

    On a terminal that is too narrow, columns are left out and names folded; with -v and elsewhere every row is a line.

    Args:
        title: its headline; none if empty.
        columns: the heads; the first column has the names.
        rows: a text for each column.
        spare: columns to leave out on a narrow terminal, in this order.
        alarming_rows: numbers of rows printed in red.
    """
    cells = [[_cell(text) for text in row] for row in rows]
    # A blank line replaces a title, and follows every table.
    click.echo(title)
    fitted = on_terminal() and not is_verbose() and len(rows) <= _MAX_DRAWN
    for hidden in range(len(spare) + 1) if fitted else ():
        shown = [place for place, head in enumerate(columns) if head not in spare[:hidden]]
        names, *others = (_widest([row[place] for row in (columns, *cells)]) for place in shown)
        if min(_MIN_NAME, names) + sum(others) + _GAP * len(others) <= terminal_width():
            heads, narrow = [columns[place] for place in shown], [[row[place] for place in shown] for row in cells]
            click.echo(_drawn(heads, narrow, alarming_rows))
            if hidden:
                click.echo(f"not shown on this terminal: {', '.join(spare[:hidden])}; -v shows all")
            return
    click.echo("\n".join([*_aligned(columns, cells, alarming_rows), ""]))


def say_more(hidden: int, noun: str) -> None:
    """A line about rows that only -v shows, if there are any."""
    if hidden:
        say(f"... and {plural(hidden, noun)} more; -v shows all")


def alarming_lines(lines: Sequence[str]) -> None:
    """Lines about tensors, in red; only the first ones without -v."""
    shown = lines if is_verbose() else lines[:_MAX_ALARMING]
    for line in shown:
        click.echo(alarming(printable(line)))
    say_more(len(lines) - len(shown), "tensor")


def _drawn(columns: Sequence[str], rows: _Rows, coloured: Collection[int]) -> str:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawing = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for place, (column, number) in enumerate(zip(columns, _numeric(columns, rows))):
        drawing.add_column(Text(column), justify="right" if number else "left", no_wrap=place > 0, overflow="fold")
    for place, row in enumerate(rows):
        drawing.add_row(*map(Text, row), style="red" if place in coloured else None)
    console = Console(width=terminal_width(), highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(drawing)
    return "\n".join(line.rstrip() for line in f"{printed.get()}\n".splitlines())


def _aligned(columns: Sequence[str], rows: _Rows, coloured: Collection[int]) -> Iterator[str]:
    numbers = _numeric(columns, rows)
    widths = [min(_MAX_ALIGNED, _widest(column)) for column in zip(columns, *rows)]
    for place, row in enumerate((columns, *rows), -1):
        spaces = [" " * (width - _width(cell)) for cell, width in zip(row, widths)]
        cells = (space + cell if number else cell + space for cell, space, number in zip(row, spaces, numbers))
        line = (" " * _GAP).join(cells).rstrip()
        yield alarming(line) if place in coloured else line


def _numeric(columns: Sequence[str], rows: _Rows) -> list[bool]:
    """Which columns hold nothing but numbers and sizes."""
    return [all(_NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(columns))]


def _widest(texts: Sequence[str]) -> int:
    return max(map(_width, texts))


def _width(text: str) -> int:
    """Columns of a text: East Asian characters take two."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(character) in "WF") for character in text)


def _cell(text: str) -> str:
    """Text on one line as it is printed, so that columns align."""
    encoding = sys.stdout.encoding or "utf-8"
    return one_line(text).encode(encoding, "backslashreplace").decode(encoding)
