"""The form of Megatron-Core's checkpoints, recognised by names.

A root holds ``latest_checkpointed_iteration.txt`` and a directory for each iteration. An iteration is a ``torch_dist``
directory (``.metadata``, ``.distcp``, and ``metadata.json``, which is written last) or a legacy tree (``mp_rank_00``
and the like, with ``model_optim_rng.pt``).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reshard.asked import Source
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import Form, FormOptions, Layouts, Names, RecordedTraining, SavedStep, Side
from reshard.forms.megatron.iterations import choose, is_iteration, iterations, kind_of_iteration
from reshard.forms.megatron.keys import LEGACY, MEGATRON, PLAIN, RANK_DIRECTORY
from reshard.forms.pytorch.form import BACKEND, COMMON, DCP, HYPER_PARALLEL, METADATA, OBJECTS, ChunkedForm, DcpForm
from reshard.forms.request import Means, Request
from reshard.forms.tracker import TRACKER, saved_steps
from reshard.storage import names_in
from reshard.text.messages import Report

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm


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
    )

    def recognise(self, src: str, names: Sequence[str]) -> bool:
        return is_iteration(src, names) or bool(iterations(src, names))

    def read(self, request: Request, means: Means) -> Checkpoint:
        iteration = choose(request.src, request.asked.source.step, means.report)
        kind = kind_of_iteration(iteration.path, names_in(iteration.path))
        if kind == LEGACY:
            from reshard.forms.megatron.legacy import read_legacy

            return read_legacy(self.name, iteration, request, means)
        from reshard.forms.megatron.torch_dist import read_plain, read_torch_dist

        return (read_plain if kind == PLAIN else read_torch_dist)(self.name, iteration, request, means)

    def for_target(self, source: Source, to: Form, renamed: bool) -> Form:
        """Metadata of the same kind is rewritten as it is: Megatron loads it as before."""
        if renamed or to.name not in (DCP, HYPER_PARALLEL):
            return self
        iteration = choose(source.path, source.step, Report())
        legacy = kind_of_iteration(iteration.path, names_in(iteration.path)) == LEGACY
        return self if legacy else DcpForm()

    @property
    def training(self) -> RecordedTraining:
        from reshard.forms.megatron.origin import MegatronTraining

        return MegatronTraining()

    def target(self, checkpoint: Checkpoint, request: Request, means: Means) -> TargetForm:
        if request.asked.target.format == LEGACY:
            from reshard.forms.megatron.legacy_written import LegacyFiles

            return LegacyFiles(checkpoint, request, means)
        from reshard.forms.megatron.written import MegatronFiles

        return MegatronFiles(checkpoint, request, means)

    def marks(self, files: Sequence[str]) -> list[str]:
        directory = os.path.dirname(files[0])
        if RANK_DIRECTORY.fullmatch(os.path.basename(directory)):
            return [TRACKER]
        return [*(os.path.join(directory, name) for name in (OBJECTS, COMMON, METADATA, BACKEND)), TRACKER]

    def check_step(self, src: str, step: str) -> None:
        if step != "latest":
            choose(src, step, Report())

    def steps(self, src: str) -> list[SavedStep]:
        return saved_steps(src, iterations(src, names_in(src)))
