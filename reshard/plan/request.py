"""A conversion and its two ends, before the source is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional

from reshard.asked import Conversion, Task
from reshard.forms.form import Form
from reshard.plan.edits import NO_EDITS, EditRules
from reshard.strategies import Strategy
from reshard.text.globs import Filters


class Request(NamedTuple):
    """A conversion and its two ends.

    Attributes:
        asked: the conversion.
        form: of the source.
        source: strategy the checkpoint was saved with; `none` where the checkpoint records its layouts.
        to: form of the target.
        target: strategy it is converted to; `none` for full tensors, `same` for the source's own.
        edits: other names, packing and types.
        task: what the run does.
        damaged: source files that count as absent, with the reason, by path.
    """

    asked: Conversion
    form: Form
    source: Strategy
    to: Form
    target: Strategy
    edits: EditRules = NO_EDITS
    task: Task = Task()
    damaged: Mapping[str, str] = {}

    @property
    def src(self) -> str:
        """The source."""
        return self.asked.source.path

    @property
    def dst(self) -> str:
        """The target directory, or the file itself."""
        return self.asked.target.path

    @property
    def filters(self) -> Filters:
        """The selection of names."""
        return self.asked.edits.filters

    @property
    def target_ranks(self) -> Optional[tuple[int, ...]]:
        """The requested target ranks, ascending; None for all, and for forms without rank files."""
        return self.asked.files if self.to.options.by_rank else None
