"""The tensors of a model: their full shapes, and which belong to which."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Optional

from reshard.text.names import ACCUMULATED_GRADIENTS

# A part of a name that is a number, as those of layers and experts are.
_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.|$)")


class FullTensor(NamedTuple):
    """A tensor as the model has it, uncut.

    Attributes:
        name: its name in strategies.
        shape: full shape.
        dtype: MindSpore's name of the element type; None where nobody has said it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Optional[str] = None


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model.

    Attributes:
        path: where the shapes are from.
        weights: what rules speak of, by name, in the file's order.
        states: per weight what stands before its name in those of its optimizer state.
        item_sizes: bytes of an element per element type.
    """

    path: str
    weights: dict[str, FullTensor]
    states: dict[str, tuple[str, ...]] = field(default_factory=dict)
    item_sizes: dict[str, int] = field(default_factory=dict)


def model_tensors(path: str, tensors: Iterable[FullTensor], item_sizes: dict[str, int]) -> ModelTensors:
    """Tell weights from what belongs to them: ``adam_m.w`` where there is a ``w``; gradients are not kept."""
    by_name = {tensor.name: tensor for tensor in tensors}
    weights: dict[str, FullTensor] = {}
    states: dict[str, list[str]] = {}
    for name, tensor in by_name.items():
        prefix, _, rest = name.partition(".")
        if rest not in by_name:
            # Gradients of a weight that is on no rank of the file say nothing of it.
            if not name.startswith(ACCUMULATED_GRADIENTS):
                weights[name] = tensor
        elif f"{prefix}." != ACCUMULATED_GRADIENTS:
            states.setdefault(rest, []).append(prefix)
    return ModelTensors(path, weights, {name: tuple(prefixes) for name, prefixes in states.items()}, item_sizes)


def patterns_for(names: Sequence[str], known: Iterable[str]) -> list[str]:
    """Patterns of a shell that exactly these of the known names fit; ``*`` stands for numbers where it can."""
    numbered: dict[str, list[str]] = {}
    wanted = frozenset(names)
    all_of: dict[str, int] = {}
    for name in known:
        pattern = numberless(name)
        all_of[pattern] = all_of.get(pattern, 0) + 1
    for name in names:
        numbered.setdefault(numberless(name), []).append(name)
    found: list[str] = []
    for pattern, fitting in numbered.items():
        if len(fitting) > 1 and all_of.get(pattern) == len(fitting):
            found.append(pattern)
        else:
            found += [_literal(name) for name in fitting]
    # A star stands for more than numbers: what fits besides is named one by one.
    return _natural(found if _fits_only(found, wanted, known) else [_literal(name) for name in names])


def _natural(patterns: Sequence[str]) -> list[str]:
    return sorted(
        patterns,
        key=lambda text: [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", text)],
    )


def numberless(name: str) -> str:
    """A name with ``*`` for every number."""
    return _NUMBER.sub("*", _literal(name))


def _literal(name: str) -> str:
    return "".join(f"[{character}]" if character in "*?[" else character for character in name)


def _fits_only(patterns: Sequence[str], wanted: frozenset[str], known: Iterable[str]) -> bool:
    from reshard.text.globs import Globs

    globs = Globs(patterns)
    return all(name in wanted for name in known if globs.match(name))
