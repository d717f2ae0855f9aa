"""build/reshard.1: the manual page, from the help of every command."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator

import click

from docs.tools.commands import walk
from docs.tools.pages import ROOT
from reshard import __version__
from reshard.cli.main import cli

PAGE = ROOT / "build/reshard.1"

_BEGINNING = """\
.\\" Made by `make docs` from the program itself.
.TH RESHARD 1 "" "reshard {version}" "User Commands"
.SH NAME
reshard \\- {title}
.SH SYNOPSIS
.B reshard
.RI [ OPTIONS ]
.I COMMAND
.RI [ ARGUMENTS ]
.SH DESCRIPTION
"""
_END = """\
.SH EXIT STATUS
.TP
.B 0
Success.
.TP
.B 1
A retry may help: I/O errors, a full disk, a file that vanished.
.TP
.B 2
Wrong usage.
.TP
.B 3
The input is wrong, missing or incomplete, or the target holds something else.
.TP
.B 4
Verification found a difference.
.TP
.BR 129 ", " 130 ", " 143
Hangup (closed terminal), interrupted, terminated; the same command continues.
.SH SEE ALSO
.B reshard
.I COMMAND
.B \\-\\-help
"""


def manual() -> str:
    """The whole page, in the macros of man(7)."""
    text = cli.help or ""
    title = text.strip().split("\n")[0].rstrip(".")
    lines = [_BEGINNING.format(version=_escaped(__version__), title=_escaped(title[0].lower() + title[1:]))]
    lines.append(_paragraphs(text))
    lines.append(".SH COMMANDS\n")
    for name, command, context in walk():
        lines += _command(name, command, context)
    return "".join(lines) + _END


def _command(name: str, command: click.Command, context: click.Context) -> Iterator[str]:
    """Usage, text, options and examples of a command."""
    yield f".SS {_escaped(name)}\n"
    usage = " ".join([name, *command.collect_usage_pieces(context)])
    yield f"{_bold(usage)}.PP\n"
    yield _paragraphs(command.help or "")
    for param in command.get_params(context):
        record = param.get_help_record(context) if isinstance(param, click.Option) else None
        if record is not None:
            yield f".TP\n{_bold(record[0])}{_filled(record[1])}"
    if command.epilog:
        yield ".PP\nExamples:\n.PP\n.RS 4\n.nf\n"
        yield from (f"{_escaped(line)}\n" for line in command.epilog.strip("\n").split("\n"))
        yield ".fi\n.RE\n"


def _paragraphs(text: str) -> str:
    """The paragraphs of a docstring."""
    return ".PP\n".join(map(_filled, re.split(r"\n\s*\n", inspect.cleandoc(text))))


def _filled(text: str) -> str:
    """Text in lines of the usual length, which mandoc asks for."""
    return "".join(f"{_escaped(line)}\n" for line in textwrap.wrap(text, 76, break_on_hyphens=False))


def _bold(text: str) -> str:
    return f"\\fB{_escaped(text)}\\fR\n"


def _escaped(line: str) -> str:
    """A line in roff: no character in it is a command."""
    line = line.replace("\\", "\\e").replace("-", "\\-").replace("'", "\\(aq").replace("`", "\\(ga")
    return f"\\&{line}" if line.startswith(".") else line
