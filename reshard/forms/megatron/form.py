"""The form of Megatron-Core's checkpoints, recognised by names.

A root holds ``latest_checkpointed_iteration.txt`` and a directory for each iteration. An iteration is a ``torch_dist``
directory (``.metadata``, ``.distcp``, and ``metadata.json``, which is written last) or a legacy tree (``mp_rank_00``
and the like, with ``model_optim_rng.pt``).
"""

from __future__ import annotations

import os
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
from reshard.forms.megatron.iterations import choose, is_iteration, iterations, kind_of_iteration
from reshard.forms.megatron.keys import LEGACY, MEGATRON, PLAIN, RANK_DIRECTORY
from reshard.forms.pytorch.form import (
    BACKEND,
    COMMON,
    DCP,
    HYPER_PARALLEL,
    METADATA,
    OBJECTS,
    ChunkedForm,
    DcpForm,
)
from reshard.forms.tracker import TRACKER, saved_steps
from reshard.storage import is_directory, names_in
from reshard.strategies import NONE, target_named
from reshard.text.messages import Report
from reshard.text.names import TRAINING_STEP

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm

_SHARDS = 16


class MegatronForm(ChunkedForm):
    """Checkpoints of Megatron-Core."""

    name = MEGATRON
    options = FormOptions(
        title="Megatron",
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
