"""Commands that need strategy or group files alone."""

from __future__ import annotations

from typing import Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import Group, argument, command, option
from reshard.cli.output import echo_json, say, show_notes
from reshard.errors import UsageError
from reshard.strategies import read_strategy
from reshard.text.wording import one_line, plural, rank_ranges


@command("rank-list", "reshard rank-list 1 --src-strategy src.ckpt --dst-strategy dst.ckpt")
@argument("rank", type=int)
@options.strategies
@option(
    "Source",
    "--available",
    show_default="all",
    type=options.Ranks(),
    metavar="0,2-5",
    help="Only these source ranks can be read.",
)
@options.json_output
@options.names_in_full
@options.common
def rank_list(
    rank: int,
    src_strategy: Optional[str],
    dst_strategy: Optional[str],
    available: Optional[tuple[int, ...]],
    as_json: bool,
) -> None:
    """Print the source ranks that target RANK needs: ascending, on one line, none of them superfluous."""
    from reshard.plan.replicas import ReplicaChoice

    source, target = map(read_strategy, options.required_strategies(src_strategy, dst_strategy))
    if not 0 <= rank < target.device_count:
        raise UsageError(
            f"rank {rank} is out of range: the target strategy ({target.path}) has "
            f"{plural(target.device_count, 'rank')}, 0 to {target.device_count - 1}",
            rank=rank,
        )
    beyond = [number for number in available or () if number >= source.device_count]
    if beyond:
        raise UsageError(
            f"--available: {rank_ranges(beyond)} is out of range: the source strategy ({source.path}) has "
            f"{plural(source.device_count, 'rank')}"
        )
    show_notes((*source.notes, *target.notes))
    ranks = ReplicaChoice(source, target).ranks(rank, available)
    if as_json:
        echo_json({"rank": rank, "ranks": list(ranks)})
    else:
        click.echo(" ".join(map(str, ranks)))


@command("merge-pipeline", "reshard merge-pipeline output/strategy merged/src_strategy.ckpt")
@click.argument("strategy_dir", shell_complete=completion.directories)
@click.argument("dst_file", shell_complete=completion.paths)
@options.names_in_full
@options.common
def merge_pipeline(strategy_dir: str, dst_file: str) -> None:
    """Merge the pipeline stages' strategy files in STRATEGY_DIR into DST_FILE (.ckpt or .json)."""
    from reshard.strategies import merge_pipeline as merge

    show_notes(merge(strategy_dir, dst_file))
    say(f"merged {strategy_dir} into {dst_file}", to_standard_error=True)


@click.group("group-info", cls=Group)
def group_info() -> None:
    """Read group_info files."""


@group_info.command("inspect", epilog="reshard group-info inspect ckpt_dir0/group_info.pb")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=completion.paths)
@options.json_output
@options.common
def group_info_inspect(files: tuple[str, ...], as_json: bool) -> None:
    """Print ranks with identical checkpoints, then groups, per FILE."""
    from reshard.strategies import read_group_info

    infos = [read_group_info(path) for path in files]
    if as_json:
        echo_json(
            [
                {
                    "file": info.file,
                    "restore_ranks": list(info.restore_ranks),
                    "groups": [{"name": name, "ranks": list(ranks)} for name, ranks in info.groups],
                }
                for info in infos
            ]
        )
        return
    for info in infos:
        if len(infos) > 1:
            say(f"{info.file}:")
        click.echo(str(list(info.restore_ranks)))
        for name, ranks in info.groups:
            say(f"  {one_line(name)}: {list(ranks)}")
