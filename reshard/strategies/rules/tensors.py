"""The tensors of a model: full shapes, and the optimizer state of each weight."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from reshard.text.globs import matcher, pattern_of
from reshard.text.names import ACCUMULATED_GRADIENTS, natural_order, state_prefix

# A number in a name, as of layers and experts.
_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")
# Factored state, of rows or columns alone, has one dimension less.
_FACTORED = ("_row.", "_col.")


class FullTensor(NamedTuple):
    """A tensor of the model, uncut."""

    name: str
    shape: tuple[int, ...]
    dtype: str | None = None


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model.

    Attributes:
        path: source of the shapes.
        weights: the tensors that rules match, by name, in the file's order.
        states: per weight the prefixes of its optimizer state.
        item_sizes: bytes of an element per element type.
        other_shapes: optimizer state with another shape than its weight.
    """

    path: str
    weights: dict[str, FullTensor]
    states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    item_sizes: dict[str, int] = field(default_factory=dict)
    other_shapes: tuple[str, ...] = ()


def model_tensors(path: str, tensors: Iterable[FullTensor], item_sizes: dict[str, int]) -> ModelTensors:
    """Separate weights from their optimizer state: ``adam_m.w`` of ``w``; gradients are not kept."""
    by_name = {tensor.name: tensor for tensor in tensors}
    belonging = belonging_to_weights(by_name, {name: tensor.shape for name, tensor in by_name.items()})
    # A gradient without its weight in the file is not a weight.
    weights = {
        name: tensor
        for name, tensor in by_name.items()
        if name not in belonging and not name.startswith(ACCUMULATED_GRADIENTS)
    }
    other_shapes = tuple(
        name for name, (_, weight) in belonging.items() if by_name[name].shape != by_name[weight].shape
    )
    return ModelTensors(path, weights, states_by_weight(belonging), item_sizes, other_shapes)


def belonging_to_weights(
    names: Collection[str], shapes: Mapping[str, tuple[int, ...]] | None = None
) -> dict[str, tuple[str, str]]:
    """Optimizer state and gradients among names: the prefix, and the weight's name.

    A weight's name can end in another weight's, as ``mtp.norm.weight`` does. A prefix of no known optimizer
    counts as one of state only if most weights have it.

    Args:
        names: weights, their state and gradients.
        shapes: their shapes, if known. State has the shape of its weight, unless it is factored.
    """
    by_prefix: dict[str, list[str]] = {}
    for name in names:
        prefix, _, weight = name.partition(".")
        if weight in names:
            by_prefix.setdefault(f"{prefix}.", []).append(weight)
    weights = len(names) - sum(map(len, by_prefix.values()))
    belonging = {}
    for prefix, of in by_prefix.items():
        optimizer = state_prefix(prefix + of[0], names)
        if not optimizer and 2 * len(of) <= weights:
            continue
        for weight in of:
            same_shape = shapes is None or shapes[prefix + weight] == shapes[weight]
            if same_shape or prefix.endswith(_FACTORED):
                belonging[prefix + weight] = prefix[:-1], weight
    return belonging


def states_by_weight(belonging: Mapping[str, tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Per weight, the prefixes of its optimizer state."""
    states: dict[str, list[str]] = {}
    for prefix, weight in belonging.values():
        if f"{prefix}." != ACCUMULATED_GRADIENTS:
            states.setdefault(weight, []).append(prefix)
    return {weight: tuple(prefixes) for weight, prefixes in states.items()}


def patterns_for(names: Sequence[str], all_names: Iterable[str]) -> list[str]:
    """Shell patterns that match exactly these of all names, with ``*`` for numbers where possible."""
    numbered: dict[str, list[str]] = {}
    chosen = frozenset(names)
    counts: dict[str, int] = {}
    for name in all_names:
        pattern = numberless(name)
        counts[pattern] = counts.get(pattern, 0) + 1
    for name in names:
        numbered.setdefault(numberless(name), []).append(name)
    patterns: list[str] = []
    for pattern, fitting in numbered.items():
        if len(fitting) > 1 and counts.get(pattern) == len(fitting):
            patterns.append(pattern)
        else:
            patterns += map(pattern_of, fitting)
    # A star matches more than numbers. If the patterns match other names, names are listed one by one.
    matches = matcher(patterns)
    fits_only = all(name in chosen for name in all_names if matches(name))
    return natural_order(patterns if fits_only else map(pattern_of, names))


def numberless(name: str) -> str:
    """A name with ``*`` for every number."""
    return _NUMBER.sub("*", pattern_of(name))
