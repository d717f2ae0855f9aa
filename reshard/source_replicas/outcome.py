"""Results of comparing replicas, and their messages."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.errors import CheckpointError
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.named_tuple import NamedTuple
from reshard.source_replicas.choice import ParameterGroup
from reshard.text.messages import Message, joined, listing
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight
from reshard.text.wording import plural, quoted, rank_ranges

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
        extent = "all bytes" if self.compared == "everything" else plural(self.samples, "sample")
        agree = f"replicas of {plural(self.parameters, 'parameter')} agree ({extent})"
        if self.untested:
            return f"{agree}; {plural(self.untested, 'other')} without replicas, checked by shape only"
        return agree if self.tested else f"{agree}; cut parameters were checked by shape only"


class Differing(NamedTuple):
    """A parameter with different values on ranks that should be replicas.

    Attributes:
        parameter: its name.
        ranks: two ranks that should hold equal bytes.
        files: their files.
        is_cut: whether ranks hold parts of it.
    """

    parameter: str
    ranks: tuple[int, int]
    files: tuple[str, str]
    is_cut: bool


class ReplicaComparison(NamedTuple):
    """The result of comparing replicas.

    Attributes:
        check: the extent of the test.
        differing: parameters with differing replicas, by name.
        gradients: accumulated gradients with differing replicas.
        compared_cut: number of compared parameters that are cut.
        of_a_layout: whether all compared parameters of some layout differ.
    """

    check: ReplicaCheck
    differing: list[Differing]
    gradients: list[Differing]
    compared_cut: int
    of_a_layout: bool

    @property
    def likely(self) -> str:
        """The probable reason of differences: ``strategy``, ``replicas``, or ``either``."""
        cut = sum(differing.is_cut for differing in self.differing)
        count, compared = (
            (cut, self.compared_cut) if self.compared_cut else (len(self.differing), self.check.parameters)
        )
        if 2 * count > compared:
            return "strategy"
        return "either" if self.of_a_layout else "replicas"

    @property
    def always(self) -> set[int]:
        """Ranks that are part of every difference."""
        return set.intersection(*(set(differing.ranks) for differing in self.differing)) if self.differing else set()

    def lines(self) -> list[str]:
        """The differences and their probable reason, in a few lines."""
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
            share = f"{cut} of the {self.compared_cut} cut parameters" if self.compared_cut else "most"
            return f"{share} differ: the strategy is probably wrong"
        if self.likely == "either":
            return (
                "all compared parameters of some layouts differ, and others agree: the strategy may be wrong for them"
            )
        where = (
            f", on {rank_ranges(self.always)}" if len(self.always) == 1 and len(self.differing) > _MOST_EXAMPLES else ""
        )
        return f"most agree: the replicas have probably diverged{where}"

    def gradient_warning(self) -> Message:
        """The warning about differing accumulated gradients."""
        count = plural(len(self.gradients), "parameter")
        names = listing([differing.parameter for differing in self.gradients])
        return (
            f"{count} of accumulated gradients differ between ranks that should hold the same: "
            + names
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
        first = self.differing[0]
        compared = "compared" if self.check.compared == "everything" else "sampled"
        count = f"{len(self.differing)} of {self.check.parameters} {compared} parameters"
        headline = (
            f"the source strategy ({strategy}) does not fit this checkpoint, or replicas have diverged: {count} differ "
            "between ranks that should hold the same slice"
        )
        return CheckpointError(
            joined("\n", [headline, *("  " + line for line in self.lines())]),
            file=first.files[1],
            rank=first.ranks[1],
            parameter=first.parameter,
            hint=f"`{check}` shows more, and `{verify}` every difference\n"
            f"to leave out a rank whose file is wrong: --without-ranks {first.ranks[0]} or --without-ranks "
            f"{first.ranks[1]}\n"
            "if replicas have diverged, such as norms that data-parallel ranks do not synchronise: "
            "--check-replicas never",
        )


class Tally:
    """The results of comparisons so far.

    Args:
        step: the compared files.
    """

    def __init__(self, step: SourceStep) -> None:
        self._step = step
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
            self._differing[parameter.name] = Differing(parameter.name, ranks, files, kind.is_cut)

    def result(self, kinds: Sequence[ParameterGroup], compared: str) -> ReplicaComparison:
        """The result.

        Args:
            kinds: all groups of parameters.
            compared: see `ReplicaCheck`.
        """
        kinds = [kind for kind in kinds if not is_gradient(kind.parameters[0])]
        compared_names = {id(kind): self._compared[id(kind)] for kind in kinds}
        cut = [kind for kind in kinds if kind.is_cut]
        check = ReplicaCheck(
            compared=compared,
            samples=self._samples,
            parameters=sum(map(len, compared_names.values())),
            untested=sum(len(kind.parameters) for kind in kinds if not len(kind)),
            tested=any(compared_names[id(kind)] for kind in cut or kinds),
        )
        names_of_all = {parameter.name for kind in kinds for parameter in kind.parameters}
        differing = sorted(self._differing.values(), key=lambda item: _relevance(item, names_of_all))
        gradients = [item for item in differing if item.parameter.startswith(ACCUMULATED_GRADIENTS)]
        return ReplicaComparison(
            check=check,
            differing=[item for item in differing if item not in gradients],
            gradients=gradients,
            compared_cut=sum(len(compared_names[id(kind)]) for kind in cut),
            of_a_layout=any(len(names) > 1 and names <= self._differing.keys() for names in compared_names.values()),
        )


def is_gradient(parameter: GlobalTensor) -> bool:
    """Whether a parameter is accumulated gradients, which may differ until they are reduced."""
    return parameter.name.startswith(ACCUMULATED_GRADIENTS)


def _relevance(differing: Differing, all_names: Container[str]) -> tuple[bool, bool, str]:
    """Sort key: the most relevant differences first."""
    return not differing.is_cut, not is_weight(differing.parameter, all_names), differing.parameter
