"""Opening a checkpoint: its form, and the selected tensors."""

from __future__ import annotations

import operator
import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import Optional, Union

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.dtypes import MEMORY
from reshard.defaults import MAX_MEMORY, usable_cpus
from reshard.errors import UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Layouts, ReadRequest
from reshard.forms.registry import check_exists, check_holds_ranks, form_named, form_of
from reshard.opened.checkpoint import OpenedCheckpoint, ReadingEffort
from reshard.plan.edits import NO_EDITS, Edits, typed_edits
from reshard.plan.request import Request
from reshard.records.identity import strategy_digest
from reshard.records.ledger import recorded_strategy
from reshard.storage import caches_listings
from reshard.strategies import NONE, SAME, Strategy, shards_of, target_named, target_words, typed_strategy
from reshard.text.globs import Filters
from reshard.text.in_python import errors_in_python, in_python
from reshard.text.messages import Report, logged, plural

Path = Union[str, "os.PathLike[str]"]
Texts = Union[str, Sequence[str]]


@errors_in_python()
def open(
    src: Path,
    *,
    src_strategy: Optional[Path] = None,
    dst_strategy: Optional[Path] = None,
    shards: Optional[int] = None,
    rank: Optional[int] = None,
    step: Union[str, int] = "latest",
    file_suffix: Optional[str] = None,
    without_ranks: Sequence[int] = (),
    include: Texts = (),
    exclude: Texts = (),
    names: Optional[Path] = None,
    rename: Texts = (),
    config: Optional[Path] = None,
    reverse: bool = False,
    optimizer: bool = False,
    cast: Texts = (),
    dequantize: Optional[str] = None,
    jobs: Optional[int] = None,
    max_memory: int = MAX_MEMORY,
    io: str = "auto",
) -> OpenedCheckpoint:
    """Open a checkpoint of any form, to read tensors from its files.

    Without ``dst_strategy`` tensors are whole, in any layout of the source. With it, they are the slices that a
    conversion would write for one of its ranks. Warnings and notes go to the logger ``reshard``.

    Args:
        src: rank directories, a file, a path with ``{rank}`` in it, or a directory of another form.
        src_strategy: strategy file or directory that rank directories were saved with; ``"none"`` for an unsharded
            checkpoint. Other forms record their layouts.
        dst_strategy: strategy of the requested slices; ``"same"`` for the source's.
        shards: number of ranks over which rows are cut, as PyTorch's FSDP cuts them, in place of ``dst_strategy``.
        rank: rank of ``dst_strategy`` or ``shards`` whose slices are read.
        step: step to read, ``"3_10"`` or an iteration's number; ``latest`` is the newest complete one.
        file_suffix: read only files of ranks whose stem ends with it.
        without_ranks: ranks of ``src`` that count as lost: replicas on other ranks are read.
        include: read only names that match this pattern, or one of these.
        exclude: skip names that match; overrides ``include``.
        names: a built-in table of rules of names and packing, or its file, with its options, such as
            ``"qwen3,gate_up=halves,qkv=grouped"``; names of tensors
            are then those on its other side.
        rename: rules ``"OLD=NEW"``; a ``*`` in both keeps its text.
        config: file with the model's sizes; by default the config.json of ``src``.
        reverse: apply the table from right to left.
        optimizer: apply the table to optimizer state as well; otherwise the state is left out.
        cast: ``"BFloat16"`` for all floating-point weights, or ``"GLOB=Float32"`` for tensors that match; the last
            match wins. ``"bf16"``, ``"fp16"`` and ``"fp32"`` are short for the types.
        dequantize: ``"BFloat16"``, ``"Float16"`` or ``"Float32"``: type in which quantised weights are read.
        jobs: CPUs to keep busy; by default those that this process may use.
        max_memory: bytes for buffers, and for tensors that are read ahead.
        io: ``auto``, which reads explicitly, ``mmap`` or ``pread``.

    Raises:
        UsageError: options are missing, or contradict each other.
        ReshardError: the checkpoint is missing, or a strategy cannot be read.
    """
    report = logged(in_python)
    filters = Filters(texts_of(include), texts_of(exclude))
    edits = typed_edits(
        os.fspath(src),
        text_of(names),
        texts_of(rename),
        text_of(config),
        reverse,
        optimizer,
        texts_of(cast),
        dequantize,
    )
    if io not in ("auto", "mmap", "pread"):
        raise UsageError(f"io {io!r} is none of 'auto', 'mmap' and 'pread'")
    cut = target_named(text_of(dst_strategy), shards)
    request = reading_request(
        os.fspath(src),
        text_of(src_strategy),
        cut,
        rank,
        str(step),
        file_suffix,
        filters,
        report,
        edits,
        without_ranks=ranks_of("without_ranks", without_ranks),
    )
    effort = ReadingEffort(jobs or usable_cpus(), max_memory, io)
    return OpenedCheckpoint(request, FileHandles(), effort, report, errors_in_python)


@caches_listings
def reading_request(
    src: str,
    src_strategy: Optional[str],
    dst_strategy: Optional[str],
    rank: Optional[int],
    step: str,
    file_suffix: Optional[str],
    filters: Filters,
    report: Report,
    edits: Edits = NO_EDITS,
    option: str = "src_strategy=",
    unrecorded: Optional[str] = None,
    without_ranks: Sequence[int] = (),
) -> Request:
    """The conversion request for reading: its target is one file in memory, which is never written.

    Args:
        src: the source.
        src_strategy: see `open`.
        dst_strategy: see `open`.
        rank: see `open`.
        step: see `open`.
        file_suffix: see `open`.
        filters: filters of names.
        report: gets notes on strategies.
        edits: requested names and types.
        option: spelling of the ``src_strategy`` option, for messages.
        unrecorded: see `source_strategy`.
        without_ranks: see `open`.

    Raises:
        UsageError: options are missing, or contradict each other.
        ReshardError: the checkpoint is missing, or a strategy cannot be read.
    """
    form = form_of(src)
    if without_ranks and not form_named(form).options.by_rank:
        raise UsageError("--without-ranks is for rank files", hint="remove --without-ranks")
    source = source_strategy(src, form, src_strategy, file_suffix, report, option, unrecorded)
    target, file = _target(src, form, source, dst_strategy, rank, step, report)
    return Request(
        src=src,
        dst=os.curdir,
        source=source,
        target=target,
        files=(file,),
        format=MEMORY,
        step=step,
        file_suffix=file_suffix,
        without_ranks=tuple(without_ranks),
        filters=filters,
        form=form,
        to=DEFAULT_FORM,
        edits=edits,
    )


def open_requested(request: Request, effort: ReadingEffort, report: Optional[Report] = None) -> OpenedCheckpoint:
    """Open the one file of a request whose target is `ranks` and whose format is `MEMORY`."""
    return OpenedCheckpoint(request, FileHandles(), effort, report or Report())


def source_strategy(
    src: str,
    form: str,
    strategy: Optional[str],
    file_suffix: Optional[str],
    report: Report,
    option: str,
    unrecorded: Optional[str] = None,
) -> Strategy:
    """The strategy of a source, as typed or recorded by the conversion that wrote it; `none` for other forms.

    Args:
        src: the source.
        form: of the source.
        strategy: as typed.
        file_suffix: as typed; only for rank directories.
        report: gets notes on the strategy.
        option: spelling of the option, for messages.
        unrecorded: the strategy of rank directories without a typed or recorded one.

    Raises:
        UsageError: rank directories have neither, or it is given for another form.
    """
    check_exists(src)
    if form_named(form).options.needs_strategy:
        recorded = recorded_strategy(src) if strategy is None else None
        strategy = unrecorded if strategy is None else strategy
        if recorded is not None:
            typed = None if strategy is None else typed_strategy(strategy, report)
            if typed is None or strategy_digest(typed) != strategy_digest(recorded.strategy):
                path = shlex.quote(recorded.strategy.path)
                report.note(f"{src} is read with its recorded strategy: {option}{path}")
            if not recorded.complete:
                report.warn(
                    f"the conversion to {src} is not complete; to complete it: reshard resume {shlex.quote(src)}"
                )
            return recorded.strategy
        if strategy is None:
            check_holds_ranks(src)
            file, directory, none = (f"'{word}'" if option.endswith("=") else word for word in ("FILE", "DIR", NONE))
            raise UsageError(
                f"{src}: rank files do not record how they are cut",
                hint=f"add {option}{file} or {option}{directory}; for an unsharded checkpoint pass none: "
                f"{option}{none}",
            )
        return typed_strategy(strategy, report)
    if strategy not in (None, NONE, "None"):
        raise UsageError(f"{src}: is of the form {form}, which needs no strategy", hint="leave it out")
    if file_suffix is not None:
        raise UsageError(
            f"{src}: is of the form {form}; a file suffix is only for rank directories", hint="leave it out"
        )
    return Strategy.none()


def _target(
    src: str, form: str, source: Strategy, strategy: Optional[str], rank: Optional[int], step: str, report: Report
) -> tuple[Strategy, int]:
    """The strategy of the requested slices, and its rank."""
    if strategy is None and rank is not None:
        raise UsageError(
            f"the strategy of rank {rank} is missing", hint="add dst_strategy=..., 'same' for the source's"
        )
    if strategy is None:
        return Strategy.none(), 0
    shards = shards_of(strategy)
    if shards is not None:
        target = Strategy.shards(shards)
    elif strategy != SAME:
        target = typed_strategy(strategy, report)
    elif form_named(form).options.layouts is Layouts.RECORDED:
        with FileHandles() as handles:
            reading = ReadRequest(src, handles, Report(), step, required=lambda name: False)
            target = form_named(form).strategy_of(form_named(form).read(reading))
    elif form_named(form).options.needs_strategy:
        # Cut like the source, under any names.
        target = replace(source, path=SAME)
    else:
        raise UsageError(f"{src}: holds full weights, which have no strategy for slices")
    count = shards or target.device_count
    shown = strategy if shards is None else " ".join(target_words(strategy))
    if rank is None and count > 1:
        raise UsageError(f"the target strategy ({shown}) has {plural(count, 'rank')}", hint="add rank=...")
    if rank is not None and not 0 <= rank < count:
        raise UsageError(
            f"rank {rank} is out of range: the target strategy ({shown}) has {plural(count, 'rank')}", rank=rank
        )
    return target, rank or 0


def texts_of(texts: Texts) -> tuple[str, ...]:
    """One text or several, as a tuple."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def ranks_of(parameter: str, ranks: Sequence[int]) -> tuple[int, ...]:
    """Ranks in ascending order, each once.

    Raises:
        UsageError: the value of the parameter of this name is another one.
    """
    try:
        return tuple(sorted({*map(operator.index, ranks)}))
    except TypeError as error:
        raise UsageError(f"{parameter}={ranks!r} is no list of ranks such as [3, 7]") from error


def text_of(path: Optional[Path]) -> Optional[str]:
    """A path as a text."""
    return None if path is None else os.fspath(path)
