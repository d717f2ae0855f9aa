"""At which sizes Megatron loads a checkpoint."""

from __future__ import annotations

import os

from reshard.forms.megatron.bucket_state import holds_buckets
from reshard.forms.megatron.iterations import choose, kind_of_iteration
from reshard.forms.megatron.keys import LEGACY
from reshard.forms.pytorch.dcp import read_metadata
from reshard.forms.pytorch.form import METADATA
from reshard.storage import names_in
from reshard.text.messages import Report


def sizes_note(src: str, step: str) -> str:
    """At which sizes Megatron loads a checkpoint, by the kind of its optimizer state.

    Raises:
        CheckpointError: there is no such iteration, or its metadata is damaged.
    """
    directory = choose(src, step, Report()).path
    if kind_of_iteration(directory, names_in(directory)) == LEGACY:
        return "Megatron loads a legacy tree only at its own sizes; this command makes torch_dist of it, for any sizes."
    metadata = read_metadata([os.path.join(directory, METADATA)])
    if any(map(holds_buckets, metadata.tensors)):
        return "Megatron loads this optimizer state, dp_reshardable, at other sizes only after this command."
    if metadata.flattened or any(map(holds_buckets, metadata.objects)):
        return "Megatron-Core 0.15 and newer load this optimizer state of 0.14 or older only after this command."
    return "Megatron loads this checkpoint at any sizes as it is; this command is for other programs."
