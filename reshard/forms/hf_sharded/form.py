"""PyTorch's sharded safetensors as a form."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Optional, cast

from reshard.checkpoints.checkpoint import Checkpoint
from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_safetensors
from reshard.forms.chunk_files import ChunkFiles
from reshard.forms.chunks import ChunkedCheckpoint, described, strategy_of
from reshard.forms.form import Description, Form, FormOptions, Layouts, Names, ReadRequest, WriteRequest
from reshard.forms.full.form import check_latest
from reshard.forms.hf_sharded.headers import FULL_SHAPE, INFO, OFFSETS
from reshard.forms.hf_sharded.reading import SHARD, read_shards, shards_in
from reshard.forms.target import FinishingFile, TargetForm
from reshard.forms.writing import Selected, selected
from reshard.layout import Box
from reshard.storage import caches_listings, is_directory, names_in
from reshard.strategies import Strategy

VERSION_KEY, _VERSION = "DCP_VERSION", "1.0"


class HfShardedForm(Form):
    """Sharded safetensors of torch.distributed.checkpoint."""

    name = "hf-sharded"
    options = FormOptions(
        title="sharded safetensors of PyTorch",
        layouts=Layouts.RECORDED,
        shards=True,
        mindspore=False,
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
    def read(self, reading: ReadRequest) -> ChunkedCheckpoint:
        """By the headers of all files."""
        check_latest(self, reading)
        return read_shards(self.name, reading)

    def strategy_of(self, checkpoint: Checkpoint) -> Strategy:
        """As the headers place the chunks."""
        return strategy_of(cast(ChunkedCheckpoint, checkpoint))

    def target(self, checkpoint: Checkpoint, request: WriteRequest) -> TargetForm:
        """A file for every rank, and the other files of a Hugging Face directory."""
        from reshard.forms.full.beside import files_beside

        chosen = selected(checkpoint, request)
        return _Shards(request.target, chosen, files_beside(checkpoint, chosen.tensors, request))

    def describe(self, checkpoint: Checkpoint) -> Description:
        """The number of chunks, and missing elements."""
        return described(cast(ChunkedCheckpoint, checkpoint))


class _Shards(ChunkFiles):
    """The files, with full shapes beside the offsets that older versions of torch go by."""

    name = "hf-sharded"
    format = "safetensors"

    def __init__(self, strategy: Strategy, chosen: Selected, others: Sequence[FinishingFile]) -> None:
        super().__init__(strategy, chosen, lambda rank: f"shard-{rank + 1:05d}-model-00001-of-00001")
        self._others = others

    def lay_out(self, tensors: Sequence[OutputTensor], boxes: Sequence[Box]) -> OutputLayout:
        """A safetensors file whose header has the place of every tensor."""
        info = {
            tensor.name: {OFFSETS: [start for start, _ in box], FULL_SHAPE: self._full_shape(tensor)}
            for tensor, box in zip(tensors, boxes)
        }
        text = json.dumps(info, ensure_ascii=False, separators=(",", ":"))
        return lay_out_safetensors(tensors, {INFO: text, VERSION_KEY: _VERSION, "format": "pt"})

    def _full_shape(self, tensor: OutputTensor) -> Sequence[int]:
        source = self.tensors.get(tensor.name)
        return tensor.dims if source is None else source.shape

    def finishing(self) -> Sequence[FinishingFile]:
        """The files beside the weights: nothing else tells that the shards are complete, but that all are there."""
        return self._others
