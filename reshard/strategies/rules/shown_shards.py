"""What strategies show of the optimizer's shards: which weights it may shard, and which have opted out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Optional, Union

from reshard.layout import Layout
from reshard.strategies.model import Stage
from reshard.strategies.rules.optimizer_shards import NO_SHARDS, UndecidedError, possible_record
from reshard.strategies.rules.shown import ShownWeight, Source
from reshard.strategies.rules.sizes import Condition, condition
from reshard.strategies.rules.tensors import FullTensor, ModelTensors

ShownShards = tuple[Union[bool, Condition, None], Optional[Condition]]
"""Whether the optimizer may shard a weight, and for which sizes that is shown."""


def has_shards(source: Source) -> bool:
    """Whether the optimizer shards anything in a strategy."""
    return any(layout.shard_size for stage in source.strategy.stages for layout in stage.layouts.values())


def shown_shards(
    sources: Sequence[Source], model: ModelTensors, weights: Mapping[str, ShownWeight]
) -> dict[str, ShownShards]:
    """Per weight what sources show of its optimizer shards.

    A weight that is not sharded shows something only where it would be, had it not opted out: in a run whose optimizer
    shards, large enough, and divisible.
    """
    evidence = [(source, _Run(source, model)) for source in sources if has_shards(source)]
    found: dict[str, ShownShards] = {}
    for name, weight in weights.items():
        # A weight whose cut is capped may opt out where the cap is reached.
        seen: dict[bool, set[bool]] = {False: set(), True: set()}
        for source, run in evidence:
            capped = weight.capped is not None and source.sizes["mp"] > weight.capped
            for stage, layout in source.holding(name):
                shown = run.shows(weight.tensor, stage, layout)
                if shown is not None:
                    seen[capped].add(shown)
        found[name] = _together(seen, weight.capped)
    return found


def _together(seen: Mapping[bool, set[bool]], cap: Optional[int]) -> ShownShards:
    below, beyond = (next(iter(said)) if len(said) == 1 else None for said in (seen[False], seen[True]))
    if cap is None:
        return below, None
    if below is None and beyond is None:
        return None, None
    if below is not None and beyond is not None:
        return (below, None) if below == beyond else (condition(f"mp{'<=' if below else '>'}{cap}"), None)
    if below is not None:
        return below, condition(f"mp<={cap}")
    return beyond, condition(f"mp>{cap}")


class _Run:
    """How the optimizer of a source shards, as far as its strategy tells."""

    def __init__(self, source: Source, model: ModelTensors) -> None:
        self._model = model
        sharded = [
            (model.weights[name], layout)
            for stage in source.strategy.stages
            for name, layout in stage.layouts.items()
            if layout.shard_size and name in model.weights
        ]
        sizes = {layout.shard_size for _, layout in sharded}
        self._all_replicas = -1 in sizes
        self._largest = max(sizes, default=0)
        # A weight with more replicas than shards tells the configured size exactly.
        self._exact = any(layout.shard_size < layout.replica_count for _, layout in sharded)
        weights = [self._bytes(tensor) for tensor, _ in sharded]
        self._known_to_suffice = min((size for size in weights if size is not None), default=None)

    def _bytes(self, tensor: FullTensor) -> Optional[int]:
        size = self._model.item_sizes.get(tensor.dtype) if tensor.dtype is not None else None
        return None if size is None else math.prod(tensor.shape) * size

    def shows(self, tensor: FullTensor, stage: Stage, layout: Layout) -> Optional[bool]:
        """Whether the optimizer may shard a weight; None where its layout does not tell."""
        if layout.shard_size:
            return True
        size = self._bytes(tensor)
        if size is None or self._known_to_suffice is None or size < self._known_to_suffice:
            return None
        replicas = layout.replica_count
        if not (self._all_replicas or self._exact or replicas <= self._largest):
            return None
        try:
            would_be = possible_record(
                layout.without_shards(),
                stage.first_rank,
                tensor.shape,
                -1 if self._all_replicas else min(self._largest, max(replicas, 2)),
            )
        except UndecidedError:
            return None
        return None if would_be == NO_SHARDS else False
