"""fingerprint: a checksum of every parameter, independent of layout, format and step."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, Optional

import click

from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.cli import completion, options
from reshard.cli.command import argument, command, option
from reshard.cli.opened import shape_words
from reshard.cli.output import echo_json, listener
from reshard.cli.progress import progress_of
from reshard.convert.ends import options_of
from reshard.convert.verifying import reading_sources
from reshard.errors import IncompleteSourceError, UsageError, one_error
from reshard.execute import ExecutionOptions
from reshard.execute.equal import check_equal, equal_of
from reshard.execute.reader import BoxReader
from reshard.forms.ranks import SourceTree, find_checkpoints
from reshard.forms.ranks.coverage import check_ranks
from reshard.forms.registry import form_named, form_of
from reshard.opened.opening import source_strategy
from reshard.plan.editing import edited as make_edits
from reshard.plan.edits import edits_of
from reshard.records.commands import EDITS
from reshard.storage import storage_of
from reshard.strategies import Strategy
from reshard.text.filter_advice import warn_of_unmatched
from reshard.text.globs import Filters
from reshard.text.messages import joined, listing
from reshard.text.report import Report
from reshard.text.wording import are, one_line, plural, quoted, rank_ranges, step_words
from reshard.verification.edited import EditedSource
from reshard.verification.fingerprint import FingerprintEntry, Fingerprints, digest_of, fingerprints
from reshard.verification.reading import Means
from reshard.verification.saved_fingerprints import read_fingerprints
from reshard.verification.sources import CheckpointPlace, RecordedCrcs, read_ranks, read_sound, reader_of
from reshard.verification.stored import StoredSource


@command(
    "fingerprint",
    """
reshard fingerprint ckpt/ --strategy src.ckpt
reshard fingerprint iterations/
reshard fingerprint hf/ --names qwen3,gate_up=interleaved,qkv=grouped

On two machines, then on any:
reshard fingerprint ckpt/ --strategy src.ckpt --ranks 0-3 --json > part0.json
reshard fingerprint ckpt/ --strategy src.ckpt --ranks 4-7 --json > part1.json
reshard fingerprint --merge part0.json --merge part1.json
""",
)
@argument("src", required=False, shell_complete=completion.paths)
@options.strategy("Strategy the checkpoint was saved with; none for an unsharded one.", "--src-strategy", "strategy")
@options.ranks("Source", "Read only these ranks' files; the result is partial.")
@option(
    "Source",
    "--merge",
    multiple=True,
    metavar="FILE",
    shell_complete=completion.paths,
    help="Merge a result that --json printed (repeatable).",
)
@options.source
@options.selection
@options.edits
@options.crc("Check the CRCs that files record; damaged files count as absent.")
@options.effort
@options.output
def fingerprint(
    src: Optional[str],
    strategy: Optional[str],
    ranks: Optional[tuple[int, ...]],
    merge: tuple[str, ...],
    **typed: Any,
) -> None:
    """Print a fingerprint of every parameter of the checkpoint in SRC.

    A fingerprint depends only on name, type, shape and values, so no conversion to another layout or form
    changes it. Names in a trainer's state (dcp, hyper-parallel) count as those that the model has. The last line
    is the fingerprint of the whole checkpoint: it includes values such as global_step, but not text and values
    of single ranks (cur_rank). Only rank files need --strategy; for other forms --ranks are numbers of files.
    Several machines can each read some ranks (--ranks, --json); --merge combines their results, and SRC may be
    omitted then. A result is partial as long as a file that was not read may hold another parameter. With
    --names, --rename or --cast the fingerprint is that of the converted checkpoint.
    """
    report = Report(listener())
    result = Fingerprints()
    edited = any(typed[name] for name in EDITS)
    if edited and (src is None or ranks is not None):
        raise UsageError("--names, --rename and --cast need all of SRC", hint="leave out --ranks, and name SRC")
    if src is not None:
        result = _fingerprints_of(src, strategy, ranks, edited, typed, report)
    elif not merge:
        raise UsageError("SRC is missing", hint="name a checkpoint, or results of other runs with --merge FILE")
    elif ranks is not None or strategy is not None:
        raise UsageError("SRC is missing: --ranks and --strategy need it", hint="pass the checkpoint")
    for path in merge:
        result.merge(read_fingerprints(path))
    for name in result.differing:
        report.warn(f"{quoted(name)} differs between files; its fingerprint is that of the lowest")
    if typed["as_json"]:
        echo_json(result.to_json())
    else:
        _print(result, report)


def _fingerprints_of(
    src: str,
    strategy: Optional[str],
    ranks: Optional[tuple[int, ...]],
    edited: bool,
    typed: Mapping[str, Any],
    report: Report,
) -> Fingerprints:
    """The fingerprints of a checkpoint, or of some of its files."""
    edits = edits_of(src, typed)
    form, suffix = form_of(src), typed["file_suffix"]
    saved = source_strategy(src, form, strategy, suffix, report, "--strategy ")
    place = CheckpointPlace(src, form, saved, typed["step"], suffix)
    by_rank = form_named(place.form).options.by_rank
    filters = Filters(typed["include"], typed["exclude"])
    progress = progress_of(typed["quiet"], typed["progress"])
    with reading_sources(options_of(typed), progress, report) as (means, crcs):
        if by_rank and ranks is not None:
            source = _some_ranks(place, ranks, filters, means.handles, crcs, report)
        else:
            # Rules decide which source tensors are needed.
            needed = Filters() if edited else filters
            source = read_sound(reader_of(place, means.handles, report, filters=needed, files=ranks), crcs)
            _check_files(source, ranks, place)
            if not by_rank:
                _check_equal(source.checkpoint, [name for name in source.tensors if filters.admit(name)], means)
        target = source if edits.is_empty else EditedSource(source, edits, report)
        if not edits.is_empty:
            converted = make_edits(source.checkpoint, edits, Report())
            _check_equal(converted, [name for name in target.names if filters.admit(name)], means)
        warn_of_unmatched(filters, (() if edited else place.strategy.parameters, target.names), report)
        model_names = {} if edited else edits.model_names(source.checkpoint.tensors, source.checkpoint)
        if len({*model_names.values()}) < len(model_names):
            # Two tensors would have one name.
            model_names = {}
        result = fingerprints(target, means, filters.admit, model_names)
    if by_rank:
        result.groups = {(stage.ranks.start, stage.ranks.stop) for stage in place.strategy.stages}
    else:
        result.groups = {(file, file + 1) for file in source.checkpoint.files}
    if ranks is None:
        # Completeness was checked before.
        result.read = {file: "" for start, stop in result.groups for file in range(start, stop)}
    elif by_rank:
        # Damaged files count as absent.
        indexes = source.checkpoint.indexes
        result.read = {rank: digest_of(indexes[rank].tensors) for rank in ranks if rank in indexes}
    else:
        result.read = dict.fromkeys(ranks, "")
    return result


def _some_ranks(
    place: CheckpointPlace,
    ranks: tuple[int, ...],
    filters: Filters,
    handles: FileHandles,
    crcs: Optional[RecordedCrcs],
    report: Report,
) -> StoredSource:
    """The files of some ranks, complete or not."""
    tree = find_checkpoints(place.path, place.file_suffix)
    check_ranks(tree, place.strategy, handles)
    files = _files(tree, place.strategy, ranks, place.step, report)
    source, problems = read_ranks(files, place.strategy, handles, report, crcs, filters.admit)
    if problems:
        raise one_error([*problems.values()], f"{len(problems)} parameters do not fit the strategy")
    return source


def _check_files(source: StoredSource, files: Optional[tuple[int, ...]], place: CheckpointPlace) -> None:
    """Refuse numbers that no file has."""
    numbers = sorted(source.checkpoint.files)
    beyond = sorted(set(files or ()).difference(numbers))
    if beyond:
        raise UsageError(
            f"{rank_ranges(beyond, 'file')} (--ranks) {are(beyond)} out of range: {place.path} has "
            f"{rank_ranges(numbers, 'file')}",
            rank=beyond[0],
        )


def _check_equal(checkpoint: Checkpoint, names: Sequence[str], means: Means) -> None:
    """Compare tied tensors."""
    equals = equal_of(checkpoint, names)
    if equals:
        storage = storage_of(next(iter(checkpoint.files.values())))
        options = ExecutionOptions(means.jobs, means.max_memory, storage=storage)
        with contextlib.closing(BoxReader(means.handles, options)) as reader:
            check_equal(checkpoint, equals, reader)


def _files(
    tree: SourceTree,
    source: Strategy,
    ranks: tuple[int, ...],
    step: str,
    report: Report,
) -> dict[int, str]:
    """The files of the newest step that all requested ranks have."""
    beyond = [rank for rank in ranks if rank >= source.device_count]
    if beyond:
        raise UsageError(
            f"{rank_ranges(beyond)} (--ranks) {are(beyond)} out of range: {source.path} has "
            f"{plural(source.device_count, 'rank')}",
            rank=beyond[0],
        )
    for candidate in tree.candidates(step):
        absent = [rank for rank in ranks if rank not in candidate.files]
        label = step_words(candidate.step)
        if not absent:
            report.note(f"{label} is read")
            return {rank: candidate.files[rank] for rank in ranks}
        report.note(f"{label} has no file of {rank_ranges(absent)} and is skipped")
    raise IncompleteSourceError(
        f"{tree.root}: no step has files of all of {rank_ranges(ranks)}", hint="pass existing ranks with --ranks"
    )


def _print(result: Fingerprints, report: Report) -> None:
    """A line per tensor: those of several elements first, then single values and text, then everything."""
    entries = result.entries()
    single = {entry.name for entry in entries if math.prod(entry.shape) == 1}
    for entry in sorted(entries, key=lambda entry: (entry.name in single, entry.name)):
        click.echo(_line(entry))
    click.echo(f"{result.whole() or 'partial':32}  checkpoint")
    lacking, unread = result.incomplete, result.unread
    reasons: list[str] = []
    if lacking:
        reasons.append(
            f"slices of {plural(len(lacking), 'parameter')} are in no file that was read: " + listing(lacking, 3)
        )
    if unread:
        reasons.append(f"{rank_ranges(unread, 'file')} were not read")
    if reasons:
        report.warn(
            joined("; ", ["partial", *reasons, "other files' results, printed with --json, can be added with --merge"])
        )


def _line(entry: FingerprintEntry) -> str:
    return f"{entry.fingerprint or 'partial':32}  {entry.dtype}  {shape_words(entry.shape)}  {one_line(entry.name)}"
