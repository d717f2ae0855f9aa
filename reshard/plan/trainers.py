"""Names of trainers' states: those of the model in them, and those that the target's trainers expect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError, UsageError
from reshard.forms.form import Names, Side
from reshard.forms.registry import form_named
from reshard.forms.request import PLAIN_KNOWN, PLAIN_WEIGHTS, EditRules
from reshard.strategies import Strategy
from reshard.text.messages import Report, as_glob, listing, plural, quoted
from reshard.text.names import TRAINING_STEP


def names_from_trainer(
    edits: EditRules, names: Collection[str], checkpoint: Checkpoint, report: Report
) -> Mapping[str, str | None]:
    """The names in the model, and in MindSpore's optimizers, by those in a trainer's state; None for skipped tensors.

    Args:
        edits: the edits.
        names: of all tensors, dequantised.
        checkpoint: the source, whose objects and recorded keys decide.
        report: gets notes on skipped tensors.

    Raises:
        CheckpointError: nothing shows which names are the model's.
    """
    # Loaded only here: most conversions keep names.
    from reshard.names import plain_names

    weights = edits.from_trainer == PLAIN_WEIGHTS
    renamed = plain_names(names, checkpoint.objects, checkpoint.nested, not weights)
    if renamed.prefix:
        report.note(f"names: the trainer's prefix {quoted(renamed.prefix)} is removed")
    if renamed.undecided and edits.from_trainer != PLAIN_KNOWN:
        first, *others = (f"'{as_glob(beginning)}*" for beginning in renamed.undecided)
        words = [f"--rename {first}=*'", *(f"--exclude {each}'" for each in others)]
        raise CheckpointError(
            f"{checkpoint.place}: names begin with {' and '.join(map(quoted, renamed.undecided))}, and neither the "
            "checkpoint nor its optimizer state shows whether the names in the model do",
            file=checkpoint.place,
            hint=f"`reshard convert` removes it with {' '.join(words)} and keeps all names with --rename '*=*'",
        )
    if renamed.left_out:
        report.note(
            f"{plural(len(renamed.left_out), 'tensor')} of the optimizer left out: " + listing(renamed.left_out)
        )
        steps = any(name.endswith(".step") for name in renamed.left_out)
        if steps and edits.side is Side.MINDFORMERS and TRAINING_STEP not in checkpoint.values():
            report.warn(
                f"steps of parameters are left out and there is no {TRAINING_STEP}, so MindSpore's optimizer "
                "corrects moments as in its first steps"
            )
    if renamed.outside:
        report.warn(f"{plural(len(renamed.outside), 'tensor')} beside the model left out: " + listing(renamed.outside))
    # Read with the optimizer's state.
    training = form_named(checkpoint.form).training
    counters = training.counters if weights and training is not None else ()
    return {**renamed.names, **dict.fromkeys(name for name in checkpoint.values() if name in counters)}


def names_in_model(edits: EditRules, names: Collection[str], checkpoint: Checkpoint) -> dict[str, str]:
    """The names in the model by names after `names_from_trainer`, which may still be those of a trainer's state."""
    if edits.from_trainer is not None or form_named(checkpoint.form).options.names is Names.MODEL:
        return {name: name for name in names}
    from reshard.names import plain_names

    renamed = plain_names(names, checkpoint.objects, checkpoint.nested, True)
    return {name: new or name for name, new in renamed.names.items()}


def names_for_trainer(edits: EditRules, names: Collection[str], report: Report) -> Mapping[str, str]:
    """The names that the target's trainers expect, by those in the model and in MindSpore's optimizers.

    Raises:
        UsageError: trainers expect names and packing of a table that was not asked for.
    """
    from reshard.names import families_of, name_one_of

    side = edits.side
    if (
        side is not None
        and side is not edits.source_side
        and not edits.tables
        and (families := families_of(side.value))
    ):
        raise UsageError(
            f"names and packing of the target, those of {side.value}, are not those of the source",
            hint=f"{name_one_of(families)}, with --config for the config.json of the model",
        )
    if edits.naming.model:
        report.note(f"tensor names get {edits.naming.model!r} in front, as FSDP trainers save them")
    return edits.naming.add(names)


def keys_for_trainer(
    edits: EditRules, names: Collection[str], recorded: Mapping[str, tuple[Any, ...]]
) -> Mapping[str, tuple[Any, ...]]:
    """The keys of a trainer's state by the names of its tensors.

    Args:
        edits: the edits.
        names: of the tensors after all edits.
        recorded: the keys in the source. Names that edits gave have keys where the source has their root.
    """
    from reshard.names import trainer_keys

    if edits.to_trainer:
        return {**recorded, **{name: trainer_keys(name) for name in names}}
    roots = {keys[0] for keys in recorded.values() if len(keys) > 1}
    if not roots:
        return recorded
    keys_by_name = {name: trainer_keys(name) for name in names if name not in recorded}
    return {**recorded, **{name: keys for name, keys in keys_by_name.items() if keys[0] in roots}}


def laid_out(edits: EditRules, target: Strategy, names: Collection[str]) -> Strategy:
    """The target's strategy for the names of a trainer's state; strategies list those of the model.

    Args:
        edits: the edits.
        target: the strategy.
        names: of all tensors that are written.
    """
    listed = set(target.parameters)
    if target.is_placeholder or target.is_none or listed.issuperset(names):
        return target
    after = {edits.naming.remove(name): name for name in names}
    # Without a renaming, tensors may have the names that the strategy lists. Other state, such as moments.w, keeps
    # its name in a trainer's state.
    changed = {name for before, name in after.items() if before != name}
    if not edits.to_trainer and not (listed.isdisjoint(changed) and len(after) == len(names)):
        return target
    renamed = target.with_layouts(lambda layouts: {after.get(name, name): one for name, one in layouts.items()})
    return replace(renamed, original=target)
