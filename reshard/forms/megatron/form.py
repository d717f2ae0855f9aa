"""The form of Megatron-Core's checkpoints, recognised by names.

A root holds ``latest_checkpointed_iteration.txt`` and a directory for each iteration. An iteration is a ``torch_dist``
directory (``.metadata``, ``.distcp``, and ``metadata.json``, which is written last) or a legacy tree (``mp_rank_00``
and the like, with ``model_optim_rng.pt``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from reshard.asked import Source, Target
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import (
    Form,
    FormOptions,
    Layouts,
    Names,
    ReadRequest,
    SavedStep,
    Side,
    WriteRequest,
)
from reshard.forms.pytorch.form import (
    BACKEND,
    COMMON,
    DCP,
    HYPER_PARALLEL,
    ITERATIONS,
    METADATA,
    OBJECTS,
    ChunkedForm,
    DcpForm,
    kind_of_directory,
)
from reshard.forms.tracker import TRACKER, Iteration, saved_steps
from reshard.storage import absolute, exists, is_directory, listings_cached, names_in
from reshard.strategies import NONE, target_named
from reshard.text.messages import Report
from reshard.text.names import TRAINING_STEP

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm

MEGATRON = "megatron"
"""The name of the form."""

MODEL_FILE = "model_optim_rng.pt"
"""The file of a rank in a legacy tree."""

RANK_DIRECTORY = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")
"""A directory of a legacy tree: tensor rank, then pipeline or expert rank, or both."""

TORCH_DIST, LEGACY, PLAIN = "torch_dist", "torch", "plain"
"""Kinds of iterations; plain ones are distributed checkpoints of torch alone: ``fsdp_dtensor`` and ``torch_dcp``."""

_SHARDS = 16


def rank_directory(tensor: int, others: Sequence[int]) -> str:
    """The name of a rank's directory in a legacy tree, by its numbers."""
    return "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])


def kind_of_iteration(path: str, names: Sequence[str]) -> str | None:
    """The kind of a directory of one checkpoint, by the names in it; None where it is not Megatron's.

    Nothing in a plain one is Megatron's: the directory has the name of an iteration and lies in a root with a tracker.
    """
    if any(map(RANK_DIRECTORY.fullmatch, names)):
        return LEGACY
    kind = kind_of_directory(names)
    # Those of zarr have no metadata of torch: the reader refuses them.
    of_zarr = kind is None and {BACKEND, COMMON}.issubset(names)
    if of_zarr or (kind == DCP and (BACKEND in names or COMMON in names)):
        return TORCH_DIST
    if kind != DCP:
        return None
    parent, name = os.path.split(absolute(path))
    return PLAIN if ITERATIONS.number(name) is not None and exists(os.path.join(parent, TRACKER)) else None


def is_iteration(path: str, names: Sequence[str]) -> bool:
    return kind_of_iteration(path, names) is not None


def choose(src: str, step: str, report: Report) -> Iteration:
    """The directory of the requested step: the source, or one in a root."""
    return ITERATIONS.find(src, is_iteration, step, report)


def iterations(root: str, names: Sequence[str]) -> list[Iteration]:
    """The iterations that a root holds, oldest first, and one without a number."""
    return ITERATIONS.held(root, names, is_iteration)


class MegatronForm(ChunkedForm):
    """Checkpoints of Megatron-Core."""

    name = MEGATRON
    options = FormOptions(
        title="Megatron's",
        layouts=Layouts.RECORDED,
        steps=True,
        shards=True,
        formats=("distcp", LEGACY),
        mindspore=False,
        side=Side.MEGATRON,
        names=Names.TRAINER,
        spellings=True,
        arguments=True,
        counters=(TRAINING_STEP,),
    )

    def recognise(self, src: str, names: Sequence[str] | None = None) -> bool:
        if not is_directory(src):
            return False
        names = names_in(src) if names is None else names
        return is_iteration(src, names) or bool(iterations(src, names))

    @listings_cached()
    def read(self, request: ReadRequest) -> Checkpoint:
        iteration = choose(request.path, request.asked.step, request.report)
        kind = kind_of_iteration(iteration.path, names_in(iteration.path))
        if kind == LEGACY:
            from reshard.forms.megatron.legacy import read_legacy

            return read_legacy(self.name, iteration, request)
        from reshard.forms.megatron.torch_dist import read_plain, read_torch_dist

        return (read_plain if kind == PLAIN else read_torch_dist)(self.name, iteration, request)

    def for_target(self, source: Source, to: Form, renamed: bool) -> Form:
        """Metadata of the same kind is rewritten as it is: Megatron loads it as before."""
        if renamed or to.name not in (DCP, HYPER_PARALLEL):
            return self
        iteration = choose(source.path, source.step, Report())
        legacy = kind_of_iteration(iteration.path, names_in(iteration.path)) == LEGACY
        return self if legacy else DcpForm()

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        if request.asked.format == LEGACY:
            from reshard.forms.megatron.legacy_written import legacy_files

            return legacy_files(checkpoint, request)
        from reshard.forms.megatron.written import torch_dist_files

        return torch_dist_files(checkpoint, request)

    def table_options(self, asked: Target, config: Mapping[str, object] | None) -> Mapping[str, str]:
        """Whether keys have the numbers of layers, and the rows of the vocabulary."""
        from reshard.forms.megatron.origin import options_of_names

        return options_of_names(asked, config)

    def default_strategy(self, asked: Target) -> str | None:
        return NONE if asked.format == LEGACY else target_named(None, _SHARDS)

    def marks(self, files: Sequence[str]) -> list[str]:
        directory = os.path.dirname(files[0])
        if RANK_DIRECTORY.fullmatch(os.path.basename(directory)):
            return [TRACKER]
        return [*(os.path.join(directory, name) for name in (OBJECTS, COMMON, METADATA, BACKEND)), TRACKER]

    def check_step(self, src: str, step: str) -> None:
        if step != "latest":
            choose(src, step, Report())

    def configuration(self, src: str, step: str, args: str | None = None) -> Mapping[str, object] | None:
        from reshard.checkpoints import FileHandles
        from reshard.forms.megatron.arguments import configuration_of
        from reshard.forms.megatron.common import common_of
        from reshard.forms.megatron.origin import stated_arguments
        from reshard.names.sizes import Configuration

        with FileHandles() as handles:
            common = common_of(choose(src, step, Report()).path, handles)
            stated = {} if args is None else stated_arguments(args, handles).all_args
        if common is None or not (common.args or stated):
            return None
        return Configuration(configuration_of({**common.args, **stated}, common.path), common.path)

    def stated_configuration(self, args: str) -> Mapping[str, object] | None:
        from reshard.checkpoints import FileHandles
        from reshard.forms.megatron.arguments import ARGUMENTS, configuration_of
        from reshard.forms.megatron.origin import stated_arguments
        from reshard.names.sizes import Configuration

        with FileHandles() as handles:
            stated = stated_arguments(args, handles)
        return Configuration(configuration_of(stated.all_args, args), args, ARGUMENTS)

    def steps(self, src: str) -> list[SavedStep]:
        return saved_steps(src, iterations(src, names_in(src)))
