"""Strategies without a compile: made from rules and shapes, or derived from other strategies.

A rule stands for one or several candidates, a grid of named axes with the axes that cut each dimension
(`candidates`). `rules` reads rules from TOML, `make` turns them into a strategy, `derive` finds them in strategies.
Every undecided value is an error with the lines that would settle it. This room does not use checkpoints.
"""

from reshard.strategies.rules.candidates import AxisSizes, parse_sizes
from reshard.strategies.rules.make import MadeStage, TargetRun, make_strategy
from reshard.strategies.rules.optimizer_shards import DEFAULT_THRESHOLD, ShardSetting
from reshard.strategies.rules.rules import LayoutRules, builtin_names, is_builtin, parse_rules, read_rules, rules_named
from reshard.strategies.rules.tensors import FullTensor, ModelTensors, model_tensors
