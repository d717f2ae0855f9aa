"""A conversion from end to end."""

from reshard.convert.options import Options
from reshard.convert.prepared import Prepared, check_target_ranks, prepare, transform
from reshard.convert.summary import Phases, Summary
from reshard.convert.writing import Counted, WriteElsewhere
from reshard.defaults import usable_cpus

__all__ = [
    "Counted",
    "Options",
    "Phases",
    "Prepared",
    "Summary",
    "WriteElsewhere",
    "check_target_ranks",
    "prepare",
    "transform",
    "usable_cpus",
]
