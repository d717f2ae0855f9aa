"""torch DCP and hyper-parallel's checkpoints as forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.chunks import ChunkedCheckpoint, described, strategy_of
from reshard.forms.dcp.metadata import METADATA
from reshard.forms.dcp.read import (
    DCP,
    HYPER_PARALLEL,
    choose,
    iterations,
    kind_of_directory,
    read_distributed,
    saved_steps,
)
from reshard.forms.form import Description, Form, FormOptions, Layouts, Names, ReadRequest, SavedStep, WriteRequest
from reshard.forms.target import TargetForm
from reshard.forms.writing import selected
from reshard.storage import caches_listings, is_directory, names_in
from reshard.strategies import Strategy
from reshard.text.report import Report


class _DistributedForm(Form):
    """The methods of both forms."""

    @caches_listings
    def read(self, reading: ReadRequest) -> Checkpoint:
        """From the metadata alone."""
        return read_distributed(self.name, reading)

    def marks(self, files: Sequence[str]) -> list[str]:
        """The metadata."""
        return [METADATA]

    def check_step(self, src: str, step: str) -> None:
        """Refuse a number that no iteration has."""
        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        """All iterations of a root."""
        return saved_steps(src)

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """As the metadata places the chunks."""
        return strategy_of(cast(ChunkedCheckpoint, checkpoint))

    def describe(self, checkpoint: Checkpoint) -> Description:
        """The number of chunks, and missing elements."""
        return described(cast(ChunkedCheckpoint, checkpoint))


class DcpForm(_DistributedForm):
    """Distributed checkpoints of torch: ``.metadata`` and ``.distcp``."""

    name = DCP
    options = FormOptions(
        title="torch DCP",
        layouts=Layouts.RECORDED,
        steps=True,
        shards=True,
        formats=("distcp",),
        mindspore=False,
        names=Names.TRAINER,
    )

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By the names of its files, or by a directory of them for an iteration of Megatron."""
        if not is_directory(src):
            return False
        names = names_in(src) if names is None else names
        return kind_of_directory(names) == DCP or any(iterations(src, names))

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """A file of records for each rank, objects, and the metadata."""
        from reshard.forms.dcp.written import DcpFiles

        return DcpFiles(checkpoint, selected(checkpoint, request), request)


class HyperParallelForm(_DistributedForm):
    """hyper-parallel's checkpoints: metadata of the same kind, tensors in safetensors."""

    name = HYPER_PARALLEL
    options = DcpForm.options._replace(title="hyper-parallel's", formats=("safetensors",))

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By the names of its files."""
        return is_directory(src) and kind_of_directory(names_in(src) if names is None else names) == HYPER_PARALLEL

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """A safetensors file for each rank, objects, and the metadata."""
        from reshard.forms.dcp.written import HyperParallelFiles

        return HyperParallelFiles(checkpoint, selected(checkpoint, request), request)
