"""common.json of Checkpoint 2.0: what training goes on from besides tensors.

Loaders before MindFormers 2.1 refuse members that they do not know, so those of 1.8.0 alone are written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MEMBERS = ("epoch_num", "step_num", "global_step", "loss_scale", "global_batch_size")


def common_json(said: Mapping[str, Any]) -> bytes:
    """The content of common.json; what is not known is null, so that training does not go on from a guess."""
    return json.dumps({name: said.get(name) for name in _MEMBERS}, indent=4).encode()
