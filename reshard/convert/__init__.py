"""A conversion from end to end."""

from reshard.convert.conversion import Run, Summary, WriteElsewhere, run
