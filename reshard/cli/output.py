"""Output for people and scripts: progress, messages, JSON."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Callable

import click

from reshard.text.messages import byte_size, full_text, printable

if TYPE_CHECKING:
    from reshard.text.names import Total


def echo_json(value: object) -> None:
    """Print JSON to standard output; valid UTF-8 in any terminal encoding.

    A path that is not UTF-8 is escaped in JSON: Python's ``os.fsencode`` restores its bytes. So
    are characters that a terminal would take for commands.
    """
    # Loaded only here: few runs print JSON.
    import json

    text = json.dumps(value, ensure_ascii=False)
    if not text.isprintable():
        text = "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
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


def listener(notes: bool = True) -> Callable[[str, str], None]:
    """Shows warnings always and notes unless -q was given, on standard error; -v names every parameter in them.

    Args:
        notes: show notes without -v.
    """
    # Read here: other threads have no click context.
    quiet, verbose = is_quiet(), is_verbose()
    silent = quiet or not (notes or verbose)

    def show(kind: str, text: str) -> None:
        text = printable(full_text(text) if verbose else text)
        if kind == "warning":
            _echo_aside(_styled(f"warning: {text}", "yellow"))
        elif not silent:
            _echo_aside(f"note: {text}")

    return show


def is_verbose() -> bool:
    """Whether -v was given: everything is named, and nothing shortened."""
    return _is_set("reshard.verbose")


def is_quiet() -> bool:
    """Whether -q was given: only results, warnings and errors are shown."""
    return _is_set("reshard.quiet")


def _is_set(name: str) -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.find_root().meta.get(name))


def show_notes(notes: Iterable[str]) -> None:
    """Show notes on standard error, unless -q was given."""
    show = listener()
    for note in notes:
        show("note", note)


def say(text: str, to_standard_error: bool = False) -> None:
    """Print lines for people; unprintable characters of names are escaped."""
    click.echo(printable(text), err=to_standard_error)


def _echo_aside(line: str) -> None:
    """Print a line to standard error, above a progress bar."""
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


def fill(line: str, width: int, indent: str) -> list[str]:
    """A line in lines of at most ``width`` columns; words such as paths are not divided."""
    import textwrap

    return textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def terminal_width() -> int:
    """Width in columns: the terminal's, or a large one for files and pipes."""
    if not on_terminal():
        return 160
    from shutil import get_terminal_size

    return get_terminal_size().columns


def write_file(path: str, content: bytes, verb: str) -> None:
    """Write a file atomically, with its directory; reports it unless -q was given.

    Args:
        path: the file.
        content: all of it.
        verb: for the note, such as ``wrote``.

    Raises:
        ReshardError: it cannot be written.
    """
    from reshard.storage import write_parts, writing_error

    try:
        write_parts(path, len(content), [content])
    except OSError as error:
        raise writing_error(path, error) from error
    listener()("note", f"{verb} {path}")


def write_picture(path: str, picture: bytes) -> None:
    """Write an SVG file as `write_file` does.

    Raises:
        ReshardError: it cannot be written.
    """
    write_file(path, picture, "drew")


def on_terminal() -> bool:
    """Whether standard output is one."""
    return sys.stdout is not None and sys.stdout.isatty()
