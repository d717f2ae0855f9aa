"""The result of comparing replicas, and its messages."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.source_replicas.choice import ParameterGroup
from reshard.text.messages import Message, joined, listing, plural, quoted
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight

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
    """A parameter with different values on ranks that should be replicas.

    Attributes:
        parameter: its name.
        ranks: two ranks that should hold equal bytes.
        files: their files.
    """

    parameter: str
    ranks: tuple[int, int]
    files: tuple[str, str]


class ReplicaComparison:
    """The compared boxes, and those that differ.

    Args:
        kinds: all groups of parameters.
        step: the compared files.
        compared: see `ReplicaCheck`.
    """

    def __init__(self, kinds: Sequence[ParameterGroup], step: SourceStep, compared: str) -> None:
        self._kinds = kinds
        self._step = step
        self._extent = compared
        self._samples = 0
        self._compared: dict[int, set[str]] = defaultdict(set)
        self._differing: dict[str, Differing] = {}

    def add(self, kind: ParameterGroup, parameter: GlobalTensor, ranks: Optional[tuple[int, int]]) -> None:
        """Count a compared box that is not constant.

        Args:
            kind: the kind of parameter.
            parameter: the parameter.
            ranks: two ranks that differ in the box, if any; only the first difference is kept.
        """
        self._samples += 1
        self._compared[id(kind)].add(parameter.name)
        if ranks is not None and parameter.name not in self._differing:
            files = self._step.files[ranks[0]], self._step.files[ranks[1]]
            self._differing[parameter.name] = Differing(parameter.name, ranks, files)

    @property
    def check(self) -> ReplicaCheck:
        """The extent of the test, without gradients."""
        kinds = [kind for kind in self._kinds if not is_gradient(kind.parameters[0])]
        return ReplicaCheck(
            compared=self._extent,
            samples=self._samples,
            parameters=sum(len(self._compared[id(kind)]) for kind in kinds),
            untested=sum(len(kind.parameters) for kind in kinds if not len(kind)),
            tested=any(self._compared[id(kind)] for kind in [kind for kind in kinds if kind.is_cut] or kinds),
        )

    @property
    def differing(self) -> list[Differing]:
        """Parameters with differing replicas, weights first; without gradients."""
        names = {parameter.name for kind in self._kinds for parameter in kind.parameters}
        found = [item for name, item in self._differing.items() if not name.startswith(ACCUMULATED_GRADIENTS)]
        return sorted(found, key=lambda item: (not is_weight(item.parameter, names), item.parameter))

    @property
    def gradients(self) -> list[Differing]:
        """Accumulated gradients with differing replicas, by name."""
        return [item for name, item in sorted(self._differing.items()) if name.startswith(ACCUMULATED_GRADIENTS)]

    def lines(self) -> list[str]:
        """The differing parameters, in a few lines."""
        differing = self.differing
        lines: list[str] = []
        for name, ranks, files in differing[:_MOST_EXAMPLES]:
            lines.append(
                f"{quoted(name)} differs between rank {ranks[0]} and rank {ranks[1]} ({files[0]} and {files[1]})"
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
        """The error about differing parameters.

        Args:
            strategy: path of the source strategy.
            place: path of the source.
            step: the compared step; None if file names contain none.
            file_suffix: ending of the stems of the source's files, if given.
        """
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


def is_gradient(parameter: GlobalTensor) -> bool:
    """Whether a parameter is accumulated gradients, which may differ until they are reduced."""
    return parameter.name.startswith(ACCUMULATED_GRADIENTS)
