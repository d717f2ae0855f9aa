"""What the target files of a conversion hold, added up by kind: weights, optimizer state and so on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from reshard.names import KINDS, Total, kind_of
from reshard.plan.conversion import Conversion
from reshard.plan.recovery import Recovery


def totals_of(conversion: Conversion, ranks: Collection[int]) -> dict[str, Total]:
    """Per kind the names, each once, and the bytes of tensor contents in the files of some target ranks together."""
    names: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for kind, name, nbytes in _held(conversion, ranks):
        names[kind].add(name)
        sizes[kind] += nbytes
    return {kind: Total(len(names[kind]), sizes[kind]) for kind in KINDS if kind in names}


class _Held(NamedTuple):
    kind: str
    name: str
    nbytes: int


def _held(conversion: Conversion, ranks: Collection[int]) -> Iterator[_Held]:
    """What the files hold; the bytes are those of one file or several."""
    intact = [rank for rank in ranks if isinstance(conversion, Recovery) and conversion.intact(rank)]
    made = set(ranks).difference(intact)
    for stage in conversion.stages.values():
        here = [rank for rank in sorted(made) if rank in stage.ranks]
        for kind in conversion.kinds_of(stage) if here else ():
            nbytes = sum(conversion.slice_bytes(kind, stage, here).values())
            elements = math.prod(kind.parameters[0].shape)
            for parameter in kind.parameters:
                yield _Held(kind_of(parameter.name, elements), parameter.name, nbytes)
    unholdable = set(conversion.sorted.unholdable)
    for rank in made:
        for value in conversion.copied_values(rank):
            if value.name not in unholdable:
                yield _Held(value.tensor.kind, value.name, value.tensor.nbytes)
    # Intact files are copied as they are, many of them built alike.
    tensors = {id(index.tensors): index.tensors for index in (conversion.step.indexes[rank] for rank in intact)}
    alike = Counter(id(conversion.step.indexes[rank].tensors) for rank in intact)
    for number, count in alike.items():
        for tensor in tensors[number].values():
            yield _Held(tensor.kind, tensor.name, tensor.nbytes * count)
