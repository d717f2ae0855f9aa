"""The forms that a conversion can write: which files there are, what is in each, and what finishes the directory.

A form knows names and layouts; nothing of where bytes come from or how they are moved.
"""

from reshard.target.form import FileId, FinishingFile, Section, TargetForm, WholeLayouts
from reshard.target.layouts import layout_in
from reshard.target.rank_files import RankFiles, stage_sections

__all__ = [
    "FileId",
    "FinishingFile",
    "RankFiles",
    "Section",
    "TargetForm",
    "WholeLayouts",
    "layout_in",
    "stage_sections",
]
