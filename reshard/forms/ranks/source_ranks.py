"""Whether the ranks that a checkpoint tree has are those of its strategy."""

from __future__ import annotations

from reshard.checkpoints import FileHandles, read_index
from reshard.errors import CheckpointError
from reshard.forms.ranks import SourceTree
from reshard.strategies import Strategy
from reshard.text.wording import rank_ranges


def check_ranks(tree: SourceTree, source: Strategy, handles: FileHandles) -> None:
    """Refuse a tree whose ranks the source strategy does not know.

    Raises:
        CheckpointError: ranks beyond the strategy's devices, or one file where there must be several.
    """
    if tree.single_file and source.device_count > 1:
        # What is no checkpoint at all is said first.
        read_index(handles, tree.root)
        raise CheckpointError(
            f"{tree.root} is one file, but {source.path} lays parameters out over {source.device_count} devices",
            file=tree.root,
            hint="pass the directory of all ranks' checkpoints, or --src-strategy none for an unsharded checkpoint",
        )
    beyond = [rank for rank in tree.ranks if rank >= source.device_count]
    if beyond:
        held = "one device (strategy none)" if source.is_none else f"{source.device_count} devices ({source.path})"
        raise CheckpointError(
            f"{tree.root} has checkpoints of {rank_ranges(beyond)}, but the source strategy has {held}",
            file=tree.root,
            rank=beyond[0],
            hint="pass the strategy that this checkpoint was saved with"
            if source.is_none
            else "is the last pipeline stage's strategy file missing?",
        )
