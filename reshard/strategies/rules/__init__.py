"""Strategies that no compile has written: made from rules and shapes, or derived from other strategies.

`sizes` and `model` are what rules say, `toml_file` reads them; `placement` and `optimizer_shards` are what a compiler
makes of them, `make` puts it together and `write` writes it. Whatever does not follow is an error that says which
lines would settle it. Nothing here knows of checkpoints.
"""

from reshard.strategies.rules.make import MadeStage, Target, make_strategy
from reshard.strategies.rules.model import Rules
from reshard.strategies.rules.optimizer_shards import DEFAULT_THRESHOLD, ShardSetting
from reshard.strategies.rules.sizes import Sizes, parse_sizes
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, model_tensors
from reshard.strategies.rules.toml_file import parse_rules, read_rules
from reshard.strategies.rules.write import write_strategy

__all__ = [
    "DEFAULT_THRESHOLD",
    "FullTensor",
    "MadeStage",
    "ModelTensors",
    "Rules",
    "ShardSetting",
    "Sizes",
    "Target",
    "make_strategy",
    "model_tensors",
    "parse_rules",
    "parse_sizes",
    "read_rules",
    "write_strategy",
]
