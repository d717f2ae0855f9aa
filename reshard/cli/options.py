"""Options: those of the groups in `reshard.asked`, and others that several commands share."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, TypeVar

import click

from reshard.asked import (
    FLAG,
    FORM,
    FORMAT,
    NUMBER,
    SHARE,
    TEXTS,
    Conversion,
    Edits,
    Effort,
    Group,
    Option,
    Source,
    Target,
    fields_of,
)
from reshard.cli.command import Parsed, option, paths, tables, types
from reshard.cli.output import set_debug, set_json, set_progress, set_quiet, set_verbose
from reshard.errors import UsageError
from reshard.forms import SHORT_NAMES
from reshard.storage import is_directory, use_endpoint

if TYPE_CHECKING:
    from reshard.cli.shard import Share

F = TypeVar("F", bound=Callable[..., Any])


def _parse_rank(text: str) -> int:
    """A rank; no step such as ``1_0``, which Python reads as 10."""
    if not re.fullmatch(r"\s*\+?\d{1,9}\s*", text, re.ASCII):
        raise ValueError(f"{text!r} is not a rank such as 12; for several ranks: convert --ranks 0-7")
    return int(text)


RANK = Parsed("rank", _parse_rank)


class FormOrFormat(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """A form of checkpoint, or a format of files; ``hf`` is Hugging Face's form."""

    def __init__(self, choices: Collection[str]) -> None:
        super().__init__(())
        # A view, for forms that are registered later.
        self.choices = choices  # type: ignore[assignment, unused-ignore]

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The form or the format; what another option takes is an error that names the option."""
        name = SHORT_NAMES.get(value, value)
        if name not in self.choices:
            # Loaded only here: help does without.
            from reshard.forms.other_words import advice_on

            advice = advice_on(str(value))
            if advice is not None:
                self.fail(advice, param, ctx)
        return super().convert(name, param, ctx)


def _parse_share(text: str) -> Share:
    # Loaded only here: most runs do all the work.
    from reshard.cli.shard import parse_share

    return parse_share(text)


def _set_endpoint(_: click.Context, __: click.Parameter, value: str | None) -> None:
    if value is not None and not re.match("https?://[^/]", value):
        raise UsageError("--endpoint-url: is no URL", hint="name the service as in --endpoint-url https://host:port")
    if value is not None:
        use_endpoint(value)


def path_to_write(
    name: str, *endings: str, standard_output: bool = False
) -> Callable[[click.Context, click.Parameter, str | None], str | None]:
    """Callback of an option that names a file to write: a name typed by mistake may be that of a checkpoint.

    Args:
        name: of the option, for messages.
        endings: of the file's name.
        standard_output: ``-`` is allowed.
    """

    def check(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        if value is None or (standard_output and value == "-"):
            return value
        if not value.lower().endswith(endings):
            raise UsageError(f"{name} {value}: the name has to end in {' or '.join(endings)}")
        if is_directory(value):
            raise UsageError(f"{name} {value}: is a directory", hint="name a file to write")
        return value

    return check


def together(*decorators: Callable[[F], F]) -> Callable[[F], F]:
    """Options that go together, in the order of the help."""

    def add(command: F) -> F:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return add


def _click(asked: Option, default: Any) -> Callable[[F], F]:
    """The click option of a field."""
    attributes: dict[str, Any] = {"help": asked.help}
    if asked.kind is FLAG:
        # An option such as --no-fallback turns off what is on.
        return option(asked.section, *asked.names, asked.parameter, is_flag=True, **attributes)
    if asked.kind in (FORM, FORMAT) or asked.choices:
        attributes["type"] = (FormOrFormat if asked.kind in (FORM, FORMAT) else click.Choice)(asked.choices)
    elif asked.kind is NUMBER and asked.limits is not None:
        attributes["type"] = click.IntRange(*asked.limits)
    elif asked.kind is SHARE:
        attributes["type"] = Parsed("shard", _parse_share)
    elif asked.kind.parse is not None:
        attributes["type"] = Parsed(asked.kind.name, asked.kind.parse)
    if asked.shown is not None or default not in (None, ()):
        attributes["show_default"] = asked.shown or True
    if asked.metavar is not None:
        attributes["metavar"] = asked.metavar
    if asked.completes is not None:
        attributes["shell_complete"] = {"paths": paths, "tables": tables, "types": types}[asked.completes]
    names = (*asked.names, asked.parameter)
    return option(asked.section, *names, default=default or None, multiple=asked.kind is TEXTS, **attributes)


def group(of: type[Group], *names: str, path: str | None = None, **changes: Any) -> Callable[[F], F]:
    """The options of a group of `reshard.asked`; the command receives the group, named like its class.

    Args:
        of: the group.
        names: only these fields; by default all.
        path: the argument with its path; without one, the command sets it.
        changes: attributes of fields' options that differ from theirs, by field; ``initial`` is another default.
    """

    def add(command: F) -> F:
        chosen: dict[str, tuple[Option, Any]] = {}
        for name, (asked, default) in fields_of(of).items():
            if not names or name in names:
                change = dict(changes.get(name, {}))
                initial = change.pop("initial", default)
                chosen[name] = asked._replace(**change), initial

        @functools.wraps(command)
        def call(*arguments: Any, **typed: Any) -> Any:
            values = {}
            for name, (asked, default) in chosen.items():
                value = typed.pop(asked.parameter)
                values[name] = not value if asked.kind is FLAG and default else value
                if value is None:
                    values[name] = default
            if "path" in of.__annotations__:
                values["path"] = os.curdir if path is None else typed.pop(path)
            if of is Conversion:
                return command(*arguments, **values, **typed)
            return command(*arguments, **typed, **{of.__name__.lower(): of(**values)})

        decorated: Any = call
        for asked, default in reversed([*chosen.values()]):
            decorated = _click(asked, default)(decorated)
        result: F = decorated
        return result

    return add


# Options that act by themselves: the function of the command does not get their value, functions of `output` return it.
_ASIDE = {"expose_value": False, "is_eager": True}

SELECTION = ("include", "exclude")
"""Fields of `Edits`: which parameters are taken."""

SAVED = {
    "names": ("--strategy", "--src-strategy"),
    "help": "Strategy the checkpoint was saved with; none for an unsharded one.",
}
"""--strategy of commands that read one checkpoint."""

STORED = ("strategy", "step", "file_suffix")
"""Fields of `Source`: which files are read, and how they are cut."""

LIMITS = ("jobs", "max_memory")
"""Fields of `Effort` for commands that only read."""


def strategy(text: str, *names: str, flag: str = "--strategy") -> Callable[[F], F]:
    """A strategy; --strategy by default."""
    return option("Strategies", flag, *names, metavar="FILE|DIR|none", shell_complete=paths, help=text)


def ranks(text: str) -> Callable[[F], F]:
    """--ranks of commands that do not receive a `Conversion`'s fields."""
    asked, default = fields_of(Conversion)["files"]
    return _click(asked._replace(help=text), default)


def flag(group: str, *names: str, text: str, **attributes: Any) -> Callable[[F], F]:
    """An option without a value."""
    return option(group, *names, is_flag=True, help=text, **attributes)


def verbose(text: str) -> Callable[[F], F]:
    """-v; messages name every parameter with it."""
    return flag("Output", "-v", "--verbose", text=text, callback=set_verbose, **_ASIDE)


def proof(text: str) -> Callable[[F], F]:
    """--verify of commands that write."""
    return flag("Checks", "--verify", text=text)


_service_and_debug = together(
    option(
        "Stores",
        "--endpoint-url",
        metavar="URL",
        callback=_set_endpoint,
        show_default="AWS_ENDPOINT_URL or the profile",
        help="Service of s3:// paths.",
        **_ASIDE,
    ),
    flag("Output", "--debug", text="Show tracebacks.", callback=set_debug, **_ASIDE),
)

common = together(
    flag("Output", "--quiet", "-q", text="Only results, warnings and errors.", callback=set_quiet, **_ASIDE),
    _service_and_debug,
)
"""Options of every command."""

names_in_full = verbose("Name every parameter in messages.")
"""-v of commands that list parameters in messages only."""

json_output = flag("Output", "--json", text="Print JSON to standard output.", callback=set_json, **_ASIDE)
"""--json."""

output = together(
    json_output,
    option(
        "Output",
        "--progress/--no-progress",
        default=None,
        show_default="unless --quiet",
        help="Show progress: a bar, or without a terminal a line every 30 s.",
        callback=set_progress,
        **_ASIDE,
    ),
    verbose("Print details: phases, checks, and the name of every parameter."),
    common,
)
"""Options of output for long-running commands."""


dry_run = flag("Checks", "--dry-run", "-n", text="Plan and check everything, but write nothing.")
"""--dry-run."""

scheduler = option(
    "Effort",
    "--scheduler",
    metavar="ADDRESS|FILE",
    help="Run on the workers of this Dask cluster. Use only clusters that you trust: Dask exchanges pickles.",
)
"""--scheduler."""

conversion = together(group(Source, path="src"), group(Target, path="dst"), group(Edits), group(Effort), output)
"""Options of convert, plan and by-rank alike: the four groups and the output."""
