"""Tables for people: names shortened to the width of the terminal, numbers aligned on the right."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from unicodedata import east_asian_width

import click

from reshard.cli.output import alarming, is_verbose, on_terminal, say, terminal_width
from reshard.text.wording import one_line, plural, printable

# Rich draws this many rows in well below a second.
_MAX_DRAWN = 1000
# Columns without a terminal; MindSpore's longest names have about 120 characters.
_MAX_WIDTH = 400
# Texts are shortened to this many characters before a column is left out, and to the minimum if that is not enough.
_FAIR_TEXT = 32
_MIN_TEXT = 12
_GAP = 2
_MAX_ALARMING = 20
_NUMBER = re.compile(r"-?|[-+]?(\d[\d,]*\.?\d*(e[-+]?\d+)?|inf|nan)( ?([KMGTPE]i?)?B)?")


def table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    spare: Sequence[str] = (),
    alarming_rows: Collection[int] = (),
) -> None:
    """Print a table to standard output.

    On a terminal that is too narrow, texts are shortened in the middle. With -v, and where the output goes elsewhere,
    every row becomes several lines instead, and names can be copied.

    Args:
        title: its headline; none if empty.
        columns: the heads.
        rows: a text for each column.
        spare: columns to leave out on a narrow terminal, in this order.
        alarming_rows: numbers of rows printed in red.
    """
    width = terminal_width() if on_terminal() else _MAX_WIDTH
    in_full = is_verbose() or not on_terminal()
    cells = [[_cell(text) for text in row] for row in rows]
    heads = list(columns)
    hidden: list[str] = []
    while _needed(_widths(heads, cells, _FAIR_TEXT)) > width and len(hidden) < len(spare) and not in_full:
        hidden.append(spare[len(hidden)])
        place = heads.index(hidden[-1])
        heads.pop(place)
        cells = [[*row[:place], *row[place + 1 :]] for row in cells]
    if _needed(_widths(heads, cells)) > width:
        if in_full:
            click.echo("\n".join([*([title] if title else []), *_listed(heads, cells)]))
            return
        cells = _shortened(heads, cells, width)
    _draw(title, heads, cells, alarming_rows)
    if hidden:
        click.echo(f"not shown on this terminal: {', '.join(hidden)}; -v shows all")


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


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], coloured: Collection[int]) -> None:
    # A blank line replaces a title, and follows every table.
    click.echo(title)
    lines = _long_lines(columns, rows, coloured) if len(rows) > _MAX_DRAWN else _drawn_lines(columns, rows, coloured)
    click.echo("\n".join([*lines, ""]))


def _drawn_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], coloured: Collection[int]) -> list[str]:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    drawing = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column, number in zip(columns, _numeric(columns, rows)):
        drawing.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
    for place, row in enumerate(rows):
        drawing.add_row(*map(Text, row), style="red" if place in coloured else None)
    console = Console(width=_needed(_widths(columns, rows)) + _GAP, highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(drawing)
    return [line.rstrip() for line in printed.get().splitlines()]


def _long_lines(columns: Sequence[str], rows: Sequence[Sequence[str]], coloured: Collection[int]) -> Iterator[str]:
    numbers = _numeric(columns, rows)
    widths = _widths(columns, rows)
    for place, row in enumerate((columns, *rows), -1):
        spaces = [" " * (width - _width(cell)) for cell, width in zip(row, widths)]
        cells = (space + cell if number else cell + space for cell, space, number in zip(row, spaces, numbers))
        line = (" " * _GAP).join(cells).rstrip()
        yield alarming(line) if place in coloured else line


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold nothing but numbers and sizes."""
    return [all(_NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(columns))]


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = sys.maxsize) -> list[int]:
    """The width of every column where texts are shortened to ``text``."""
    widths = [max(map(_width, column)) for column in zip(columns, *rows)]
    numbers = _numeric(columns, rows)
    return [
        width if number else max(len(head), min(width, text)) for head, width, number in zip(columns, widths, numbers)
    ]


def _needed(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _shortened(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[list[str]]:
    """Rows with the widest texts shortened to fit, down to a minimum."""
    widths, least = _widths(columns, rows), _widths(columns, rows, _MIN_TEXT)
    while _needed(widths) > width:
        spare = [size - low for size, low in zip(widths, least)]
        if not any(spare):
            break
        widest = max((size, place) for place, size in enumerate(widths) if spare[place])[1]
        widths[widest] -= 1
    return [[_middle_out(cell, size) for cell, size in zip(row, widths)] for row in rows]


def _middle_out(text: str, most: int) -> str:
    """A text of at most ``most`` characters, shortened in the middle; keeps layer numbers if possible."""
    if len(text) <= most:
        return text
    mark = _cell("…")
    mark = mark if len(mark) == 1 else "..."
    length = max(0, most - len(mark))
    cut = len(text) - length
    starts = range(length // 4, length - length // 4 + 1)
    start = min(starts, key=lambda at: (sum(map(str.isdigit, text[at : at + cut])), abs(at - length // 2)))
    return text[:start] + mark + text[start + cut :]


def _listed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """A table's rows below each other: the first cell on a line of its own, then the others with their heads."""
    width = terminal_width() - 4
    for first, *cells in rows:
        yield first
        yield textwrap.fill(
            ", ".join(f"{head} {text}" for head, text in zip(columns[1:], cells)),
            width,
            initial_indent="    ",
            subsequent_indent="    ",
            break_long_words=False,
        )


def _width(text: str) -> int:
    """Columns of a text: East Asian characters take two."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(character) in "WF") for character in text)


def _cell(text: str) -> str:
    """Text on one line as it is printed, so that columns align."""
    encoding = sys.stdout.encoding or "utf-8"
    return one_line(text).encode(encoding, "backslashreplace").decode(encoding)
