"""What came of comparing alleged replicas, and what is said of it."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.source_replicas.choice import AlikeParameters
from reshard.text.messages import Message, joined, listing
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight
from reshard.text.wording import plural, quoted, rank_ranges

_MOST_EXAMPLES = 2


@dataclass(frozen=True)
class ReplicaCheck:
    """How well a source strategy was tested against the files.

    Attributes:
        compared: ``samples``, ``everything``, or ``nothing`` where that was asked for.
        samples: boxes of parameters that were compared, those of a single value left out.
        parameters: parameters that they are of.
        untested: parameters of which no two ranks that can be read are said to hold the same.
        tested: whether parameters that are cut were compared, if there are any.
    """

    compared: str
    samples: int = 0
    parameters: int = 0
    untested: int = 0
    tested: bool = False

    def __str__(self) -> str:
        """In words."""
        if self.compared == "nothing":
            return "replicas were not compared (--check-replicas never)"
        if not self.samples:
            return "no parameter has replicas to compare, so only shapes were checked"
        how = "all bytes" if self.compared == "everything" else plural(self.samples, "sample")
        agree = f"replicas of {plural(self.parameters, 'parameter')} agree ({how})"
        if self.untested:
            return f"{agree}; {plural(self.untested, 'other')} without replicas, checked by shape only"
        return agree if self.tested else f"{agree}; those that are cut were checked by shape only"


class Differing(NamedTuple):
    """A parameter that ranks hold different values of.

    Attributes:
        parameter: its name.
        ranks: two ranks that should hold the same.
        files: their files.
        is_cut: whether ranks hold parts of it.
    """

    parameter: str
    ranks: tuple[int, int]
    files: tuple[str, str]
    is_cut: bool


class ReplicaComparison(NamedTuple):
    """What came of comparing alleged replicas.

    Attributes:
        check: how well the strategy was tested.
        differing: parameters of which replicas differ, by name.
        gradients: accumulated gradients likewise.
        compared_cut: how many of the compared parameters are cut.
        of_a_layout: whether all differ that were compared of some layout.
    """

    check: ReplicaCheck
    differing: list[Differing]
    gradients: list[Differing]
    compared_cut: int
    of_a_layout: bool

    @property
    def likely(self) -> str:
        """Where differences come from: ``strategy``, ``replicas``, or ``either`` where that is open."""
        cut = sum(differing.is_cut for differing in self.differing)
        found, compared = (
            (cut, self.compared_cut) if self.compared_cut else (len(self.differing), self.check.parameters)
        )
        if 2 * found > compared:
            return "strategy"
        return "either" if self.of_a_layout else "replicas"

    @property
    def always(self) -> set[int]:
        """Ranks that are among those that differ wherever some do."""
        return set.intersection(*(set(differing.ranks) for differing in self.differing)) if self.differing else set()

    def lines(self) -> list[str]:
        """What differs and what that probably means, in a few lines."""
        lines: list[str] = [
            f"{quoted(name)} differs between rank {ranks[0]} and rank {ranks[1]} ({files[0]} and {files[1]})"
            for name, ranks, files, _ in self.differing[:_MOST_EXAMPLES]
        ]
        names = [differing.parameter for differing in self.differing]
        if len(names) > _MOST_EXAMPLES:
            lines.append(f"in all {plural(len(names), 'parameter')}: " + listing(names))
        return [*lines, self._probably()]

    def _probably(self) -> str:
        cut = sum(differing.is_cut for differing in self.differing)
        if self.likely == "strategy":
            of = f"{cut} of the {self.compared_cut} that are cut" if self.compared_cut else "most"
            return f"{of} differ: the strategy is probably wrong"
        if self.likely == "either":
            return "all differ that were compared of some layouts, and others agree: the strategy may be wrong for them"
        where = (
            f", on {rank_ranges(self.always)}" if len(self.always) == 1 and len(self.differing) > _MOST_EXAMPLES else ""
        )
        return f"most agree: the replicas have probably diverged{where}"

    def said_of_gradients(self) -> Message:
        """What to warn of where accumulated gradients differ."""
        count = plural(len(self.gradients), "parameter")
        names = listing([differing.parameter for differing in self.gradients])
        return (
            f"{count} of accumulated gradients differ between ranks that should hold the same: "
            + names
            + "; data-parallel ranks have not reduced them yet, and of each only one rank's is written"
        )

    def error(self, strategy: str, place: str, step: Optional[str], file_suffix: Optional[str]) -> CheckpointError:
        """The error to raise, since parameters differ.

        Args:
            strategy: path of the source strategy.
            place: path of the source.
            step: the step that was looked at; None where file names tell none.
            file_suffix: stems of the source's files end so, if anything tells.
        """
        words = ["--step", step] if step is not None else []
        words += ["--file-suffix", file_suffix] if file_suffix is not None else []
        check = shlex.join(["reshard", "strategy", "check", strategy, place, *words])
        verify = shlex.join(["reshard", "verify", place, "--replicas", "--strategy", strategy, *words])
        first = self.differing[0]
        compared = "compared" if self.check.compared == "everything" else "sampled"
        count = f"{len(self.differing)} of {self.check.parameters} {compared} parameters"
        headline = (
            f"the source strategy ({strategy}) does not fit this checkpoint, or replicas have diverged: {count} differ "
            "between ranks that it says hold the same slice"
        )
        return CheckpointError(
            joined("\n", [headline, *("  " + line for line in self.lines())]),
            file=first.files[1],
            rank=first.ranks[1],
            parameter=first.parameter,
            hint=f"`{check}` tells more, and `{verify}` every difference\n"
            "if replicas are known to have diverged, as those of norms that data-parallel ranks do not synchronise: "
            "--check-replicas never",
        )


class Tally:
    """What has been compared so far, and what differs.

    Args:
        step: the files that are compared.
    """

    def __init__(self, step: SourceStep) -> None:
        self._step = step
        self._samples = 0
        self._compared: dict[int, set[str]] = defaultdict(set)
        self._differing: dict[str, Differing] = {}

    def add(self, kind: AlikeParameters, parameter: GlobalTensor, ranks: Optional[tuple[int, int]]) -> None:
        """Count a box that was compared and is not all of one value.

        Args:
            kind: the kind of parameter.
            parameter: the parameter.
            ranks: two ranks that differ in the box, if any do; of several boxes the first one's are told.
        """
        self._samples += 1
        self._compared[id(kind)].add(parameter.name)
        if ranks is not None and parameter.name not in self._differing:
            files = self._step.files[ranks[0]], self._step.files[ranks[1]]
            self._differing[parameter.name] = Differing(parameter.name, ranks, files, kind.is_cut)

    def result(self, kinds: Sequence[AlikeParameters], compared: str) -> ReplicaComparison:
        """What came of it.

        Args:
            kinds: what was to be compared.
            compared: see `ReplicaCheck`.
        """
        kinds = [kind for kind in kinds if not is_gradient(kind.parameters[0])]
        found = {id(kind): self._compared[id(kind)] for kind in kinds}
        cut = [kind for kind in kinds if kind.is_cut]
        check = ReplicaCheck(
            compared=compared,
            samples=self._samples,
            parameters=sum(map(len, found.values())),
            untested=sum(len(kind.parameters) for kind in kinds if not len(kind)),
            tested=any(found[id(kind)] for kind in cut or kinds),
        )
        known = {parameter.name for kind in kinds for parameter in kind.parameters}
        differing = sorted(self._differing.values(), key=lambda item: _telling(item, known))
        gradients = [item for item in differing if item.parameter.startswith(ACCUMULATED_GRADIENTS)]
        return ReplicaComparison(
            check=check,
            differing=[item for item in differing if item not in gradients],
            gradients=gradients,
            compared_cut=sum(len(found[id(kind)]) for kind in cut),
            of_a_layout=any(len(names) > 1 and names <= self._differing.keys() for names in found.values()),
        )


def is_gradient(parameter: GlobalTensor) -> bool:
    """Whether a parameter is accumulated gradients, which may differ until they are reduced."""
    return parameter.name.startswith(ACCUMULATED_GRADIENTS)


def _telling(differing: Differing, known: Container[str]) -> tuple[bool, bool, str]:
    """Sorts what tells most first."""
    return not differing.is_cut, not is_weight(differing.parameter, known), differing.parameter
