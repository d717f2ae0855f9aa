"""convert, which is transform-dir too, and by-rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable, Optional

from reshard.cli import completion, options
from reshard.cli.command import argument, command
from reshard.cli.conversion import carry_out, contents_words, detail_lines
from reshard.cli.output import listener
from reshard.cli.shard import Share
from reshard.convert import Options, Summary
from reshard.convert.ends import check_verifiable, options_of, request_between
from reshard.forms.registry import counted_as
from reshard.plan.request import Request
from reshard.text.report import Report
from reshard.text.wording import byte_size, counted_ranks, step_words


@command(
    "convert",
    """
reshard convert ckpt/ out/ \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt

Into one file without optimizer state, proven afterwards:
reshard convert ckpt/ full/ --exclude 'adam_*' --format safetensors \\
    --verify --src-strategy strategy/ --dst-strategy none

As a task of a Slurm array; the last one writes the manifest:
reshard convert ckpt/ out/ --shard auto \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt

On the workers of a Dask cluster that see ckpt/ and out/:
reshard convert ckpt/ out/ --scheduler tcp://host:8786 \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt
""",
)
@argument("src", shell_complete=completion.paths)
@argument("dst", shell_complete=completion.directories)
@options.strategies
@options.targets
@options.conversion
def convert(
    src: str,
    dst: str,
    ranks: Optional[tuple[int, ...]],
    shard: Optional[Share],
    scheduler: Optional[str],
    **typed: Any,
) -> None:
    """Convert the checkpoint in SRC to another layout or another form, and write it to DST.

    SRC is a directory with rank_0/, rank_1/ ... (or rank0/, 0/), one file with a whole checkpoint, or a path
    with {rank} and wildcards in it; these need --src-strategy. Or it is a directory of Checkpoint 2.0, unified
    or Hugging Face weights. DST gets rank_{r}/{prefix}{r}.{ckpt|safetensors}, or the form that --to names.
    Run the same command again to continue after an interruption.
    """
    _convert(src, dst, ranks, typed, adding=False, share=shard, scheduler=scheduler)


@command(
    "by-rank",
    """
One job per rank:
for r in 0 1 2 3; do
    reshard by-rank $r ckpt/ out/ \\
        --src-strategy src.ckpt --dst-strategy dst.ckpt
done
""",
)
@argument("rank", type=int)
@argument("src", shell_complete=completion.paths)
@argument("dst", shell_complete=completion.directories)
@options.strategies
@options.conversion
def by_rank(rank: int, src: str, dst: str, **typed: Any) -> None:
    """Convert the checkpoint in SRC for one RANK of the target strategy.

    Only the source ranks that `reshard rank-list RANK` prints are needed; with --names, also one rank of each
    pipeline stage. With --to checkpoint2, unified or huggingface, RANK is the number of a target file, as
    `reshard plan` lists them, and the source must be complete. The run that writes the last missing rank
    completes DST.
    """
    _convert(src, dst, (rank,), typed, adding=True)


def _convert(
    src: str,
    dst: str,
    ranks: Optional[tuple[int, ...]],
    typed: dict[str, Any],
    adding: bool,
    share: Optional[Share] = None,
    scheduler: Optional[str] = None,
) -> None:
    report = Report(listener())
    request = request_between(src, dst, ranks, typed, report)
    how = options_of(typed, adding=adding, share=share)
    check_verifiable(request, how)
    carry_out(request, report, typed, how, summary_lines(request, typed, how), scheduler)


def summary_lines(request: Request, typed: Mapping[str, Any], how: Options) -> Callable[[Summary, float], list[str]]:
    """For `carry_out`: written files and their contents in a line each; the rest with -v."""

    def lines(summary: Summary, verifying: float) -> list[str]:
        files = counted_as(request.to)
        complete = counted_ranks(summary.done_before, files)
        if summary.ranks:
            rate = summary.bytes_written / summary.seconds if summary.seconds else 0.0
            first = (
                f"wrote {counted_ranks(summary.ranks, files)} to {request.dst}: "
                f"{byte_size(summary.bytes_written)} in {summary.seconds:.1f} s ({byte_size(int(rate))}/s)"
            )
            first += f"; {complete} already complete" if summary.done_before else ""
        elif summary.done_before:
            first = f"nothing to write: {complete} already complete in {request.dst}"
        else:
            number, runs = how.share or (0, 1)
            first = f"nothing to write: share {number}/{runs} is empty: fewer {files}s than shares"
        contents = [f"{step_words(summary.step)}: {contents_words(summary)}"] if summary.target_files else []
        if typed["verbose"]:
            contents += detail_lines(summary, request, verifying)
        elif summary.manifest and (request.files is not None or how.share is not None):
            # Other runs wrote the rest.
            contents.append(f"complete, all {files}s written: {summary.manifest}")
        return [first, *contents]

    return lines
