"""Strategies: the devices, and the layout of each parameter over them.

A strategy is read from protobuf or JSON files, one per pipeline stage or all stages merged into one, and is then a
list of stages, each with one layout per parameter. Every fault of a file is refused here, so that other rooms can
trust their input. This room does not use checkpoints.
"""

from reshard.strategies.files import GroupInfo, read_group_info, read_strategy_file
from reshard.strategies.model import (
    NONE,
    SAME,
    Holding,
    RecordedLayout,
    Stage,
    Strategy,
    StrategyFile,
    StrategyItem,
    names_files,
    rows_over,
    shards_of,
    target_named,
    target_words,
)
from reshard.strategies.read import read_strategy, required_strategies, typed_strategy
