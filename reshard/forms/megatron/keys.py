"""Keys of Megatron's tensors that readers and writers need by name."""

from __future__ import annotations

import re

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
