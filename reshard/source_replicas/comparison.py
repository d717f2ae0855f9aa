"""The result of comparing replicas, and its messages."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.errors import CheckpointError
from reshard.layout import Box
from reshard.source_replicas.choice import ParameterGroup, is_gradient
from reshard.text.messages import Message, joined, listing, plural, quoted
from reshard.text.names import is_weight

_MOST_EXAMPLES = 2


class ReplicaCheck(NamedTuple):
    """The extent of a test of a source strategy against the files.

    Attributes:
        compared: ``samples``, ``everything``, or ``nothing`` if disabled.
        samples: compared boxes of parameters, without constant boxes.
        parameters: number of their parameters.
        untested: number of parameters without two readable replicas.
        tested: whether cut parameters were compared, if there are any.
    """

    compared: str
    samples: int = 0
    parameters: int = 0
    untested: int = 0
    tested: bool = False

    def __str__(self) -> str:
        """The result, for messages."""
        if self.compared == "nothing":
            return "replicas were not compared (--check-replicas never)"
        if not self.samples:
            return "no parameter has replicas to compare, so only shapes were checked"
        extent = "" if self.compared == "everything" else f" in {plural(self.samples, 'sample')}"
        agree = f"no difference between replicas{extent} of {plural(self.parameters, 'parameter')}"
        if self.untested:
            return f"{agree}; {plural(self.untested, 'other')} without replicas, checked by shape only"
        return agree if self.tested else f"{agree}; cut parameters were checked by shape only"


class Differing(NamedTuple):
    """A box of a parameter with different values on ranks, or files, that should be replicas.

    Attributes:
        parameter: its name.
        box: the box, in elements of the full tensor.
        groups: the compared ranks by content.
        files: the files of two ranks that differ.
    """

    parameter: str
    box: Box
    groups: list[list[int]]
    files: tuple[str, str]

    @property
    def ranks(self) -> tuple[int, int]:
        """Two ranks that should hold equal bytes."""
        return self.groups[0][0], self.groups[1][0]


class ReplicaComparison:
    """The compared boxes, and those that differ.

    Attributes:
        differences: all boxes that differ.
    """

    def __init__(self, groups: Sequence[ParameterGroup], source: Checkpoint, compared: str) -> None:
        self.differences: list[Differing] = []
        self._groups = groups
        self._source = source
        self._extent = compared
        self._samples = 0
        self._compared: dict[int, set[str]] = defaultdict(set)

    def add(self, group: ParameterGroup, parameter: GlobalTensor) -> None:
        """Count a compared box that is not constant."""
        self._samples += 1
        self._compared[id(group)].add(parameter.name)

    def add_difference(self, parameter: str, box: Box, ranks_by_content: list[list[int]]) -> None:
        """Add a box whose replicas differ."""
        (first, *_), (other, *_), *_ = ranks_by_content
        paths = self._source.indexes[first].path, self._source.indexes[other].path
        self.differences.append(Differing(parameter, box, ranks_by_content, paths))

    @property
    def check(self) -> ReplicaCheck:
        """The extent of the test, without gradients."""
        groups = [group for group in self._groups if not is_gradient(group.parameters[0].name)]
        return ReplicaCheck(
            compared=self._extent,
            samples=self._samples,
            parameters=sum(len(self._compared[id(group)]) for group in groups),
            untested=sum(len(group.parameters) for group in groups if not len(group)),
            tested=any(self._compared[id(group)] for group in [group for group in groups if group.is_cut] or groups),
        )

    @property
    def alone(self) -> int:
        """The number of parameters of which no two files hold the same slice."""
        return sum(len(group.parameters) for group in self._groups if not len(group))

    @property
    def differing(self) -> list[Differing]:
        """The first difference of each parameter, weights first; without gradients."""
        names = {parameter.name for group in self._groups for parameter in group.parameters}
        return sorted(self._first(False), key=lambda item: (not is_weight(item.parameter, names), item.parameter))

    @property
    def gradients(self) -> list[Differing]:
        """The first difference of each accumulated gradient, by name."""
        return sorted(self._first(True))

    def _first(self, gradients: bool) -> list[Differing]:
        first: dict[str, Differing] = {}
        for item in self.differences:
            if is_gradient(item.parameter) == gradients:
                first.setdefault(item.parameter, item)
        return list(first.values())

    def lines(self) -> list[str]:
        """The differing parameters, in a few lines."""
        differing = self.differing
        lines: list[str] = []
        for item in differing[:_MOST_EXAMPLES]:
            (first, other), files = item.ranks, item.files
            lines.append(
                f"{quoted(item.parameter)} differs between rank {first} and rank {other} ({files[0]} and {files[1]})"
            )
        if len(differing) > _MOST_EXAMPLES:
            names = listing([item.parameter for item in differing])
            lines.append(f"in all {plural(len(differing), 'parameter')}: " + names)
        return lines

    def gradient_warning(self) -> Message:
        """The warning about differing accumulated gradients."""
        names = [item.parameter for item in self.gradients]
        return (
            f"{plural(len(names), 'parameter')} of accumulated gradients differ between ranks that should hold the "
            "same: "
            + listing(names)
            + "; data-parallel ranks have not reduced them yet, and one rank's copy stands for all"
        )

    def error(self, strategy: str, place: str, step: Optional[str], file_suffix: Optional[str]) -> CheckpointError:
        """The error about ranks that differ, by the strategy at a path."""
        words = ["--step", step] if step is not None else []
        words += ["--file-suffix", file_suffix] if file_suffix is not None else []
        check = shlex.join(["reshard", "strategy", "check", strategy, place, *words])
        verify = shlex.join(["reshard", "verify", place, "--replicas", "--strategy", strategy, *words])
        differing, compared = self.differing, self.check
        first = differing[0]
        count = f"{len(differing)} of {compared.parameters} "
        count += "compared parameters" if compared.compared == "everything" else "sampled parameters"
        headline = (
            f"the source strategy ({strategy}) does not fit this checkpoint, or replicas have diverged: {count} differ "
            "between ranks that should hold the same slice"
        )
        return CheckpointError(
            joined("\n", [headline, *("  " + line for line in self.lines())]),
            file=first.files[1],
            rank=first.ranks[1],
            parameter=first.parameter,
            hint=f"`{check}` compares everything, and `{verify}` lists every difference\n"
            f"to leave out a rank whose file is wrong: --without-ranks {first.ranks[0]} or --without-ranks "
            f"{first.ranks[1]}\n"
            "if replicas have diverged, such as norms that data-parallel ranks do not synchronise: "
            "--check-replicas never",
        )

    def error_of_copies(self, place: str) -> CheckpointError:
        """The error about files that differ by the metadata at a path."""
        first = self.differing[0]
        return CheckpointError(
            f"{first.files[1]}: {quoted(first.parameter)} differs from that in {first.files[0]}, and both are the box "
            f"{[list(interval) for interval in first.box]} by the metadata of {place}",
            file=first.files[1],
            parameter=first.parameter,
            hint="the metadata or a file is damaged: take them from a copy, or another step; if the ranks that wrote "
            "them have diverged: --check-replicas never",
        )
