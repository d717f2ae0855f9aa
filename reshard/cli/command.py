"""The base of all commands: help in groups with examples, and advice on typing errors."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Optional, TypeVar

import click

from reshard.errors import UsageError
from reshard.signals import unwinding
from reshard.text.names import near_names

F = TypeVar("F", bound="Callable[..., Any]")

# In the order of the work; the order of the decorators does not matter.
_GROUPS = (
    *("Strategies", "Source", "Parameters", "Names and types", "Target", "Stores", "Checks", "Effort"),
    "Output",
)
_MAX_COLUMNS = 32

# Options of MindSpore's functions that have another name here.
_SPELLINGS = {"src-strategy-file": "src-strategy", "dst-strategy-file": "dst-strategy"}

_ARGUMENTS = "SRC and DST are arguments: reshard convert SRC DST."
_RANKS_OF_STRATEGIES = "Not needed: strategies contain the number of ranks."
_SHARES = "convert --shard I/N writes share I of N of the target; by-rank RANK writes one target rank."
_JOBS = "Use --jobs N for the number of CPUs."
_DECRYPT = "Decrypt first: reshard decrypt SRC PLAIN --key-file KEY, then this command with PLAIN."
# Options of MindSpore and MindFormers, or of earlier versions.
_ELSEWHERE = {
    "--src-checkpoint": _ARGUMENTS,
    "--src-checkpoints-dir": _ARGUMENTS,
    "--dst-checkpoint": _ARGUMENTS,
    "--dst-checkpoints-dir": _ARGUMENTS,
    "--transform-rank": "RANK is the first argument of by-rank and rank-list.",
    "--world-size": _RANKS_OF_STRATEGIES,
    "--device-num": _RANKS_OF_STRATEGIES,
    "--rank-id": _SHARES,
    "--transform-process-num": f"{_JOBS} {_SHARES}",
    "--process-num": _JOBS,
    "--max-process-num": _JOBS,
    "--ckpt-prefix": "It is --prefix here.",
    "--strict": "Differences and missing weights are errors; convert --allow-missing GLOB accepts missing ones.",
    "--output-format": "It is --format here.",
    "--accept-changed-source": "A target is made from one source: another DST, or everything again with --overwrite.",
    "--available": "For ranks that cannot be read: --without-ranks 3,7.",
    "--all": "strategy check compares everything: leave it out.",
    "--decrypt-key-file": _DECRYPT,
    "--decrypt-mode": _DECRYPT,
    "--src": "SRC is an argument. rank-list reads strategies alone: reshard plan SRC DST lists the sources of each target.",
    "--merge": "A machine proves its own ranks: verify OUT --src SRC --ranks 0-3.",
    "--assume": 'State it in a file for --rules: matrix = ["dp", "cp", "mp"], or the cuts in map.',
}

# Commands under other names.
_OTHER_NAMES = {
    "transform": "convert",
    "merge": "merge-pipeline",
    "show": "strategy show",
    "compare": "diff",
    "dry-run": "plan",
    "help": "reshard COMMAND --help",
}


def _filled(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """A typed value, or several; an empty one comes from an unset variable of a shell, and is an error."""
    if "" in (value if isinstance(value, (tuple, list)) else (value,)) and not ctx.resilient_parsing:
        name = param.opts[0] if isinstance(param, click.Option) else str(param.name).upper()
        raise UsageError(f"{name} is empty", hint="is a variable of the shell unset?")
    return value


class GroupedOption(click.Option):
    """An option in one of the help groups above."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value of a text."""
        return super().type_cast_value(ctx, _filled(ctx, self, value))


def option(group: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an option in a group of the help."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


class Argument(click.Argument):
    """An argument that is not empty."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value of a text."""
        return super().type_cast_value(ctx, _filled(ctx, self, value))


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an argument that is not empty."""
    return click.argument(name, cls=Argument, **attributes)


class Command(click.Command):
    """A command; its epilog is its examples, one or more lines each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with advice on options of other tools."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in _ELSEWHERE:
                raise
            advice = _ELSEWHERE[error.option_name]
            raise click.UsageError(f"No such option: {error.option_name}. {advice}", ctx) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Do the work, which ends in good order when a signal comes."""
        with unwinding():
            return super().invoke(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, all in the same two columns."""
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in _GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                groups[param.group if isinstance(param, GroupedOption) else _GROUPS[-1]].append(record)
        width = min(_MAX_COLUMNS, max(len(names) for rows in groups.values() for names, _ in rows))
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl([(names.ljust(width), text) for names, text in rows], _MAX_COLUMNS)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples unwrapped, for copying."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip("\n").split("\n"):
                    formatter.write(f"{' ' * formatter.current_indent if line else ''}{line}\n")


def command(name: str, examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Decorator: a command and the examples of its help, one or more lines each."""
    return click.command(name, cls=Command, epilog=examples)


class Group(click.Group):
    """A group of these commands, with advice on typing errors."""

    command_class = Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[Optional[str], Optional[click.Command], list[str]]:
        """Find the command, or suggest similar ones."""
        name = spelling(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            near = f" Did you mean {_OTHER_NAMES[name]}?" if name in _OTHER_NAMES else nearest(name, self.names())
            ctx.fail(f"No such command: {args[0]}.{near}")
        return super().resolve_command(ctx, args)

    def names(self) -> list[str]:
        """Everything that may be typed as a command."""
        return [*self.commands]


class LazyGroup(Group):
    """A group that imports a command's module on first use.

    Args:
        entries: module, attribute and one line of help of each command, in the order of the help.
        aliases: other names of commands.
    """

    def __init__(
        self,
        *arguments: Any,
        entries: Mapping[str, tuple[str, str, str]],
        aliases: Optional[Mapping[str, str]] = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self._entries = entries
        self._aliases = aliases or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Command names in the order of the work, aliases left out."""
        return list(self._entries)

    def names(self) -> list[str]:
        """Command names and aliases."""
        return [*self._entries, *self._aliases]

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """The command of a name or alias."""
        entry = self._entries.get(self._aliases.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"reshard.cli.{entry[0]}"), entry[1])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self._entries.items()])


class Parsed(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Values that a function reads from their text; the message of its error becomes that of a usage error.

    Args:
        name: noun of the values, for click.
        parse: the function; raises `ValueError` or `UsageError`.
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The value of a text; others are values already."""
        try:
            return self._parse(value) if isinstance(value, str) else value
        except UsageError as error:
            self.fail(error.message, param, ctx)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def spelling(name: str) -> str:
    """An option's or command's name as it is here."""
    name = name.replace("_", "-")
    return _SPELLINGS.get(name, name)


def nearest(typed: str, names: Iterable[str]) -> str:
    """`` Did you mean ...?`` with similar names, or an empty text."""
    candidates = near_names(typed, names)
    return f" Did you mean {' or '.join(candidates)}?" if candidates else ""
