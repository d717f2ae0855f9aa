"""recover."""

from __future__ import annotations

from typing import Any, Optional

from reshard.checkpoints.forms import RANKS, form_of
from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.conversion import (
    kinds_line,
    options_of,
    phases_line,
    replicas_line,
    request_of,
    summary_json,
)
from reshard.cli.forms import typed_strategy
from reshard.cli.output import echo_json, listener, say
from reshard.cli.progress import progress_of
from reshard.convert import prepare
from reshard.errors import UsageError
from reshard.text.report import Report
from reshard.text.wording import byte_size, counted_ranks, rank_ranges, step_words


@command(
    "recover",
    """
Ranks 3 and 7 of 8 are lost:
reshard recover ckpt/ whole/ --strategy strategy/

The lost ones alone, put back into the tree:
reshard recover ckpt/ lost/ --lost-only --strategy strategy/
cp -rf lost/rank_* ckpt/
""",
)
@argument("src", shell_complete=completion.paths)
@argument("dst", shell_complete=completion.directories)
@options.strategy("Strategy the checkpoint was saved with.")
@options.ranks("Target", "Only these ranks.")
@option("Target", "--lost-only", is_flag=True, help="Write only ranks that are lost or damaged, not the intact ones.")
@options.prefix(None, "names as in SRC")
@options.source
@options.fallback
@options.writing
@options.output
def recover(src: str, dst: str, strategy: Optional[str], ranks: Optional[tuple[int, ...]], **typed: Any) -> None:
    """Give every lost rank its checkpoint back from replicas.

    At the newest step that can be had whole, the checkpoint of each rank that is lost, damaged or was
    never saved is made from ranks that hold the same slices, parameter by parameter where no rank has
    them all. Ranks whose files are intact are copied unchanged, so DST is the whole tree. What no
    rank holds any more is listed by parameter and rank, and nothing is written.

    Files are named as in SRC, those of lost ranks as their siblings (rank_3/llama_rank_3-1_200.ckpt), so
    that what --lost-only writes can be copied over SRC; --prefix names them as in a conversion.
    """
    form = form_of(src)
    if form != RANKS:
        raise UsageError(
            f"{src}: is of the form {form}, whose files are no ranks that replicas could bring back",
            hint="`reshard convert` takes the copies that are there; `reshard inspect` tells what is lost",
        )
    if strategy is None:
        raise UsageError("--strategy is missing", hint="name the strategy file or directory of the checkpoint")
    report = Report(listener(typed["quiet"]))
    read = typed_strategy(strategy, report)
    request = request_of(src, dst, read, read, ranks, typed, recover=True)
    how = options_of(typed, lost_only=typed["lost_only"])
    progress = progress_of(typed["quiet"], typed["progress"])
    with prepare(request, how, report, progress) as prepared:
        summary = prepared.carry_out(progress)
        if how.dry_run:
            from reshard.cli.plan import tell_plan

            tell_plan(prepared, summary, as_json=typed["as_json"], verbose=typed["verbose"])
            return
    if typed["as_json"]:
        echo_json(summary_json(summary))
    if typed["quiet"]:
        return
    if summary.ranks:
        wrote = f"wrote {counted_ranks(summary.ranks)} of {step_words(summary.step)} to {dst}"
        first = f"{wrote}: {byte_size(summary.bytes_written)}"
    else:
        first = f"nothing is left to write to {dst}"
    made = [rank for rank in summary.recovered if rank in summary.ranks]
    text = f"{rank_ranges(made)} made from replicas" if made else "no rank had to be made from replicas"
    lines = [
        first,
        *phases_line(summary),
        text + (f"; {rank_ranges(summary.done_before)} done before" if summary.done_before else ""),
        *kinds_line(summary),
        *replicas_line(summary),
    ]
    if summary.manifest:
        lines.append(f"all ranks are there: {summary.manifest}")
    elif typed["lost_only"] and summary.ranks and request.prefix is None:
        lines.append(f"named as in {src}, so that they can be copied back into it")
    say("\n".join(lines), to_standard_error=True)
