"""docs/commands.md: the help of every command, as the program prints it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from reshard.cli.main import cli

PAGE = Path(__file__).parents[1] / "commands.md"
WIDTH = 100

_BEGINNING = """\
# Command reference

<!-- Made by `make docs` from the program itself; a test compares the two. -->

What `--help` prints, for every command. The rules behind the options: [rules.md](rules.md). The output of
`--json`: [json.md](json.md). Exit statuses: [troubleshooting.md](troubleshooting.md#exit-statuses).

Commands and options may be typed with `_` for `-`.
`transform-dir` and `transform-all` are `convert`, `transform-by-rank` is `by-rank`.
"""


def walk() -> Iterator[tuple[str, click.Command, click.Context]]:
    """Every command below `reshard` that is no group: its name as typed, itself, and the context of its help."""
    yield from _below(cli, _root())


def _below(group: click.Group, context: click.Context) -> Iterator[tuple[str, click.Command, click.Context]]:
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None, name
        inner = click.Context(command, parent=context, info_name=name)
        if isinstance(command, click.Group):
            yield from _below(command, inner)
        else:
            yield inner.command_path, command, inner


def reference() -> str:
    """The whole page."""
    root = _root()
    entries = [("reshard", cli.get_help(root)), *((name, command.get_help(inner)) for name, command, inner in walk())]
    return "\n".join([_BEGINNING, *(f"## {name}\n\n```text\n{text}\n```\n" for name, text in entries)])


def _root() -> click.Context:
    return click.Context(cli, info_name="reshard", terminal_width=WIDTH, **cli.context_settings)
