"""Strategies, stages and layouts in the output of commands: as text and as JSON."""

from __future__ import annotations

from reshard.layout import Layout
from reshard.strategies import Strategy
from reshard.text.wording import plural


def strategy_words(strategy: Strategy) -> str:
    """A strategy with the numbers of its devices, stages and parameters."""
    devices, stages = plural(strategy.device_count, "device"), plural(len(strategy.stages), "stage")
    parameters = "" if strategy.is_none else f", {plural(len(strategy.parameters), 'parameter')}"
    return f"{strategy.path}: {devices} in {stages}{parameters}"


def layout_row(layout: Layout) -> dict[str, object]:
    """A layout as JSON has it, without the shape, in which layouts differ that cut alike."""
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": [list(axes) for axes in layout.tensor_map],
        "cuts": list(layout.tensor_cuts),
        "optimizer_shards": layout.shards,
        "uneven": list(layout.uneven) if layout.uneven is not None else None,
        "replicas": layout.copies,
    }
