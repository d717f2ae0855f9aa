"""Checkpoints of Megatron to be written, as ``torch_dist``: a root with one iteration, and its tracker, written last.

The iteration is a distributed checkpoint with Megatron's common state, an object for every module of Transformer
Engine, and ``metadata.json``, without which Megatron takes the directory for none of its own.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from reshard.checkpoints.checkpoint import Checkpoint, StoredObject
from reshard.checkpoints.formats.archives import archive_of_pickle
from reshard.checkpoints.formats.pickles import pickled
from reshard.forms.megatron.keys import MEGATRON
from reshard.forms.megatron.model import EXTRA, Model
from reshard.forms.megatron.training import Training, training_of
from reshard.forms.pytorch.dcp_written import BACKEND_CONTENT, DcpFiles
from reshard.forms.pytorch.form import BACKEND, COMMON, ITERATIONS, METADATA, OBJECTS
from reshard.forms.request import Means, Request
from reshard.forms.target import FinishingFile
from reshard.forms.tracker import TRACKER
from reshard.forms.writing import Selected, selected, step_of
from reshard.text.messages import Report, listing
from reshard.text.names import TRAINING_STEP, is_training_value
from reshard.threads import cached_property

_EMPTY = archive_of_pickle(pickled([None]))


def prepared(checkpoint: Checkpoint, request: Request, means: Means) -> tuple[Selected, Model, Training]:
    """The tensors to write, without values of the training, and what is written beside them.

    Raises:
        CheckpointError: the tensors are not Megatron's, or what Megatron needs beside them is not known.
    """
    chosen = selected(checkpoint, request.filters.admit)
    model = Model(chosen.tensors, checkpoint.place)
    if checkpoint.form != MEGATRON:
        model.check_names()
    model.check_optimizer()
    training = training_of(checkpoint, model, step_of(checkpoint, means.handles), request, means)
    values = {name: size for name, size in chosen.values.items() if not is_training_value(name)}
    _note_left_out(checkpoint, chosen, model, training, request, means.report)
    return chosen._replace(values=values), model, training


def _note_left_out(
    checkpoint: Checkpoint, chosen: Selected, model: Model, training: Training, request: Request, report: Report
) -> None:
    values = [name for name in sorted(chosen.values) if is_training_value(name) and name != TRAINING_STEP]
    if values:
        report.note("values that Megatron does not have are left out: " + listing(values))
    if training.optimizers is None and training.iteration is not None:
        report.note("without optimizer state: Megatron loads it with --no-load-optim, or --finetune")
    carried = ("common_state", "optimizer.", "chained_")
    objects = filter(request.filters.admit, checkpoint.objects if checkpoint.form == MEGATRON else ())
    others = [name for name in objects if name != COMMON and f".{EXTRA}/" not in name and not name.startswith(carried)]
    if others:
        report.note("objects of the source's layout, such as random states, are left out: " + listing(others))
    rounded = [name for name in model.weights if name.endswith(".expert_bias") and request.edits.casts]
    rounded = [name for name in rounded if model.tensors[name].dtype != "Float32"]
    if rounded:
        report.warn(
            "Megatron keeps biases of experts in Float32; add --cast '*.expert_bias=Float32' for " + listing(rounded)
        )


def directory_of(iteration: int | None) -> str:
    """The directory of an iteration in a root; without one, Megatron begins at the first."""
    return ITERATIONS.of(iteration)


class MegatronFiles(DcpFiles):
    """Files of a root of Megatron, as its ``--load`` reads them; see `ChunkFiles`. Raises as `prepared`."""

    name = MEGATRON

    def __init__(self, checkpoint: Checkpoint, request: Request, means: Means) -> None:
        chosen, model, training = prepared(checkpoint, request, means)
        self.directory = directory_of(training.iteration)
        self.objects_file = OBJECTS
        super().__init__(checkpoint, chosen, request, means)
        self._state = archive_of_pickle(pickled(training.state()))
        # Objects of modules whose keys stay.
        kept = self._objects if checkpoint.form == MEGATRON else {}
        self._of_modules: Mapping[str, StoredObject | None] = {
            **{name: stored for name, stored in kept.items() if f".{EXTRA}/" in name},
            **{name: kept.get(name) for name in model.objects()},
        }
        self._objects = {}

    @property
    def settings(self) -> bytes:
        return self._state

    @cached_property
    def _contents(self) -> Mapping[str, bytes]:
        return {
            name: _EMPTY if stored is None else self._content(name, stored) for name, stored in self._of_modules.items()
        }

    def finishing(self) -> Sequence[FinishingFile]:
        place = self.directory
        number = ITERATIONS.tracked_as(place)
        return [
            FinishingFile(os.path.join(place, OBJECTS), lambda: list(self._contents.values())),
            FinishingFile(os.path.join(place, COMMON), lambda: [self._state]),
            self._metadata_file(os.path.join(place, METADATA)),
            FinishingFile(os.path.join(place, BACKEND), lambda: [BACKEND_CONTENT]),
            FinishingFile(TRACKER, lambda: [number.encode()]),
        ]

    def _keys(self, names: Sequence[str]) -> Mapping[str, tuple[Any, ...]]:
        """None: Megatron's keys are no paths."""
        return {}
