"""Names that readers and writers of Megatron's checkpoints share: of files, and keys of tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence

MEGATRON = "megatron"
"""The name of the form."""

MODEL_FILE = "model_optim_rng.pt"
"""The file of a rank in a legacy tree."""

RANK_DIRECTORY = re.compile(r"mp_rank_([0-9]{2,})(?:_([0-9]{3,}))?(?:_([0-9]{3,}))?")
"""A directory of a legacy tree: tensor rank, then pipeline or expert rank, or both."""

TORCH_DIST, LEGACY, PLAIN = "torch_dist", "torch", "plain"
"""Kinds of iterations; plain ones are distributed checkpoints of torch alone: ``fsdp_dtensor`` and ``torch_dcp``."""

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

STATE = "optimizer.state."
"""Before the kind of a state and the key of its weight."""

LAYER = re.compile(r"decoder\.layers\.(?:([0-9]{1,6})\.)?(.+)")
"""A tensor of a decoder layer, or of all of them if the key has no number: the number, and the name in the layer."""

MTP = re.compile(r"mtp\.layers\.([0-9]{1,6})\.(.+)")
"""A tensor of a layer of multi-token prediction: the number, and the name in the layer."""

MTP_INNER = re.compile(r"(?:transformer_layer|mtp_model_layer)\.(.+)")
"""A name in such a layer, of the usual layer in it."""


def weight_of(name: str) -> str:
    """The key of the weight that a state belongs to; empty for other names."""
    if not name.startswith(STATE):
        return ""
    return name[len(STATE) :].partition(".")[2]


def rank_directory(tensor: int, others: Sequence[int]) -> str:
    """The name of a rank's directory in a legacy tree, by its numbers."""
    return "_".join([f"mp_rank_{tensor:02d}", *(f"{number:03d}" for number in others)])
