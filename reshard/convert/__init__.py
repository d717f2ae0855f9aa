"""A conversion from end to end."""

from reshard.convert.prepared import Prepared, prepare, transform
from reshard.convert.summary import Summary
from reshard.convert.writing import WriteElsewhere
