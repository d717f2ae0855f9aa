"""Commands that need strategy or group files alone."""

from __future__ import annotations

from typing import Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import Group, argument, command, option
from reshard.cli.output import echo_json, table
from reshard.errors import UsageError
from reshard.strategies import Stage, read_strategy
from reshard.wording import number_ranges, plural, rank_ranges


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
@options.debug
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
            f"--available: rank {number_ranges(beyond)} is out of range: the source strategy ({source.path}) has "
            f"{plural(source.device_count, 'rank')}"
        )
    ranks = ReplicaChoice(source, target).ranks(rank, available)
    if as_json:
        echo_json({"rank": rank, "ranks": list(ranks)})
    else:
        click.echo(" ".join(map(str, ranks)))


@command("merge-pipeline", "reshard merge-pipeline output/strategy merged/src_strategy.ckpt")
@click.argument("strategy_dir", shell_complete=completion.directories)
@click.argument("dst_file", shell_complete=completion.paths)
@options.debug
def merge_pipeline(strategy_dir: str, dst_file: str) -> None:
    """Merge the pipeline stages' strategy files in STRATEGY_DIR into DST_FILE (.ckpt or .json)."""
    from reshard.strategies import merge_pipeline as merge

    for note in merge(strategy_dir, dst_file):
        click.echo(f"note: {note}", err=True)
    click.echo(f"merged {strategy_dir} into {dst_file}", err=True)


@click.group("group-info", cls=Group)
def group_info() -> None:
    """Read group_info files."""


@group_info.command("inspect", epilog="reshard group-info inspect ckpt_dir0/group_info.pb")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", shell_complete=completion.paths)
@options.json_output
@options.debug
def group_info_inspect(files: tuple[str, ...], as_json: bool) -> None:
    """Print, per group_info FILE, the ranks with identical checkpoints, then the groups."""
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
            click.echo(f"{info.file}:")
        click.echo(str(list(info.restore_ranks)))
        for name, ranks in info.groups:
            click.echo(f"  {name}: {list(ranks)}")


@click.group("strategy", cls=Group)
def strategy() -> None:
    """Show what strategy files say."""


@strategy.command("show", epilog="reshard strategy show output/strategy")
@click.argument("path", metavar="FILE|DIR", shell_complete=completion.paths)
@options.json_output
@options.debug
def strategy_show(path: str, as_json: bool) -> None:
    """Show the layout of every parameter in a strategy FILE or DIR."""
    found = read_strategy(path)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if as_json:
        echo_json([row for stage in found.stages for row in _layout_rows(stage)])
        return
    stages = plural(len(found.stages), "stage")
    click.echo(f"{path}: {plural(found.device_count, 'device')} in {stages}")
    for stage in found.stages:
        ranks = rank_ranges(range(stage.first_rank, stage.first_rank + stage.device_count))
        rows = [
            [
                str(row["parameter"]),
                str(row["device_matrix"]),
                str(row["tensor_map"]),
                str(row["cuts"]) if row["uneven"] is None else f"{row['cuts']}, by hand {row['uneven']}",
                str(row["optimizer_shards"]) if row["optimizer_shards"] != 1 else "-",
                str(row["replicas"]),
            ]
            for row in _layout_rows(stage)
        ]
        columns = ["parameter", "device matrix", "tensor map", "cuts", "optimizer shards", "replicas"]
        table(f"stage {stage.number}: {ranks}", columns, rows)


def _layout_rows(stage: Stage) -> list[dict[str, object]]:
    rows = []
    for name, layout in stage.layouts.items():
        rows.append(
            {
                "stage": stage.number,
                "parameter": name,
                "device_matrix": list(layout.device_matrix),
                "tensor_map": [list(axes) for axes in layout.tensor_map],
                "cuts": list(layout.tensor_cuts),
                "optimizer_shards": layout.shards,
                "uneven": list(layout.uneven) if layout.uneven is not None else None,
                "shape": list(layout.recorded_shape) if layout.recorded_shape is not None else None,
                "replicas": layout.device_count // layout.slice_count,
            }
        )
    return rows
