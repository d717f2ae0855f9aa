"""A checkpoint with other names, packing and types than its base.

It is not stored. Plans and checks use its tensors, which will be written; only readers of bytes use the
tensors in the files.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from reshard.checkpoints.checkpoint import (
    Addition,
    ByName,
    Checkpoint,
    GlobalTensor,
    ShardReading,
    TiedTensors,
)
from reshard.checkpoints.formats.dtypes import ITEM_SIZES

if TYPE_CHECKING:
    from reshard.layout.views import View


class Recipe(NamedTuple):
    """The sources of an edited tensor.

    Attributes:
        sources: names of tensors of the base, numbered as in the view.
        view: its elements of the sources; None for a single unchanged source.
        dtype: its element type; None for that of its sources.
        added: the addition to its elements; None without one.
    """

    sources: tuple[str, ...]
    view: Optional[View] = None
    dtype: Optional[str] = None
    added: Optional[Addition] = None


class EditedTensors(ByName[GlobalTensor]):
    """Edited tensors by name, created on demand.

    Args:
        base: the tensors of the base.
        recipes: by name, in order.
    """

    def __init__(self, base: Mapping[str, GlobalTensor], recipes: Mapping[str, Recipe]) -> None:
        super().__init__(recipes.keys())
        self._base = base
        self._recipes = recipes
        self._tensors: dict[str, GlobalTensor] = {}

    def __getitem__(self, name: str) -> GlobalTensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            recipe = self._recipes[name]
            stored = tuple(self._base[source] for source in recipe.sources)
            if recipe.dtype is not None:
                # A cast would round quantised tensors a second time.
                stored = tuple(source.decoded_to(recipe.dtype) for source in stored)
            first = stored[0]
            dtype = first.dtype if recipe.dtype is None else recipe.dtype
            tensor = self._tensors[name] = GlobalTensor(
                name,
                dtype,
                first.item_size if dtype == first.dtype else ITEM_SIZES[dtype],
                first.shape if recipe.view is None else recipe.view.shape,
                tuple(itertools.chain.from_iterable(source.shardings for source in stored)),
                ShardReading.of_all([source.shards for source in stored]),
                stored,
                recipe.view,
                recipe.added,
            )
        return tensor


class EditedCheckpoint:
    """A checkpoint with edits; see `checkpoint.Checkpoint`. Files are the base's.

    Args:
        base: the unedited checkpoint.
        recipes: of its tensors, by name, in order.
        kept_values: names of the base's values that it keeps.
        identity: a text; equal edits have equal texts.
        tied: further tied tensors of the base.
        nested: per name the keys of nested dictionaries in a trainer's state; None for those of the base.
        unseen: per parameter that the base's strategy lists and no file holds, its new name; None if only shapes
            could determine it.
        packing: the table of names that was applied, its options and sizes, for records; `plan.edits` makes it.
    """

    def __init__(
        self,
        base: Checkpoint,
        recipes: Mapping[str, Recipe],
        kept_values: Collection[str],
        identity: str,
        tied: Sequence[TiedTensors] = (),
        unseen: Mapping[str, Optional[str]] = MappingProxyType({}),
        nested: Optional[Mapping[str, tuple[Any, ...]]] = None,
        packing: Sequence[str] = (),
    ) -> None:
        self.identity = identity
        self.packing = tuple(packing)
        self.base = base
        self.form, self.step = base.form, base.step
        self.files, self.indexes = base.files, base.indexes
        self.training, self.extra_files, self.objects = base.training, base.extra_files, base.objects
        self.recipes = recipes
        self.tensors: Mapping[str, GlobalTensor] = EditedTensors(base.tensors, recipes)
        self.unseen = unseen
        self.nested: Mapping[str, tuple[Any, ...]] = base.nested if nested is None else nested
        self._kept_values = frozenset(kept_values)
        self._tied = tuple(tied)

    @property
    def label(self) -> str:
        """That of the base."""
        return self.base.label

    @property
    def place(self) -> str:
        """That of the base."""
        return self.base.place

    @property
    def laid_out(self) -> Collection[str]:
        """Names of its tensors."""
        return self.tensors.keys()

    def order(self) -> list[str]:
        """The order of each tensor's first source in the base."""
        places = {name: place for place, name in enumerate(self.base.order())}
        return sorted(self.recipes, key=lambda name: places[self.recipes[name].sources[0]])

    def tied_tensors(self) -> Sequence[TiedTensors]:
        """The tied tensors of the base and of rules."""
        return (*self.base.tied_tensors(), *self._tied)

    def names(self) -> set[str]:
        """Names of tensors and of kept values."""
        return {*self.recipes, *self._kept_values}

    def values(self) -> Sequence[str]:
        """Names of kept values."""
        return [name for name in self.base.values() if name in self._kept_values]

    def without_layout(self) -> Sequence[str]:
        """Names of the base's weights without a layout that are kept."""
        return [name for name in self.base.without_layout() if name in self._kept_values]

    def holders(self, name: str) -> list[int]:
        """The files that hold a kept value, or a source of a tensor, ascending."""
        if name in self._kept_values:
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
