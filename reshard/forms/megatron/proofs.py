"""Proofs that optimizer state belongs to its weights: masters, cast to the types of the weights, equal them."""

from __future__ import annotations

from collections.abc import Collection

from reshard.checkpoints.checkpoint import TiedTensors
from reshard.forms.megatron.keys import STATE, weight_of
from reshard.forms.recorded import ChunkedCheckpoint, tensor_fault

MASTERS = (f"{STATE}fp32_param.", f"{STATE}param.")
"""Before the keys of the weights whose masters these are."""

CURE = "save it with --dist-ckpt-optim-fully-reshardable of Megatron-Core 0.15 or newer"
"""For state that cannot be read or proved."""

ONE_SAVE = "copy all files of one save"
"""For state under the names of its weights, which a part of another save makes wrong."""

LEAVE_OUT = "or leave it out: without --optimizer keep, or with --exclude 'optimizer.*'"
"""How the weights alone are converted."""


def proofs(checkpoint: ChunkedCheckpoint, names: Collection[str], others: bool = False) -> list[TiedTensors]:
    """Pairs of a master, cast to its weight's type, and the weight: if they are equal, state belongs to the weights.

    Args:
        names: masters whose state is used only if they do.
        others: all other masters are compared as well, where they are converted with their weights.
    """
    found = []
    of_weight: dict[str, list[str]] = {}
    for name in checkpoint.tensors:
        of_weight.setdefault(weight_of(name), []).append(name)
    for name, master in checkpoint.tensors.items():
        weight = checkpoint.tensors.get(weight_of(name)) if name.startswith(MASTERS) else None
        needed = name in names
        if weight is not None and (needed or others):
            cast = master._replace(dtype=weight.dtype, item_size=weight.item_size, stored=(master,))
            reason = f"state of the optimizer in {checkpoint.place} is not that of its weights"
            hint = f"{CURE if needed else ONE_SAVE}, {LEAVE_OUT}"
            only_if_equal = tuple(of_weight[weight.name]) if needed else ()
            found.append(TiedTensors(cast, (weight,), reason, hint, only_if_equal, not needed))
    return found


def refuse_unproved(checkpoint: ChunkedCheckpoint, names: Collection[str]) -> None:
    """Make state unreadable that has to be proved, with the names of some of it, where its weight or master is."""
    weights = {weight_of(name) for name in names} - {equal.copies[0].name for equal in checkpoint.tied}
    unproved = sorted(name for name in checkpoint.tensors if weight_of(name) in weights)
    error = "belongs to a weight only if its master shows it, and the master or the weight cannot be read"
    faults = {name: tensor_fault(checkpoint.place, name, error, CURE) for name in unproved}
    checkpoint.faults = {**checkpoint.faults, **faults}
    checkpoint.tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if name not in faults}
