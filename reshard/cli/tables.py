"""Tables for people: names shortened to the width of the terminal, numbers aligned on the right."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Collection, Iterable, Sequence

import click

from reshard.cli.output import alarming, is_verbose, on_terminal, terminal_width
from reshard.text.wording import one_line

# Rich draws so many rows in well below a second.
_MAX_DRAWN = 1000
# Columns without a terminal; MindSpore's longest names have about 120 characters.
_MAX_WIDTH = 400
# Texts are shortened to so much before a column is left out, and to so little where that is not enough.
_FAIR_TEXT = 32
_MIN_TEXT = 12
_GAP = 2
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
        spare: columns to leave out on a narrow terminal, the first one first.
        alarming_rows: numbers of the rows that are coloured.
    """
    width = terminal_width() if on_terminal() else _MAX_WIDTH
    whole = is_verbose() or not on_terminal()
    cells = [[_cell(text) for text in row] for row in rows]
    heads = list(columns)
    left_out: list[str] = []
    while _needed(_widths(heads, cells, _FAIR_TEXT)) > width and len(left_out) < len(spare) and not whole:
        left_out.append(spare[len(left_out)])
        place = heads.index(left_out[-1])
        heads.pop(place)
        cells = [[*row[:place], *row[place + 1 :]] for row in cells]
    if _needed(_widths(heads, cells)) > width:
        if whole:
            click.echo("\n".join([*([title] if title else []), *_listed(heads, cells)]))
            return
        cells = _shortened(heads, cells, width)
    _draw(title, heads, cells, alarming_rows)
    if left_out:
        click.echo(f"not shown on this terminal: {', '.join(left_out)}; -v shows all")


def _padded(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table whose columns are as wide as their widest cells, heads included."""
    numbers = _numeric(columns, rows)
    widths = _widths(columns, rows)
    return [
        (" " * _GAP)
        .join(f"{cell:>{width}}" if number else f"{cell:{width}}" for cell, width, number in zip(line, widths, numbers))
        .rstrip()
        for line in (columns, *rows)
    ]


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], coloured: Collection[int]) -> None:
    lines = _padded(columns, rows)
    # A blank line replaces a title, and follows every table.
    click.echo(title)
    if len(rows) > _MAX_DRAWN:
        head, *body = lines
        painted = (alarming(line) if number in coloured else line for number, line in enumerate(body))
        click.echo("\n".join([head, *painted, ""]))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    for column, number in zip(columns, _numeric(columns, rows)):
        shown.add_column(Text(column), justify="right" if number else "left", no_wrap=True)
    for place, row in enumerate(rows):
        shown.add_row(*map(Text, row), style="red" if place in coloured else None)
    console = Console(width=max(map(len, lines)) + 1, highlight=False)
    # Through click, because rich ends the process with status 1 when a reader like `head` has enough.
    with console.capture() as printed:
        console.print(shown)
    click.echo("\n".join([*(line.rstrip() for line in printed.get().splitlines()), ""]))


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[bool]:
    """Which columns hold nothing but numbers and sizes."""
    return [all(_NUMBER.fullmatch(row[place]) for row in rows) for place in range(len(columns))]


def _widths(columns: Sequence[str], rows: Sequence[Sequence[str]], text: int = sys.maxsize) -> list[int]:
    """The width of every column where texts are shortened to ``text``."""
    widths = [max(map(len, column)) for column in zip(columns, *rows)]
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
    kept = max(0, most - len(mark))
    gone = len(text) - kept
    starts = range(kept // 4, kept - kept // 4 + 1)
    start = min(starts, key=lambda at: (sum(map(str.isdigit, text[at : at + gone])), abs(at - kept // 2)))
    return text[:start] + mark + text[start + gone :]


def _listed(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """A table's rows below each other: the first cell on a line of its own, then the others with their heads."""
    width = terminal_width() - 4
    for first, *others in rows:
        yield first
        cells = (f"{head} {text}" for head, text in zip(columns[1:], others))
        yield textwrap.fill(
            ", ".join(cells), width, initial_indent="    ", subsequent_indent="    ", break_long_words=False
        )


def _cell(text: str) -> str:
    """Text on one line as it will be seen, for columns that are aligned."""
    encoding = sys.stdout.encoding or "utf-8"
    return one_line(text).encode(encoding, "backslashreplace").decode(encoding)
