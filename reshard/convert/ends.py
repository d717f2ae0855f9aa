"""From the parameters of a conversion, typed in a shell or in Python, to its `Request` and its `Options`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Optional

from reshard.checkpoints import FileHandles
from reshard.convert.options import Options
from reshard.defaults import DEFAULT_PREFIX, usable_cpus
from reshard.errors import CheckpointError, UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Form, Layouts, ReadRequest
from reshard.forms.ranks.naming import RANK
from reshard.forms.ranks.tree import find_checkpoints
from reshard.forms.registry import (
    all_forms,
    check_exists,
    check_holds_ranks,
    form_named,
    form_of,
)
from reshard.plan.edits import NO_EDITS, Edits, edits_of
from reshard.plan.request import Request
from reshard.records.commands import EDITS
from reshard.records.ledger import ledger_in
from reshard.storage import caches_listings, exists, is_directory
from reshard.strategies import AS_CUT, NONE, SAME, Strategy, required_strategies, shards_of, typed_strategy
from reshard.text.globs import Filters
from reshard.text.messages import Report, rank_ranges
from reshard.text.names import similar_path_hint


class Ends(NamedTuple):
    """The source and target of a conversion, and their strategies.

    Attributes:
        form: of the source.
        source: its strategy; `none` where the checkpoint records its layouts.
        to: form of the target.
        target: its strategy; `none` where it is written in full, `same` until the source is read.
    """

    form: str
    source: Strategy
    to: str
    target: Strategy


@caches_listings
def read_ends(src: str, typed: Mapping[str, Any], report: Report) -> Ends:
    """The forms and strategies of source and target.

    Raises:
        UsageError: options are missing, or do not go together.
        ReshardError: a strategy cannot be read.
    """
    form = form_named(form_of(src))
    source_path, target_path = typed["src_strategy"], typed["dst_strategy"]
    name = typed.get("to") or (DEFAULT_FORM if target_path is not None or form.options.by_rank else None)
    if name is None and form.options.layouts is Layouts.WHOLE and (typed.get("dequantize") or typed.get("cast")):
        # Other types of the same weights are the whole conversion.
        name = form.name
    if name is None:
        *names, last = (each.name for each in all_forms() if each.options.written and each.name != DEFAULT_FORM)
        raise UsageError(
            f"--dst-strategy or --to is missing: {src} is of the form {form.name}",
            hint=f"add --dst-strategy FILE for rank files, or --to {', '.join(names)} or {last}",
        )
    to = form_named(name)
    _check(src, form, to, typed)
    needs_strategy = form.options.needs_strategy
    if source_path is None:
        (check_holds_ranks if needs_strategy else check_exists)(src)
    if _keeps_cut(form, to, typed):
        strategy = _as_cut(src, typed["file_suffix"])
        return Ends(form.name, strategy, to.name, strategy)
    if to.options.shards and target_path is None:
        raise UsageError(
            f"--to {to.name}: --shards or --dst-strategy is missing",
            hint="add --shards N to cut rows over N files as FSDP does, or --dst-strategy FILE, DIR, same or none",
        )
    if to.options.cut:
        source_path, target_path = required_strategies(source_path if needs_strategy else NONE, target_path)
    elif needs_strategy:
        source_path, _ = required_strategies(source_path, NONE)
    source = typed_strategy(source_path, report) if needs_strategy else Strategy.none()
    if not to.options.cut:
        target = Strategy.none()
    elif shards_of(target_path) is not None:
        target = Strategy((), target_path)
    elif target_path != SAME:
        target = typed_strategy(target_path, report)
    else:
        target = replace(source, path=SAME) if needs_strategy else Strategy.same()
    return Ends(form.name, source, to.name, target)


def _keeps_cut(form: Form, to: Form, typed: Mapping[str, Any]) -> bool:
    """Whether only the format of rank files changes: neither strategy is given, and nothing else is requested."""
    strategies = (typed["src_strategy"], typed["dst_strategy"])
    if not (form.options.by_rank and to.options.by_rank) or any(typed.get(name) for name in EDITS):
        return False
    return strategies == (AS_CUT, AS_CUT) or (strategies == (None, None) and typed.get("format") in to.options.formats)


def _as_cut(src: str, file_suffix: Optional[str]) -> Strategy:
    """The cut of the files of a rank tree, of any layouts.

    Raises:
        CheckpointError: ranks are missing between others, or files are.
    """
    ranks = find_checkpoints(src, file_suffix).ranks
    missing = sorted(set(range(ranks[-1])).difference(ranks))
    if missing:
        raise CheckpointError(
            f"{src}: has no directory of {rank_ranges(missing)}, but of rank {ranks[-1]}",
            file=src,
            rank=missing[0],
            hint="to copy the cut of other ranks, bring these back; with strategies, replicas take their place: add "
            "--src-strategy and --dst-strategy",
        )
    return Strategy.as_cut(len(ranks))


def with_recorded_target(src: str, ends: Ends, step: str) -> Ends:
    """The same with the target strategy that the source records.

    Args:
        src: the source.
        ends: as typed.
        step: the step to read.

    Raises:
        ReshardError: the source cannot be read, or records no strategy.
    """
    if not ends.target.is_placeholder:
        return ends
    if shards_of(ends.target.path) is not None:
        # Verification compares full tensors, so it does not need the shapes of the cut rows.
        return ends._replace(target=Strategy.none())
    with FileHandles() as handles:
        # Reading the tensors later prints the warnings.
        form = form_named(ends.form)
        checkpoint = form.read(ReadRequest(src, handles, Report(), step, required=lambda name: False))
        return ends._replace(target=form.strategy_of(checkpoint))


def _check(src: str, form: Form, to: Form, typed: Mapping[str, Any]) -> None:
    """Refuse options that make no sense with a form."""
    source, target = typed["src_strategy"], typed["dst_strategy"]
    if form.options.layouts is Layouts.RECORDED and source is not None:
        raise UsageError(
            f"{src}: is {form.options.title}, whose metadata contains the layouts", hint="leave out --src-strategy"
        )
    if not form.options.cut and source not in (None, NONE, "None"):
        raise UsageError(f"{src}: holds full weights, which have no strategy", hint="leave out --src-strategy")
    if not form.options.by_rank and typed["file_suffix"] is not None:
        raise UsageError("--file-suffix is for rank files", hint="remove --file-suffix")
    if not form.options.by_rank and typed.get("without_ranks"):
        raise UsageError("--without-ranks is for rank files", hint="remove --without-ranks")
    if not to.options.shards and target is not None and shards_of(target) is not None:
        sharded = " and ".join(f"--to {each.name}" for each in all_forms() if each.options.shards)
        hint = "name a strategy: --dst-strategy FILE or DIR" if typed.get("to") else "add --to dcp"
        raise UsageError(f"--shards goes with {sharded}", hint=hint)
    if not to.options.cut and target not in (None, NONE, "None"):
        raise UsageError(f"--to {to.name} writes full weights, which have no strategy", hint="leave out --dst-strategy")
    if target == SAME and not form.options.cut:
        raise UsageError(
            f"{src}: holds full weights and no strategy, so --dst-strategy same has none to use",
            hint="name one: --dst-strategy FILE or DIR",
        )
    if typed.get("format") not in (None, "same", *to.options.formats):
        raise UsageError(f"--to {to.name} writes .{to.options.formats[0]} files", hint="leave out --format")
    if not to.options.prefix and typed.get("prefix", DEFAULT_PREFIX) != DEFAULT_PREFIX:
        raise UsageError(
            f"--prefix: --to {to.name} has fixed file names",
            hint="remove --prefix; to put TEXT before the names of tensors: --rename '*=TEXT*'",
        )
    if not to.options.shard_size and typed.get("max_shard_size") is not None:
        sized = " and ".join(f"--to {each.name}" for each in all_forms() if each.options.shard_size)
        raise UsageError(f"--max-shard-size is for {sized}", hint="remove --max-shard-size")


def check_verifiable(request: Request, options: Options) -> None:
    """Refuse to verify a part of the files of full weights: they are compared with the source together.

    Raises:
        UsageError: it is requested.
    """
    in_part = request.files is not None or options.share is not None
    if options.verify and in_part and not form_named(request.to).options.by_rank:
        raise UsageError(
            f"--verify needs all files of {request.to}: they are verified together",
            hint="remove --verify; when all files are written: reshard verify DST --src SRC",
        )


@caches_listings
def request_between(
    src: str, dst: str, ranks: Optional[Sequence[int]], typed: Mapping[str, Any], report: Report
) -> Request:
    """The request of a conversion.

    Args:
        src: the source.
        dst: the target directory.
        ranks: target ranks, or numbers of target files, ascending; None for all.
        typed: the other parameters, by the names of their options.
        report: receives notes on strategies.

    Raises:
        ReshardError: parameters are missing or contradict each other, or a strategy cannot be read.
    """
    if RANK not in src and not exists(src) and is_directory(dst) and ledger_in(dst) is None:
        hint = similar_path_hint(src) or f"{dst} exists: the source comes first, then the target"
        raise CheckpointError(f"{src}: does not exist", file=src, hint=hint)
    ends = read_ends(src, typed, report)
    return request_of(src, dst, ranks, typed, ends, edits_of(src, typed, ends.to))


def request_of(
    src: str,
    dst: str,
    ranks: Optional[Sequence[int]],
    typed: Mapping[str, Any],
    ends: Ends,
    edits: Edits = NO_EDITS,
    recover: bool = False,
) -> Request:
    """The request for known forms and strategies; a recovery has only some of the parameters."""
    return Request(
        src=src,
        dst=dst,
        source=ends.source,
        target=ends.target,
        files=None if ranks is None else tuple(ranks),
        prefix=typed.get("prefix", DEFAULT_PREFIX),
        format=typed.get("format", "same"),
        step=typed["step"],
        fallback=not typed.get("no_fallback"),
        file_suffix=typed["file_suffix"],
        without_ranks=typed.get("without_ranks") or (),
        filters=Filters(typed.get("include", ()), typed.get("exclude", ())),
        allow_missing=tuple(typed.get("allow_missing", ())),
        recover=recover,
        form=ends.form,
        to=ends.to,
        max_shard_size=typed.get("max_shard_size"),
        edits=edits,
    )


def options_of(typed: Mapping[str, Any], **attributes: Any) -> Options:
    """How a conversion is carried out, by those of its parameters that `Options` has; ``attributes`` override them."""
    values = {name: typed[name] for name in Options._fields if name in typed}
    values["jobs"] = typed["jobs"] or usable_cpus()
    return Options(**{**values, **attributes})
