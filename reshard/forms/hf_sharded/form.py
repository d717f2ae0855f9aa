"""PyTorch's sharded safetensors as a form, and their directories by names."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Optional

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.forms.form import ChunkedForm, FormOptions, Layouts, Names, ReadRequest, WriteRequest, check_latest
from reshard.storage import caches_listings, is_directory, names_in

if TYPE_CHECKING:
    from reshard.forms.target import TargetForm

INFO = "DCP_SHARDING_INFO"
"""The key of a header's metadata for the places of the file's tensors."""
VERSION_KEY = "DCP_VERSION"

SHARDED = "sharded"
"""The directory of shards beside consolidated files."""
SHARD = re.compile(r"shard-([0-9]{5,9})-model-([0-9]{5,9})-of-([0-9]{5,9})\.safetensors")
"""Names of files: number of the shard, number of the file in it, and how many files a shard may have."""


def shards_in(path: str, names: Sequence[str]) -> Optional[str]:
    """The directory of shards: this one, or `SHARDED` in it; None if neither has any."""
    if any(map(SHARD.fullmatch, names)):
        return path
    inner = os.path.join(path, SHARDED)
    if SHARDED in names and is_directory(inner) and any(map(SHARD.fullmatch, names_in(inner))):
        return inner
    return None


class HfShardedForm(ChunkedForm):
    """Sharded safetensors of torch.distributed.checkpoint."""

    name = "hf-sharded"
    options = FormOptions(
        title="sharded safetensors of PyTorch",
        layouts=Layouts.RECORDED,
        shards=True,
        mindspore=False,
        huggingface=True,
        names=Names.ANY,
        metadata=(INFO, VERSION_KEY),
    )

    def recognise(self, src: str, names: Optional[Sequence[str]] = None) -> bool:
        """By names as torch gives them; consolidated files beside them are Hugging Face's form."""
        if not is_directory(src):
            return SHARD.fullmatch(os.path.basename(src)) is not None
        names = names_in(src) if names is None else names
        consolidated = any(name.endswith(".safetensors.index.json") or name == "model.safetensors" for name in names)
        directory = shards_in(src, names)
        return directory == src or (directory is not None and not consolidated)

    @caches_listings
    def read(self, reading: ReadRequest) -> Checkpoint:
        from reshard.forms.hf_sharded.shards import read_shards

        check_latest(self, reading)
        return read_shards(self.name, reading)

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        from reshard.forms.full.beside import files_beside
        from reshard.forms.hf_sharded.shards import ShardFiles
        from reshard.forms.writing import selected

        chosen = selected(checkpoint, request)
        return ShardFiles(request.target, chosen, files_beside(checkpoint, chosen.tensors, request))
