"""rank-list: the source files that a target rank or file needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import click

from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.output import echo_json, listener, show_notes
from reshard.errors import UsageError
from reshard.text.messages import plural

_WITH_SRC = ("to", "max_shard_size", "names", "rename", "config", "reverse", "optimizer")


@command(
    "rank-list",
    """
reshard rank-list 1 --src-strategy src.ckpt --dst-strategy dst.ckpt

Files of a source of another form, or with other names:
reshard rank-list 1 --src hf/ --names qwen3,gate_up=interleaved,qkv=grouped \\
    --dst-strategy dst.ckpt
""",
)
@argument("rank", type=options.RANK)
@options.strategies
@options.without_ranks
@option(
    "Source",
    "--src",
    metavar="SRC",
    shell_complete=completion.paths,
    help="The source; needed for forms other than ranks, and for options of names and types.",
)
@options.source
@options.target_form("ranks", "Form of the target, whose files are numbered from 0.")
@options.edits
@options.json_output
@options.names_in_full
@options.common
def rank_list(
    rank: int,
    src_strategy: Optional[str],
    dst_strategy: Optional[str],
    without_ranks: Optional[tuple[int, ...]],
    src: Optional[str],
    as_json: bool,
    **typed: Any,
) -> None:
    """Print the source ranks that target RANK needs: ascending, on one line, each of them necessary.

    With --src, it prints the ranks or files that a conversion of that checkpoint reads. Files of forms without
    ranks are printed by number, and RANK is then the number of a target file.
    """
    if src is None:
        extra = [name for name in _WITH_SRC if typed[name]]
        if extra:
            option = "--" + extra[0].replace("_", "-")
            raise UsageError(f"{option} is given without the checkpoint", hint="name it: --src SRC")
        ranks = _of_strategies(rank, src_strategy, dst_strategy, without_ranks or ())
    else:
        ends = {"src_strategy": src_strategy, "dst_strategy": dst_strategy, "without_ranks": without_ranks}
        ranks = _of_checkpoint(rank, src, {**typed, **ends})
    if as_json:
        echo_json({"rank": rank, "ranks": list(ranks)})
    else:
        click.echo(" ".join(map(str, ranks)))


def _of_strategies(
    rank: int, src_strategy: Optional[str], dst_strategy: Optional[str], without_ranks: Sequence[int]
) -> Sequence[int]:
    """The source ranks, from strategies alone."""
    # Loaded only here: --help needs neither NumPy nor protobuf.
    from reshard.plan.replicas import ReplicaChoice
    from reshard.strategies import read_strategy, required_strategies

    source, target = map(read_strategy, required_strategies(src_strategy, dst_strategy))
    if not 0 <= rank < target.device_count:
        raise UsageError(
            f"rank {rank} is out of range: the target strategy ({target.path}) has "
            f"{plural(target.device_count, 'rank')}, 0 to {target.device_count - 1}",
            rank=rank,
        )
    readable = source.without(without_ranks)
    show_notes((*source.notes, *target.notes))
    return ReplicaChoice(source, target).ranks(rank, readable if without_ranks else None)


def _of_checkpoint(rank: int, src: str, typed: dict[str, Any]) -> Sequence[int]:
    """The source files of one target file."""
    # Loaded only here: strategies alone are read in loops.
    from reshard.checkpoints import FileHandles
    from reshard.convert import check_target_ranks
    from reshard.convert.ends import request_between
    from reshard.forms.registry import form_named
    from reshard.plan.planner import make_plan
    from reshard.text.messages import Report

    to = typed.get("to")
    # Any format that goes with the form: files of different ones in the source are read alike.
    format = "safetensors" if to is None or "safetensors" in form_named(to).options.formats else "same"
    # Notes are about the conversion, which prints them.
    report = Report(listener(notes=False))
    request = request_between(src, "", (rank,), {**typed, "format": format, "allow_missing": "*"}, report)
    if form_named(request.to).options.by_rank and not request.target.is_placeholder:
        check_target_ranks(request)
    with FileHandles() as handles:
        plan = make_plan(request, handles, report)
        paths = plan.target_file(rank).source_paths
        return sorted(holder for holder, path in plan.checkpoint.files.items() if path in paths)
