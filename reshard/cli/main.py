"""The command group. Commands are imported when they are run, which keeps --help fast."""

from __future__ import annotations

import importlib
from typing import Optional

import click
from click.shell_completion import CompletionItem

from reshard._version import __version__
from reshard.cli.advice import spelling
from reshard.cli.command import passed_on
from reshard.cli.errors import ReshardGroup, set_debug

# Name on the command line: module, attribute, one line of help (spares importing the module).
_COMMANDS = {
    "convert": ("convert", "convert", "Convert a checkpoint to another layout or another form."),
    "by-rank": ("convert", "by_rank", "Convert a checkpoint for one target rank, for shell loops."),
    "merge-lora": ("merge_lora", "merge_lora", "Merge a LoRA adapter into the weights that it was trained on."),
    "plan": ("plan", "plan", "Print the plan of a conversion: ranks, files, bytes, memory."),
    "rank-list": ("rank_list", "rank_list", "Print the source ranks that a target rank needs."),
    "merge-pipeline": ("strategy", "merge_pipeline", "Merge the pipeline stages' strategy files into one."),
    "group-info": ("strategy", "group_info", "Read group_info files."),
    "inspect": ("inspect", "inspect", "Show the contents of a checkpoint file or rank tree."),
    "suggest": ("suggest", "suggest", "Print the commands for the usual aims with a checkpoint."),
    "view": ("view", "view", "Write an HTML page that shows a checkpoint and a conversion."),
    "status": ("status", "status", "Print which targets of a conversion are done and which are missing."),
    "resume": ("resume", "resume", "Resume a conversion or recovery."),
    "verify": ("verify", "verify", "Prove that a converted checkpoint is right, or that copies agree."),
    "fingerprint": ("fingerprint", "fingerprint", "Print layout-independent fingerprints of all parameters."),
    "get": ("get", "get", "Print a tensor or a slice of one, or write it to a .npy file."),
    "stats": ("stats", "stats", "Print statistics of every tensor: NaN, zeros, min, max, mean, norm."),
    "diff": ("diff", "diff", "Compare the tensors of two checkpoints."),
    "replicas": ("strategy", "replicas", "Print the groups of ranks with identical checkpoints."),
    "recover": ("recover", "recover", "Rebuild the checkpoints of lost ranks from replicas."),
    "strategy": ("strategy_group", "strategy", "Show, compare, check and make strategy files."),
    "names": ("names", "names", "Show tables for --names: names and packing of other frameworks."),
    "help": ("help", "show_help", "Show the help of a command."),
    "completion": ("help", "completion", "Print the script for completion in bash, zsh or fish."),
}
_ALIASES = {"transform-dir": "convert", "transform-all": "convert", "transform-by-rank": "by-rank"}


class LazyGroup(ReshardGroup):
    """A group that imports a command's module on first use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Command names in the order of the work, aliases left out."""
        return list(_COMMANDS)

    def command_names(self, ctx: click.Context) -> list[str]:
        """Command names and aliases."""
        return [*_COMMANDS, *_ALIASES]

    def get_command(self, ctx: click.Context, cmd_name: str) -> Optional[click.Command]:
        """The command of a name or alias."""
        entry = _COMMANDS.get(_ALIASES.get(cmd_name, cmd_name))
        if entry is None:
            return None
        module = importlib.import_module(f"reshard.cli.{entry[0]}")
        command: click.Command = getattr(module, entry[1])
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Commands without importing any, then options."""
        known = {**_COMMANDS, **({alias: _COMMANDS[name] for alias, name in _ALIASES.items()} if incomplete else {})}
        names = [CompletionItem(name, help=entry[2]) for name, entry in known.items() if name.startswith(incomplete)]
        return [*names, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry[2]) for name, entry in _COMMANDS.items()])


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": spelling},
)
@click.option(
    "-v",
    "--verbose",
    is_flag=True,
    expose_value=False,
    callback=passed_on,
    help="Print details; the same as after COMMAND.",
)
@click.option(
    "-q",
    "--quiet",
    is_flag=True,
    expose_value=False,
    callback=passed_on,
    help="Print only results, warnings and errors; the same as after COMMAND.",
)
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=set_debug, help="Show tracebacks.")
@click.version_option(__version__, "-V", "--version", prog_name="reshard")
def cli() -> None:
    """Convert distributed MindSpore checkpoints from one parallel layout to another.

    MindSpore and accelerators are not needed. `reshard COMMAND --help` shows the options of a command. They may be
    typed as in MindSpore's scripts: --src_strategy_file, --src_checkpoints_dir, --dst_checkpoint, --transform_rank.
    """


def main() -> None:
    """Run the command line of this process, and raise SystemExit; `reshard.entry` is the program."""
    cli(prog_name="reshard")
