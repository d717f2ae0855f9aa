"""What the target files of a conversion hold, added up by kind: weights, optimizer state and so on."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from typing import NamedTuple

from reshard.plan.plan import Plan, in_section
from reshard.text.names import KINDS, Total, kind_of


def totals_of(plan: Plan, files: Collection[int]) -> dict[str, Total]:
    """Per kind the names, each once, and the bytes of tensor contents in some target files together."""
    known = plan.known_names()
    names: dict[str, set[str]] = defaultdict(set)
    sizes: Counter[str] = Counter()
    for name, elements, nbytes in _held(plan, files):
        kind = kind_of(name, elements, known)
        names[kind].add(name)
        sizes[kind] += nbytes
    return {kind: Total(len(names[kind]), sizes[kind]) for kind in KINDS if kind in names}


class _Held(NamedTuple):
    name: str
    elements: int
    nbytes: int


def _held(plan: Plan, files: Collection[int]) -> Iterator[_Held]:
    """What the files hold; the bytes are those of one file or several."""
    taken_over = {file: plan.form.taken_over(file) for file in files}
    copies = [plan.checkpoint.indexes[holder] for holder in taken_over.values() if holder is not None]
    made = sorted(file for file, holder in taken_over.items() if holder is None)
    for section in plan.sections:
        here = in_section(section, made)
        # Files that hold the same ones of the section's tensors.
        alike: dict[object, list[int]] = defaultdict(list)
        for file in here:
            alike[plan.form.names_in(file)].append(file)
        for kind in plan.kinds_of(section) if here else ():
            elements = math.prod(kind.tensors[0].shape)
            for members in alike.values():
                names = plan.form.names_in(members[0])
                nbytes = sum(plan.slice_bytes(kind, section, members).values())
                for tensor in kind.tensors:
                    if names is None or tensor.name in names:
                        yield _Held(tensor.name, elements, nbytes)
    for file in made:
        for value in plan.values_of(file):
            yield _Held(value.name, value.tensor.elements, value.tensor.nbytes)
    # Files that are taken over are copied as they are, many of them built alike.
    tensors = {id(index.tensors): index.tensors for index in copies}
    counts = Counter(id(index.tensors) for index in copies)
    for number, count in counts.items():
        for stored in tensors[number].values():
            yield _Held(stored.name, stored.elements, stored.nbytes * count)
