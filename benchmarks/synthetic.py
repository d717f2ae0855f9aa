"""Checkpoints of any size and layout, with their strategy files.

A model is a list of parameters; a scheme says how many pipeline stages, data and model parallel ranks
there are, which dimension model parallelism cuts, and whether the optimizer is sharded. Element i of a
parameter (in C order) is i plus a number of the parameter's own, so every misplaced element shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reshard.checkpoints import Data, FileHandles, Literal, OutputTensor, lay_out_ckpt, lay_out_safetensors, read_index
from reshard.layout import Layout
from reshard.storage import read_range
from reshard.strategies.files import protobuf_bytes
from reshard.strategies.model import RecordedLayout, StrategyFile, StrategyItem

Words = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class Scheme:
    """A parallel layout.

    Attributes:
        stages: pipeline stages, into which layers are divided in order.
        data: data parallel ranks of a stage.
        model: model parallel ranks of a stage.
        cut: the dimension that model parallelism cuts: 0 for rows, 1 for columns.
        sharded: whether the optimizer is sharded over the data parallel ranks.
    """

    stages: int = 1
    data: int = 1
    model: int = 1
    cut: int = 0
    sharded: bool = False

    @property
    def per_stage(self) -> int:
        return self.data * self.model

    @property
    def ranks(self) -> int:
        return self.stages * self.per_stage

    def layout(self) -> Layout:
        """The layout of every matrix."""
        axes: list[tuple[int, ...]] = [(), ()]
        axes[self.cut] = (0,)
        step = self.model if self.sharded else 0
        return Layout((self.data, self.model), tuple(axes), shard_size=-1 if self.sharded else 0, shard_step=step)


@dataclass(frozen=True)
class Model:
    """``layers`` layers of ``matrices`` Float32 matrices of shape (rows, columns) each."""

    layers: int
    matrices: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        return self.layers * self.matrices * self.rows * self.columns * 4

    def names(self, scheme: Scheme, stage: int) -> list[str]:
        """Parameters of a stage."""
        share = self.layers // scheme.stages
        return [
            f"backbone.blocks.{layer}.weight{number}"
            for layer in range(stage * share, (stage + 1) * share)
            for number in range(self.matrices)
        ]

    def tensor(self, name: str) -> Words:
        """The full tensor of a parameter, as 32-bit words."""
        first = sum(name.encode()) * 2654435761 % 2**32
        count = self.rows * self.columns
        return (np.arange(count, dtype=np.uint32) + np.uint32(first)).reshape(self.rows, self.columns)


def write_strategy(directory: Path, model: Model, scheme: Scheme) -> None:
    """Write one strategy file per stage."""
    directory.mkdir(parents=True, exist_ok=True)
    for stage in range(scheme.stages):
        path = directory / f"ckpt_strategy_rank_{stage * scheme.per_stage}.ckpt"
        path.write_bytes(strategy_bytes(model.names(scheme, stage), scheme, stage))


def strategy_bytes(names: list[str], scheme: Scheme, stage: int) -> bytes:
    """A strategy file of one stage, as MindSpore writes it."""
    layout = scheme.layout()
    recorded = RecordedLayout(
        device_matrix=layout.device_matrix,
        tensor_maps=(tuple(axes[0] if axes else -1 for axes in layout.tensor_map),),
        shard_step=layout.shard_step,
        shard_size=layout.shard_size,
    )
    item = StrategyItem(f"MatMul-{stage}", stage, ())
    return protobuf_bytes(StrategyFile("", "protobuf", (item,), dict.fromkeys(names, recorded)))


def write_checkpoint(directory: Path, model: Model, scheme: Scheme, ending: str = "ckpt") -> None:
    """Write ``rank_<r>/net-1_10.<ending>`` for every rank."""
    write_ranks(model, scheme, lambda rank: directory / f"rank_{rank}" / f"net-1_10.{ending}")


def write_ranks(model: Model, scheme: Scheme, path_of: Callable[[int], Path]) -> None:
    """Write a file for every rank."""
    layout = scheme.layout()
    shape = (model.rows, model.columns)
    for stage in range(scheme.stages):
        names = model.names(scheme, stage)
        boxes = [layout.slice_box(shape, int(number)) for number in layout.slice_of_rank]
        size = [int(np.prod([stop - start for start, stop in box])) * 4 for box in boxes]
        writers = []
        for rank, (box, nbytes) in enumerate(zip(boxes, size)):
            path = path_of(stage * scheme.per_stage + rank)
            writers.append(Writer(path, names, tuple(stop - start for start, stop in box), nbytes))
        for name in names:
            full = model.tensor(name)
            for box, writer in zip(boxes, writers):
                writer.write(np.ascontiguousarray(full[tuple(slice(*interval) for interval in box)]))
        for writer in writers:
            writer.close()


def wrong_slices(
    directory: Path, model: Model, scheme: Scheme, ending: str = "ckpt", prefix: str = "checkpoint_"
) -> int:
    """The number of wrong slices of a converted checkpoint."""
    layout = scheme.layout()
    shape = (model.rows, model.columns)
    wrong = 0
    with FileHandles() as handles:
        for rank in range(scheme.ranks):
            stage, local = divmod(rank, scheme.per_stage)
            path = str(directory / f"rank_{rank}" / f"{prefix}{rank}.{ending}")
            index = read_index(handles, path)
            box = layout.slice_box(shape, int(layout.slice_of_rank[local]))
            for name in model.names(scheme, stage):
                with handles.borrow(path) as file:
                    data = b"".join(read_range(file, offset, size) for offset, size in index.tensors[name].extents)
                part = model.tensor(name)[tuple(slice(*interval) for interval in box)]
                wrong += np.ascontiguousarray(part).tobytes() != data
    return wrong


class Writer:
    """Writes a file tensor by tensor, in order."""

    def __init__(self, path: Path, names: list[str], shape: tuple[int, ...], nbytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        lay_out = lay_out_safetensors if path.suffix == ".safetensors" else lay_out_ckpt
        layout = lay_out([OutputTensor(name, "Float32", shape, nbytes) for name in names])
        self._segments = layout.segments()
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115

    def write(self, data: Words) -> None:
        remaining = data.reshape(-1).view(np.uint8).data
        while remaining.nbytes:
            segment = next(self._segments)
            if isinstance(segment, Literal):
                self._file.write(segment.data)
            else:
                self._file.write(remaining[: segment.stop - segment.start])
                remaining = remaining[segment.stop - segment.start :]

    def close(self) -> None:
        for segment in self._segments:
            assert not isinstance(segment, Data)
            self._file.write(segment.data)
        self._file.close()
