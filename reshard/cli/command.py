"""The base of all commands: help in groups with examples, arguments as options, advice on typing errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any, Optional, TypeVar

import click

from reshard.cli import advice
from reshard.signals import unwinding

F = TypeVar("F", bound="Callable[..., Any]")

# The order of the work, whatever the order of the decorators.
_GROUPS = (
    *("Options", "Strategies", "Source", "Parameters", "Names and types", "Target", "Stores", "Checks", "Effort"),
    "Output",
)
_TYPED = "reshard.typed"
_PASSED_ON = "reshard.passed_on"
_MOST_COLUMNS = 32


class GroupedOption(click.Option):
    """An option in one of the help groups above."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group

    def get_help_record(self, ctx: click.Context) -> Optional[tuple[str, str]]:
        """Names and help, with a default in words as in ``[default: unchanged]``, which click puts in parentheses."""
        record = super().get_help_record(ctx)
        return None if record is None else (record[0], re.sub(r"\[default: \((.*?)\)", r"[default: \1", record[1]))


def option(group: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an option in a group of the help."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


class Argument(click.Argument):
    """An argument that may be typed as an option of its name, too, as in MindSpore's scripts."""

    @property
    def option_name(self) -> str:
        """``--src`` for SRC."""
        return f"--{self.name}"

    def as_option(self) -> click.Option:
        """The option form of the argument."""
        return click.Option(
            [self.option_name, str(self.name)],
            required=self.required,
            type=self.type,
            shell_complete=lambda ctx, param, incomplete: self.shell_complete(ctx, incomplete),
        )


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an argument that may be typed as an option."""
    return click.argument(name, cls=Argument, **attributes)


class Command(click.Command):
    """A command; its epilog is its examples, one or more lines each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with advice on options that do not exist and arguments given twice."""
        ctx.meta[_TYPED] = {_spelled(ctx, word) for word in args[: args.index("--") if "--" in args else None]}
        if ctx.resilient_parsing and args and self._takes_value(_spelled(ctx, args[-1])):
            # Shell completion needs a value here, or it parses nothing before.
            args = args[:-1]
        flags = {name for param in self.params for name in param.opts}
        args = [*flags.intersection(ctx.meta.get(_PASSED_ON, ())), *args]
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown_option(ctx, error, typed) from error
        except click.UsageError as error:
            by_option = [param for param in self.params if isinstance(param, Argument) and _is_typed(ctx, param)]
            if by_option and type(error) is click.UsageError:
                names = " and ".join(str(param.name).upper() for param in by_option)
                reason = f"{names} {'is' if len(by_option) == 1 else 'are'} given by option"
                raise click.UsageError(f"{error.message.rstrip('.')}: {reason}", ctx) from error
            raise

    def invoke(self, ctx: click.Context) -> Any:
        """Do the work, which ends in good order when a signal comes."""
        with unwinding():
            return super().invoke(ctx)

    def _takes_value(self, word: str) -> bool:
        return any(word in param.opts for param in self.params if isinstance(param, click.Option) and not param.is_flag)

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters, with the options that were typed in place of arguments."""
        return [
            param.as_option() if isinstance(param, Argument) and _is_typed(ctx, param) else param
            for param in super().get_params(ctx)
        ]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options by group, all in the same two columns."""
        groups: dict[str, list[tuple[str, str]]] = {group: [] for group in _GROUPS}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                last = _GROUPS[-1 if "--help" in param.opts else 0]
                groups[param.group if isinstance(param, GroupedOption) else last].append(record)
        width = min(_MOST_COLUMNS, max(len(names) for rows in groups.values() for names, _ in rows))
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl([(names.ljust(width), text) for names, text in rows], _MOST_COLUMNS)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples unwrapped, for copying."""
        if self.epilog:
            with formatter.section("Examples"):
                for line in self.epilog.strip("\n").split("\n"):
                    formatter.write(f"{' ' * formatter.current_indent if line else ''}{line}\n")


def passed_on(ctx: click.Context, param: click.Parameter, value: bool) -> bool:
    """Callback of a flag before the command, which passes it on to the command."""
    if value:
        ctx.meta.setdefault(_PASSED_ON, []).append(param.opts[-1])
    return value


def command(name: str, examples: str) -> Callable[[Callable[..., Any]], Command]:
    """Decorator: a command and the examples of its help, one or more lines each."""
    return click.command(name, cls=Command, epilog=examples)


class Group(click.Group):
    """A group of these commands, with advice on typing errors."""

    command_class = Command

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with advice on options that do not exist."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise _unknown_option(ctx, error, typed) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[Optional[str], Optional[click.Command], list[str]]:
        """Find the command, or suggest similar ones."""
        name = args[0]
        exists = any(self.get_command(ctx, spelled) for spelled in (name, _spelled(ctx, name)))
        if not exists and not name.startswith("-") and not ctx.resilient_parsing:
            ctx.fail(f"No such command: {name}.{advice.on_command(_spelled(ctx, name), self.command_names(ctx))}")
        return super().resolve_command(ctx, args)

    def command_names(self, ctx: click.Context) -> list[str]:
        """Everything that may be typed as a command."""
        return self.list_commands(ctx)


class Choice(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """One of a few words; an error suggests the nearest."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + advice.nearest(str(value), map(str, self.choices)), param, ctx)


def _is_typed(ctx: click.Context, argument: Argument) -> bool:
    return argument.option_name in ctx.meta.get(_TYPED, ())


def _spelled(ctx: click.Context, word: str) -> str:
    """A word of the command line without its value, in this project's spelling."""
    name = word.partition("=")[0]
    bare = name.lstrip("-")
    return name[: len(name) - len(bare)] + (ctx.token_normalize_func(bare) if ctx.token_normalize_func else bare)


def _unknown_option(ctx: click.Context, error: click.NoSuchOption, args: Iterable[str]) -> click.UsageError:
    """The error with advice, and with the option as it was typed."""
    name = error.option_name
    typed = next((word.partition("=")[0] for word in args if _spelled(ctx, word) == name), name)
    owners: list[str] = []
    root = ctx.find_root()
    for path, command in _commands(root, root.command, ()):
        if command is not ctx.command and any(name in param.opts for param in command.params):
            owners.append(path)
    options = [opt for param in ctx.command.get_params(ctx) if isinstance(param, click.Option) for opt in param.opts]
    return click.UsageError(f"No such option: {typed}.{advice.on_option(ctx.command.name, name, options, owners)}", ctx)


def _commands(ctx: click.Context, command: click.Command, path: tuple[str, ...]) -> Iterable[tuple[str, click.Command]]:
    """Every command, with its words."""
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    for name in command.list_commands(ctx):
        subcommand = command.get_command(ctx, name)
        if subcommand is not None:
            yield from _commands(ctx, subcommand, (*path, name))
