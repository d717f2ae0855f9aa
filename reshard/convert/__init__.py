"""A conversion from end to end."""

from reshard.convert.prepared import Prepared, check_target_ranks, prepare, transform
from reshard.convert.summary import Phases, Summary
from reshard.convert.writing import Counted, WriteElsewhere

__all__ = [
    "Counted",
    "Phases",
    "Prepared",
    "Summary",
    "WriteElsewhere",
    "check_target_ranks",
    "prepare",
    "transform",
]
