"""Names that readers and writers of Megatron's checkpoints share: of files, and keys of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

MEGATRON = "megatron"
"""The name of the form."""

MODEL_FILE = "model_optim_rng.pt"
"""The file of a rank in a legacy tree."""

RANK_DIRECTORY = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")
"""A directory of a legacy tree: tensor rank, then pipeline or expert rank, or both."""

TORCH_DIST, LEGACY, PLAIN = "torch_dist", "torch", "plain"
"""Kinds of iterations; plain ones are distributed checkpoints of torch alone: ``fsdp_dtensor`` and ``torch_dcp``."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

DECODER = "decoder.layers."
"""Before the number of a layer."""

STATE = "optimizer.state."
"""Before the kind of a state and the key of its weight."""

_LAYER = re.compile(r"((?:decoder|encoder)\.layers\.)(?:([0-9]{1,6})\.)?(.+)")
_MTP = re.compile(r"(mtp\.layers\.([0-9]{1,6})\.)((?:transformer_layer|mtp_model_layer)\.)?(.+)")


class Place(NamedTuple):
    """The module of a tensor, and its key there.

    Attributes:
        prefix: of the keys of the module; for a layer of the decoder or the encoder that before its number.
        layer: the number of such a layer; None for others, and for tensors of all layers.
        tail: the key in the module.
        mtp: the number of a layer of multi-token prediction; None for others.
    """

    prefix: str
    layer: int | None
    tail: str
    mtp: int | None = None

    @property
    def is_layer(self) -> bool:
        """Whether the module is a layer of the usual kind, or all of them."""
        return self.prefix.endswith(("layers.", "_layer."))

    @property
    def is_stacked(self) -> bool:
        """Whether the tensor is that of all layers."""
        return self.layer is None and self.prefix.endswith("layers.")


def place_of(key: str) -> Place:
    match = _LAYER.fullmatch(key)
    if match:
        return Place(match[1], None if match[2] is None else int(match[2]), match[3])
    match = _MTP.fullmatch(key)
    if match:
        return Place(match[1] + (match[3] or ""), None, match[4], int(match[2]))
    return Place("", None, key)


def weight_of(name: str) -> str:
    """The key of the weight that a state belongs to; empty for other names."""
    if not name.startswith(STATE):
        return ""
    return name[len(STATE) :].partition(".")[2]


def rank_directory(tensor: int, others: Sequence[int]) -> str:
    """The name of a rank's directory in a legacy tree, by its numbers."""
    return "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])
