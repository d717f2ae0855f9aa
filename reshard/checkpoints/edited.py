"""A checkpoint whose tensors are made of another's: under other names, packed otherwise, of other types.

It is not stored. Plans and checks use its tensors, which will be written; only readers of bytes use the
tensors in the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

from reshard.checkpoints.by_name import ByName
from reshard.checkpoints.checkpoint import Addition, Checkpoint, Equal, GlobalTensor, ShardReading, StoredObject
from reshard.checkpoints.formats.dtypes import ITEM_SIZES
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.layout import View


@dataclass(frozen=True)
class Recipe:
    """The parts of a tensor.

    Attributes:
        sources: names of tensors of the source, numbered as in the view.
        view: its elements of them; None for a single unchanged source.
        dtype: element type that it gets; None for that of its sources.
        added: the addition to its elements; None without one.
    """

    sources: tuple[str, ...]
    view: Optional[View] = None
    dtype: Optional[str] = None
    added: Optional[Addition] = None


class MadeTensors(ByName[GlobalTensor]):
    """Tensors by name, each made of others, as objects on demand.

    Args:
        base: the tensors that they are made of.
        made: their parts, by name, in order.
    """

    def __init__(self, base: Mapping[str, GlobalTensor], made: Mapping[str, Recipe]) -> None:
        super().__init__(made.keys())
        self._base = base
        self._made = made
        self._known: dict[str, GlobalTensor] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        found = self._known.get(name)
        if found is None:
            made = self._made[name]
            stored = tuple(self._base[each] for each in made.sources)
            first = stored[0]
            dtype = first.dtype if made.dtype is None else made.dtype
            found = self._known[name] = GlobalTensor(
                name,
                dtype,
                first.item_size if dtype == first.dtype else ITEM_SIZES[dtype],
                first.shape if made.view is None else made.view.shape,
                tuple(itertools.chain.from_iterable(each.shardings for each in stored)),
                ShardReading.of_all([each.shards for each in stored]),
                stored,
                made.view,
                made.added,
            )
        return found


class EditedCheckpoint:
    """A checkpoint made of another, the base; see `checkpoint.Checkpoint`. Files are the base's.

    Args:
        base: the other.
        made: the parts of its tensors, by name, in order.
        kept: names of the base's values that it keeps.
        identity: a text; equal edits have equal texts.
        tied: further tied tensors of the base.
        nested: by name the keys of the nested dictionaries that a trainer's state has it in; those of the base where
            None.
        unseen: per parameter that the base's strategy lists and no file holds, the name that it would get; None where
            only shapes would tell.
    """

    def __init__(
        self,
        base: Checkpoint,
        made: Mapping[str, Recipe],
        kept: Collection[str],
        identity: str,
        tied: Sequence[Equal] = (),
        unseen: Mapping[str, Optional[str]] = MappingProxyType({}),
        nested: Optional[Mapping[str, tuple[Any, ...]]] = None,
    ) -> None:
        self.identity = identity
        self.base = base
        self.made = made
        self.tensors: Mapping[str, GlobalTensor] = MadeTensors(base.tensors, made)
        self.unseen = unseen
        self.nested: Mapping[str, tuple[Any, ...]] = getattr(base, "nested", {}) if nested is None else nested
        self._kept = frozenset(kept)
        self._tied = tuple(tied)

    @property
    def form(self) -> str:
        """That of the base."""
        return self.base.form

    @property
    def step(self) -> Optional[str]:
        """That of the base."""
        return self.base.step

    @property
    def label(self) -> str:
        """That of the base."""
        return self.base.label

    @property
    def place(self) -> str:
        """That of the base."""
        return self.base.place

    @property
    def files(self) -> Mapping[int, str]:
        """Those of the base."""
        return self.base.files

    @property
    def indexes(self) -> Mapping[int, CheckpointIndex]:
        """Those of the base."""
        return self.base.indexes

    @property
    def laid_out(self) -> Collection[str]:
        """Names of its tensors."""
        return self.tensors.keys()

    @property
    def training(self) -> Mapping[str, Any]:
        """That of the base."""
        return self.base.training

    @property
    def others(self) -> Sequence[str]:
        """Those of the base."""
        return self.base.others

    @property
    def objects(self) -> Mapping[str, StoredObject]:
        """Those of the base."""
        return self.base.objects

    def order(self) -> list[str]:
        """The order of each tensor's first source in the base."""
        places = {name: place for place, name in enumerate(self.base.order())}
        return sorted(self.made, key=lambda name: places[self.made[name].sources[0]])

    def equal(self) -> Sequence[Equal]:
        """Those of the base, and those tied by rules."""
        return (*self.base.equal(), *self._tied)

    def names(self) -> set[str]:
        """Names of tensors and of kept values."""
        return {*self.made, *self._kept}

    def values(self) -> Sequence[str]:
        """Names of kept values."""
        return [name for name in self.base.values() if name in self._kept]

    def without_layout(self) -> Sequence[str]:
        """Names of the base's weights without a layout that are kept."""
        return [name for name in self.base.without_layout() if name in self._kept]

    def holders(self, name: str) -> list[int]:
        """The files that hold a kept value, or anything of a tensor, ascending."""
        if name in self._kept:
            return self.base.holders(name)
        return sorted(frozenset().union(*self.present(self.tensors[name])))

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The files that hold a tensor's sources, per sharding of each."""
        return tuple(itertools.chain.from_iterable(map(self.base.present, tensor.stored)))


def stored_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint in the files."""
    while isinstance(checkpoint, EditedCheckpoint):
        checkpoint = checkpoint.base
    return checkpoint
