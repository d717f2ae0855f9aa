"""The command group, and the ways in which a command can end.

Commands are imported when they are run, which keeps --help fast.
"""

from __future__ import annotations

import signal
from typing import Any, NoReturn

import click

from reshard._version import __version__
from reshard.cli.command import LazyGroup, spelling
from reshard.cli.output import alarming, is_verbose
from reshard.errors import ReshardError, is_read_only
from reshard.signals import Stopped
from reshard.text.messages import is_shortened, printable

# Longer errors repeat their first line at the end.
_MANY_LINES = 8
# Exit statuses of errors that a retry may cure, and of interrupted runs.
_CURABLE = (1, 129, 130, 143)
# Shows the help; older versions of click do so without an error.
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())

# Name on the command line: module, attribute, one line of help (spares importing the module).
_COMMANDS = {
    "Look": {
        "suggest": ("suggest", "suggest", "Print the commands for the usual aims with a checkpoint."),
        "inspect": ("inspect", "inspect", "Show the contents of a checkpoint of any form."),
        "view": ("view", "view", "Write an HTML page that shows a checkpoint and a conversion."),
        "get": ("get", "get", "Print a tensor or a slice of one, or write it to a file."),
        "stats": ("numbers", "stats", "Print NaN, zeros, min, max, mean and norm of every tensor."),
    },
    "Convert": {
        "plan": ("plan", "plan", "Print the plan of a conversion: ranks, files, bytes, memory."),
        "rank-list": ("strategy", "rank_list", "Print the source ranks that a target rank needs."),
        "convert": ("convert", "convert", "Convert a checkpoint to another layout or another form."),
        "by-rank": ("convert", "by_rank", "Convert a checkpoint for one target rank, for shell loops."),
        "status": ("status", "status", "Print finished and missing targets of a conversion."),
        "resume": ("resume", "resume", "Resume a conversion or recovery."),
        "merge-lora": ("merge_lora", "merge_lora", "Merge a LoRA adapter into its base model."),
        "decrypt": ("decrypt", "decrypt", "Decrypt .ckpt files that were saved with enc_key."),
    },
    "Check": {
        "verify": ("verify", "verify", "Prove that a converted checkpoint is right."),
        "diff": ("numbers", "diff", "Compare the tensors of two checkpoints."),
        "fingerprint": ("verify", "fingerprint", "Print layout-independent fingerprints of all parameters."),
    },
    "Repair": {
        "recover": ("convert", "recover", "Rebuild the checkpoints of lost ranks from replicas."),
        "replicas": ("strategy", "replicas", "Print the groups of ranks with identical checkpoints."),
        "group-info": ("strategy", "group_info", "Read group_info files."),
    },
    "Prepare": {
        "strategy": ("strategy", "strategy_group", "Show, compare, check and make strategy files."),
        "merge-pipeline": ("strategy", "merge_pipeline", "Merge the pipeline stages' strategy files into one."),
        "names": ("strategy", "names", "Show tables for --names: names and packing of models."),
    },
}
_ALIASES = {"transform-dir": "convert", "transform-all": "convert", "transform-by-rank": "by-rank"}


class _Reshard(LazyGroup):
    """A group whose commands end with the documented exit statuses, and never with a traceback."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            _refuse(ctx, error)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ReshardError as error:
            _finish(ctx, _error_text(error), error.status)
        except KeyboardInterrupt as interrupt:
            stopped = interrupt if isinstance(interrupt, Stopped) else Stopped(signal.SIGINT)
            _finish(ctx, str(stopped), stopped.status)
        except MemoryError:
            _finish(ctx, "out of memory; try a smaller --max-memory or fewer --jobs", 1)
        except click.UsageError as error:
            _refuse(ctx, error)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except OSError as error:
            name = f"{error.filename}: " if error.filename else ""
            _finish(ctx, f"{name}{error.strerror or error}", 3 if is_read_only(error) else 1)
        except Exception as error:
            text = f"internal error ({type(error).__name__}: {error})\nthis is a bug; --debug shows where"
            _finish(ctx, text, 3)


def _refuse(ctx: click.Context, error: click.UsageError) -> NoReturn:
    """Show an error of click as the others are shown."""
    if isinstance(error, _NO_ARGUMENTS):
        raise error
    message = error.format_message().strip().replace("a valid integer range", "a whole number")
    path = (error.ctx or ctx).command_path
    text = f"{message[:1].lower()}{message[1:].rstrip('.')}\n`{path} --help` shows what it takes"
    _finish(ctx, text, error.exit_code)


def _error_text(error: ReshardError) -> str:
    """The error as shown: with all parameter names for -v, else with a hint to use -v."""
    if is_verbose():
        return error.full
    return f"{error}\n-v names every parameter" if is_shortened(error.message) else str(error)


def _finish(ctx: click.Context, text: str, status: int) -> NoReturn:
    shared = ctx.find_root().meta
    if shared.get("reshard.debug"):
        import traceback

        click.echo(printable(traceback.format_exc().rstrip()), err=True)
    headline, *details = printable(text).split("\n")
    click.echo(alarming(f"reshard: error: {headline}"), err=True)
    for line in details:
        click.echo(f"  {line}", err=True)
    if len(details) > _MANY_LINES:
        # Logs often show only the end of the output.
        click.echo(alarming(f"reshard: error: {headline.rstrip(':')}"), err=True)
    next_command = shared.get("reshard.next_command")
    if next_command is not None and status in _CURABLE:
        click.echo(f"  {printable(next_command)}", err=True)
    ctx.exit(status)


@click.group(
    cls=_Reshard,
    sections=_COMMANDS,
    aliases=_ALIASES,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": spelling},
)
@click.version_option(__version__, "-V", "--version", prog_name="reshard")
def cli() -> None:
    """Convert distributed checkpoints between parallel layouts and between forms.

    Forms are MindSpore's rank files, PyTorch's DCP and Hugging Face's safetensors, among others. MindSpore, PyTorch
    and accelerators are not needed. `reshard COMMAND --help` shows the options of a command. They may be
    typed with underscores, and as in MindSpore's functions: --src_strategy_file, --dst_strategy_file.
    """


def main() -> None:
    """Run the command line of this process, and raise SystemExit; `reshard.entry` is the program."""
    cli(prog_name="reshard")
