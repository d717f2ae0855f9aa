"""What is asked of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Optional, Union

from reshard.defaults import DEFAULT_PREFIX
from reshard.forms.registry import form_named
from reshard.forms.target import FileId
from reshard.plan.edits import NO_EDITS, Edits
from reshard.strategies import Strategy
from reshard.text.name_filters import Filters


@dataclass(frozen=True)
class Request:
    """What is asked for.

    Attributes:
        src: source tree, file or `{rank}` path, or the file of each rank.
        dst: target directory, or the exact file to write for the one rank asked for.
        source: strategy the checkpoint was saved with; `none` where its form tells the layouts.
        target: strategy it is converted to; `none` where it is written in full, `same` where the source tells it.
        files: target files asked for, ascending; None for all.
        prefix: target file names begin so; None for the names of the source's files, where ranks stay the same.
        format: ``same``, ``ckpt`` or ``safetensors``; `formats.dtypes.MEMORY` where nothing is written.
        step: ``latest`` or ``<epoch>_<step>``.
        fallback: whether ``latest`` may be an older step than the newest, where that is not complete.
        file_suffix: only source files whose stem ends so.
        filters: which parameters are written.
        strict: missing parameters and unlisted tied ones are errors.
        exact_file: ``dst`` is the file itself.
        damaged: source files that count as absent whatever their headers say, and why, by path.
        recover: source and target are the same strategy, and intact files stay as they are.
        form: of the source; see `forms.registry`.
        to: form that is written.
        max_shard_size: bytes of tensors in a file of full weights; None for what is usual.
        edits: other names, packing and types.
    """

    src: Union[str, Mapping[int, str]]
    dst: str
    source: Strategy
    target: Strategy
    files: Optional[tuple[FileId, ...]] = None
    prefix: Optional[str] = DEFAULT_PREFIX
    format: str = "same"
    step: str = "latest"
    fallback: bool = True
    file_suffix: Optional[str] = None
    filters: Filters = field(default_factory=Filters)
    strict: bool = False
    exact_file: bool = False
    damaged: Mapping[str, str] = field(default_factory=dict)
    recover: bool = False
    form: str = "ranks"
    to: str = "ranks"
    max_shard_size: Optional[int] = None
    edits: Edits = NO_EDITS

    @property
    def target_ranks(self) -> Optional[tuple[int, ...]]:
        """The target ranks asked for, ascending; None for all, and where target files are no ranks."""
        return self.files if form_named(self.to).options.by_rank else None
