"""How the parameters of the source are cut for the target; one `Overlap` per kind of parameter.

A model has thousands of parameters but tens of kinds: combinations of full shape, source layouts and
target layout. Everything that depends on the kind alone is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from reshard.errors import CheckpointError, LayoutError
from reshard.layout import Layout, Overlap
from reshard.plan.parameters import Parameter
from reshard.plan.replicas import Holding, whole
from reshard.strategies import Stage, Strategy
from reshard.wording import quoted


@dataclass(frozen=True)
class Cut:
    """How parameters of one kind are cut for the ranks of one target stage.

    Attributes:
        number: numbers the kinds in the order they were met.
        overlap: the cells of every target slice.
        target: the target layout.
        holdings: the source stages that hold such parameters.
    """

    number: int
    overlap: Overlap
    target: Layout
    holdings: tuple[Holding, ...]

    def slice_of(self, local_rank: int) -> int:
        """The slice that a local rank of the target stage gets."""
        return int(self.target.slice_of_rank[local_rank])


class Cuts:
    """Looks up, and makes where it is new, the cut of a parameter for a target stage."""

    def __init__(self, target: Strategy) -> None:
        self._target = target
        self._cuts: dict[object, Cut] = {}
        # By what decides it. Parameters that are read alike share layout and holdings, so these are told apart by
        # identity, and kept, so that nothing else gets theirs.
        self._by_reading: dict[tuple[object, ...], tuple[Cut, Optional[Layout], tuple[Holding, ...]]] = {}

    def of(self, parameter: Parameter, stage: Stage) -> Cut:
        """The cut of a parameter that this target stage gets.

        Raises:
            CheckpointError: the target layout does not fit the parameter; names it.
        """
        recorded = None if self._target.is_none else stage.layouts[parameter.name]
        reading = (parameter.shape, parameter.plain, parameter.unsharded, parameter.undecided)
        key = (stage.number, id(recorded), id(parameter.holdings), *reading)
        found = self._by_reading.get(key)
        if found is None:
            found = self._by_reading[key] = (self._make(parameter, stage), recorded, parameter.holdings)
        return found[0]

    def _make(self, parameter: Parameter, stage: Stage) -> Cut:
        try:
            if self._target.is_none:
                layout = whole(len(parameter.shape))
            else:
                layout = parameter.target_layout(stage.layouts[parameter.name], len(self._target.stages) > 1)
            sources = tuple((holding.stage.number, holding.layout) for holding in parameter.holdings)
            key = (stage.number, parameter.shape, sources, layout)
            if key not in self._cuts:
                overlap = Overlap([cut.grid(parameter.shape) for _, cut in sources], layout.grid(parameter.shape))
                self._cuts[key] = Cut(len(self._cuts), overlap, layout, parameter.holdings)
            return self._cuts[key]
        except LayoutError as error:
            raise CheckpointError(
                f"{quoted(parameter.name)}: {error.message} "
                f"(target strategy {self._target.path}, stage {stage.number})",
                parameter=parameter.name,
                hint="the target strategy has to be of the same model, and every dimension to divide by its slices",
            ) from error
