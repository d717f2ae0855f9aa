"""verify: prove that a checkpoint is right; fingerprint: a checksum of every parameter in any layout and form."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace

import click

from reshard.asked import CHANGES, Conversion, Edits, Effort, Source, Target, has_changes
from reshard.cli import options
from reshard.cli.command import argument, command, option, paths
from reshard.cli.opened import shape_words
from reshard.cli.output import alarming, echo_json, exit_different, is_json, is_quiet, is_verbose, listener
from reshard.cli.progress import progress_of
from reshard.convert.recorded import merge_hint, recorded_source
from reshard.convert.replicas import verify_replicas
from reshard.convert.verifying import (
    against_manifest,
    of_ranks,
    reading_sources,
    source_fingerprints,
    verify_with_source,
)
from reshard.errors import InputError, TargetError, UsageError
from reshard.forms.registry import counted_as, form_named
from reshard.numbers.fingerprint import Fingerprints
from reshard.opened.opening import reading_request
from reshard.records import Manifest, read_manifest
from reshard.records.status import status_of
from reshard.text.globs import Filters
from reshard.text.messages import MAX_LINES, Report, listing, one_line, plural, printable, quoted, rank_ranges
from reshard.verification.reading import Difference


@command(
    "verify",
    """
reshard verify out/
reshard verify out/ --src ckpt/ \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt
reshard verify ckpt/ --replicas --strategy src.ckpt

With the names and types that the conversion was given:
reshard verify out/ --src ckpt/ --cast BFloat16 \\
    --names qwen3,gate_up=interleaved,qkv=grouped \\
    --src-strategy src.ckpt --dst-strategy dst.ckpt
""",
)
@argument("out")
@option(
    "Source",
    "--src",
    metavar="SRC",
    shell_complete=paths,
    help="The checkpoint that OUT was converted from.",
)
@options.group(Source, *options.STORED)
@options.group(
    Target,
    "strategy",
    "shards",
    "args",
    path="out",
    args={"help": "Arguments of a checkpoint of Megatron that OUT was written with.", "shown": "as recorded"},
)
@options.strategy("Strategy of OUT, for --replicas.")
@option("Checks", "--replicas", is_flag=True, help="Compare copies of the same slices within OUT.")
@option("Checks", "--headers-only", is_flag=True, help="Check sizes and headers only; read no contents.")
@options.ranks("Verify only these ranks of OUT.")
@options.group(Edits, *options.SELECTION, *CHANGES)
@options.group(
    Effort,
    "crc",
    *options.LIMITS,
    crc={"help": "Check the CRCs that source files record; damaged files count as absent."},
)
@options.output
def verify(
    src: str | None,
    source: Source,
    target: Target,
    replicas: bool,
    headers_only: bool,
    strategy: str | None,
    ranks: tuple[int, ...] | None,
    edits: Edits,
    effort: Effort,
) -> None:
    """Verify the checkpoint in OUT; the exit status is 4 if anything differs.

    Without --src, every file is compared with the manifest in OUT: size, headers and checksum. If the manifest
    has no checksums (--checksum crc32 of convert records them), the recorded source is compared as with --src.
    If it is gone, the exit status is 2 unless --headers-only is given.

    With --src, every tensor is computed again from SRC by independent code and compared byte by byte.
    Strategies, step, names and casts come from the records in OUT; options override them.
    OUT and SRC may be of any form. An index or other metadata in OUT must agree with its files.

    With --replicas, ranks of OUT that should hold the same slices are compared with each other.
    """
    report = Report(listener())
    out, filters = target.path, Filters(edits.include, edits.exclude)
    if headers_only and (replicas or src is not None):
        raise UsageError("--headers-only is for OUT alone", hint="--src and --replicas compare contents")
    if strategy is not None and not replicas:
        raise UsageError(
            "--strategy needs --replicas",
            hint="to compare with the source, pass --src SRC with --src-strategy and --dst-strategy",
        )
    if replicas and src is None and ranks is not None:
        raise UsageError("--replicas compares the copies on all ranks", hint="leave out --ranks, or add --src SRC")
    if src is None and has_changes(edits):
        raise UsageError("--src is missing", hint="options of names and types need --src SRC")
    if src is None and (source.strategy or target.strategy or target.shards or target.args):
        raise UsageError("--src is missing", hint="--src-strategy, --dst-strategy and --args need --src SRC")
    if src is None and not replicas and (filters.include or filters.exclude):
        raise UsageError(
            "--include and --exclude need --src or --replicas",
            hint="OUT alone is compared with its manifest, file by file",
        )
    differences: list[Difference] = []
    verdict = ""
    manifest = None if replicas or src is not None else of_ranks(read_manifest(out), ranks)
    recorded = None if manifest is None or headers_only else _without_checksums(manifest, ranks)
    if recorded is not None:
        src, manifest = recorded, None
        report.note(f"the manifest lacks checksums; contents are compared with the recorded source: --src {src}")
    progress = progress_of()
    with reading_sources(effort, progress, report) as means:
        if replicas:
            # The other options of strategies, names and types are those of SRC.
            read, selection = replace(source, path=out, strategy=strategy), Edits(edits.include, edits.exclude)
            asked = Conversion(read, Target(os.curdir), selection, effort)
            request = reading_request(asked, report, option="--strategy ")
            differences, verdict = verify_replicas(request, means.handles, progress, report)
        if src is not None:
            try:
                asked = Conversion(replace(source, path=src), target, edits, effort, ranks)
                differences += verify_with_source(asked, means)
            except InputError as error:
                if recorded is not None:
                    error.add_hint("to check sizes and headers: --headers-only")
                raise
            verdict = f"verified: no differences from {src}"
        elif manifest is not None:
            if headers_only:
                manifest = manifest._replace(files=tuple(file._replace(crc32=None) for file in manifest.files))
            differences = against_manifest(out, manifest, ranks, means)
            verdict = "verified: no differences from the manifest in sizes, headers and checksums"
    unchecked = [] if manifest is None else [file.rank for file in manifest.files if file.crc32 is None]
    if is_json():
        echo_json({"differences": differences, "unchecked_ranks": unchecked})
    if manifest is not None and unchecked:
        noun = counted_as(manifest.record.form)
        contents = f"contents of {rank_ranges(unchecked, noun)} were not compared"
        _warn_of_changed(out, unchecked, noun, report)
        if not differences and not headers_only:
            # Users may delete the source after this output: it must not look like a check of contents.
            with_source = shlex.join(["reshard", "verify", out, "--src", recorded_source(manifest.record)])
            raise UsageError(
                f"{out}: {contents}: the manifest has no checksums of them; sizes and headers match it",
                hint="to compare them with the source: "
                f"{merge_hint(out) if manifest.record.task.merge else with_source}\n"
                "add --headers-only if names and sizes are enough; convert --checksum crc32 records checksums",
            )
        verdict = f"no differences in sizes and headers; {contents}"
    print_differences(differences, not is_json(), verdict)


def _without_checksums(manifest: Manifest, ranks: tuple[int, ...] | None) -> str | None:
    """The recorded source, which replaces missing checksums; None if none is missing, or the source is."""
    in_part = ranks is not None and not form_named(manifest.record.form).options.by_rank
    if in_part or all(file.crc32 is not None for file in manifest.files):
        return None
    source = recorded_source(manifest.record)
    return None if source == "SRC" else source


def print_differences(
    differences: Sequence[Difference],
    to_standard_output: bool = False,
    verdict: str = "verified: no differences",
) -> None:
    """Print the differences, with -v each of them, and a line that sums up; with any, end with exit status 4.

    Args:
        differences: the differences.
        to_standard_output: where the differences go; the rest goes to standard error.
        verdict: the line without differences; none if empty.
    """
    for line in map(str, differences) if is_verbose() else _folded(differences):
        click.echo(printable(line), err=not to_standard_output)
    if differences:
        text = f"reshard: {plural(len(differences), 'difference')}: this checkpoint must not be used"
        click.echo(alarming(text), err=True)
        exit_different()
    if verdict and not is_quiet():
        click.echo(printable(verdict), err=True)


def _folded(differences: Sequence[Difference]) -> list[str]:
    """Differences in few lines: parameters that are wrong alike together."""
    alike: dict[object, list[Difference]] = {}
    for number, difference in enumerate(differences):
        if difference.parameter is None:
            alike[number] = [difference]
            continue
        detail = difference.detail.replace(quoted(difference.parameter), "")
        alike.setdefault((difference.kind, difference.ranks, detail), []).append(difference)
    lines = []
    for group in alike.values():
        names = [difference.parameter for difference in group if difference.parameter is not None]
        lines.append(str(group[0]._replace(parameter=None)) if not names else group[0].of(listing(names)))
    hidden = sum(map(len, [*alike.values()][MAX_LINES:]))
    return [*lines[:MAX_LINES], *([f"... and {plural(hidden, 'more difference')}; -v shows all"] if hidden else [])]


def _warn_of_changed(out: str, unchecked: Sequence[int], noun: str, report: Report) -> None:
    """Warn of files that may have changed, of ranks whose contents are not compared."""
    with contextlib.suppress(TargetError):
        changed = sorted(set(status_of(out).changed) & set(unchecked))
        if changed:
            report.warn(f"{rank_ranges(changed, noun)}: modified after they were written, by the times of the files")


@command(
    "fingerprint",
    """
reshard fingerprint ckpt/ --strategy src.ckpt
reshard fingerprint iterations/
reshard fingerprint hf/ --names qwen3,gate_up=interleaved,qkv=grouped
""",
)
@argument("src")
@options.group(Source, *options.STORED, path="src", strategy=options.SAVED)
@options.group(Edits, *options.SELECTION, *CHANGES)
@options.group(
    Effort, "crc", *options.LIMITS, crc={"help": "Check the CRCs that files record; damaged files count as absent."}
)
@options.output
def fingerprint(source: Source, edits: Edits, effort: Effort) -> None:
    """Print a fingerprint of every parameter of the checkpoint in SRC.

    A fingerprint depends only on name, type, shape and values, so no conversion to another layout or form
    changes it. Names in a trainer's state (dcp, hyper-parallel) count as those that the model has. The last line
    is the fingerprint of the whole checkpoint: it includes values such as global_step, but not text and values
    of single ranks (cur_rank). Only rank files need --strategy. With --names, --rename or --cast the
    fingerprint is that of the converted checkpoint.
    """
    report = Report(listener())
    asked = Conversion(source, Target(os.curdir), edits, effort)
    request = reading_request(asked, report, option="--strategy ")
    with reading_sources(effort, progress_of(), report) as means:
        result = source_fingerprints(request, means)
    for name in result.differing:
        report.warn(f"{quoted(name)} differs between files; its fingerprint is that of the lowest")
    if is_json():
        echo_json(result.to_json())
    else:
        _print_fingerprints(result)


def _print_fingerprints(result: Fingerprints) -> None:
    """A line per tensor: those of several elements first, then single values and text, then everything."""
    for each in sorted(result.parameters, key=lambda each: (math.prod(each.shape) == 1, each.name)):
        click.echo(f"{each.fingerprint:32}  {each.dtype}  {shape_words(each.shape)}  {one_line(each.name)}")
    click.echo(f"{result.whole():32}  checkpoint")
