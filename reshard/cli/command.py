"""The base of all commands: help in groups with examples, arguments as options, advice on typing errors."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, TypeVar

import click

from reshard.errors import UsageError
from reshard.signals import unwinding
from reshard.text.near_names import near_names

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound="Callable[..., Any]")

# In the order of the work; the order of the decorators does not matter.
_GROUPS = (
    *("Options", "Strategies", "Source", "Parameters", "Names and types", "Target", "Stores", "Checks", "Effort"),
    "Output",
)
_TYPED = "reshard.typed"
_PASSED_ON = "reshard.passed_on"
_MAX_COLUMNS = 32

# Options of MindSpore and MindFormers with a counterpart here.
SPELLINGS = {
    "src-checkpoint": "src",
    "src-checkpoint-dir": "src",
    "src-checkpoints-dir": "src",
    "dst-checkpoint": "dst",
    "dst-checkpoint-dir": "dst",
    "dst-checkpoints-dir": "dst",
    "src-strategy-file": "src-strategy",
    "src-strategy-dir": "src-strategy",
    "dst-strategy-file": "dst-strategy",
    "dst-strategy-dir": "dst-strategy",
    "transform-rank": "rank",
}

# Options of their scripts, or of earlier versions, that mean something else than any option here.
_ELSEWHERE = {
    "--world-size": "Not needed: strategies contain the number of ranks.",
    "--device-num": "Not needed: strategies contain the number of ranks.",
    "--npu-num-per-node": "Not needed: which machine writes which ranks is free; see convert --shard I/N.",
    "--rank-id": (
        "The I-th of N processes takes its part of the target ranks with convert --shard I/N; "
        "by-rank RANK converts one target rank."
    ),
    "--transform-process-num": (
        "One process uses all CPUs (limit: --jobs N); "
        "several processes, on one machine or many, divide the work with convert --shard I/N."
    ),
    "--transform-by-rank": "For one target rank use the command by-rank.",
    "--process-num": "Use --jobs N for the number of CPUs.",
    "--max-process-num": "Use --jobs N for the number of CPUs.",
    "--ckpt-prefix": "It is --prefix here.",
    "--strict": "Missing weights are errors; convert --allow-missing GLOB accepts them.",
    "--output-format": "It is --format here.",
    "--accept-changed-source": "A target is made from one source: another DST, or everything again with --overwrite.",
    "--available": "For ranks that cannot be read: --without-ranks 3,7.",
    "--decrypt-key-file": "Decrypt first: reshard decrypt SRC PLAIN --key-file KEY, then this command with PLAIN.",
    "--decrypt-mode": "Decrypt first: reshard decrypt SRC PLAIN --key-file KEY finds the mode of each file.",
    "--assume": 'State it in a file for --rules: matrix = ["dp", "cp", "mp"], or the cuts in map.',
}

_DERIVE = "strategy derive reads the rules of a strategy, and makes the target's: derive SRC OUT --src-sizes dp=2,mp=4."
# Options that a command deliberately lacks.
_BESIDE = {
    **{("rules", name): _DERIVE for name in ("--sizes", "--also", "--also-sizes", "--shapes")},
    ("verify", "--strict"): "Every difference gives status 4.",
    ("check", "--strict"): "Every contradiction gives status 4.",
    ("stats", "--svg"): "The page of view SRC --stats shows magnitudes.",
    ("check", "--all"): "It compares everything: leave it out.",
    ("merge-lora", "--cast"): "Merge first, then cast: convert OUT OTHER --cast DTYPE.",
    ("merge-lora", "--names"): "Merge first, then give other names: convert OUT OTHER --names TABLE.",
    ("merge-lora", "--rename"): "Merge first, then give other names: convert OUT OTHER --rename OLD=NEW.",
}

# Commands under other names.
_OTHER_NAMES = {
    "transform": "convert",
    "merge": "merge-pipeline",
    "show": "strategy show",
    "compare": "diff",
    "dry-run": "plan",
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

    def get_help_record(self, ctx: click.Context) -> Optional[tuple[str, str]]:
        """Names and help, with a default in words as in ``[default: unchanged]``: no parentheses, and no range."""
        record = super().get_help_record(ctx)
        if record is None:
            return None
        text = re.sub(r"\[default: \((.*?)\)", r"[default: \1", record[1])
        return record[0], re.sub(r"  \[\d+<=x<=\d+\]|; \d+<=x<=\d+(?=\])", "", text)


def option(group: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an option in a group of the help."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


class Argument(click.Argument):
    """An argument that may be typed as an option of its name, too, as in MindSpore's scripts."""

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        """The value of a text."""
        return super().type_cast_value(ctx, _filled(ctx, self, value))

    @property
    def option_name(self) -> str:
        """``--src`` for SRC."""
        return f"--{self.name}"

    def as_option(self) -> click.Option:
        """The option form of the argument."""
        return GroupedOption(
            [self.option_name, str(self.name)],
            group=_GROUPS[0],
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
            strategies = [param.opts[0] for param in self.params if str(param.name).endswith("_strategy")]
            if "unexpected extra" in error.message and strategies:
                # MindSpore's functions take strategies as arguments.
                reason = f"strategies are options: {' S '.join(strategies)} S"
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
            ctx.fail(f"No such command: {name}.{_advice_on_command(_spelled(ctx, name), self.command_names(ctx))}")
        return super().resolve_command(ctx, args)

    def command_names(self, ctx: click.Context) -> list[str]:
        """Everything that may be typed as a command."""
        return self.list_commands(ctx)


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

    def command_names(self, ctx: click.Context) -> list[str]:
        """Command names and aliases."""
        return [*self._entries, *self._aliases]

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """The command of a name or alias."""
        entry = self._entries.get(self._aliases.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"reshard.cli.{entry[0]}"), entry[1])
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands without importing any, then options; aliases once something is typed."""
        # Loaded only here: a command runs without it.
        from click.shell_completion import CompletionItem

        names = self.command_names(ctx) if incomplete else self.list_commands(ctx)
        items = [
            CompletionItem(name, help=self._entries[self._aliases.get(name, name)][2])
            for name in names
            if name.startswith(incomplete)
        ]
        return [*items, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in self._entries.items()])


class Choice(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """One of a few words; an error suggests the nearest."""

    def convert(self, value: Any, param: Optional[click.Parameter], ctx: Optional[click.Context]) -> Any:
        """The word."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + nearest(str(value), map(str, self.choices)), param, ctx)


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
    return click.UsageError(
        f"No such option: {typed}.{_advice_on_option(ctx.command.name, name, options, owners)}", ctx
    )


def _commands(ctx: click.Context, command: click.Command, path: tuple[str, ...]) -> Iterable[tuple[str, click.Command]]:
    """Every command, with its words."""
    if not isinstance(command, click.Group):
        yield " ".join(path), command
        return
    for name in command.list_commands(ctx):
        subcommand = command.get_command(ctx, name)
        if subcommand is not None:
            yield from _commands(ctx, subcommand, (*path, name))


def spelling(name: str) -> str:
    """An option's or command's name as it is here: hyphens for underscores, and MindSpore's own names."""
    name = name.replace("_", "-")
    return SPELLINGS.get(name, name)


def nearest(typed: str, names: Iterable[str]) -> str:
    """`` Did you mean ...?`` with similar names, or an empty text."""
    candidates = near_names(typed, names)
    return f" Did you mean {' or '.join(candidates)}?" if candidates else ""


def _advice_on_command(typed: str, names: Iterable[str]) -> str:
    """The probable command for one that does not exist; empty without a guess."""
    return f" Did you mean {_OTHER_NAMES[typed]}?" if typed in _OTHER_NAMES else nearest(typed, names)


def _advice_on_option(command: Optional[str], typed: str, options: Sequence[str], commands: Sequence[str]) -> str:
    """The replacement of an unknown option.

    Args:
        command: the command.
        typed: the option, in this project's spelling.
        options: the command's options.
        commands: the commands that have it.
    """
    if command is not None and (command, typed) in _BESIDE:
        return f" {_BESIDE[command, typed]}"
    if typed in _ELSEWHERE:
        return f" {_ELSEWHERE[typed]}"
    owners = f" It is an option of {', '.join(commands)}." if commands else ""
    return nearest(typed, options) + owners
