"""One step of a rank tree, read by its strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

from reshard.checkpoints import CheckpointIndex
from reshard.checkpoints.checkpoint import Checkpoint, Equal, GlobalTensor, order_in_files
from reshard.checkpoints.edited import stored_checkpoint
from reshard.plan.source import SourceStep


@dataclass(frozen=True)
class RankCheckpoint:
    """One step of a rank tree; see `checkpoint.Checkpoint`. Holders are ranks.

    Attributes:
        source: the files.
        tensors: what the strategy lists, as the files hold it, by name.
        laid_out: names that the strategy lists.
        unseen: those of them that no file holds, where files of some ranks are missing.
    """

    source: SourceStep
    tensors: Mapping[str, GlobalTensor]
    laid_out: frozenset[str]
    unseen: frozenset[str] = frozenset()

    form = "ranks"

    @property
    def step(self) -> Optional[str]:
        """``3_10``; None for files without a step in their names."""
        return None if self.source.step is None else str(self.source.step)

    @property
    def label(self) -> str:
        """How the step is called in messages."""
        return self.source.label

    @property
    def place(self) -> str:
        """The directory that all files of the step lie below."""
        return self.source.place

    @property
    def files(self) -> Mapping[int, str]:
        """Path per rank that has a file of this step."""
        return self.source.files

    @property
    def indexes(self) -> Mapping[int, CheckpointIndex]:
        """What the readable files hold, by rank."""
        return self.source.indexes

    @property
    def training(self) -> Mapping[str, Any]:
        """Nothing but what files hold as values."""
        return {}

    @property
    def others(self) -> Sequence[str]:
        """None."""
        return ()

    def order(self) -> list[str]:
        """Names of all tensors, in the order in which files hold them."""
        return order_in_files(self)

    def equal(self) -> Sequence[Equal]:
        """None: every tensor stands for itself."""
        return ()

    def names(self) -> set[str]:
        """Every tensor name in the files."""
        return self.source.names()

    def values(self) -> list[str]:
        """Names that files hold and that the strategy does not list."""
        return sorted(self.source.names() - self.laid_out)

    def without_layout(self) -> list[str]:
        """None is known: what is not listed may be cut."""
        return []

    def holders(self, name: str) -> list[int]:
        """All ranks whose file holds a tensor of this name, ascending."""
        return self.source.holders(name)

    def present(self, tensor: GlobalTensor) -> tuple[frozenset[int], ...]:
        """The ranks whose file holds a tensor, per stage that does."""
        return self.source.present(tensor)


def rank_checkpoint_of(checkpoint: Checkpoint) -> Optional[RankCheckpoint]:
    """What a checkpoint, or what it is made of, is as files of ranks; None where it is of another form."""
    stored = stored_checkpoint(checkpoint)
    return stored if isinstance(stored, RankCheckpoint) else None
