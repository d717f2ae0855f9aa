"""Fingerprints of a checkpoint: equal before and after any conversion."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Callable, NamedTuple, Optional

from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError
from reshard.text.messages import number_ranges, quoted
from reshard.text.names import belongs_to_rank
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.reading import Means, sums
from reshard.verification.stored import Content, Source, StoredTensor, value_content
from reshard.verification.sums import PRIME, VERSION, fingerprint


class Fingerprint(NamedTuple):
    """The fingerprint of a tensor, or of a value in the lowest file that holds it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: str


class Fingerprints(NamedTuple):
    """The fingerprints of a checkpoint.

    Attributes:
        parameters: of every tensor and value, by name.
        differing: values whose copies differ between files, except those that belong to a rank.
    """

    parameters: list[Fingerprint]
    differing: list[str]

    def whole(self) -> str:
        """One fingerprint of the checkpoint.

        Text, map tensors and rank-specific values do not count: conversions may drop or change them.
        """
        counted = [each for each in self.parameters if each.dtype not in NO_ARRAYS and not belongs_to_rank(each.name)]
        text = repr((VERSION, [each.fingerprint for each in counted]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def to_json(self) -> dict[str, Any]:
        """The documented JSON."""
        parameters = [each._asdict() for each in self.parameters]
        return {"version": VERSION, "fingerprint": self.whole(), "parameters": parameters}


def fingerprints(
    source: Source,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
    model_names: Optional[Mapping[str, str]] = None,
) -> Fingerprints:
    """Sum every distinct slice once, from its lowest file, and every copy of a value.

    Args:
        source: the checkpoint, complete.
        means: files, threads and memory.
        admit: whether a parameter or value is included, by name.
        model_names: the names in the model, where others are those of a trainer's state.

    Raises:
        CheckpointError: pipeline stages that share a parameter hold different values.
        ReshardError: a file cannot be read, or a parameter contradicts the strategy.
    """
    new_names = model_names or {}
    tensors = {new_names.get(name, name): source.tensors[name] for name in source.tensors if admit(name)}
    values = {name: files for name, files in source.values.items() if admit(name)}
    copies = [(name, value_content(source.indexes, name, file)) for name, files in values.items() for file in files]
    nbytes = sum(content.item_size * volume_of(whole_box(content.shape)) for _, content in copies)
    nbytes += sum(part.item_size * volume_of(box) for each in tensors.values() for _, part, box in _slices(each))
    result: list[Fingerprint] = []
    differing: list[str] = []
    with means.counting(nbytes, "reading"):
        parts = (((name, stage), part, box) for name, tensor in tensors.items() for stage, part, box in _slices(tensor))
        for name, group in itertools.groupby(sums(parts, means), key=lambda item: item[0][0]):
            totals: dict[int, int] = {}
            for (_, stage), slice_sum in group:
                totals[stage] = (totals.get(stage, 0) + slice_sum) % PRIME
            if len(set(totals.values())) > 1:
                raise _stages_differ(name, totals)
            tensor = tensors[name]
            digest = fingerprint(name, tensor.dtype, tensor.shape, next(iter(totals.values())))
            result.append(Fingerprint(name, tensor.dtype, tensor.shape, digest))
        value_sums = sums(((name, content, whole_box(content.shape)) for name, content in copies), means)
        for name, some_sums in itertools.groupby(value_sums, key=lambda item: item[0]):
            headers = [source.value(name, file) for file in values[name]]
            kinds = [(each.dtype, each.shape, total) for each, (_, total) in zip(headers, some_sums)]
            result.append(Fingerprint(name, *kinds[0][:2], fingerprint(name, *kinds[0])))
            if len(set(kinds)) > 1 and not belongs_to_rank(name):
                differing.append(name)
    return Fingerprints(sorted(result), sorted(differing))


def _slices(tensor: Content) -> Iterator[tuple[int, Content, Box]]:
    """The boxes to sum of a tensor: its stage, the tensor with the slices of that stage alone, and the box."""
    complete = tensor.whole_slice_sets() if isinstance(tensor, StoredTensor) else []
    if not isinstance(tensor, StoredTensor) or not complete:
        yield 0, tensor, whole_box(tensor.shape)
        return
    for slices in complete:
        for box in sorted(box for box, files in slices.files_of.items() if files):
            yield slices.number, replace(tensor, slice_sets=(slices,)), box


def _stages_differ(name: str, stages: Mapping[int, int]) -> CheckpointError:
    return CheckpointError(
        f"{quoted(name)} has different values in pipeline stages {number_ranges(stages)}, which share it",
        parameter=name,
        hint="`reshard verify --replicas` shows where copies differ",
    )
