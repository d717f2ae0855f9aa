"""Every way a command can end, as an exit status and a few lines on standard error."""

from __future__ import annotations

import os
import signal
import traceback
from types import FrameType
from typing import Any, NoReturn, Optional

import click

from reshard.cli.command import Group
from reshard.errors import ReshardError
from reshard.wording import printable


class Terminated(BaseException):
    """SIGTERM arrived."""


class ReshardGroup(Group):
    """A group whose commands end with the documented exit statuses, and never with a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command and turn what it raises into an exit status."""
        _exit_on_sigterm()
        try:
            return super().invoke(ctx)
        except ReshardError as error:
            _finish(ctx, str(error), error.status)
        except KeyboardInterrupt:
            _finish(ctx, "interrupted; nothing half-written was left behind", 130)
        except Terminated:
            _finish(ctx, "terminated; nothing half-written was left behind", 143)
        except MemoryError:
            _finish(ctx, "out of memory; try a smaller --max-memory or fewer --jobs", 1)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # Whoever read our output has enough of it, as in `reshard inspect FILE | head`.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            ctx.exit(0)
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            _finish(ctx, f"{name}{error.strerror or error}", 1)
        except Exception as error:
            text = f"internal error ({type(error).__name__}: {error})\nthis is a bug; --debug shows where"
            _finish(ctx, text, 3)


def set_debug(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    """Callback of --debug: errors show where they come from."""
    if value:
        ctx.find_root().meta["reshard.debug"] = True
    return value


def _finish(ctx: click.Context, text: str, status: int) -> NoReturn:
    if ctx.find_root().meta.get("reshard.debug"):
        traceback.print_exc()
    first, *rest = printable(text).split("\n")
    click.echo(f"reshard: error: {first}", err=True)
    for line in rest:
        click.echo(f"  {line}", err=True)
    ctx.exit(status)


def _exit_on_sigterm() -> None:
    def terminate(number: int, frame: Optional[FrameType]) -> None:
        raise Terminated

    try:
        signal.signal(signal.SIGTERM, terminate)
    except ValueError:
        # Not the main thread: whoever embeds the command handles signals.
        return
