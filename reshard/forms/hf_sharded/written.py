"""Target files of PyTorch's sharded safetensors."""

from __future__ import annotations

import json
from collections.abc import Sequence

from reshard.checkpoints.formats.output import OutputLayout, OutputTensor, lay_out_safetensors
from reshard.forms.chunk_files import ChunkFiles
from reshard.forms.hf_sharded.form import INFO, VERSION_KEY
from reshard.forms.hf_sharded.headers import FULL_SHAPE, OFFSETS
from reshard.forms.target import FinishingFile
from reshard.forms.writing import Selected
from reshard.layout import Box
from reshard.strategies import Strategy

_VERSION = "1.0"


class ShardFiles(ChunkFiles):
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
        """The files beside the weights: a directory is complete when all shards are there, without a mark."""
        return self._others
