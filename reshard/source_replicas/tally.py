"""What has been compared so far, and what differs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Sequence
from typing import Optional

from reshard.checkpoints.checkpoint import GlobalTensor
from reshard.forms.ranks.checkpoint import SourceStep
from reshard.source_replicas.choice import Alike
from reshard.source_replicas.outcome import Comparison, Differing, ReplicaCheck
from reshard.text.names import ACCUMULATED_GRADIENTS, is_weight


class Tally:
    """Keeps count; one thread at a time may add.

    Args:
        step: the files that are compared.
    """

    def __init__(self, step: SourceStep) -> None:
        self._step = step
        self._samples = 0
        self._compared: dict[int, set[str]] = defaultdict(set)
        self._differing: dict[str, tuple[int, Differing]] = {}

    def add(
        self, kind: Alike, parameter: GlobalTensor, ranks: Optional[tuple[int, int]] = None, number: int = 0
    ) -> None:
        """Count a box that was compared and is not all of one value.

        Args:
            kind: the kind of parameter.
            parameter: the parameter.
            ranks: two ranks that differ in the box, if any do.
            number: the box's; of several that differ the first one's ranks are told.
        """
        self._samples += 1
        self._compared[id(kind)].add(parameter.name)
        known = self._differing.get(parameter.name)
        if ranks is not None and (known is None or number < known[0]):
            files = self._step.files[ranks[0]], self._step.files[ranks[1]]
            self._differing[parameter.name] = number, Differing(parameter.name, ranks, files, kind.is_cut)

    def result(self, kinds: Sequence[Alike], compared: str) -> Comparison:
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
        differing = sorted(
            (differing for _, differing in self._differing.values()), key=lambda item: _telling(item, known)
        )
        gradients = [item for item in differing if item.parameter.startswith(ACCUMULATED_GRADIENTS)]
        return Comparison(
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
