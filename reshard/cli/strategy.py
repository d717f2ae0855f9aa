"""Commands that read strategies, group files or tables of names alone; the group `strategy` loads its commands late."""

from __future__ import annotations

import shlex

import click

from reshard.asked import Source, Target
from reshard.cli import options
from reshard.cli.command import Group, LazyGroup, argument, command, option, paths, tables
from reshard.cli.output import echo_json, is_json, is_quiet, say, show_notes
from reshard.errors import NamesError, ReshardError, UsageError
from reshard.text.messages import one_line, plural


@command("merge-pipeline", "reshard merge-pipeline output/strategy merged/src_strategy.ckpt")
@argument("strategy_dir")
@argument("dst_file")
@options.names_in_full
@options.common
def merge_pipeline(strategy_dir: str, dst_file: str) -> None:
    """Merge the pipeline stages' strategy files in STRATEGY_DIR into DST_FILE (.ckpt or .json)."""
    from reshard.strategies import read_strategy
    from reshard.strategies.written import merge_pipeline as merge

    show_notes(merge(strategy_dir, dst_file))
    if not is_quiet():
        merged = read_strategy(dst_file)
        stages, devices = plural(len(merged.stages), "stage"), plural(merged.device_count, "device")
        say(f"merged {strategy_dir} into {dst_file}: {stages}, {devices}", to_standard_error=True)


# Module, attribute and one line of help of each command.
_COMMANDS = {
    "check": ("strategy_check", "strategy_check", "Check whether the checkpoint in CKPT was saved with strategy S."),
    "derive": ("strategy_make", "strategy_derive", "Derive the strategy of another run from that of one at hand."),
    "diff": ("strategy_show", "strategy_diff", "Show the differences from strategy A to strategy B."),
    "make": ("strategy_make", "strategy_make", "Make the strategy of a cluster from rules, without the cluster."),
    "rules": ("strategy_make", "strategy_rules", "Print the built-in rules of make, or list them."),
    "show": ("strategy_show", "strategy_show", "Show layouts, or a picture of the slices of one PARAM."),
}


@click.group("strategy", cls=LazyGroup, sections={"Commands": _COMMANDS})
def strategy_group() -> None:
    """Show strategy files, check them against a checkpoint, and make new ones."""


@command("rank-list", "reshard rank-list 1 --src-strategy src.ckpt --dst-strategy dst.ckpt")
@argument("rank", type=options.RANK)
@options.group(Source, "strategy", "without_ranks")
@options.group(Target, "strategy")
@options.json_output
@options.names_in_full
@options.common
def rank_list(rank: int, source: Source, target: Target) -> None:
    """Print the source ranks that target RANK needs: ascending, on one line, each of them necessary.

    Only the strategies are read. `reshard plan` prints the source files of every target of any form.
    """
    # Loaded only here: the other commands do without.
    from reshard.plan.replicas import ReplicaChoice
    from reshard.strategies import read_strategy, required_strategies

    saved, wanted = map(read_strategy, required_strategies(source.strategy, target.strategy))
    if not 0 <= rank < wanted.device_count:
        raise UsageError(
            f"rank {rank} is out of range: the target strategy ({wanted.path}) has "
            f"{plural(wanted.device_count, 'rank')}, 0 to {wanted.device_count - 1}",
            rank=rank,
        )
    readable = saved.without(source.without_ranks) if source.without_ranks else None
    show_notes((*saved.notes, *wanted.notes))
    ranks = ReplicaChoice(saved, wanted).ranks(rank, readable)
    if is_json():
        echo_json({"rank": rank, "ranks": ranks})
    else:
        click.echo(" ".join(map(str, ranks)))


@click.group("group-info", cls=Group)
def group_info() -> None:
    """Read group_info files."""


@group_info.command("inspect", epilog="reshard group-info inspect ckpt_dir0/group_info.pb")
@argument("files", nargs=-1, required=True, metavar="FILE...")
@options.json_output
@options.common
def group_info_inspect(files: tuple[str, ...]) -> None:
    """Print the restore list and the groups of each FILE.

    The restore list contains the ranks with identical checkpoints.
    """
    from reshard.strategies import read_group_info

    infos = [read_group_info(path) for path in files]
    if is_json():
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
    shell_complete=paths,
    help="group_info file of one rank (repeatable).",
)
@argument("more", nargs=-1, metavar="[FILE...]")
@options.json_output
@options.names_in_full
@options.common
def replicas(strategy: str | None, group_info: tuple[str, ...], more: tuple[str, ...]) -> None:
    """Print the groups of ranks with identical checkpoints, one group per line.

    With --strategy, all groups are exact, and a rank without replicas is a group of its own. group_info files
    may list only some: lists that share a rank are joined, and unlisted ranks are omitted. --json prints a list
    of {"ranks": [...], "stage": n}; the stage is null if only group_info files were read.
    """
    from reshard.strategies import read_group_info, read_strategy
    from reshard.strategies.replicas import replicas_of_group_infos, replicas_of_strategy

    if more and not group_info:
        hint = f"use: reshard replicas --strategy {shlex.quote(more[0])}, or --group-info for group_info files"
        try:
            read_strategy(more[0])
        except ReshardError:
            hint = "name the strategy that the checkpoint was saved with: reshard replicas --strategy FILE; to compare "
            hint += f"its copies: reshard verify {shlex.quote(more[0])} --replicas --strategy FILE"
        raise UsageError(f"{more[0]}: a strategy is an option here", hint=hint)
    if (strategy is None) == (not group_info):
        raise UsageError("pass either --strategy or --group-info", hint="prefer --strategy, if a strategy file exists")
    if strategy is not None:
        result = replicas_of_strategy(read_strategy(strategy))
    else:
        # A shell expands a pattern after --group-info to several words.
        result = replicas_of_group_infos([read_group_info(path) for path in (*group_info, *more)])
    show_notes(result.notes)
    if is_json():
        echo_json([{"ranks": list(group.ranks), "stage": group.stage} for group in result.groups])
        return
    for group in result.groups:
        click.echo(str(list(group.ranks)))


@click.group("names", cls=Group)
def names() -> None:
    """Show rules that give tensors other names and packing, between Hugging Face's models and MindFormers'."""


@names.command("list", epilog="reshard names list\nreshard names list --json")
@options.json_output
@options.common
def names_list() -> None:
    """Print the built-in tables."""
    from reshard.names import builtin_names, rules_named

    tables = [rules_named(name) for name in builtin_names()]
    if is_json():
        echo_json(
            [
                {"name": table.path, "title": table.title, "options": [option.name for option in table.options]}
                for table in tables
            ]
        )
        return
    width = max(len(table.path) for table in tables)
    say("\n".join(f"{table.path:{width}}  {table.title}" for table in tables))


@names.command(
    "show",
    epilog="""
reshard names show qwen3

To begin a table of your own:
reshard names show llama > mine.toml
""",
)
@argument("rules", metavar="NAME|FILE", shell_complete=tables)
@options.json_output
@options.common
def names_show(rules: str) -> None:
    """Print a table: a built-in one, or that of a file, which is checked.

    With --json, the rules as data.
    """
    from reshard.names import rules_named
    from reshard.storage.toml_tables import TomlFile

    table = rules_named(rules)
    if not is_json():
        click.echo(table.text, nl=False)
        return
    echo_json({"name": table.path, "content": TomlFile(table.path, NamesError).parse(table.text)})
