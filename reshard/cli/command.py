"""The base of all commands: help in groups with examples, advice on typing errors, completion of values."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.errors import UsageError
from reshard.signals import unwinding
from reshard.text.names import near_names

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

F = TypeVar("F", bound="Callable[..., Any]")

# In the order of the work; the order of the decorators does not matter.
_GROUPS = (
    *("Strategies", "Source", "Parameters", "Names and types", "Target", "Stores", "Checks", "Effort"),
    "Output",
)
_MAX_COLUMNS = 32

# Options of MindSpore's functions that have another name here.
_SPELLINGS = {"src-strategy-file": "src-strategy", "dst-strategy-file": "dst-strategy"}

_SRC = "SRC is the first argument: reshard convert SRC DST."
_DST = "DST is the second argument: reshard convert SRC DST."
_SHARES = "convert --shard I/N writes share I of N of the target; by-rank RANK writes one target rank."
_JOBS = f"Use --jobs N for the number of CPUs. {_SHARES}"
_CAST = "Use --cast TYPE, as in --cast bf16."
_SIZES = (
    "A strategy gives the sizes of MindSpore's rank files: see reshard strategy make and reshard strategy derive. "
    "Use --shards N for PyTorch, and --sizes tp=2,pp=2 for a legacy tree of Megatron."
)
_NAMES = "Use --names TABLE --config config.json; reshard names list prints the tables."
# Options of MindSpore and MindFormers, of Megatron, verl and vLLM, and of other tools that draw.
_FOREIGN = {
    "--src-ckpt-strategy": "Use --src-strategy FILE.",
    "--dst-ckpt-strategy": "Use --dst-strategy FILE, or --dst-strategy none for whole weights.",
    **dict.fromkeys(
        ("--src-checkpoint", "--src-checkpoints-dir", "--src-ckpt-dir", "--src-ckpt", "--ckpt-dir", "--checkpoint"),
        _SRC,
    ),
    **dict.fromkeys(
        ("--load", "--load-dir", "--local-dir", "--input", "--input-path", "--input-dir", "--src", "--src-dir"), _SRC
    ),
    **dict.fromkeys(("--in", "--from"), _SRC),
    **dict.fromkeys(("--dst-checkpoint", "--dst-checkpoints-dir", "--dst-ckpt-dir", "--dst-ckpt", "--dst"), _DST),
    **dict.fromkeys(
        ("--save", "--save-dir", "--target-dir", "--out", "--output-path", "--output-dir", "--output"), _DST
    ),
    **dict.fromkeys(("--dst-safetensors-dir", "--dst-dir", "-o"), _DST),
    "--transform-rank": "RANK is the first argument of by-rank and rank-list.",
    "--rank-id": _SHARES,
    "--world-size": _SHARES,
    "--transform-process-num": _JOBS,
    "--process-num": _JOBS,
    **dict.fromkeys(("--num-workers", "--workers", "--num-processes", "--max-workers"), "Use --jobs N."),
    **dict.fromkeys(("--dtype", "--torch-dtype", "--precision"), _CAST),
    **dict.fromkeys(("--tp", "--pp", "--ep", "--dp", "--tp-size", "--pp-size", "--ep-size"), _SIZES),
    **dict.fromkeys(("--target-tp", "--target-pp", "--target-ep", "--target-tp-size", "--target-pp-size"), _SIZES),
    **dict.fromkeys(("--tensor-model-parallel-size", "--target-tensor-parallel-size"), _SIZES),
    **dict.fromkeys(("--pipeline-model-parallel-size", "--target-pipeline-parallel-size"), _SIZES),
    **dict.fromkeys(("--model", "--model-type", "--model-name", "--hf-model-path"), _NAMES),
    **dict.fromkeys(("--loader", "--backend"), "The form of SRC is recognised: leave it out."),
    "--saver": "Use --to FORM.",
    "--svg": "reshard view draws checkpoints and conversions.",
    "--html": "reshard view writes HTML: reshard view CKPT -o FILE.html.",
    "--devices": f"reshard suggest SRC --devices N prints the commands for N devices. {_SIZES}",
    **dict.fromkeys(("--no-optimizer", "--weights-only"), "Use --exclude 'adam_*' to leave out the state of Adam."),
}
# Options by another name, where the command has them.
_MEANT = {
    **dict.fromkeys(("--threads", "--parallel", "--num-threads", "--cpus"), "--jobs"),
    **dict.fromkeys(("--validate", "--check"), "--verify"),
    **dict.fromkeys(("--epoch", "--iteration", "--iter", "--ckpt-step"), "--step"),
    **dict.fromkeys(("--mem", "--memory"), "--max-memory"),
    "--force": "--overwrite",
    "--tokenizer": "--config",
}
_WHOLE = "Whole weights in one file: reshard convert SRC DST --dst-strategy none."
_CUT = "Another number of devices: reshard convert SRC DST --dst-strategy FILE, or --shards N for PyTorch."
# Commands of other tools.
_FOREIGN_COMMANDS = {
    **dict.fromkeys(("merge", "consolidate", "unshard", "gather"), _WHOLE),
    **dict.fromkeys(("split", "shard", "transform", "transform-checkpoints"), _CUT),
    "export": "For Hugging Face: reshard convert SRC DST --to huggingface.",
    "compare": "Two checkpoints: reshard diff A B.",
    **dict.fromkeys(("check", "validate"), "A conversion: reshard verify DST --src SRC."),
    **dict.fromkeys(("show", "ls", "list", "info"), "The contents of a checkpoint: reshard inspect CKPT."),
    "cat": "A tensor: reshard get CKPT NAME.",
    "help": "Use reshard --help, or reshard COMMAND --help.",
}


class GroupedOption(click.Option):
    """An option in one of the help groups above."""

    def __init__(self, *names: Any, group: str, **attributes: Any) -> None:
        super().__init__(*names, **attributes)
        self.group = group


def option(group: str, *names: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an option in a group of the help."""
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


def argument(name: str, **attributes: Any) -> Callable[[F], F]:
    """Decorator: an argument; one without a type is a path, which shells complete."""
    if "type" not in attributes:
        attributes.setdefault("shell_complete", paths)
    return click.argument(name, **attributes)


def _refuse_empty(ctx: click.Context, name: str) -> None:
    if not ctx.resilient_parsing:
        raise UsageError(f"{name} is empty", hint="is a variable of the shell unset?")


class Command(click.Command):
    """A command; its epilog is its examples, one or more lines each."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, with advice on foreign options; refuse empty values, which come from unset variables of a shell."""
        for place, word in enumerate(args):
            if not word or re.fullmatch(r"--[\w-]+=", word):
                name = word.rstrip("=") or (args[place - 1] if place else "")
                if name.startswith("-"):
                    _refuse_empty(ctx, name.replace("_", "-"))
        # Extra arguments are refused below, with advice.
        ctx.allow_extra_args = True
        try:
            remaining = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            typed = error.option_name
            # Without dashes, which make any two options similar.
            options = {name: param for param in self.get_params(ctx) for name in param.opts if name[:2] == "--"}
            words = {name.lstrip("-"): name for name in options}
            near = [words[name] for name in near_names(typed.lstrip("-"), words)]
            advice = f" Did you mean {' or '.join(near)}?" if near else ""
            advice = f" {_FOREIGN[typed]}" if typed in _FOREIGN else advice
            if typed in _MEANT:
                meant = options.get(_MEANT[typed])
                advice = "" if meant is None else f" Use {_MEANT[typed]} {meant.metavar or ''}".rstrip() + "."
            raise click.UsageError(f"No such option: {typed}.{advice}", ctx) from error
        if remaining and not ctx.resilient_parsing:
            ctx.fail(f"Got unexpected extra arguments: {' '.join(remaining)}.{self._on_extra(ctx, remaining)}")
        for param in self.params:
            if isinstance(param, click.Argument) and param.name is not None and ctx.params.get(param.name) == "":
                _refuse_empty(ctx, param.human_readable_name)
        return remaining

    def _on_extra(self, ctx: click.Context, words: list[str]) -> str:
        """What to type in place of arguments that the command does not take."""
        if re.fullmatch(r"[a-z_]+=\w+", words[0]):
            table = ctx.params.get("names")
            joined = f": --names {','.join([table, *words])}" if table else ""
            return f" Join the parts of a value with commas{joined}."
        names = {param.name for param in self.params}
        if words[-1].lower().endswith((".html", ".htm")):
            return f" To name the page: -o {words[-1]}."
        if any("--src" in param.opts for param in self.params):
            return f" The source is an option: --src {words[0]}."
        return " Strategies are options: --src-strategy A --dst-strategy B." if "dst_strategy" in names else ""

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
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = spelling(args[0])
        if self.get_command(ctx, name) is None and not name.startswith("-") and not ctx.resilient_parsing:
            foreign = _FOREIGN_COMMANDS.get(name) if ctx.parent is None else None
            advice = nearest(name, self.names()) if foreign is None else f" {foreign}"
            ctx.fail(f"No such command: {args[0]}.{advice}")
        return super().resolve_command(ctx, args)

    def names(self) -> list[str]:
        return [*self.commands]


class LazyGroup(Group):
    """A group that imports a command's module on first use.

    Args:
        sections: per section of the help and command its module, attribute and one line of help.
        aliases: other names of commands.
    """

    def __init__(
        self,
        *arguments: Any,
        sections: Mapping[str, Mapping[str, tuple[str, str, str]]],
        aliases: Mapping[str, str] | None = None,
        **attributes: Any,
    ) -> None:
        super().__init__(*arguments, **attributes)
        self._sections = sections
        self._entries = {name: entry for entries in sections.values() for name, entry in entries.items()}
        self._aliases = aliases or {}

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._entries)

    def names(self) -> list[str]:
        return [*self._entries, *self._aliases]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = self._entries.get(self._aliases.get(cmd_name, cmd_name))
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(f"reshard.cli.{entry[0]}"), entry[1])
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands by section without importing any."""
        width = max(map(len, self._entries))
        for section, entries in self._sections.items():
            with formatter.section(section):
                formatter.write_dl([(name.ljust(width), text) for name, (_, _, text) in entries.items()])


class Parsed(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    """Values that a function reads from their text; the message of its error becomes that of a usage error.

    Args:
        name: noun of the values, for click.
        parse: the function; raises `ValueError` or `UsageError`.
    """

    def __init__(self, name: str, parse: Callable[[str], object]) -> None:
        self.name = name
        self._parse = parse

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
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


def paths(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    # Loaded only here: a command runs without it.
    from click.shell_completion import CompletionItem

    return [CompletionItem(typed, type="file")]


def tables(ctx: click.Context, param: click.Parameter, typed: str) -> list[CompletionItem]:
    """Built-in tables of names; files where none fits: click's script for bash shows one or the other."""
    from click.shell_completion import CompletionItem

    from reshard.names.tables import builtin_names

    names = [CompletionItem(name) for name in builtin_names() if name.startswith(typed)]
    return names or paths(ctx, param, typed)


def types(_: click.Context, __: click.Parameter, typed: str) -> list[CompletionItem]:
    from click.shell_completion import CompletionItem

    from reshard.checkpoints.formats.dtypes import CAST_TO

    return [CompletionItem(name) for name in CAST_TO if name.lower().startswith(typed.lower())]
