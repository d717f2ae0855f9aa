"""Names of an adapter's matrices: their pairs, and their weights."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from reshard.errors import CheckpointError
from reshard.text.messages import listing, quoted
from reshard.text.names import is_weight, near_names

# Prefix of PEFT before every name of the model.
_PEFT = "base_model.model."
# Names of PEFT, with or without the adapter's name, of MindFormers and of MindPet.
_MATRIX = re.compile(
    r"(?P<stem>.+)\.(?P<before>lora_|mindpet_delta_lora_)"
    r"(?:(?P<upper>[AB])(?P<adapter>\.[^.]+)?\.weight|(?P<lower>[ab]))",
    re.DOTALL,
)
_UNKNOWN = {
    "lora_magnitude_vector": "DoRA",
    "lora_embedding_": "LoRA of an embedding",
    "lora_": "a kind of LoRA",
}
# Names of the weight: of a linear layer, and of wrapped ones.
_WEIGHTS = ("{stem}.weight", "{stem}.base_layer.weight", "{stem}.layer.weight", "{stem}")


class Pair(NamedTuple):
    """The module of two matrices of an adapter, and their names: A has as many rows as the rank, B as many columns."""

    stem: str
    down: str
    up: str


def is_matrix(name: str) -> bool:
    """Whether this is the name of an adapter's matrix."""
    return _MATRIX.fullmatch(name) is not None


def module_of(stem: str) -> str:
    """The module of a pair, without PEFT's prefix, as PEFT compares it with patterns."""
    return stem[len(_PEFT) :] if stem.startswith(_PEFT) else stem


def pairs_of(names: Iterable[str], place: str) -> list[Pair]:
    """The pairs among the tensors of an adapter, sorted; optimizer state and values are skipped.

    Args:
        names: of all tensors.
        place: path of the adapter, for messages.

    Raises:
        CheckpointError: no pair, a matrix without its partner, several adapters, or unknown kinds.
    """
    sides_of: dict[str, dict[str, str]] = {}
    unmatched = []
    # First matrix of each adapter, by its name without module and side.
    adapters: dict[tuple[str, ...], str] = {}
    all_names = frozenset(names)
    for name in sorted(all_names):
        match = _MATRIX.fullmatch(name)
        if not is_weight(name, all_names):
            continue
        if match is None:
            unmatched.append(name)
            continue
        side = (match["upper"] or match["lower"]).upper()
        adapters.setdefault((match["before"], str(match["adapter"]), str(match["lower"] is None)), name)
        if side in sides_of.setdefault(match["stem"], {}):
            raise CheckpointError(
                f"{place}: {quoted(name)} and {quoted(sides_of[match['stem']][side])} are both matrices of one adapter",
                file=place,
                parameter=name,
                hint="merge one adapter after the other, each from its own directory",
            )
        sides_of[match["stem"]][side] = name
    for name in unmatched:
        for sign, kind in _UNKNOWN.items():
            if sign in name:
                raise CheckpointError(
                    f"{place}: {quoted(name)} is of {kind}, which merge-lora does not support",
                    file=place,
                    parameter=name,
                )
    if len(adapters) > 1:
        raise CheckpointError(
            f"{place}: contains matrices of {len(adapters)} adapters: " + listing(sorted(adapters.values())),
            file=place,
            parameter=min(adapters.values()),
            hint="merge one adapter after the other, each from its own directory",
        )
    unpaired = [name for sides in sides_of.values() if len(sides) < 2 for name in sides.values()]
    if unpaired:
        raise CheckpointError(
            f"{place}: without the other matrix of their pair: " + listing(unpaired), file=place, parameter=unpaired[0]
        )
    if not sides_of:
        raise CheckpointError(
            f"{place}: contains no matrices of an adapter, such as model.layers.0.self_attn.q_proj.lora_A.weight",
            file=place,
        )
    return [Pair(stem, sides["A"], sides["B"]) for stem, sides in sorted(sides_of.items())]


def weight_of(pair: Pair, weights: Collection[str]) -> str:
    """The weight of a pair.

    Args:
        pair: the pair.
        weights: names of the base's tensors.

    Raises:
        CheckpointError: no weight, or several weights fit.
    """
    stems = list(dict.fromkeys([pair.stem, module_of(pair.stem)]))
    possible = [form.format(stem=stem) for stem in stems for form in _WEIGHTS]
    candidates = [name for name in dict.fromkeys(possible) if name in weights]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        raise CheckpointError(
            f"{quoted(pair.down)} may belong to {' or '.join(map(quoted, candidates))}",
            parameter=pair.down,
        )
    expected = f"{stems[-1]}.weight"
    near = " or ".join(map(quoted, near_names(expected, weights)))
    cure = f"the base has {near}" if near else "`reshard convert --rename OLD=NEW` renames tensors"
    raise CheckpointError(
        f"{quoted(pair.down)} belongs to {quoted(expected)}, which the base does not have",
        parameter=pair.down,
        hint=f"is it the adapter of another model, or are names different? {cure}",
    )
