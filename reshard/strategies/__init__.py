"""Strategies: which devices there are, and how each parameter is laid out over them.

A strategy is read from protobuf or JSON files, one per pipeline stage or all stages merged into
one, and is then a list of stages, each with one layout per parameter. Everything a file can get
wrong is found here, so that the rooms built on this one can trust what they are given. Nothing here
knows of checkpoints.
"""

from reshard.strategies.groups import GroupInfo, read_group_info
from reshard.strategies.merge import merge_pipeline
from reshard.strategies.model import (
    NONE,
    SAME,
    SHARDS,
    RecordedLayout,
    Stage,
    Strategy,
    StrategyFile,
    StrategyItem,
    names_files,
    shards_of,
)
from reshard.strategies.one_file import read_strategy_file
from reshard.strategies.read import read_strategy, required_strategies

__all__ = [
    "NONE",
    "SAME",
    "SHARDS",
    "GroupInfo",
    "RecordedLayout",
    "Stage",
    "Strategy",
    "StrategyFile",
    "StrategyItem",
    "merge_pipeline",
    "names_files",
    "read_group_info",
    "read_strategy",
    "read_strategy_file",
    "required_strategies",
    "shards_of",
]
