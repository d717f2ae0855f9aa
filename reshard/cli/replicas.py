"""replicas: groups of ranks with identical checkpoints."""

from __future__ import annotations

from typing import Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import command, option
from reshard.cli.output import echo_json, show_notes
from reshard.errors import UsageError


@command(
    "replicas",
    """
reshard replicas --strategy src_strategy.ckpt
reshard replicas --group-info ckpt_dir*/group_info.pb
""",
)
@options.strategy("Strategy the checkpoint was saved with.")
@option(
    "Source",
    "--group-info",
    multiple=True,
    metavar="FILE",
    shell_complete=completion.paths,
    help="group_info file of one rank (repeatable).",
)
@click.argument("more", nargs=-1, metavar="[FILE...]", shell_complete=completion.paths)
@options.json_output
@options.names_in_full
@options.common
def replicas(strategy: Optional[str], group_info: tuple[str, ...], more: tuple[str, ...], as_json: bool) -> None:
    """Print the groups of ranks with identical checkpoints, one group per line.

    With --strategy, all groups are exact, and a rank without replicas is a group of its own. group_info files
    may list only some: lists that share a rank are joined, and unlisted ranks are omitted. --json prints a list
    of {"ranks": [...], "stage": n}; the stage is null if only group_info files were read.
    """
    from reshard.strategies import read_group_info, read_strategy
    from reshard.strategies.replicas import replicas_of_group_infos, replicas_of_strategy

    if more and not group_info:
        raise UsageError(f"{more[0]}: name a strategy with --strategy, or group_info files with --group-info")
    if (strategy is None) == (not group_info):
        raise UsageError("pass either --strategy or --group-info", hint="the strategy tells more, where there is one")
    if strategy is not None:
        found = replicas_of_strategy(read_strategy(strategy))
    else:
        # A shell expands a pattern after --group-info to several words.
        found = replicas_of_group_infos([read_group_info(path) for path in (*group_info, *more)])
    show_notes(found.notes)
    if as_json:
        echo_json([{"ranks": list(group.ranks), "stage": group.stage} for group in found.groups])
        return
    for group in found.groups:
        click.echo(str(list(group.ranks)))
