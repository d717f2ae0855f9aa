"""Commands that need strategy or group files alone."""

from __future__ import annotations

import click

from reshard.cli import completion, options
from reshard.cli.command import Group, command
from reshard.cli.output import echo_json, is_quiet, say, show_notes
from reshard.text.wording import one_line


@command("merge-pipeline", "reshard merge-pipeline output/strategy merged/src_strategy.ckpt")
@click.argument("strategy_dir", shell_complete=completion.directories)
@click.argument("dst_file", shell_complete=completion.paths)
@options.names_in_full
@options.common
def merge_pipeline(strategy_dir: str, dst_file: str) -> None:
    """Merge the pipeline stages' strategy files in STRATEGY_DIR into DST_FILE (.ckpt or .json)."""
    from reshard.strategies import merge_pipeline as merge

    show_notes(merge(strategy_dir, dst_file))
    if not is_quiet():
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
