"""torch DCP and hyper-parallel's checkpoints as forms, and their directories by names."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.forms.form import ChunkedForm, FormOptions, Layouts, Names, ReadRequest, SavedStep, WriteRequest
from reshard.forms.tracker import Iteration, IterationNames, saved_steps
from reshard.storage import caches_listings, is_directory, names_in
from reshard.text.messages import Report

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm

METADATA = ".metadata"
"""Metadata of all ranks, which is written last."""

ENDING = f".{ARCHIVES}"

DCP, HYPER_PARALLEL = "dcp", "hyper-parallel"
"""The names of the forms."""

ITERATIONS = IterationNames("iter_", 7)
# Metadata of one rank: torch's, and hyper-parallel's of two generations.
OF_RANK = re.compile(r"__([0-9]{1,7})\.metadata")
OF_HYPER_RANK = re.compile(r"\.rank([0-9]{1,7})_metadata|([0-9]{1,7})\.metadata")
_OF_HYPER = re.compile(r"_rank[0-9]{1,7}_\.(safetensors|bytes)|.*_rank[0-9]{1,7}\.bytes")


def kind_of_directory(names: Sequence[str]) -> Optional[str]:
    """Which form a directory of one checkpoint has, by the names in it; None where it has neither."""
    if any(OF_HYPER_RANK.fullmatch(name) or _OF_HYPER.fullmatch(name) for name in names):
        return HYPER_PARALLEL
    if METADATA in names or any(name.endswith(ENDING) or OF_RANK.fullmatch(name) for name in names):
        return DCP
    return None


def iterations(directory: str, names: Sequence[str]) -> list[Iteration]:
    """The iterations that a root of Megatron holds, oldest first."""
    found = ITERATIONS.in_root(directory, names)
    return [iteration for iteration in found if kind_of_directory(names_in(iteration.path)) == DCP]


class _DistributedForm(ChunkedForm):
    """The methods of both forms."""

    @caches_listings
    def read(self, reading: ReadRequest) -> Checkpoint:
        from reshard.forms.dcp.read import read_distributed

        return read_distributed(self.name, reading)

    def marks(self, files: Sequence[str]) -> list[str]:
        return [METADATA]

    def check_step(self, src: str, step: str) -> None:
        from reshard.forms.dcp.read import choose

        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        return saved_steps(src, iterations(src, names_in(src)))


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
        huggingface=True,
        names=Names.TRAINER,
    )

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        if not is_directory(src):
            return False
        names = names_in(src) if names is None else names
        return kind_of_directory(names) == DCP or bool(iterations(src, names))

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        from reshard.forms.dcp.written import DcpFiles
        from reshard.forms.writing import selected

        return DcpFiles(checkpoint, selected(checkpoint, request), request)


class HyperParallelForm(_DistributedForm):
    """hyper-parallel's checkpoints: metadata of the same kind, tensors in safetensors."""

    name = HYPER_PARALLEL
    options = DcpForm.options._replace(title="hyper-parallel's", formats=("safetensors",), huggingface=False)

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        return is_directory(src) and kind_of_directory(names_in(src) if names is None else names) == HYPER_PARALLEL

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        from reshard.forms.dcp.written import HyperParallelFiles
        from reshard.forms.writing import selected

        return HyperParallelFiles(checkpoint, selected(checkpoint, request), request)
