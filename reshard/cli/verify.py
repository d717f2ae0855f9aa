"""verify: prove that a checkpoint is what it should be."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Optional

import click

from reshard.checkpoints import FileHandles
from reshard.cli import completion, options
from reshard.cli.command import command, option
from reshard.cli.conversion import strategy_of
from reshard.cli.output import echo_json, listener
from reshard.cli.progress import progress_of
from reshard.errors import CheckpointError, TargetError, UsageError
from reshard.name_filters import Filters
from reshard.records import Manifest, read_manifest
from reshard.records.status import status_of
from reshard.report import Report
from reshard.transform import usable_cpus
from reshard.verification import Difference, Means
from reshard.verification.against_manifest import compare_with_manifest
from reshard.verify import converted_files, verify_conversion, verify_replicas
from reshard.wording import plural, printable, rank_ranges

DIFFERENT = 4
"""Exit status where something is not as it should be."""


@command(
    "verify",
    """
reshard verify out/
reshard verify out/ --src ckpt/ \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt
reshard verify ckpt/ --replicas --strategy src.ckpt
""",
)
@click.argument("out", shell_complete=completion.directories)
@option(
    "Source",
    "--src",
    metavar="SRC",
    shell_complete=completion.paths,
    help="The checkpoint that OUT was converted from.",
)
@options.strategies
@options.strategy("Strategy of OUT, for --replicas.")
@option("Checks", "--replicas", is_flag=True, help="Compare copies of the same slices within OUT.")
@options.ranks("Target", "Only these ranks of OUT.")
@options.source
@options.selection
@options.effort
@options.output
def verify(
    out: str,
    src: Optional[str],
    src_strategy: Optional[str],
    dst_strategy: Optional[str],
    replicas: bool,
    strategy: Optional[str],
    ranks: Optional[tuple[int, ...]],
    **typed: Any,
) -> None:
    """Verify the checkpoint in OUT; exit status 4 and a line per difference if something is wrong.

    Alone: every file is as the manifest says, in size, headers and, where they were recorded,
    checksums. With --src and both strategies: every tensor on every rank is what the source makes of
    it, worked out anew from the strategies and compared through fingerprints. With --replicas:
    ranks that should hold the same slices do.
    """
    report = Report(listener(typed["quiet"]))
    filters = Filters(typed["include"], typed["exclude"])
    found: list[Difference] = []
    unchecked: list[int] = []
    with FileHandles() as handles:
        progress = progress_of(typed["quiet"], typed["progress"])
        means = Means(handles, typed["jobs"] or usable_cpus(), typed["max_memory"], progress)
        if replicas:
            if strategy is None:
                raise UsageError("--strategy is missing", hint="--replicas needs the strategy of OUT")
            found += verify_replicas(
                out, strategy_of(strategy, report), typed["step"], typed["file_suffix"], filters, means, report
            )
        elif strategy is not None:
            raise UsageError(
                "--strategy goes with --replicas",
                hint="to compare with the source, pass --src SRC with --src-strategy and --dst-strategy",
            )
        if src is not None:
            source, target = options.required_strategies(src_strategy, dst_strategy)
            manifest = _manifest(out)
            step = typed["step"]
            if manifest is not None:
                found += _against_manifest(out, manifest, ranks, means)
                if step == "latest" and manifest.plan.step is not None:
                    step = manifest.plan.step
                if not (filters.include or filters.exclude):
                    filters = Filters(manifest.plan.include, manifest.plan.exclude)
            files, others = converted_files(out, manifest, ranks)
            found += others
            found += verify_conversion(
                src,
                strategy_of(source, report),
                files,
                strategy_of(target, report),
                step=step,
                file_suffix=typed["file_suffix"],
                ranks=ranks,
                filters=filters,
                means=means,
                report=report,
            )
        elif src_strategy is not None or dst_strategy is not None:
            raise UsageError("--src is missing", hint="--src-strategy and --dst-strategy go with --src SRC")
        elif not replicas:
            manifest = read_manifest(out)
            found += _against_manifest(out, manifest, ranks, means)
            unchecked = _unchecked(out, manifest, ranks, report)
    if typed["as_json"]:
        echo_json({"differences": [difference._asdict() for difference in found], "unchecked_ranks": unchecked})
    tell_differences(found, typed["quiet"], to_standard_output=not typed["as_json"], unchecked=unchecked)


def tell_differences(
    found: Sequence[Difference], quiet: bool, to_standard_output: bool = False, unchecked: Sequence[int] = ()
) -> None:
    """Print every difference and a line that sums up; with any, end with exit status 4.

    Args:
        found: the differences.
        quiet: say nothing where there are none.
        to_standard_output: where the differences go; the rest goes to standard error.
        unchecked: ranks whose contents were not compared.
    """
    for difference in found:
        click.echo(printable(str(difference)), err=not to_standard_output)
    if found:
        click.echo(f"reshard: {plural(len(found), 'difference')}: this checkpoint must not be used", err=True)
        click.get_current_context().exit(DIFFERENT)
    if quiet:
        return
    if unchecked:
        click.echo(
            f"no differences in sizes and headers; contents of {rank_ranges(unchecked)} were not compared", err=True
        )
    else:
        click.echo("verified: no differences", err=True)


def _against_manifest(out: str, manifest: Manifest, ranks: Optional[tuple[int, ...]], means: Means) -> list[Difference]:
    """What is not as the manifest says, of some ranks or all."""
    found = compare_with_manifest(out, _of_ranks(manifest, ranks), means)
    return [difference for difference in found if ranks is None or set(difference.ranks) & set(ranks)]


def _of_ranks(manifest: Manifest, ranks: Optional[tuple[int, ...]]) -> Manifest:
    if ranks is None:
        return manifest
    return dataclasses.replace(manifest, files=tuple(file for file in manifest.files if file.rank in ranks))


def _unchecked(out: str, manifest: Manifest, ranks: Optional[tuple[int, ...]], report: Report) -> list[int]:
    """Ranks whose contents were not compared; says why, and which of them may have been changed."""
    files = _of_ranks(manifest, ranks).files
    unchecked = [file.rank for file in files if file.crc32 is None]
    if not unchecked:
        return []
    of_whom = "" if len(unchecked) == len(files) else f" of {rank_ranges(unchecked)}"
    report.note(
        f"the manifest has no checksums{of_whom}; to compare contents give --src, or convert with --checksum crc32"
    )
    with contextlib.suppress(TargetError):
        changed = sorted(set(status_of(out).changed) & set(unchecked))
        if changed:
            report.warn(
                f"files of {rank_ranges(changed)} have another time than when they were written: they may have been "
                "changed since"
            )
    return unchecked


def _manifest(out: str) -> Optional[Manifest]:
    try:
        return read_manifest(out)
    except CheckpointError:
        # A part of the ranks, or written by something else: the comparison with the source stands alone.
        return None
