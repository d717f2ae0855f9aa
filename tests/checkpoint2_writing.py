"""Checkpoint 2.0 written naively, for tests: as MindFormers writes it, or as it should not be written.

Nothing here uses the code under test.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.checkpoint_writing import DTYPES, write_safetensors

Array = npt.NDArray[Any]
TRACKER = "latest_checkpointed_iteration.txt"
COMMON = {"epoch_num": 1, "step_num": 10, "global_step": 10, "loss_scale": None, "global_batch_size": 16}


@dataclass(frozen=True)
class Laid:
    """A tensor and its layout, in the words of metadata.json; without a matrix every rank holds it whole."""

    array: Array
    matrix: Sequence[int] | None
    tensor_map: Sequence[int | Sequence[int]]
    ranks: Sequence[int]

    def part(self, rank: int) -> tuple[int, tuple[slice, ...]]:
        """Number and place of the slice that a rank holds."""
        if self.matrix is None:
            return 0, (slice(None),) * self.array.ndim
        coordinates = np.unravel_index(self.ranks.index(rank), self.matrix) if self.matrix else ()
        number, place = 0, []
        for size, axes in zip(self.array.shape, self.tensor_map):
            count, position = 1, 0
            for axis in [axes] if isinstance(axes, int) else axes:
                if axis >= 0:
                    count *= self.matrix[-1 - axis]
                    position = position * self.matrix[-1 - axis] + int(coordinates[-1 - axis])
            number = number * count + position
            place.append(slice(size // count * position, size // count * (position + 1)))
        return number, tuple(place)

    def groups(self) -> dict[int, list[int]]:
        """The ranks that hold each slice, by its number."""
        actual: dict[int, list[int]] = {}
        for rank in self.ranks:
            actual.setdefault(self.part(rank)[0], []).append(rank)
        return actual

    @property
    def cuts(self) -> list[int]:
        """Slices per dimension."""
        if self.matrix is None:
            return [1] * self.array.ndim
        several = ([axes] if isinstance(axes, int) else axes for axes in self.tensor_map)
        return [math.prod(self.matrix[-1 - axis] for axis in axes if axis >= 0) for axes in several]


@dataclass(frozen=True)
class Saving:
    """How an iteration is saved.

    Attributes:
        tensors: what is listed.
        world: number of ranks.
        unlisted: what lies in the files of all ranks without being listed; of arrays per rank, each its own.
        values: scalars in every optimizer file.
        deduplicated: one copy of each slice, and files numbered by themselves.
        groups: whether rank groups are recorded.
        indent: of metadata.json.
        prefix: of the files' names.
    """

    tensors: Mapping[str, Laid]
    world: int
    unlisted: Mapping[str, Array | Sequence[Array]]
    values: Mapping[str, Array]
    deduplicated: bool = False
    groups: bool = True
    indent: int | None = None
    prefix: str | None = "llm"

    def metadata(self) -> dict[str, Any]:
        """The content of metadata.json."""
        return {"state_dict_metadata": self._descriptions(), "storage_data": self._storage()}

    def _descriptions(self) -> dict[str, Any]:
        actual = {}
        for name, laid in self.tensors.items():
            layout = None
            if laid.matrix is not None:
                layout = {
                    "device_matrix": list(laid.matrix),
                    "tensor_map": [axes if isinstance(axes, int) else list(axes) for axes in laid.tensor_map],
                    "interleaved_parallel": False,
                    "alias_name": [chr(ord("a") + axis) for axis in range(len(laid.matrix))],
                    "rank_list": list(laid.ranks),
                }
            shape = [size // cut for size, cut in zip(laid.array.shape, laid.cuts)]
            actual[name] = {
                "properties": {"dtype": DTYPES[laid.array.dtype.name].lower(), "replica_id": 0},
                "global_shape": list(laid.array.shape),
                "axis_fragmentations": laid.cuts,
                "layout": layout,
                "chunk": [{"global_offset": [number], "local_shape": shape} for number in laid.groups()],
            }
        return actual

    def _storage(self) -> dict[str, Any]:
        actual = {}
        for name, laid in self.tensors.items():
            for number, ranks in laid.groups().items():
                entries: list[dict[str, Any]] = []
                for rank in self._storing(name, number, ranks):
                    entries.append({"file_name": self.file(kind_of(name), rank), "storage_rank": rank})
                    if self.groups:
                        entries[-1]["rank_group"] = ranks
                actual[str((name, (number,)))] = entries
        return actual

    def _storing(self, name: str, number: int, ranks: list[int]) -> list[int]:
        """The ranks that store a slice, of those that hold it."""
        return [ranks[(len(name) + number) % len(ranks)]] if self.deduplicated else ranks

    def _stored(self, kind: str, rank: int) -> dict[str, Array]:
        """What a rank stores of the tensors that are listed."""
        actual = {}
        for name, laid in self.tensors.items():
            if kind_of(name) == kind and rank in laid.ranks:
                number, place = laid.part(rank)
                if rank in self._storing(name, number, laid.groups()[number]):
                    actual[name] = laid.array[place].copy()
        return actual

    def _writers(self, kind: str) -> list[int]:
        """The ranks that write a file of this kind, in the order of the files."""
        return [rank for rank in range(self.world) if not self.deduplicated or self._stored(kind, rank)]

    def file(self, kind: str, rank: int) -> str:
        """The name of a rank's file."""
        writers = self._writers(kind)
        start = "" if self.prefix is None else f"{self.prefix}-"
        return f"{start}{kind}-{writers.index(rank):07d}-{len(writers):07d}.safetensors"

    def files(self) -> dict[str, dict[str, Array]]:
        """What every file holds."""
        actual: dict[str, dict[str, Array]] = {}
        optimizer = bool(self.values) or any(kind_of(name) == "opt" for name in self.tensors)
        for kind in ("model", "opt") if optimizer else ("model",):
            for rank in self._writers(kind):
                contents = actual[self.file(kind, rank)] = self._stored(kind, rank)
                if self.deduplicated:
                    continue
                for name, array in self.unlisted.items():
                    if kind_of(name) == kind:
                        contents[name] = array if isinstance(array, np.ndarray) else array[rank]
                contents.update(self.values if kind == "opt" else {})
        return actual

    def write(self, directory: Path) -> Path:
        """Write the iteration; a single rank has no metadata.json."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, contents in self.files().items():
            write_safetensors(directory / name, contents, {"format": "ms"})
        (directory / "common.json").write_text(json.dumps(COMMON, indent=4))
        if self.world > 1:
            (directory / "metadata.json").write_text(json.dumps(self.metadata(), indent=self.indent))
        return directory

    def write_root(self, root: Path, iteration: int = 10) -> Path:
        """Write the iteration below a root whose tracker names it."""
        self.write(root / f"iteration_{iteration:08d}")
        (root / TRACKER).write_text(str(iteration))
        return root


def kind_of(name: str) -> str:
    """The kind of file that contains a tensor."""
    return "opt" if name.startswith(("adam_", "exp_avg", "learning_rate", "global_step")) else "model"


def numbered(shape: Sequence[int], start: int = 0, dtype: str = "float32") -> Array:
    """An array of elements that encode their positions."""
    return (np.arange(math.prod(shape)) + start).astype(dtype).reshape(shape)


def saving(**changes: Any) -> Saving:
    """Two stages of data parallel 2 x tensor parallel 2, a weight and its state in each."""
    tensors = {
        "first.weight": Laid(numbered((4, 6), 100), (2, 2), (0, -1), range(4)),
        "second.weight": Laid(numbered((4, 6), 200), (2, 2), (-1, 0), range(4, 8)),
        "second.norm": Laid(numbered((6,), 300), (2, 2), (-1,), range(4, 8)),
        "adam_m.first.weight": Laid(numbered((4, 6), 400), (2, 2), (0, -1), range(4)),
        "adam_m.second.weight": Laid(numbered((4, 6), 500), (2, 2), (-1, 0), range(4, 8)),
        "adam_m.second.norm": Laid(numbered((6,), 600), (2, 2), (-1,), range(4, 8)),
    }
    values = {"learning_rate": np.array(0.5, np.float32), "global_step": np.array([10], np.int32)}
    return replace(Saving(tensors, 8, {}, values), **changes)
