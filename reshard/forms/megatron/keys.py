"""Keys of Megatron's tensors that readers and writers need by name."""

from __future__ import annotations

EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"

STATE = "optimizer.state."
"""Before the kind of a state and the key of its weight."""


def weight_of(name: str) -> str:
    """The key of the weight that a state belongs to; empty for other names."""
    if not name.startswith(STATE):
        return ""
    return name[len(STATE) :].partition(".")[2]
