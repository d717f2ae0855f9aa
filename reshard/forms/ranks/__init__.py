"""Trees of rank directories: files by rank and step, their contents and layouts.

`find_checkpoints` uses names alone. A strategy holds the layouts; `selection` chooses the step.
"""

from reshard.forms.ranks.naming import FileNames
from reshard.forms.ranks.steps import Step
from reshard.forms.ranks.tree import SourceTree, StepFiles, find_checkpoints

__all__ = ["FileNames", "SourceTree", "Step", "StepFiles", "find_checkpoints"]
