"""Strategies without a compile: made from rules and shapes, or derived from other strategies.

A rule stands for one or several candidates, a grid of named axes with the axes that cut each dimension
(`candidates`). `toml_file` reads rules, `make` turns them into a strategy, `shown` and `learn` find them in strategies,
`write` writes the result. Every undecided value is an error with the lines that would settle it. This room does not use
checkpoints.
"""

from reshard.strategies.rules.make import MadeStage, TargetRun, make_strategy
from reshard.strategies.rules.model import LayoutRules
from reshard.strategies.rules.optimizer_shards import DEFAULT_THRESHOLD, ShardSetting
from reshard.strategies.rules.sizes import AxisSizes, parse_sizes
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, model_tensors
from reshard.strategies.rules.toml_file import parse_rules, read_rules
from reshard.strategies.rules.write import write_strategy

__all__ = [
    "DEFAULT_THRESHOLD",
    "AxisSizes",
    "FullTensor",
    "LayoutRules",
    "MadeStage",
    "ModelTensors",
    "ShardSetting",
    "TargetRun",
    "make_strategy",
    "model_tensors",
    "parse_rules",
    "parse_sizes",
    "read_rules",
    "write_strategy",
]
