"""Tables for people: names shortened to the width of the terminal, numbers aligned on the right."""

from __future__ import annotations

import itertools
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Optional
from unicodedata import east_asian_width

import click

from reshard.cli.output import alarming, is_verbose, on_terminal, say, terminal_width
from reshard.text.messages import one_line, plural, printable

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

    On a terminal that is too narrow, texts are shortened, and different ones stay different. Where that is impossible,
    with -v, and where the output goes elsewhere, every row becomes several lines instead, and names can be copied.

    Args:
        title: its headline; none if empty.
        columns: the heads.
        rows: a text for each column.
        spare: columns to leave out on a narrow terminal, in this order.
        alarming_rows: numbers of rows printed in red.
    """
    width = terminal_width() if on_terminal() else _MAX_WIDTH
    in_full = is_verbose() or not on_terminal()
    every_cell = [[_cell(text) for text in row] for row in rows]
    for hidden in range(1 if in_full else len(spare) + 1):
        places = [place for place, head in enumerate(columns) if head not in spare[:hidden]]
        heads, cells = [columns[place] for place in places], [[row[place] for place in places] for row in every_cell]
        shown: Optional[list[list[str]]] = None
        if _needed(_widths(heads, cells)) <= width:
            shown = cells
        elif not in_full and (hidden == len(spare) or _needed(_widths(heads, cells, _FAIR_TEXT)) <= width):
            shown = _shortened(heads, cells, width)
        if shown is not None:
            _draw(title, heads, shown, alarming_rows)
            if hidden:
                click.echo(f"not shown on this terminal: {', '.join(spare[:hidden])}; -v shows all")
            return
    click.echo("\n".join([*([title] if title else []), *_listed(columns, every_cell)]))


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


def _shortened(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Optional[list[list[str]]]:
    """Rows with the widest texts shortened to fit, down to a minimum; None if different texts would become equal."""
    widths, least = _widths(columns, rows), _widths(columns, rows, _MIN_TEXT)
    while _needed(widths) > width:
        spare = [size - low for size, low in zip(widths, least)]
        if not any(spare):
            break
        widest = max((size, place) for place, size in enumerate(widths) if spare[place])[1]
        widths[widest] -= 1
    shortened = [_fitting(column, size) for column, size in zip(zip(*rows), widths)]
    return None if any(texts is None for texts in shortened) else [*map(list, zip(*filter(None, shortened)))]


def _fitting(texts: Sequence[str], most: int) -> Optional[list[str]]:
    """Texts of at most ``most`` characters, different where these are; None if no way to shorten them keeps that."""
    long = [text for text in dict.fromkeys(texts) if len(text) > most]
    mark = _cell("…")
    mark = mark if len(mark) == 1 else "..."
    for shortened in itertools.chain([_without_common(long, most, mark)], _cut_alike(long, most, mark)):
        shown = [shortened.get(text, text) for text in texts]
        if len({*shown}) == len({*texts}) and max(map(len, shown)) <= most:
            return shown
    return None


def _without_common(texts: Sequence[str], most: int, mark: str) -> dict[str, str]:
    """Texts without parts between dots: first those that most texts share, the middle ones of these; numbers last."""
    parts = {text: re.findall(r"[^./]+[./]?|[./]", text) for text in texts}
    counts = Counter(part for each in parts.values() for part in {*each})
    shortened = {}
    for text, each in parts.items():
        shown, short = [*each], text
        middle = len(each) // 2
        for place in sorted(
            range(len(each)), key=lambda at: (not any(map(str.isalpha, each[at])), -counts[each[at]], abs(at - middle))
        ):
            if len(short) <= most:
                break
            shown[place] = mark
            short = "".join(part for at, part in enumerate(shown) if part != mark or shown[at - 1 : at] != [mark])
        shortened[text] = short
    return shortened


def _cut_alike(texts: Sequence[str], most: int, mark: str) -> Iterator[dict[str, str]]:
    """Texts without some characters, each time from another place on, the middle first; no number is cut."""
    length = max(0, most - len(mark))
    # As many characters of all remain before the place: `a.1…` and `a.1.b…` would differ only in the place.
    for start in sorted(range(length), key=lambda at: abs(at - length // 2)):
        ends = {text: len(text) - length + start for text in texts}
        if not any(text[at - 1 : at + 1].isdigit() for text, end in ends.items() for at in (start, end) if at):
            yield {text: text[:start] + mark + text[end:] for text, end in ends.items()}


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
