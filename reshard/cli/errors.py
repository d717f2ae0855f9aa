"""Every way a command can end, as an exit status and a few lines on standard error."""

from __future__ import annotations

import io
import signal
from typing import Any, Callable, NoReturn

import click

from reshard.cli.command import LazyGroup
from reshard.cli.output import alarming
from reshard.errors import ReshardError, is_read_only
from reshard.signals import Stopped
from reshard.text.messages import is_shortened, printable

# Longer errors repeat their first line at the end.
_MANY_LINES = 8
DIFFERENT = 4
"""The exit status of a difference."""

# Exit statuses of errors that a retry may cure, and of interrupted runs.
_CURABLE = (1, 129, 130, 143)


class ReshardGroup(LazyGroup):
    """A group whose commands end with the documented exit statuses, and never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn exceptions into an exit status."""
        try:
            return super().invoke(ctx)
        except ReshardError as error:
            _finish(ctx, _error_text(ctx, error), error.status)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
            _finish(ctx, str(stopped), stopped.status)
        except MemoryError:
            _finish(ctx, "out of memory; try a smaller --max-memory or fewer --jobs", 1)
        except click.UsageError as error:
            shown = io.StringIO()
            error.show(shown)
            usage, mark, message = shown.getvalue().partition("Error: ")
            click.echo(usage + alarming(mark + message.rstrip()), err=True)
            ctx.exit(error.exit_code)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            _finish(ctx, f"{name}{error.strerror or error}", 3 if is_read_only(error) else 1)
        except Exception as error:
            text = f"internal error ({type(error).__name__}: {error})\nthis is a bug; --debug shows where"
            _finish(ctx, text, 3)


def _remembered(name: str) -> Callable[[click.Context, click.Parameter, bool], bool]:
    """Callback of a flag whose value all modules can read from the root context."""

    def remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
        if value:
            ctx.find_root().meta[f"reshard.{name}"] = True
        return value

    return remember


set_debug, set_verbose, set_quiet = map(_remembered, ("debug", "verbose", "quiet"))


def exit_different() -> NoReturn:
    """End with the status of a comparison that has found a difference, or of a check that has failed."""
    click.get_current_context().exit(DIFFERENT)


def set_next_command(text: str) -> None:
    """Errors of this run that a retry may cure end with this line."""
    click.get_current_context().find_root().meta["reshard.next_command"] = text


def _finish(ctx: click.Context, text: str, status: int) -> NoReturn:
    if ctx.find_root().meta.get("reshard.debug"):
        import traceback

        click.echo(printable(traceback.format_exc().rstrip()), err=True)
    headline, *details = printable(text).split("\n")
    click.echo(alarming(f"reshard: error: {headline}"), err=True)
    for line in details:
        click.echo(f"  {line}", err=True)
    if len(details) > _MANY_LINES:
        # Logs often show only the end of the output.
        click.echo(alarming(f"reshard: error: {headline.rstrip(':')}"), err=True)
    next_command = ctx.find_root().meta.get("reshard.next_command")
    if next_command is not None and status in _CURABLE:
        click.echo(f"  {printable(next_command)}", err=True)
    ctx.exit(status)


def _error_text(ctx: click.Context, error: ReshardError) -> str:
    """The error as shown: with all parameter names for -v, else with a hint to use -v."""
    if ctx.find_root().meta.get("reshard.verbose"):
        return error.full
    return f"{error}\n-v names every parameter" if is_shortened(error.message) else str(error)
