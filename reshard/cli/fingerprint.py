"""fingerprint: a checksum of every parameter, independent of layout, format and step."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Mapping, Sequence

import click

from reshard.asked import CHANGES, Conversion, Edits, Effort, Target
from reshard.asked import Source as Read
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.cli import completion, options
from reshard.cli.command import argument, command
from reshard.cli.opened import shape_words
from reshard.cli.output import echo_json, is_json, listener
from reshard.cli.progress import progress_of
from reshard.convert.verifying import reading_sources
from reshard.execute import Budget
from reshard.execute.equal import check_equal, equal_of
from reshard.execute.reader import BoxReader
from reshard.opened.opening import reading_request
from reshard.plan.editing import edited as make_edits
from reshard.plan.planner import read_source
from reshard.storage import storage_of
from reshard.text.globs import warn_of_unmatched
from reshard.text.messages import Report, one_line, quoted
from reshard.verification.edited import edited_source
from reshard.verification.files import read_sound
from reshard.verification.fingerprint import Fingerprints, fingerprints
from reshard.verification.reading import Means
from reshard.verification.stored import Source, stored_source


@command(
    "fingerprint",
    """
reshard fingerprint ckpt/ --strategy src.ckpt
reshard fingerprint iterations/
reshard fingerprint hf/ --names qwen3,gate_up=interleaved,qkv=grouped
""",
)
@argument("src", shell_complete=completion.paths)
@options.group(Read, "strategy", "step", "file_suffix", path="src", strategy=options.SAVED)
@options.group(Edits, *options.SELECTION, *CHANGES)
@options.group(
    Effort, "crc", *options.LIMITS, crc={"help": "Check the CRCs that files record; damaged files count as absent."}
)
@options.output
def fingerprint(source: Read, edits: Edits, effort: Effort) -> None:
    """Print a fingerprint of every parameter of the checkpoint in SRC.

    A fingerprint depends only on name, type, shape and values, so no conversion to another layout or form
    changes it. Names in a trainer's state (dcp, hyper-parallel) count as those that the model has. The last line
    is the fingerprint of the whole checkpoint: it includes values such as global_step, but not text and values
    of single ranks (cur_rank). Only rank files need --strategy. With --names, --rename or --cast the
    fingerprint is that of the converted checkpoint.
    """
    report = Report(listener())
    edited, filters = edits.changes, edits.filters
    asked = Conversion(source, Target(os.curdir), edits, effort)
    request = reading_request(asked, report, option="--strategy ")
    rules = request.edits
    progress = progress_of()
    with reading_sources(effort, progress, report) as (means, crcs):

        def read(damaged: Mapping[str, str]) -> Source:
            checkpoint = read_source(request._replace(damaged=damaged), means.handles, report)
            return stored_source(checkpoint, request.source)

        stored = read_sound(read, crcs, report)
        if not request.form.options.by_rank:
            _check_equal(stored.checkpoint, [name for name in stored.tensors if filters.admit(name)], means)
        target = stored if rules.is_empty else edited_source(stored, rules, report)
        if not rules.is_empty:
            converted = make_edits(stored.checkpoint, rules, Report())
            _check_equal(converted, [name for name in target.names if filters.admit(name)], means)
        warn_of_unmatched(filters, (() if edited else request.source.parameters, target.names), report)
        model_names = {} if edited else rules.model_names(stored.checkpoint.tensors, stored.checkpoint)
        if len({*model_names.values()}) < len(model_names):
            # Two tensors would have one name.
            model_names = {}
        result = fingerprints(target, means, filters.admit, model_names)
    for name in result.differing:
        report.warn(f"{quoted(name)} differs between files; its fingerprint is that of the lowest")
    if is_json():
        echo_json(result.to_json())
    else:
        _print(result)


def _check_equal(checkpoint: Checkpoint, names: Sequence[str], means: Means) -> None:
    """Compare tied tensors."""
    equals = equal_of(checkpoint, names)
    if equals:
        storage = storage_of(next(iter(checkpoint.files.values())))
        budget = Budget.of(means.jobs, means.max_memory, storage)
        with contextlib.closing(BoxReader(means.handles, budget)) as reader:
            check_equal(checkpoint, equals, reader)


def _print(result: Fingerprints) -> None:
    """A line per tensor: those of several elements first, then single values and text, then everything."""
    for each in sorted(result.parameters, key=lambda each: (math.prod(each.shape) == 1, each.name)):
        click.echo(f"{each.fingerprint:32}  {each.dtype}  {shape_words(each.shape)}  {one_line(each.name)}")
    click.echo(f"{result.whole():32}  checkpoint")
