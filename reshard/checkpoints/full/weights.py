"""A directory of full weights as the plan sees it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional

from reshard.checkpoints.by_name import ByName
from reshard.checkpoints.checkpoint import Equal, FileSharding, GlobalTensor
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.checkpoints.full.weight_map import HUGGINGFACE_INDEX, UNIFIED_MAP
from reshard.layout import Grid
from reshard.text.wording import step_words

UNIFIED, HUGGINGFACE = "unified", "huggingface"
"""The forms."""

MAP_FILES = {UNIFIED: UNIFIED_MAP, HUGGINGFACE: HUGGINGFACE_INDEX}
"""The file of each form that says in which file a tensor is."""


class WholeTensors(ByName[GlobalTensor]):
    """Tensors by name, each whole in one file; a `GlobalTensor` is made when one is asked for.

    Args:
        indexes: what is in the files, by number.
        holders: the file of every tensor.
    """

    def __init__(self, indexes: Mapping[int, CheckpointIndex], holders: Mapping[str, int]) -> None:
        super().__init__(holders)
        self._indexes = indexes
        self._holders = holders
        # There are few shapes and files, and many tensors.
        self._shardings: dict[tuple[int, tuple[int, ...]], tuple[FileSharding]] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        number = self._holders[name]
        tensor = self._indexes[number].tensors[name]
        shardings = self._shardings.get((number, tensor.shape))
        if shardings is None:
            shardings = (FileSharding(Grid.whole(tensor.shape), ((number,),)),)
            self._shardings[number, tensor.shape] = shardings
        return GlobalTensor(name, tensor.dtype, tensor.item_size, tensor.shape, shardings)


@dataclass
class FullWeights:
    """A directory of full weights; see `reshard.checkpoints.checkpoint.Checkpoint`.

    Attributes:
        form: ``unified`` or ``huggingface``.
        place: the directory.
        files: path of every file, by its number in natural order, from 0 on.
        indexes: what is in each of them.
        tensors: all tensors, in the order of the files, layers in natural order.
        scalars: values that are no part of the model, and the file that holds each.
        others: files beside the weights that belong to the model, such as its configuration and tokenizer,
            relative to the directory; none for unified weights.
        step: None; nothing tells it.
        label: how the checkpoint is called in messages.
    """

    form: str
    place: str
    files: Mapping[int, str]
    indexes: Mapping[int, CheckpointIndex]
    tensors: Mapping[str, GlobalTensor]
    scalars: Mapping[str, int] = field(default_factory=dict)
    others: tuple[str, ...] = ()
    step: Optional[str] = None
    label: str = step_words(None)

    @property
    def laid_out(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    @property
    def unseen(self) -> Collection[str]:
        """None: a directory that lacks a file is refused."""
        return ()

    @property
    def training(self) -> Mapping[str, Any]:
        """Nothing."""
        return {}

    def order(self) -> list[str]:
        """The names of all tensors in the order in which to write them."""
        return list(self.tensors)

    def equal(self) -> Sequence[Equal]:
        """None: every tensor stands for itself."""
        return ()

    def names(self) -> set[str]:
        """Names of all that is read."""
        return {*self.tensors, *self.scalars}

    def values(self) -> Sequence[str]:
        """Names of scalars that are no part of the model, sorted."""
        return sorted(self.scalars)

    def without_layout(self) -> Sequence[str]:
        """None is: a target says what it takes of full weights."""
        return ()

    def holders(self, name: str) -> list[int]:
        """The files that hold an entry of this name, ascending: one or none."""
        if name in self.tensors:
            return [number for held in self.present(self.tensors[name]) for number in held]
        return [self.scalars[name]] if name in self.scalars else []

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The files that do hold a tensor, per way of holding it: the one that is said to."""
        return tuple(frozenset(sharding.holders(0)) for sharding in tensor.shardings)
