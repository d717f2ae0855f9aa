"""The small files of our own in a target directory.

Loaders do not all wait for an index: MindSpore's takes the only ``.safetensors`` file of a directory for all there is,
MindFormers' and inference engines read every such file that they find. So while files are missing there is one among
them, of the same ending, that no loader can read.
"""

from __future__ import annotations

STRATEGY_FILE = "reshard-strategy.json"
"""The strategy of ranks that are cut as the source was, where the source's own is of other names, or in no file."""


UNFINISHED = "reshard-unfinished.safetensors"
"""The file that makes loaders fail while others are missing."""

UNFINISHED_CONTENT = b"This checkpoint is not complete: reshard status tells what is missing, reshard resume goes on.\n"
"""What it holds: nothing that a loader takes for the header of a safetensors file, or a person for a checkpoint."""
