"""The record of a conversion, from its plan; and what commands that compare take from records."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from dataclasses import replace

from reshard.asked import CHANGES, Conversion, Effort, given, has_changes, is_typed, words_of
from reshard.checkpoints import FileHandles
from reshard.checkpoints.checkpoint import Checkpoint, EditedCheckpoint
from reshard.errors import UsageError
from reshard.forms.ranks.naming import RANK, fixed_directory
from reshard.forms.registry import form_of
from reshard.forms.request import EditRules, Request
from reshard.forms.target import TargetForm
from reshard.forms.tracker import RELEASE
from reshard.plan.editing import Editing
from reshard.plan.edits import NO_TABLE
from reshard.plan.plan import Plan
from reshard.records import Record, strategy_digest
from reshard.records.ledger import recorded_packing
from reshard.records.sources import digest_of, short_digest
from reshard.storage import absolute, exists, is_absolute, is_directory, real
from reshard.strategies import SAME, names_files, read_strategy
from reshard.text.messages import Report


def record_of(plan: Plan) -> Record:
    """The conversion of a plan, with the step and the format that were chosen."""
    request, form, checkpoint = plan.request, plan.form, plan.checkpoint
    asked, task = with_absolute_paths(request.asked), request.task
    # A table leaves other packing than the source's, or none.
    if isinstance(checkpoint, EditedCheckpoint) and request.edits.table is not None:
        packing = checkpoint.packing
    else:
        packing = recorded_packing(request.src)
    # Files of ranks have the source's format, which may change; those of other forms the form's.
    format = asked.target.format if not request.to.options.by_rank else "same" if task.recover else form.format
    strategy = asked.source.strategy if task.recover else asked.target.strategy
    # With other names, the strategy of "same" also lists parameters of absent ranks. It differs between runs
    # with different source ranks that write equal files, and from the source's strategy by its names.
    by_source = request.form.options.by_rank and request.target.path == SAME and not request.edits.is_empty
    return Record(
        Conversion(
            replace(asked.source, step=step_to_read(request, checkpoint.step), fallback=True),
            replace(asked.target, path=os.curdir, form=form.name, format=format, strategy=strategy, overwrite=False),
            asked.edits,
            Effort(crc=asked.effort.crc, check_replicas=asked.effort.check_replicas),
            # To resume one of several runs is to resume all of them.
            None if task.by_rank or asked.shard is not None else asked.files,
        ),
        checkpoint.step,
        form.count,
        form.names,
        form.format,
        task._replace(by_function=not is_typed(asked)),
        {
            "source_strategy": strategy_digest(request.source),
            "target_strategy": SAME if by_source else strategy_digest(request.target),
            "edits": _edits_digest(checkpoint),
            "division": _division(form),
        },
        packing,
        tuple(file for file in range(form.count) if task.lost_only and form.copied_file(file) is None),
    )


def step_to_read(request: Request, step: str | None) -> str:
    """The step that reads the source of a conversion again, which read this one, or one without a name."""
    # The directory of a single iteration is read without a step: its name may lack the number.
    if step == RELEASE or request.form.options.by_rank or request.form.steps(request.src):
        return step or "latest"
    return "latest"


def _edits_digest(checkpoint: Checkpoint) -> str:
    """A digest of the edits of a checkpoint; empty if its names and types are unchanged."""
    text = checkpoint.identity if isinstance(checkpoint, EditedCheckpoint) else ""
    return short_digest(text.encode()) if text else ""


def _division(form: TargetForm) -> str:
    """A digest of which tensors are in which file of a form, and of what options decide beside them."""
    return "" if form.by_rank else digest_of(_divided(form))


def _divided(form: TargetForm) -> Iterator[bytes]:
    yield form.settings
    for file in range(form.count):
        names = form.names_in(file)
        yield repr(sorted(form.section_of(file).layouts if names is None else names)).encode()
    for beside in form.finishing():
        if beside.compared:
            yield repr(beside.name).encode()
            yield from beside.make()


def with_absolute_paths(asked: Conversion) -> Conversion:
    """The same conversion for another working directory."""
    return replace(
        asked,
        source=replace(asked.source, path=_absolute(asked.source.path), strategy=_strategy(asked.source.strategy)),
        target=replace(
            asked.target,
            path=absolute(asked.target.path),
            strategy=_strategy(asked.target.strategy),
            args=_optional(asked.target.args),
        ),
        edits=replace(asked.edits, names=_names(asked.edits.names), config=_optional(asked.edits.config)),
    )


def _absolute(path: str) -> str:
    """The absolute path; a pattern is not normalised."""
    if RANK not in path:
        return absolute(path)
    return path if is_absolute(path) else os.path.join(os.getcwd(), path)


def _strategy(path: str | None) -> str | None:
    return absolute(path) if path is not None and names_files(path) else path


def _optional(path: str | None) -> str | None:
    return None if path is None else absolute(path)


def _names(names: str | None) -> str | None:
    """A built-in table as it is; the absolute path of a file, with its options."""
    if names is None or names == NO_TABLE:
        return names
    from reshard.names import builtin_names

    return names if names.partition(",")[0] in builtin_names() else absolute(names)


def is_copy(request: Request, record: Record | None) -> bool:
    """Whether a directory has its source's names: without records and options, one of the same form."""
    return record is None and not has_changes(request.asked.edits) and request.form.name == request.to.name


def as_recorded(asked: Conversion, record: Record, report: Report) -> Conversion:
    """A conversion with the recorded values where nothing is asked.

    Names and types are asked for together, as are filters, and the strategy and the shards of the target.

    Raises:
        UsageError: a recorded strategy is missing or was changed, or an adapter was added.
    """
    out, was, source = asked.target.path, record.asked, asked.source
    if record.task.merge and not has_changes(asked.edits):
        raise UsageError(
            f"{out}: was written by merge-lora, and verify --src has no adapter to add", hint=merge_hint(out)
        )
    if form_of(source.path).options.by_rank:
        unset = {"path": source.path, "step": source.step, "fallback": source.fallback}
        source = replace(was.source, **{**unset, **given(source)})
    cut = {"strategy": None, "shards": None} if {"strategy", "shards"} & given(asked.target).keys() else {}
    target = replace(was.target, path=out, **{**cut, **given(asked.target)})
    edits = was.edits
    for names in (CHANGES, ("include", "exclude")):
        if given(asked.edits).keys() & {*names}:
            edits = replace(edits, **{name: getattr(asked.edits, name) for name in names})
    for option, path, typed, content in (
        ("--src-strategy", source.strategy, asked.source.strategy, "source_strategy"),
        ("--dst-strategy", target.strategy, asked.target.strategy, "target_strategy"),
    ):
        if typed is None and path is not None and names_files(path):
            problem = "does not exist" if not exists(path) else "has changed"
            if not exists(path) or strategy_digest(read_strategy(path)) != record.digests[content]:
                raise UsageError(
                    f"{option} is missing: {path}, which the records in {out} name, {problem}",
                    hint=f"add {option} FILE or DIR with the strategy that {out} was converted with",
                )
    # The other recorded options decide nothing, or are those of every comparison.
    shown = [
        word
        for here, there, names in (
            (source, asked.source, ("strategy", "file_suffix", "without_ranks")),
            (target, asked.target, ("strategy", "shards", "args")),
            (edits, asked.edits, (*CHANGES, "include", "exclude")),
        )
        for word in words_of(here, names)
        if word not in words_of(there, names)
    ]
    if shown:
        report.note(f"compared with the recorded options: {shlex.join(shown)}")
    return replace(asked, source=source, target=target, edits=edits)


def check_rules(checkpoint: Checkpoint, rules: EditRules, out: str, record: Record, handles: FileHandles) -> None:
    """Compare rules of names and types, applied to the source, with those that a directory was written with.

    Raises:
        UsageError: they are others.
    """
    if not rules.is_empty:
        checkpoint = Editing(checkpoint, rules, Report(), handles=handles).edited()
    if _edits_digest(checkpoint) == record.digests["edits"]:
        return
    words = " ".join(words_of(record.asked.edits, CHANGES))
    raise UsageError(
        f"{out}: was written with other names or types than its source has; "
        + (f"the rules of {words} have changed since" if words else "no recorded option gives them"),
        hint="add the options of names and types that convert had",
    )


def source_exists(path: str) -> bool:
    """Whether a source exists; of a path with ``{rank}``, the directory before it."""
    return exists(path) or (RANK in path and is_directory(fixed_directory(path)))


def recorded_source(record: Record) -> str:
    """The recorded source, if a command can read it here; otherwise ``SRC``."""
    path = record.asked.source.path
    return path if record.is_repeatable and source_exists(path) else "SRC"


def other_source(out: str, src: str, record: Record) -> str | None:
    """A sentence with the recorded source of a directory, if it is another path than ``src``."""
    path = record.asked.source.path
    if real(src) == real(path):
        return None
    text, place = f"{out} was converted from {path}, not from {src}", recorded_source(record)
    command = f"reshard verify {shlex.quote(out)} --src {shlex.quote(place)}"
    return text if place == "SRC" else f"{text}; to compare with it: {command}"


def merge_hint(out: str) -> str:
    """How the output of merge-lora is verified."""
    return (
        f"reshard merge-lora BASE ADAPTER {shlex.quote(out)} --verify, with all options of the first run; "
        "complete files are not written again"
    )
