"""PyTorch's forms, recognised by names: torch DCP, hyper-parallel's, sharded safetensors and verl's rank files."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.dtypes import ARCHIVES
from reshard.forms.form import Form, FormOptions, Layouts, Names, RecordedCut, SavedStep, Side, check_latest
from reshard.forms.pytorch.chunk_headers import INFO, VERSION_KEY
from reshard.forms.request import Means, Request
from reshard.forms.tracker import Iteration, IterationNames, saved_steps
from reshard.storage import is_directory, names_in
from reshard.text.messages import Report

if TYPE_CHECKING:
    from reshard.forms.recorded import ChunkedCheckpoint
    from reshard.forms.target import TargetForm


METADATA = ".metadata"
"""Metadata of all ranks, which is written last."""

OBJECTS = "__0_1.distcp"
"""The file of objects of checkpoints that are written here; files of tensors have another last number."""

COMMON = "common.pt"
"""Megatron's file of objects, before core 0.19."""

BACKEND = "metadata.json"
"""Megatron's file that names the library that it was saved with; it is written last."""

ENDING = f".{ARCHIVES}"

DCP, HYPER_PARALLEL = "dcp", "hyper-parallel"
"""The names of the forms."""

ITERATIONS = IterationNames("iter_", 7, releases=True)
# Metadata of one rank: torch's, and hyper-parallel's of two generations.
OF_RANK = re.compile(r"__([0-9]{1,7})\.metadata")
OF_HYPER_RANK = re.compile(r"\.rank([0-9]{1,7})_metadata|([0-9]{1,7})\.metadata")
_OF_HYPER = re.compile(r"_rank[0-9]{1,7}_\.(safetensors|bytes)|.*_rank[0-9]{1,7}\.bytes")


def kind_of_directory(names: Sequence[str]) -> str | None:
    """Which form a directory of one checkpoint has, by the names in it; None where it has neither."""
    if any(OF_HYPER_RANK.fullmatch(name) or _OF_HYPER.fullmatch(name) for name in names):
        return HYPER_PARALLEL
    if METADATA in names or any(name.endswith(ENDING) or OF_RANK.fullmatch(name) for name in names):
        return DCP
    return None


def iterations(directory: str, names: Sequence[str]) -> list[Iteration]:
    """The iterations that a root holds, oldest first."""
    candidates = ITERATIONS.in_root(directory, names)
    return [iteration for iteration in candidates if kind_of_directory(names_in(iteration.path)) == DCP]


class ChunkedForm(Form):
    """The common part of forms whose checkpoints are `ChunkedCheckpoint`."""

    def cut(self, checkpoint: Checkpoint) -> RecordedCut:
        return cast("ChunkedCheckpoint", checkpoint)


class _DistributedForm(ChunkedForm):
    """The common part of torch DCP and hyper-parallel's form."""

    def read(self, request: Request, means: Means) -> Checkpoint:
        from reshard.forms.pytorch.dcp import read_distributed

        return read_distributed(self.name, request, means)

    def marks(self, files: Sequence[str]) -> list[str]:
        return [METADATA]

    def check_step(self, src: str, step: str) -> None:
        from reshard.forms.pytorch.dcp import choose

        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        return saved_steps(src, iterations(src, names_in(src)))


class DcpForm(_DistributedForm):
    """Distributed checkpoints of torch: ``.metadata`` and ``.distcp``."""

    name = DCP
    options = FormOptions(
        title="PyTorch DCP",
        layouts=Layouts.RECORDED,
        steps=True,
        shards=True,
        formats=("distcp",),
        mindspore=False,
        side=Side.HUGGINGFACE,
        names=Names.TRAINER,
    )

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return kind_of_directory(names) == DCP or bool(iterations(src, names))

    def marks(self, files: Sequence[str]) -> list[str]:
        return [OBJECTS, METADATA]

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.pytorch.dcp_written import DcpFiles
        from reshard.forms.writing import selected

        return DcpFiles(checkpoint, selected(checkpoint, request.filters.admit), request, means)


class HyperParallelForm(_DistributedForm):
    """hyper-parallel's checkpoints: metadata of the same kind, tensors in safetensors."""

    name = HYPER_PARALLEL
    options = DcpForm.options._replace(title="hyper-parallel", formats=("safetensors",), side=Side.MINDFORMERS)

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return kind_of_directory(names) == HYPER_PARALLEL

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.pytorch.dcp_written import HyperParallelFiles
        from reshard.forms.writing import selected

        return HyperParallelFiles(checkpoint, selected(checkpoint, request.filters.admit), request, means)


SHARDED = "sharded"
"""The directory of shards beside consolidated files."""
SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
"""Names of files: number of the shard, number of the file in it, and how many files a shard may have."""


def shards_in(path: str, names: Sequence[str]) -> str | None:
    """The directory of shards: this one, or `SHARDED` in it; None if neither has any."""
    if any(map(SHARD.fullmatch, names)):
        return path
    inner = os.path.join(path, SHARDED)
    if SHARDED in names and is_directory(inner) and any(map(SHARD.fullmatch, names_in(inner))):
        return inner
    return None


class HfShardedForm(ChunkedForm):
    """Sharded safetensors of torch.distributed.checkpoint."""

    name = "hf-sharded"
    options = FormOptions(
        title="sharded safetensors",
        layouts=Layouts.RECORDED,
        shards=True,
        mindspore=False,
        side=Side.HUGGINGFACE,
        names=Names.ANY,
        metadata=(INFO, VERSION_KEY),
    )

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        """By names as torch gives them; consolidated files beside them are Hugging Face's form."""
        if not names:
            return SHARD.fullmatch(os.path.basename(src)) is not None
        consolidated = any(name.endswith(".safetensors.index.json") or name == "model.safetensors" for name in names)
        directory = shards_in(src, names)
        return directory == src or (directory is not None and not consolidated)

    def read(self, request: Request, means: Means) -> Checkpoint:
        from reshard.forms.pytorch.shards import read_shards

        check_latest(self, request)
        return read_shards(self.name, request, means)

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        from reshard.forms.full.beside import files_beside
        from reshard.forms.pytorch.shards import ShardFiles
        from reshard.forms.writing import selected

        chosen = selected(checkpoint, request.filters.admit)
        return ShardFiles(request.target, chosen, files_beside(checkpoint, chosen.tensors, request, means))


VERL_FILE = re.compile(r"model_world_size_([1-9][0-9]{0,5})_rank_(0|[1-9][0-9]{0,5})\.pt")


class VerlForm(ChunkedForm):
    """The files ``model_world_size_N_rank_R.pt`` of a directory."""

    name = "verl"
    options = FormOptions(title="verl", layouts=Layouts.RECORDED, formats=(), mindspore=False, side=Side.HUGGINGFACE)

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return any(map(VERL_FILE.fullmatch, names or [os.path.basename(src)]))

    def read(self, request: Request, means: Means) -> Checkpoint:
        """From the pickle of every file; replicas stand in for a file that is missing or damaged."""
        from reshard.forms.pytorch.verl import read_ranks

        check_latest(self, request)
        return read_ranks(self.name, request, means)
