"""Fingerprints of a checkpoint: equal before and after any conversion, mergeable across machines.

A result contains the sum of every slice, so results of several machines, each from some ranks' files, can be
merged, and are compared where they overlap.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, NamedTuple, Optional

from reshard.checkpoints.formats.dtypes import NO_ARRAYS
from reshard.errors import CheckpointError, InputError
from reshard.text.names import belongs_to_rank
from reshard.text.wording import number_ranges, quoted
from reshard.verification.boxes import Box, volume_of, whole_box
from reshard.verification.converted import AnySource
from reshard.verification.reading import Means, sums
from reshard.verification.stored import Content, StoredTensor, value_content
from reshard.verification.sums import PRIME, VERSION, fingerprint

_SUM_BYTES = 16
SEVERAL = -1
"""The stage number of a sum over a parameter that no single stage holds completely."""


class FingerprintEntry(NamedTuple):
    """A line of the result; the fingerprint is None where slices are missing."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fingerprint: Optional[str]


@dataclass
class ParameterSums:
    """A parameter that the strategy lists.

    Attributes:
        name: its name.
        dtype: MindSpore's name of its element type.
        shape: shape of the full tensor.
        slices: the sum of every read slice, by stage and box; `SEVERAL` for a parameter that only several stages
            together hold completely.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: Mapping[tuple[int, Box], int]

    def entry(self) -> FingerprintEntry:
        """The parameter's fingerprint.

        Raises:
            CheckpointError: pipeline stages that share it hold different values.
        """
        totals: dict[int, int] = {}
        elements: dict[int, int] = defaultdict(int)
        for (stage, box), total in self.slices.items():
            totals[stage] = (totals.get(stage, 0) + total) % PRIME
            elements[stage] += math.prod(stop - start for start, stop in box)
        complete = {stage: total for stage, total in totals.items() if elements[stage] == math.prod(self.shape)}
        if len(set(complete.values())) > 1:
            raise CheckpointError(
                f"{quoted(self.name)} has different values in pipeline stages {number_ranges(self._stages)}, which "
                "share it",
                parameter=self.name,
                hint="`reshard verify --replicas` shows where copies differ",
            )
        digest = fingerprint(self.name, self.dtype, self.shape, next(iter(complete.values()))) if complete else None
        return FingerprintEntry(self.name, self.dtype, self.shape, digest)

    @property
    def _stages(self) -> set[int]:
        return {stage for stage, _ in self.slices if stage != SEVERAL}

    def check_cuts(self) -> None:
        """Refuse overlapping slices of one stage, which come from different strategies."""
        for _, group in itertools.groupby(sorted(self.slices), key=lambda key: key[0]):
            for intervals in zip(*(box for _, box in group)):
                ordered = sorted(interval for interval in set(intervals) if interval[0] < interval[1])
                for (_, stop), (start, end) in zip(ordered, ordered[1:]):
                    if start < stop:
                        raise InputError(
                            f"{quoted(self.name)}: the results to merge cut it differently ({start}-{end} overlaps "
                            f"a slice that ends at {stop})",
                            parameter=self.name,
                            hint="merge results of one checkpoint and one strategy",
                        )


class ValueSum(NamedTuple):
    """A rank's copy of a value that the strategy does not list."""

    dtype: str
    shape: tuple[int, ...]
    total: int


class _SliceSums(Mapping[tuple[int, Box], int]):
    """Sums by stage and box; compact, because parameters with the same cuts share the places."""

    def __init__(self, places: dict[tuple[int, Box], int], sums: bytes) -> None:
        self._places = places
        self._sums = sums

    def __getitem__(self, key: tuple[int, Box]) -> int:
        at = self._places[key] * _SUM_BYTES
        return int.from_bytes(self._sums[at : at + _SUM_BYTES], "little")

    def __iter__(self) -> Iterator[tuple[int, Box]]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class SharedPlaces:
    """The places that parameters share."""

    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, Box], ...], dict[tuple[int, Box], int]] = {}

    def sums(self, keys: Iterable[tuple[int, Box]], sums: Iterable[int]) -> _SliceSums:
        """The sums, one for every key."""
        order = tuple(keys)
        places = self._known.get(order)
        if places is None:
            places = self._known[order] = {key: number for number, key in enumerate(order)}
        return _SliceSums(places, b"".join(total.to_bytes(_SUM_BYTES, "little") for total in sums))


@dataclass
class Fingerprints:
    """The fingerprints of a checkpoint, or of the part that some ranks hold.

    Attributes:
        parameters: the parameters with a layout, by name.
        values: all other entries, by name and rank.
        groups: the files of the checkpoint, as half-open ranges of numbers. A range holds the files of a pipeline
            stage, whose names agree unless the save was de-duplicated, or a single file.
        read: per read file a digest of the names in it.
    """

    parameters: dict[str, ParameterSums] = field(default_factory=dict)
    values: dict[str, dict[int, ValueSum]] = field(default_factory=dict)
    groups: set[tuple[int, int]] = field(default_factory=set)
    read: dict[int, str] = field(default_factory=dict)
    _shared: SharedPlaces = field(default_factory=SharedPlaces, init=False, repr=False, compare=False)

    def entries(self) -> list[FingerprintEntry]:
        """Every tensor by name, listed or not; for a value the lowest rank's copy."""
        entries = [parameter.entry() for parameter in self.parameters.values()]
        for name, copies in self.values.items():
            dtype, shape, total = copies[min(copies)]
            entries.append(FingerprintEntry(name, dtype, shape, fingerprint(name, dtype, shape, total)))
        return sorted(entries)

    @property
    def incomplete(self) -> list[str]:
        """Parameters with missing slices."""
        return [entry.name for entry in self.entries() if entry.fingerprint is None]

    @property
    def unread(self) -> list[int]:
        """Unread files that may hold parameters of no read file."""
        unread: list[int] = []
        for start, stop in sorted(self.groups):
            group = range(start, stop)
            if len({self.read[file] for file in group if file in self.read}) != 1:
                unread += (file for file in group if file not in self.read)
        return unread

    @property
    def complete(self) -> bool:
        """Whether all of the checkpoint was read."""
        return not self.unread and not self.incomplete

    @property
    def differing(self) -> list[str]:
        """Values whose copies on ranks differ, except rank-specific ones."""
        return sorted(
            name for name, copies in self.values.items() if len(set(copies.values())) > 1 and not belongs_to_rank(name)
        )

    def whole(self) -> Optional[str]:
        """One fingerprint of the checkpoint, or None if a part was not read.

        Text, map tensors and rank-specific values do not count: conversions may drop or change them.
        """
        entries = [
            entry for entry in self.entries() if entry.dtype not in NO_ARRAYS and not belongs_to_rank(entry.name)
        ]
        if not self.complete:
            return None
        text = repr((VERSION, [entry.fingerprint for entry in entries]))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def merge(self, other: Fingerprints) -> None:
        """Merge another result of the same checkpoint; both must agree where they overlap.

        Raises:
            InputError: the two contradict each other; names the parameter and slice.
        """
        self.groups |= other.groups
        self.read.update((file, names) for file, names in other.read.items() if file not in self.read)
        for name, theirs in other.parameters.items():
            mine = self.parameters.get(name)
            if name in self.values or (mine and (mine.dtype, mine.shape) != (theirs.dtype, theirs.shape)):
                raise _contradiction(name, "its type, its shape or the strategy")
            if mine is None:
                self.parameters[name] = ParameterSums(name, theirs.dtype, theirs.shape, theirs.slices)
                continue
            merged = dict(mine.slices)
            for (stage, box), total in theirs.slices.items():
                if merged.setdefault((stage, box), total) != total:
                    raise _contradiction(name, f"the slice {[list(interval) for interval in box]} of stage {stage}")
            mine.slices = self._shared.sums(merged, merged.values())
            mine.check_cuts()
        for name, copies in other.values.items():
            if name in self.parameters:
                raise _contradiction(name, "the strategy")
            own_copies = self.values.setdefault(name, {})
            for rank, copy in copies.items():
                if own_copies.setdefault(rank, copy) != copy:
                    raise _contradiction(name, f"the copy of file {rank}")

    def to_json(self) -> dict[str, Any]:
        """The documented JSON, for `read_fingerprints`."""
        digests = {entry.name: entry.fingerprint for entry in self.entries()}
        return {
            "version": VERSION,
            "fingerprint": self.whole(),
            "complete": self.complete,
            "files": {
                "groups": [list(group) for group in sorted(self.groups)],
                "read": [{"file": file, "names": names} for file, names in sorted(self.read.items())],
            },
            "parameters": [
                {
                    "name": name,
                    "dtype": parameter.dtype,
                    "shape": list(parameter.shape),
                    "fingerprint": digests[name],
                    "slices": [
                        {
                            "stage": None if stage == SEVERAL else stage,
                            "box": [list(interval) for interval in box],
                            "sum": f"{total:032x}",
                        }
                        for (stage, box), total in sorted(parameter.slices.items())
                    ],
                }
                for name, parameter in sorted(self.parameters.items())
            ],
            "values": [
                {
                    "name": name,
                    "fingerprint": digests[name],
                    "copies": [
                        {"rank": rank, "dtype": dtype, "shape": list(shape), "sum": f"{total:032x}"}
                        for rank, (dtype, shape, total) in sorted(copies.items())
                    ],
                }
                for name, copies in sorted(self.values.items())
            ],
        }


def digest_of(names: Iterable[str]) -> str:
    """A digest of the names in a file."""
    return hashlib.blake2b(repr(sorted(names)).encode(), digest_size=8).hexdigest()


def _contradiction(name: str, subject: str) -> InputError:
    return InputError(
        f"{quoted(name)}: the results to merge differ in {subject}",
        parameter=name,
        hint="merge results of one checkpoint and one strategy",
    )


def fingerprints(
    source: AnySource,
    means: Means,
    admit: Callable[[str], bool] = lambda name: True,
    model_names: Optional[Mapping[str, str]] = None,
) -> Fingerprints:
    """Sum every distinct slice once, from its lowest file, and every copy of a value.

    Args:
        source: the checkpoint.
        means: files, threads and memory.
        admit: whether a parameter or value is included, by name.
        model_names: the names in the model, where others are those of a trainer's state.

    Raises:
        ReshardError: a file cannot be read, or a parameter contradicts the strategy.
    """
    result, shared, new_names = Fingerprints(), SharedPlaces(), model_names or {}
    tensors = {new_names.get(name, name): source.tensors[name] for name in source.tensors if admit(name)}
    copies = [
        (name, file, value_content(source.indexes, name, file))
        for name, files in source.values.items()
        if admit(name)
        for file in files
    ]
    total = sum(content.item_size * math.prod(content.shape) for _, _, content in copies)
    total += sum(tensor.item_size * volume_of(box) for tensor in tensors.values() for (_, box), _ in _slices(tensor))
    with means.counting(total, "reading"):
        parts = (((name, place), part, place[1]) for name, tensor in tensors.items() for place, part in _slices(tensor))
        for name, slice_sums in itertools.groupby(sums(parts, means), key=lambda item: item[0][0]):
            places, totals = zip(*((place, slice_sum) for (_, place), slice_sum in slice_sums))
            tensor = tensors[name]
            result.parameters[name] = ParameterSums(name, tensor.dtype, tensor.shape, shared.sums(places, totals))
        # Parameters without slices in the read files.
        for name, tensor in tensors.items():
            if name not in result.parameters:
                result.parameters[name] = ParameterSums(name, tensor.dtype, tensor.shape, shared.sums((), ()))
        value_parts = (((name, file), content, whole_box(content.shape)) for name, file, content in copies)
        shared_copies: dict[ValueSum, ValueSum] = {}
        for (name, file), slice_sum in sums(value_parts, means):
            header = source.value(name, file)
            copy = ValueSum(header.dtype, header.shape, slice_sum)
            result.values.setdefault(name, {})[file] = shared_copies.setdefault(copy, copy)
    return result


def _slices(tensor: Content) -> Iterator[tuple[tuple[int, Box], Content]]:
    """The boxes to sum of a tensor: stage and box, and the tensor with the slices of that stage alone."""
    if not isinstance(tensor, StoredTensor):
        yield (0, whole_box(tensor.shape)), tensor
        return
    for slices in tensor.slice_sets:
        for box in sorted(box for box, files in slices.files_of.items() if files):
            yield (slices.number, box), replace(tensor, slice_sets=(slices,))
    if not tensor.whole_slice_sets() and tensor.is_whole():
        yield (SEVERAL, whole_box(tensor.shape)), tensor
