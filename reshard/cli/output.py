"""Output for people and scripts: messages, JSON, files; flags that all commands share; the status of a difference."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import click

from reshard.text.messages import byte_size, full_text, printable

if TYPE_CHECKING:
    from reshard.text.names import Total

DIFFERENT = 4
"""The exit status of a difference."""


def echo_json(value: object) -> None:
    """Print JSON to standard output, in ASCII, which every terminal and locale can show.

    A path that is not UTF-8 is escaped: Python's ``os.fsencode`` restores its bytes.
    """
    # Loaded only here: few runs print JSON.
    import json

    click.echo(json.dumps(plain(value)))


def plain(value: Any) -> Any:
    """A value of JSON's types: records as objects, sets ascending, texts in full.

    Numbers that JSON lacks become texts such as ``"NaN"``, complex ones their two parts, and bytes hexadecimal.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    if isinstance(value, str):
        return full_text(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, complex):
        value = value.real, value.imag
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    elif is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple, range)):
        return list(map(plain, value))
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return value


def totals_words(totals: Mapping[str, Total]) -> str:
    """``weights 68 (332.6 KiB), optimizer state 136 (665.2 KiB)``."""
    return ", ".join(f"{key} {total.tensors} ({byte_size(total.bytes)})" for key, total in totals.items())


def listener() -> Callable[[str, str], None]:
    """Shows warnings always and notes unless -q was given, on standard error; -v names every parameter in them."""
    # Read here: other threads have no click context.
    quiet, verbose = is_quiet(), is_verbose()

    def show(kind: str, text: str) -> None:
        text = printable(full_text(text) if verbose else text)
        if kind == "warning":
            _echo_aside(_styled(f"warning: {text}", "yellow"))
        elif not quiet:
            _echo_aside(f"note: {text}")

    return show


def _remembered(name: str) -> Callable[[click.Context, click.Parameter, bool | None], None]:
    """Callback of a flag whose value all modules can read from the root context."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool | None) -> None:
        # A command that runs another one, such as resume, passes its flags on.
        if value or (name == "progress" and value is not None):
            ctx.find_root().meta[f"reshard.{name}"] = value

    return remember


set_debug, set_json, set_progress, set_quiet, set_verbose = map(
    _remembered, ("debug", "json", "progress", "quiet", "verbose")
)


def is_verbose() -> bool:
    """Whether -v was given: everything is named, and nothing shortened."""
    return bool(_flag("verbose"))


def is_quiet() -> bool:
    """Whether -q was given: only results, warnings and errors are shown."""
    return bool(_flag("quiet"))


def is_json() -> bool:
    """Whether --json was given: standard output is one JSON document."""
    return bool(_flag("json"))


def progress_requested() -> bool | None:
    """The value of --progress or --no-progress; None without either."""
    return _flag("progress")


def _flag(name: str) -> bool | None:
    context = click.get_current_context(silent=True)
    return None if context is None else context.find_root().meta.get(f"reshard.{name}")


def set_next_command(text: str) -> None:
    """Errors of this run that a retry may cure end with this line."""
    click.get_current_context().find_root().meta["reshard.next_command"] = text


def exit_different() -> NoReturn:
    """End with the status of a comparison that has found a difference, or of a check that has failed."""
    click.get_current_context().exit(DIFFERENT)


def shown_text(text: str) -> str:
    """A text as shown: with every name if -v was given."""
    return full_text(text) if is_verbose() else text


def show_notes(notes: Iterable[str]) -> None:
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


def on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()
