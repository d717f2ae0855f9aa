"""Directories of full weights: MindSpore's unified safetensors and Hugging Face's.

Every tensor lies whole in one of several ``.safetensors`` files, and a map says in which. The map is
believed only as far as the files bear it out: a tensor that is not in the file named, or in two files, is an
error, since readers of such a directory would not agree on it.

Unified weights have a file more, ``hyper_param.safetensors``: whatever else the file of rank 0 held. What of
it is no scalar may be rank 0's slice of a tensor, so it is left out.
"""

from reshard.forms.full.contents import FullWeights, read_huggingface, read_unified
from reshard.forms.full.directory import (
    HUGGINGFACE,
    HUGGINGFACE_INDEX,
    HYPER_PARAMETERS,
    MAP_FILES,
    UNIFIED,
    UNIFIED_MAP,
    full_weights_form,
)

__all__ = [
    "HUGGINGFACE",
    "HUGGINGFACE_INDEX",
    "HYPER_PARAMETERS",
    "MAP_FILES",
    "UNIFIED",
    "UNIFIED_MAP",
    "FullWeights",
    "full_weights_form",
    "read_huggingface",
    "read_unified",
]
