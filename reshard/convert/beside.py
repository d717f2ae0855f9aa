"""Checkpoints beside those of a conversion, in its directory."""

from __future__ import annotations

import os

from reshard.execute.destination import Destination
from reshard.records.identity import Identity


def beside(directory: str, identity: Identity) -> list[str]:
    """Checkpoint files that the conversion did not write and that readers may take for its own, sorted.

    Args:
        directory: the target directory; the names are relative to it.
        identity: which conversion.

    Raises:
        ReshardError: it cannot be read.
    """
    own = {identity.file_of(file) for file in range(identity.ranks)}
    found = Destination(directory).checkpoints({os.path.dirname(name) for name in own})
    return [name for name in found if name not in own]
