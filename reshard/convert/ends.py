"""From what is asked to a `Request`: the forms and strategies of both ends."""

from __future__ import annotations

from dataclasses import replace

from reshard.asked import TORCH, Conversion, Source, Task, has_changes, is_in_part
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import CheckpointError, UsageError
from reshard.forms import DEFAULT_FORM
from reshard.forms.form import Form, Layouts
from reshard.forms.ranks.naming import RANK
from reshard.forms.ranks.tree import find_checkpoints, missing_hint
from reshard.forms.registry import all_forms, check_exists, check_holds_ranks, check_options, form_named, form_of
from reshard.forms.request import Request
from reshard.plan.edits import NO_TABLE, edit_rules
from reshard.records.ledger import ledger_in
from reshard.storage import exists, is_directory
from reshard.strategies import NONE, SAME, Strategy, required_strategies, shards_of, target_named, typed_strategy
from reshard.text.messages import Report, rank_ranges


def request_of(asked: Conversion, report: Report, task: Task = Task()) -> Request:
    """The conversion with its two ends and its edits.

    Args:
        asked: the conversion.
        report: receives notes on strategies.
        task: what the run does.

    Raises:
        ReshardError: parameters are missing or contradict each other, or a strategy cannot be read.
    """
    src, dst = asked.source.path, asked.target.path
    if RANK not in src and not exists(src) and is_directory(dst) and ledger_in(dst) is None:
        hint = missing_hint(src) or f"{dst} exists: the source comes first, then the target"
        raise CheckpointError(f"{src}: does not exist", file=src, hint=hint)
    request = with_ends(asked, report, task)
    request = request.with_edits(edit_rules(src, asked.edits, request.to, asked.source.step, asked.target))
    if task.verify and is_in_part(asked) and not request.to.options.by_rank:
        raise UsageError(
            f"--verify needs all files of {request.to.name}: they are verified together",
            hint="remove --verify; when all files are written: reshard verify DST --src SRC",
        )
    return request


def with_ends(asked: Conversion, report: Report, task: Task = Task()) -> Request:
    """The conversion with the forms and strategies of source and target, without edits.

    Raises:
        UsageError: options are missing, or do not go together.
        ReshardError: a strategy cannot be read.
    """
    src = asked.source.path
    form = form_of(src)
    source_path, target_path = asked.source.strategy, target_named(asked.target.strategy, asked.target.shards)
    name = asked.target.form or (DEFAULT_FORM if target_path is not None or form.options.by_rank else None)
    if name is None and form.options.layouts is Layouts.WHOLE and (asked.edits.dequantize or asked.edits.cast):
        # Other types of the same weights are the whole conversion.
        name = form.name
    if name is None:
        *names, last = (each.name for each in all_forms() if each.options.written and each.name != DEFAULT_FORM)
        raise UsageError(
            f"--dst-strategy or --to is missing: {src} is of the form {form.name}",
            hint=f"add --dst-strategy FILE for rank files, or --to {', '.join(names)} or {last}",
        )
    to = form_named(name)
    check_options(asked.source, form)
    _check_target(asked, target_path, form, to)
    needs_strategy = form.options.needs_strategy
    if source_path is None:
        (check_holds_ranks if needs_strategy else check_exists)(src)
    if _keeps_cut(asked, form, to, target_path):
        strategy = _as_cut(asked.source)
        return Request(asked, form, strategy, to, strategy, task=task)
    if target_path is None and to.training is not None:
        target_path = to.training.default_strategy(asked.target)
    if target_path is None and to.options.shards:
        raise UsageError(
            f"--to {to.name}: --shards or --dst-strategy is missing",
            hint="add --shards N to cut rows over N files as FSDP does, or --dst-strategy FILE, DIR, same or none",
        )
    if to.options.cut:
        source_path, target_path = required_strategies(source_path if needs_strategy else NONE, target_path)
    elif needs_strategy:
        source_path, _ = required_strategies(source_path, NONE)
    source = typed_strategy(source_path, report) if source_path is not None and needs_strategy else Strategy.none()
    if target_path is None or not to.options.cut:
        target = Strategy.none()
    elif shards_of(target_path) is not None:
        target = Strategy((), target_path)
    elif target_path != SAME:
        target = typed_strategy(target_path, report)
    else:
        target = replace(source, path=SAME) if needs_strategy else Strategy.same()
    return Request(asked, form, source, to, target, task=task)


def _keeps_cut(asked: Conversion, form: Form, to: Form, target: str | None) -> bool:
    """Whether only the format of rank files changes: neither strategy is given, and nothing else is requested."""
    if not (form.options.by_rank and to.options.by_rank) or has_changes(asked.edits):
        return False
    return asked.source.strategy is None and target is None and asked.target.format in to.options.formats


def _as_cut(source: Source) -> Strategy:
    """The cut of the files of a rank tree, of any layouts.

    Raises:
        CheckpointError: ranks are missing between others, or files are.
    """
    src, ranks = source.path, find_checkpoints(source).ranks
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


def _check_target(asked: Conversion, strategy: str | None, form: Form, to: Form) -> None:
    """Refuse options that make no sense with the target's form."""
    target, src = asked.target, asked.source.path
    if not to.options.shards and target.shards is not None:
        sharded = " and ".join(f"--to {each.name}" for each in all_forms() if each.options.shards)
        hint = "name a strategy: --dst-strategy FILE or DIR" if target.form else "add --to dcp"
        hint = f"--to {to.name} divides by size: --max-shard-size SIZE" if to.options.shard_size else hint
        raise UsageError(f"--shards goes with {sharded}", hint=hint)
    if not to.options.cut and strategy not in (None, NONE):
        raise UsageError(f"--to {to.name} writes full weights, which have no strategy", hint="leave out --dst-strategy")
    if strategy == SAME and not form.options.cut:
        raise UsageError(
            f"{src}: holds full weights and no strategy, so --dst-strategy same has none to use",
            hint="name one: --dst-strategy FILE or DIR",
        )
    if target.format not in ("same", *to.options.formats):
        raise UsageError(f"--to {to.name} writes .{to.options.formats[0]} files", hint="leave out --format")
    if target.args is not None or target.sizes or target.format == TORCH:
        _check_arguments(asked, strategy, form, to)
    if not to.options.prefix and target.prefix != DEFAULT_PREFIX:
        raise UsageError(
            f"--prefix: --to {to.name} has fixed file names",
            hint="remove --prefix; to put TEXT before the names of tensors: --rename '*=TEXT*'",
        )
    if not to.options.shard_size and target.max_shard_size is not None:
        sized = " and ".join(f"--to {each.name}" for each in all_forms() if each.options.shard_size)
        raise UsageError(f"--max-shard-size is for {sized}", hint="remove --max-shard-size")


def _check_arguments(asked: Conversion, strategy: str | None, form: Form, to: Form) -> None:
    """Refuse options of trees and arguments of a training where they have no meaning."""
    target, named = asked.target, asked.edits.names not in (None, NO_TABLE)
    of_source = named and form.training is not None and target.args is not None
    if to.training is None and (target.sizes or not of_source):
        forms = " and ".join(f"--to {each.name}" for each in all_forms() if each.training is not None)
        option = "--sizes" if of_source or target.args is None else "--args"
        raise UsageError(f"{option} is for {forms}", hint=f"leave out {option}")
    if target.format != TORCH and target.sizes:
        raise UsageError("--sizes is for --format torch", hint="add --format torch, or leave out --sizes")
    if target.format == TORCH and strategy is not None:
        raise UsageError(
            "--format torch writes a tree for tensor, pipeline and expert ranks",
            hint="give their sizes in place of a strategy: --sizes tp=2,pp=2",
        )
