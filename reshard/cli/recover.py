"""recover."""

from __future__ import annotations

import shlex
from typing import Any, Optional

from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.conversion import contents_words, detail_lines, summary_json
from reshard.cli.output import echo_json, listener, say
from reshard.cli.progress import progress_of
from reshard.convert import prepare
from reshard.convert.ends import Ends, options_of, request_of, typed_strategy
from reshard.errors import UsageError
from reshard.forms.registry import form_named, form_of
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
    read = typed_strategy(strategy, report)
    request = request_of(src, dst, ranks, typed, Ends(form, read, form, read), recover=True)
    how = options_of(typed, lost_only=typed["lost_only"])
    progress = progress_of(typed["quiet"], typed["progress"])
    with prepare(request, how, report, progress) as prepared:
        summary = prepared.carry_out(progress)
        if how.dry_run:
            from reshard.cli.plan import tell_plan

            if typed["as_json"] or not typed["quiet"]:
                tell_plan(prepared, summary, as_json=typed["as_json"], verbose=typed["verbose"])
            return
    if typed["as_json"]:
        echo_json(summary_json(summary))
    if typed["quiet"]:
        return
    done = counted_ranks(summary.done_before)
    if summary.ranks:
        wrote = f"wrote {counted_ranks(summary.ranks)} of {step_words(summary.step)} to {dst}"
        first = f"{wrote}: {byte_size(summary.bytes_written)}"
        first += f"; {done} already complete" if summary.done_before else ""
    else:
        first = f"nothing to write: {f'{done} already complete in {dst}' if summary.done_before else 'no rank is lost'}"
    made = [rank for rank in summary.recovered if rank in summary.ranks]
    lines = [first]
    if summary.ranks:
        lines.append(f"{rank_ranges(made)} made from replicas" if made else "no rank was missing or damaged")
    if typed["verbose"]:
        lines += [f"{step_words(summary.step)}: {contents_words(summary)}", *detail_lines(summary, request)]
    if typed["lost_only"] and summary.ranks and not summary.manifest and request.prefix is None:
        lines.append(f"file names are those of {src}: copy them back into it")
    say("\n".join(lines), to_standard_error=True)
