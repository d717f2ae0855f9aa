"""What parameter names in MindSpore's checkpoints say by themselves."""

from __future__ import annotations

import re

ACCUMULATED_GRADIENTS = "accu_grads."
"""Begins the name of a parameter's accumulated gradients; the rest is the parameter's own name."""

# End-of-life saves store cur_rank; generators are cells with _seed and _offset.
_OF_ONE_RANK = re.compile(r"(^|[._])(cur_rank|rng_state|generator(_\d+)?\._?(seed|offset|state))$|\._(seed|offset)$")


def belongs_to_rank(name: str) -> bool:
    """Whether a value outside the strategies differs between ranks by nature."""
    return _OF_ONE_RANK.search(name) is not None
