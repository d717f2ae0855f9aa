"""Verification of a conversion: its source is read and edited again, and compared with the target."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, stored_checkpoint
from reshard.checkpoints.formats.dtypes import PT
from reshard.forms.form import Names, Side
from reshard.forms.registry import form_named
from reshard.strategies import SAME, Strategy, shards_of
from reshard.text.messages import Report, listing, plural, quoted
from reshard.text.names import TRAINER_OPTIMIZERS, warn_of_unmatched
from reshard.verification.boxes import whole_box
from reshard.verification.computed import sums_of
from reshard.verification.converted import compare_form, object_differences, training_differences
from reshard.verification.edited import edited_source, renamed, same_layouts, stored_parts
from reshard.verification.files import RecordedCrcs, read_sound, read_written
from reshard.verification.operations import DerivedTensor
from reshard.verification.ranks import compare_ranks
from reshard.verification.reading import Difference, Means, Pair, unequal
from reshard.verification.stored import Content, Source, StoredTensor, files_read, stored_source, value_content

if TYPE_CHECKING:
    from reshard.lora import Scale
    from reshard.names import NameRules
    from reshard.plan.edits import EditRules, Request

_MAX_SHOWN = 3


class MergedAdapter(NamedTuple):
    """A low-rank adapter that was merged into the weights.

    Attributes:
        reading: its checkpoint, and the edits that give its matrices the names in the model.
        scale: factor of its products.
    """

    reading: Request
    scale: Scale


class Verified(NamedTuple):
    """A conversion to verify.

    Attributes:
        request: as it was made, with the step that it read.
        files: in rank directories the files to compare, by rank; for other forms the files relative to the directory,
            by number, empty if no record lists them.
        read: reads the source of a request.
        checked: the conversion has checked the CRCs of the source's files; they are checked only if something differs.
        adapter: the adapter added to the weights, if any.
    """

    request: Request
    files: Mapping[int, str]
    read: Callable[[Request], Checkpoint]
    checked: bool = False
    adapter: MergedAdapter | None = None


def verify_conversion(
    conversion: Verified, means: Means, report: Report, crcs: RecordedCrcs | None
) -> list[Difference]:
    """Compare a converted checkpoint with its source.

    Raises:
        ReshardError: the source lacks compared slices, or cannot be read.
    """
    request = conversion.request

    def read(damaged: Mapping[str, str]) -> Source:
        stored = stored_source(conversion.read(request._replace(damaged=damaged)), request.source)
        if not _is_tree(stored):
            return stored
        # Imported only here: other forms record the places of their slices.
        from reshard.verification.rank_trees import read_tree

        return read_tree(stored, means.handles)

    damaged = dict(request.damaged)
    if conversion.checked:
        source = read(damaged)
        different = _differences(source, conversion, means, report)
        # The conversion read a replica instead of a file with a wrong CRC.
        more = crcs.damaged(files_read(source)) if different and crcs is not None else {}
        if not more:
            return different
        damaged.update(more)
    return _differences(read_sound(read, crcs, report, damaged), conversion, means, report)


def _differences(stored: Source, conversion: Verified, means: Means, report: Report) -> list[Difference]:
    request = conversion.request
    target, source = request.target, stored
    if target.is_placeholder:
        # Of rows that are cut evenly, the full tensors are compared.
        by_shards = shards_of(target.path) is not None
        target = Strategy.none() if by_shards else request.form.strategy_of(stored.checkpoint)
    listed = [*request.source.parameters]
    if not request.edits.is_empty or conversion.adapter is not None:
        listed = [*stored.names] if request.edits.exclude else []
        source = edited_source(stored, request.edits, report)
        if request.target.path == SAME:
            target = same_layouts(source, target)
        elif not (target.is_none or source.tensors.keys() <= set(target.parameters)):
            target = renamed(target, source.last_names)
        if conversion.adapter is not None:
            reading, scale = conversion.adapter
            matrices = edited_source(stored_source(conversion.read(reading), reading.source), reading.edits, Report())
            source.tensors = sums_of(source, matrices, str(reading.src), scale)
    compared = (source.tensors[name] for name in filter(request.filters.admit, source.tensors))
    used = {name for each in compared for name in _stored_names(each)}
    differences = unequal([*_pairs(stored, source, used)], means)
    target = _for_trainer(request, target, source.tensors)
    warn_of_unmatched(request.filters, (listed, target.parameters, source.names), report)
    return [*differences, *_compared(source, target, conversion, means, report)]


def _is_tree(source: Source) -> bool:
    """Whether a checkpoint is a legacy tree of Megatron, of which the places of tensors are recorded nowhere."""
    options, paths = form_named(source.checkpoint.form).options, source.checkpoint.files.values()
    return options.arguments and bool(paths) and all(path.endswith(f".{PT}") for path in paths)


def as_asked(request: Request) -> bool:
    """Whether the rules of a request are of the kinds that are asked for."""
    rules, asked = request.edits, request.asked.edits
    return (
        rules.table is not None,
        rules.renames is not None,
        len(rules.casts),
        rules.quantisation is not None,
        rules.optimizer,
        bool(rules.reverse),
        rules.exactly,
    ) == (
        asked.names not in (None, "none"),
        bool(asked.rename),
        len(asked.cast),
        asked.dequantize is not None,
        asked.optimizer is not None,
        asked.reverse,
        asked.exactly,
    )


def between_forms(request: Request) -> EditRules:
    """The edits, with the changes of names between models and states of trainers, which are decided here again."""
    source, target = request.form.options, request.to.options
    edits = request.edits._replace(source_side=source.side, side=target.side)
    edits = edits._replace(megatron=_megatron(edits))
    if edits.renames is not None:
        return edits
    trains = source.names is not Names.MODEL
    plain = None
    if trains and target.names is Names.MODEL:
        plain = "all" if target.mindspore or edits.optimizer else "weights"
    elif trains and (edits.table is not None or target.side is Side.MEGATRON):
        plain = "all"
    trainer = target.names is Names.TRAINER and (not trains or plain is not None)
    return edits._replace(plain=plain, trainer=trainer)


def _megatron(edits: EditRules) -> NameRules | None:
    """Megatron's table for the family of the other table, where one end is Megatron's; None without."""
    if edits.table is None or Side.MEGATRON not in (edits.source_side, edits.side):
        return None
    # Imported only here: most conversions have no rules.
    from reshard.names import MEGATRON, megatron_families, rules_named, with_options

    if edits.table.path not in megatron_families():
        return None
    typed = {} if edits.megatron is None else dict(edits.megatron.chosen)
    return with_options(rules_named(MEGATRON), {**typed, "family": edits.table.path})


def _for_trainer(request: Request, strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy of a trainer's state, which may list the names of the model."""
    if strategy.is_none or request.to.options.names is Names.MODEL:
        return strategy
    listed = set(names).intersection(strategy.parameters)
    if any(name.startswith(("model.", *TRAINER_OPTIMIZERS)) for name in listed):
        return strategy
    # Imported only here: most targets have a model's names.
    from reshard.names import megatron_names, trainer_names

    names_of = megatron_names if request.to.options.side is Side.MEGATRON else trainer_names
    new_names = names_of(strategy.parameters)
    # Names that a trainer's state has beside the model, such as moments.w, are those of the strategy.
    return renamed(strategy, {name: new for name, new in new_names.items() if name not in listed})


def _compared(source: Source, target: Strategy, conversion: Verified, means: Means, report: Report) -> list[Difference]:
    request, files = conversion.request, conversion.files
    form, admit, directory = request.to, request.filters.admit, request.dst
    if form.options.by_rank:
        differences, names = compare_ranks(
            source, files, target, means, ranks=request.asked.files, admit=admit, recovered=request.task.recover
        )
        if request.asked.files is None:
            _note_left_out(source, names, request, differences, report)
        return differences
    written, differences = read_written(directory, request.to.name, means.handles, [*files.values()] or None)
    if written is None:
        return differences
    damage = RecordedCrcs(means, report).damaged(written.indexes.values())
    if damage:
        # Reading a damaged archive would end the comparison with an error.
        paths = {path: os.path.relpath(path, directory) for path in sorted(damage)}
        return [*differences, *(Difference("file", None, (), damage[path], (file,)) for path, file in paths.items())]
    if _is_tree(written):
        # Imported only here: other targets have a tensor for each of the source.
        from reshard.verification.live_trees import as_layers, problems_of
        from reshard.verification.rank_trees import ranks_of, read_tree

        source = as_layers(source, written)
        ranks = ranks_of(sorted(written.checkpoint.files.values()), means.handles)
        problems = [*problems_of([source.tensors[name] for name in filter(admit, source.tensors)], ranks)]
        if problems:
            # Which tensors such files hold is not known.
            return [
                *differences,
                *(Difference("file", None, (), text, (os.path.relpath(path, directory),)) for path, text in problems),
            ]
        written = read_tree(written, means.handles)
    if form.options.arguments:
        differences += _training_differences(source, written, request, means)
    elif form.options.names is Names.TRAINER:
        kept = admit if request.edits.keeps_objects else lambda name: False
        differences += object_differences(source.checkpoint, written.checkpoint, kept, means.handles)
        differences += _other_keys(source, written, request.edits.trainer)
    differences += training_differences(source.checkpoint, written, means.handles)
    differences += compare_form(source, written, target, directory, means, admit)
    _note_left_out(source, written.names, request, differences, report)
    cast = bool(request.edits.casts) or request.edits.quantisation is not None
    beside = form.check_beside(directory, written.checkpoint, source.checkpoint, cast, report)
    return [*differences, *(Difference("file", None, (), text, (name,)) for name, text in beside)]


def _training_differences(source: Source, written: Source, request: Request, means: Means) -> Iterator[Difference]:
    """Differences of a form's own records of the training."""
    # Imported only here: other forms have no such records.
    from reshard.verification.training import WrittenTraining, differences

    names = set(request.to.options.counters or ())
    recorded = source.checkpoint.training
    counters = {name: recorded[name] for name in names if type(recorded.get(name)) is int}
    for name in names & source.values.keys():
        value = value_content(source.indexes, name, source.values[name][0])
        data = value.read(whole_box(value.shape), means.handles).tobytes()
        counters[name] = int.from_bytes(data, "little", signed=value.dtype.startswith("Int"))
    config = request.edits.config_path or getattr(request.edits.config, "path", None)
    origin = stored_checkpoint(source.checkpoint)
    training = WrittenTraining(
        request.dst, written.checkpoint, origin, counters, request.asked.target, config, means.handles
    )
    return (Difference("file", None, (), text, (file,)) for file, text in differences(training))


def _other_keys(source: Source, written: Source, renamed: bool) -> Iterator[Difference]:
    """Tensors of a trainer's state with other keys in the metadata than their names, or the source, have."""
    # Imported only here: most targets have a model's names.
    from reshard.names import trainer_keys

    for name in written.tensors:
        expected = trainer_keys(name) if renamed else source.checkpoint.nested.get(name)
        keys = written.checkpoint.nested.get(name)
        if expected is not None and tuple(expected) != (keys and tuple(keys)):
            yield Difference("strategy", name, (), f"has the keys {keys} in the metadata, not {expected}")


def _note_left_out(
    source: Source, names: Collection[str], request: Request, differences: Collection[Difference], report: Report
) -> None:
    """Report what only the source has: users may delete it after a verification without differences."""
    left_out = sorted(source.names.difference(names))
    if left_out and not differences:
        report.note(
            f"{request.dst} lacks {plural(len(left_out), 'tensor')} of {request.src}, which filters, the "
            f"target strategy or the format left out: {listing(left_out, _MAX_SHOWN)}"
        )


def _pairs(stored: Source, source: Source, used: Collection[str]) -> Iterator[Pair]:
    """Tensors of a source that have to be equal.

    Args:
        stored: the source as it is stored.
        source: with edits.
        used: the names in its files of all that is compared.
    """
    for equal in stored.checkpoint.tied_tensors():
        tensors = (equal.representative, *equal.copies)
        if any(tensor.stored for tensor in tensors) and equal.concerns(used):
            master, *weights = (_cast_content(stored, tensor) for tensor in tensors)
            detail = f"is not its master {quoted(master.name)}, cast: the optimizer's state is that of other weights"
            yield from (Pair(master, weight, "content", detail) for weight in weights)
    for first, second in source.tied:
        detail = f"is tied to {quoted(first.name)}, which is written in its place, but their contents differ"
        yield Pair(first, second, "content", detail)
    for tensor in stored_parts(source).values():
        stages = [replace(tensor, slice_sets=(each,)) for each in tensor.whole_slice_sets()]
        for stage in stages[1:]:
            yield Pair(stages[0], stage, "stages", "the source's pipeline stages hold different values of it")


def _cast_content(stored: Source, tensor: GlobalTensor) -> Content:
    """A tensor of files, or one cast to another type; all NaN are equal."""
    content = stored.tensors[tensor.stored[0].name if tensor.stored else tensor.name]
    return DerivedTensor(content.name, tensor.dtype, tensor.item_size, tensor.shape, (content,), (), 0, True)


def _stored_names(tensor: Content) -> Iterator[str]:
    """The names in the files of all that a tensor is made of."""
    if isinstance(tensor, StoredTensor):
        yield tensor.stored_name
    for source in getattr(tensor, "sources", ()):
        yield from _stored_names(source)
