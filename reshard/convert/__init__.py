"""A conversion from end to end."""

from reshard.convert.conversion import Run, WriteElsewhere, run
from reshard.convert.summary import Summary
