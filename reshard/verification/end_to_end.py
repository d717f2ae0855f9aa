"""Verification of a conversion: its source is read and edited again, and compared with the target."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from reshard.asked import has_changes, is_in_part
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, stored_checkpoint
from reshard.checkpoints.formats.dtypes import PT
from reshard.defaults import DEFAULT_PREFIX
from reshard.errors import UsageError
from reshard.forms.form import Names, Side, strategy_of
from reshard.forms.full.form import CONFIG
from reshard.forms.pytorch.form import HYPER_PARALLEL
from reshard.forms.registry import form_named
from reshard.strategies import SAME, Strategy, shards_of
from reshard.text.globs import warn_of_unmatched
from reshard.text.messages import Report, listing, plural, quoted
from reshard.text.names import TRAINER_OPTIMIZERS
from reshard.verification.beside import beside_differences
from reshard.verification.computed import sums_of
from reshard.verification.converted import (
    compare_form,
    is_iteration,
    iteration_differences,
    object_differences,
    record_differences,
)
from reshard.verification.edited import edited_source, renamed, same_layouts, steps_listed, stored_parts
from reshard.verification.files import read_sound, read_written
from reshard.verification.operations import DerivedTensor
from reshard.verification.ranks import compare_ranks
from reshard.verification.reading import Difference, Pair, Reading, unequal
from reshard.verification.stored import Content, Source, StoredTensor, files_read, stored_source

if TYPE_CHECKING:
    from reshard.forms.request import EditRules, Request
    from reshard.lora import Scale
    from reshard.names import NameRules

_MAX_SHOWN = 3
_MAX_CONFIG = 1 << 22


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
        kept: files beside the weights that the target held before the conversion.
        recorded: the target's records, or the conversion that has just ended, list its options.
    """

    request: Request
    files: Mapping[int, str]
    read: Callable[[Request], Checkpoint]
    checked: bool = False
    adapter: MergedAdapter | None = None
    recorded: bool = True
    kept: Collection[str] = ()


def verify_conversion(conversion: Verified, means: Reading) -> list[Difference]:
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
        different = _differences(source, conversion, means)
        # The conversion read a replica instead of a file with a wrong CRC.
        more = means.damaged(files_read(source)) if different and means.crc else {}
        if not more:
            return different
        damaged.update(more)
    return _differences(read_sound(read, means, damaged), conversion, means)


def _differences(stored: Source, conversion: Verified, means: Reading) -> list[Difference]:
    request = conversion.request
    target, source = request.target, stored
    if target.is_placeholder:
        # Of rows that are cut evenly, the full tensors are compared.
        by_shards = shards_of(target.path) is not None
        target = Strategy.none() if by_shards else strategy_of(request.form, stored.checkpoint)
    listed = [*request.source.parameters]
    if not request.edits.is_empty or conversion.adapter is not None:
        listed = [*stored.names] if request.edits.exclude else []
        source = edited_source(stored, request.edits, means.report, means.handles)
        if request.target.path == SAME:
            target = same_layouts(source, target)
        elif not (target.is_none or source.tensors.keys() <= set(target.parameters)):
            target = renamed(target, source.last_names)
        if conversion.adapter is not None:
            reading, scale = conversion.adapter
            adapter = stored_source(conversion.read(reading), reading.source)
            matrices = edited_source(adapter, reading.edits, Report(), means.handles)
            source.tensors = sums_of(source, matrices, str(reading.src), scale)
    compared = (source.tensors[name] for name in filter(request.filters.admit, source.tensors))
    used = {name for each in compared for name in _stored_names(each)}
    differences = unequal([*_pairs(stored, source, used, is_in_part(request.asked))], means)
    target = steps_listed(_for_trainer(request, target, source.tensors), source.tensors)
    warn_of_unmatched(request.filters, (listed, target.parameters, source.names), means.report)
    return [*differences, *_compared(source, target, conversion, means)]


def _is_tree(source: Source) -> bool:
    """Whether a checkpoint is a legacy tree of Megatron, of which the places of tensors are recorded nowhere."""
    training, paths = form_named(source.checkpoint.form).training, source.checkpoint.files.values()
    return training is not None and bool(paths) and all(path.endswith(f".{PT}") for path in paths)


def has_the_asked_rules(request: Request) -> bool:
    """Whether the rules of a request are of the kinds that are asked for."""
    rules, asked = request.edits, request.asked.edits
    return (
        rules.table is not None,
        rules.renames is not None,
        len(rules.casts),
        rules.quantisation is not None,
        rules.optimizer,
        bool(rules.reverse),
        rules.renamed_one_by_one,
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
    edits = edits._replace(tables=_tables(edits))
    if edits.renames is not None:
        return edits
    trains = source.names is not Names.MODEL
    plain = None
    if trains and target.names is Names.MODEL:
        plain = "all" if target.mindspore or edits.optimizer else "weights"
    elif trains and (edits.table is not None or target.side is Side.MEGATRON):
        plain = "all"
    trainer = target.names is Names.TRAINER and (not trains or plain is not None)
    return edits._replace(from_trainer=plain, to_trainer=trainer)


def _tables(edits: EditRules) -> tuple[NameRules, ...]:
    """The table that was asked for and, where one end is Megatron's, Megatron's for the same family."""
    if edits.table is None or Side.MEGATRON not in (edits.source_side, edits.side):
        return edits.tables[:1]
    # Imported only here: most conversions have no rules.
    from reshard.names import families_of, rules_named, with_options

    megatron = Side.MEGATRON.value
    if edits.table.path not in families_of(megatron):
        return (edits.table,)
    typed = {} if edits.table_of_side is None else dict(edits.table_of_side.chosen)
    return edits.table, with_options(rules_named(megatron), {**typed, "family": edits.table.path})


def _for_trainer(request: Request, strategy: Strategy, names: Collection[str]) -> Strategy:
    """The strategy of a trainer's state, which may list the names of the model."""
    if strategy.is_none or request.to.options.names is Names.MODEL:
        return strategy
    listed = set(names).intersection(strategy.parameters)
    if any(name.startswith(("model.", *TRAINER_OPTIMIZERS)) for name in listed):
        return strategy
    # Imported only here: most targets have a model's names.
    from reshard.names import naming_of

    new_names = naming_of(request.to.options.side.value).add(strategy.parameters)
    # Names that a trainer's state has beside the model, such as moments.w, are those of the strategy.
    return renamed(strategy, {name: new for name, new in new_names.items() if name not in listed})


def _compared(source: Source, target: Strategy, conversion: Verified, means: Reading) -> list[Difference]:
    request, files = conversion.request, conversion.files
    form, admit, directory = request.to, request.filters.admit, request.dst
    if form.options.by_rank:
        differences, names = compare_ranks(
            source, files, target, means, ranks=request.asked.files, admit=admit, recovered=request.task.recover
        )
        _check_options(conversion, names, differences)
        if request.asked.files is None:
            _note_left_out(source, names, request, differences, means.report)
        return differences
    written, differences = read_written(directory, request.to.name, means.handles, [*files.values()] or None)
    if written is None:
        return differences
    damage = means.damaged(written.indexes.values())
    if damage:
        # Reading a damaged archive would end the comparison with an error.
        paths = {path: os.path.relpath(path, directory) for path in sorted(damage)}
        return [*differences, *(Difference("file", None, (), damage[path], (file,)) for path, file in paths.items())]
    # A copy without records has what its source has: that is no difference.
    own = None if conversion.recorded or request.form.name != form.name else stored_checkpoint(source.checkpoint)
    training = form.training
    if _is_tree(written):
        # Imported only here: other targets have a tensor for each of the source.
        from reshard.verification.live_trees import as_layers, tree_differences
        from reshard.verification.rank_trees import read_tree

        stated = request.asked.target.args
        stated_sizes = {} if stated is None or training is None else training.stated_configuration(stated)
        source = as_layers(source, written, stated_sizes.get("padded_vocab_size"))
        expected = [source.tensors[name] for name in filter(admit, source.tensors)]
        found = _beyond(own, written.checkpoint, lambda each: tree_differences(expected, each, means.handles))
        if found:
            # Which tensors such files hold is not known.
            return [*differences, *found]
        written = read_tree(written, means.handles)
    if training is not None:
        # Imported only here: other forms have no such records.
        from reshard.verification.live_trees import MASTERS, named_as
        from reshard.verification.training import training_differences

        if own is not None:
            source = replace(source, tensors=named_as(source.tensors.values(), written.tensors, MASTERS))
        asked, config = request.asked.target, request.edits.config_path
        differences += _beyond(
            own, written.checkpoint, lambda each: training_differences(each, source, asked, config, means.handles)
        )
    elif form.options.names is Names.TRAINER:
        kept = request.edits.keeps_objects
        objects = {name: each for name, each in source.checkpoint.objects.items() if kept and admit(name)}
        differences += object_differences(objects, written.checkpoint, means.handles)
        differences += _other_keys(source, written, request)
        if form.name == HYPER_PARALLEL and conversion.recorded:
            differences += record_differences(written.checkpoint)
    if is_iteration(written.checkpoint):
        # Later runs of verify do not know the prefix.
        prefix = (request.asked.target.prefix or DEFAULT_PREFIX) if conversion.checked else None
        origin = stored_checkpoint(source.checkpoint)
        differences += iteration_differences(origin, written.checkpoint, prefix, means.handles)
    differences += compare_form(source, written, target, directory, means, admit)
    _check_options(conversion, written.names, differences)
    _note_left_out(source, written.names, request, differences, means.report)
    if form.options.side is Side.HUGGINGFACE and not form.options.cut:
        copied = conversion.checked and CONFIG not in conversion.kept
        differences += beside_differences(source.checkpoint, written.checkpoint, request.asked, copied, means.report)
    return differences


def _beyond(
    own: Checkpoint | None, written: Checkpoint, check: Callable[[Checkpoint], Iterable[Difference]]
) -> list[Difference]:
    """What a check finds in a written checkpoint, but what it finds in ``own`` as well."""
    found = [*check(written)]
    known = {*check(own)} if found and own is not None else set()
    return [each for each in found if each not in known]


def _check_options(conversion: Verified, names: Collection[str], differences: Collection[Difference]) -> None:
    """Refuse a target without records whose names or types no option gives.

    Raises:
        UsageError: most names or types are not the source's.
    """
    request = conversion.request
    if conversion.recorded or has_changes(request.asked.edits):
        return
    for kind, noun, options in (("extra", "names", "--names, --rename or --optimizer"), ("type", "types", "--cast")):
        others = sorted({each.parameter for each in differences if each.kind == kind and each.parameter is not None})
        if 2 * len(others) > len(names):
            raise UsageError(
                f"{request.dst}: its {noun} are not those of {request.src}, and no record lists the options of the "
                "conversion: " + listing(others, _MAX_SHOWN),
                parameter=others[0],
                hint=f"add the options that convert had: {options}",
            )


def _other_keys(source: Source, written: Source, request: Request) -> Iterator[Difference]:
    """Tensors of a trainer's state with other keys in the metadata than their names, or the source, have."""
    recorded = source.checkpoint.nested
    # torch takes a state whose keys are recorded in part, or not at all, for one without a key "model".
    keyless = request.edits.is_empty and not recorded and request.form.options.names is not Names.MODEL
    # Imported only here: most targets have a model's names.
    from reshard.names import trainer_keys

    for name in written.tensors:
        expected = trainer_keys(name) if request.edits.to_trainer else recorded.get(name)
        keys = written.checkpoint.nested.get(name)
        if keyless and keys:
            yield Difference("strategy", name, (), f"has the keys {keys} in the metadata, and none in the source's")
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


def _pairs(stored: Source, source: Source, used: Collection[str], in_part: bool) -> Iterator[Pair]:
    """Tensors of a source that have to be equal.

    Args:
        stored: the source as it is stored.
        source: with edits.
        used: the names in its files of all that is compared.
        in_part: some files of the target are compared.
    """
    for equal in stored.checkpoint.tied_tensors():
        tensors = (equal.representative, *equal.copies)
        if any(tensor.stored for tensor in tensors) and equal.concerns(used) and not (equal.optional and in_part):
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
