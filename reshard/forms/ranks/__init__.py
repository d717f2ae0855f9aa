"""Trees of rank directories: which rank has a file of which step, what the files hold, and how it is cut.

`find_checkpoints` goes by names alone. A strategy says how tensors are cut; `selection` takes the step to convert.
"""

from reshard.forms.ranks.naming import FileNames
from reshard.forms.ranks.steps import Step
from reshard.forms.ranks.tree import SourceTree, StepFiles, find_checkpoints

__all__ = ["FileNames", "SourceTree", "Step", "StepFiles", "find_checkpoints"]
