"""The request of a conversion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Optional, Union

from reshard.defaults import DEFAULT_PREFIX
from reshard.forms.registry import form_named
from reshard.plan.edits import NO_EDITS, Edits
from reshard.strategies import Strategy
from reshard.text.globs import Filters


class Request(NamedTuple):
    """A conversion as requested.

    Attributes:
        src: source tree, file or `{rank}` path, or the file of each rank.
        dst: target directory, or the exact file of the one requested rank.
        source: strategy the checkpoint was saved with; `none` where the checkpoint records its layouts.
        target: strategy it is converted to; `none` for full tensors, `same` for the source's own.
        files: requested target files, ascending; None for all.
        prefix: prefix of target file names; None for the names of the source's files, where ranks are unchanged.
        format: ``same``, ``ckpt`` or ``safetensors``; `formats.dtypes.MEMORY` where nothing is written.
        step: ``latest`` or ``<epoch>_<step>``.
        fallback: whether ``latest`` may be an older step than the newest, where that is not complete.
        file_suffix: only source files whose stem has this ending.
        without_ranks: source ranks that count as lost, ascending.
        filters: which parameters are written.
        allow_missing: patterns of parameters that the target lists and the source may lack.
        exact_file: ``dst`` is the file itself.
        damaged: source files that count as absent, with the reason, by path.
        recover: source and target are the same strategy, and intact files are copied.
        form: of the source; see `forms.registry`.
        to: form that is written.
        max_shard_size: bytes of tensors in a file of full weights; None for the default.
        edits: other names, packing and types.
    """

    src: Union[str, Mapping[int, str]]
    dst: str
    source: Strategy
    target: Strategy
    files: Optional[tuple[int, ...]] = None
    prefix: Optional[str] = DEFAULT_PREFIX
    format: str = "same"
    step: str = "latest"
    fallback: bool = True
    file_suffix: Optional[str] = None
    without_ranks: tuple[int, ...] = ()
    filters: Filters = Filters()
    allow_missing: tuple[str, ...] = ()
    exact_file: bool = False
    damaged: Mapping[str, str] = {}
    recover: bool = False
    form: str = "ranks"
    to: str = "ranks"
    max_shard_size: Optional[int] = None
    edits: Edits = NO_EDITS

    @property
    def target_ranks(self) -> Optional[tuple[int, ...]]:
        """The requested target ranks, ascending; None for all, and for forms without rank files."""
        return self.files if form_named(self.to).options.by_rank else None
