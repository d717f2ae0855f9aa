"""Trees of rank directories: files by rank and step, their contents and layouts.

`tree.find_checkpoints` uses names alone. A strategy holds the layouts; `selection` chooses the step.
"""
