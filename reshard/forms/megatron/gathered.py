"""Tensors of a legacy tree of Megatron, put together from the parameters of all ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reshard.checkpoints.checkpoint import GlobalTensor, TiedTensors
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.archives import Elements
from reshard.checkpoints.formats.dtypes import ARCHIVES, ITEM_SIZES
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.checkpoints.placed import Placement, Stored
from reshard.errors import InputError
from reshard.forms.megatron.common import Common
from reshard.forms.megatron.keys import EMBEDDING, OUTPUT, STATE
from reshard.forms.megatron.legacy_state import HALF, MASTER
from reshard.forms.megatron.live import strides_in
from reshard.forms.megatron.placing import TensorPart
from reshard.forms.megatron.proofs import MASTERS, proofs, refuse_unproved
from reshard.forms.megatron.rank_files import HINT
from reshard.forms.recorded import Chunk, ChunkedCheckpoint, ChunkedTensor, chunked_checkpoint, tensor_fault
from reshard.text.names import TRAINING_STEP

_TIED = "the run has tied weights"


@dataclass
class _Tensor:
    """A tensor of the model in the files of one stage."""

    dtype: str
    shape: tuple[int, ...]
    chunks: list[tuple[str, int, TensorPart]] = field(default_factory=list)


class Gathered:
    """Parts of tensors from all files.

    Attributes:
        faults: unreadable tensors, and why, by name.
    """

    def __init__(self, directory: str) -> None:
        self.faults: dict[str, InputError] = {}
        self._directory = directory
        self._sizes: dict[str, int] = {}
        # Per file its tensors: the entry, and where its elements are.
        self._stored: dict[str, list[tuple[Stored, Elements]]] = defaultdict(list)
        self._values: dict[str, list[Stored]] = defaultdict(list)
        # Per key, by stage and chunk.
        self._tensors: dict[str, dict[tuple[int, int], _Tensor]] = {}
        # Keys of weights that have state, and their types.
        self._expected: dict[str, str] = {}

    def fault(self, path: str, name: str, problem: str, cure: str = "") -> None:
        self.faults.setdefault(name, tensor_fault(path, name, problem, cure))

    def expect(self, key: str, dtype: str) -> None:
        """Note that a weight has state in the checkpoint."""
        self._expected[key] = dtype

    def _check_expected(self) -> None:
        """State of which no file was read is a fault."""
        for key, dtype in self._expected.items():
            kinds = ("exp_avg", "exp_avg_sq", MASTER) if dtype in HALF else ("exp_avg", "exp_avg_sq")
            for name in (f"{STATE}{kind}.{key}" for kind in kinds):
                if name not in self._tensors:
                    self.fault(self._directory, name, "is in no file, although the optimizer was saved", HINT)

    def add(
        self, file: tuple[str, int], stage: tuple[int, int], key: str, part: TensorPart, elements: Elements
    ) -> None:
        """Add a part of a parameter.

        Args:
            file: path and bytes of the file.
            stage: of the pipeline, and the chunk of it.
            key: the tensor, which may be the optimizer's state of the parameter's.
            part: the part.
            elements: where the parameter, or the state in its shape, is stored.
        """
        path, size = file
        placed = strides_in(part, elements.shape, elements.strides)
        if placed is None:
            self.fault(path, key, f"is stored with the strides {list(elements.strides)}, which are not read")
            return
        first, strides = placed
        tensor = self._tensors.setdefault(key, {}).setdefault(stage, _Tensor(elements.dtype, part.shape))
        if (tensor.dtype, tensor.shape) != (elements.dtype, part.shape):
            self.fault(
                path,
                key,
                f"is {elements.dtype} {list(part.shape)} by this file, and {tensor.dtype} {list(tensor.shape)} by "
                "another",
            )
            return
        self._sizes[path] = size
        stored = self._stored[path]
        tensor.chunks.append((path, len(stored), part))
        offset = elements.offset + first * ITEM_SIZES[elements.dtype]
        stored.append(
            (
                Stored(key, elements.dtype, part.sizes),
                elements._replace(shape=part.sizes, strides=strides, offset=offset),
            )
        )

    def add_step(self, common: Common, steps: Iterable[int]) -> None:
        try:
            value = common.with_steps(frozenset(steps)).step_value()
        except InputError as error:
            self.faults[TRAINING_STEP] = error
            return
        if value is not None and common.path in self._sizes:
            self._values[common.path].append(value)

    def checkpoint(self, form: str, handles: FileHandles, tied: bool) -> ChunkedCheckpoint:
        self._check_expected()
        paths = sorted(self._sizes)
        numbers = {path: number for number, path in enumerate(paths)}
        headers = [CheckpointIndex(path, ARCHIVES, self._sizes[path], {}, archived=True) for path in paths]
        entries = {}
        for path in paths:
            stored = self._stored[path]
            placement = Placement(
                path, [*(each for each, _ in stored), *self._values[path]], [elements for _, elements in stored]
            )
            handles.place(path, placement)
            entries[path] = [*placement.tensors()]
        copies: list[tuple[str, str]] = []
        tensors: list[ChunkedTensor] = []
        for key, stages in self._tensors.items():
            if key in self.faults:
                continue
            for number, stage in enumerate(sorted(stages)):
                tensor = stages[stage]
                name = key if not number else f"{key} of stage {stage[0]}, chunk {stage[1]}"
                if number:
                    copies.append((key, name))
                chunks = [
                    Chunk(part.start, part.sizes, numbers[path], entries[path][at]) for path, at, part in tensor.chunks
                ]
                tensors.append(ChunkedTensor(name, tensor.dtype, tensor.shape, chunks))
        for path, values in self._values.items():
            for at, value in enumerate(values, len(self._stored[path])):
                chunk = Chunk((0,) * len(value.shape), value.shape, numbers[path], entries[path][at])
                tensors.append(ChunkedTensor(value.name, value.dtype, value.shape, [chunk]))
        checkpoint = chunked_checkpoint(form, self._directory, headers, tensors, self.faults, HINT)
        outputs = [key for key in self._tensors if key.endswith(OUTPUT)] if tied else []
        copies += [(key[: -len(OUTPUT)] + EMBEDDING, key) for key in outputs]
        self._tie(checkpoint, copies)
        return checkpoint

    def _tie(self, checkpoint: ChunkedCheckpoint, copies: Sequence[tuple[str, str]]) -> None:
        """Take copies out of a checkpoint, to be compared with what they are copies of."""
        tensors, faults = dict(checkpoint.tensors), dict(checkpoint.faults)
        sets: dict[str, list[GlobalTensor]] = {}
        for key, copy in copies:
            tensor, fault = tensors.pop(copy, None), faults.pop(copy, None)
            if tensor is not None:
                sets.setdefault(key, []).append(tensor)
            elif fault is not None:
                faults.setdefault(key, fault)
        checkpoint.tensors, checkpoint.faults = tensors, faults
        checkpoint.tied = [
            *(
                TiedTensors(tensors[key], tuple(each), _TIED, "take a checkpoint whose copies agree")
                for key, each in sets.items()
                if key in tensors
            ),
            *proofs(checkpoint, checkpoint.tensors),
        ]
        refuse_unproved(checkpoint, [name for name in (*tensors, *faults) if name.startswith(MASTERS)])
