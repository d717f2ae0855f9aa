"""recover: lost ranks from replicas."""

from __future__ import annotations

import shlex
from typing import Any, Optional

from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.conversion import carry_out, contents_words, detail_lines
from reshard.cli.output import listener
from reshard.convert import Summary
from reshard.convert.ends import Ends, options_of, request_of
from reshard.errors import UsageError
from reshard.forms.registry import form_named, form_of
from reshard.opened.opening import typed_strategy
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
@options.ranks("Target", "Write only these ranks.")
@option("Target", "--lost-only", is_flag=True, help="Write only lost and damaged ranks.")
@options.prefix(None, "as in SRC")
@options.source
@options.fallback
@options.writing
@options.output
def recover(src: str, dst: str, strategy: Optional[str], ranks: Optional[tuple[int, ...]], **typed: Any) -> None:
    """Rebuild the checkpoint of every lost rank from replicas.

    The newest step is used of which some rank still holds every slice. A rank that is lost, damaged or was
    never saved is made from ranks with the same slices, parameter by parameter if no single rank has them
    all. Intact files are copied unchanged, so DST is the whole tree. If no rank holds a slice any more,
    nothing is written, and the error lists these slices by parameter and rank.

    Files are named as in SRC (rank_3/llama_rank_3-1_200.ckpt): the files of --lost-only can be
    copied back into SRC; with --prefix they are named as in a conversion.
    """
    form = form_of(src)
    if not form_named(form).options.by_rank:
        raise UsageError(
            f"{src}: is of the form {form}; recover works on rank directories",
            hint=f"use: reshard convert {shlex.quote(src)} {shlex.quote(dst)} --to {form}"
            + (" --dst-strategy same" if form_named(form).options.cut else ""),
        )
    if strategy is None:
        raise UsageError("--strategy is missing", hint="name the strategy file or directory of the checkpoint")
    report = Report(listener())
    saved = typed_strategy(strategy, report)
    request = request_of(src, dst, ranks, typed, Ends(form, saved, form, saved), recover=True)
    how = options_of(typed)

    def lines(summary: Summary, _: float) -> list[str]:
        complete = counted_ranks(summary.done_before)
        rebuilt = [rank for rank in summary.recovered if rank in summary.ranks]
        if summary.ranks:
            wrote = f"wrote {counted_ranks(summary.ranks)} of {step_words(summary.step)} to {dst}"
            rows = [
                f"{wrote}: {byte_size(summary.bytes_written)}"
                + (f"; {complete} already complete" if summary.done_before else ""),
                f"{rank_ranges(rebuilt)} made from replicas" if rebuilt else "no rank was missing or damaged",
            ]
        else:
            reason = f"{complete} already complete in {dst}" if summary.done_before else "no rank is lost"
            rows = [f"nothing to write: {reason}"]
        if typed["verbose"]:
            rows += [f"{step_words(summary.step)}: {contents_words(summary)}", *detail_lines(summary, request)]
        if how.lost_only and summary.ranks and not summary.manifest and request.prefix is None:
            rows.append(f"file names are those of {src}: copy them back into it")
        return rows

    carry_out(request, report, typed, how, lines)
