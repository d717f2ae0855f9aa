"""Low-rank adapters: merging them into their base model.

`pairs` maps matrices to weights, `scale` computes their factor (with `module_patterns` for modules with their own
alpha), `low_rank` adds the product of two matrices to a weight during the conversion, and `adapter` combines these
for the plan.
"""

from reshard.lora.adapter import Adapter, check_beside
from reshard.lora.scale import MAX_ALPHA, MIN_ALPHA, Scale, scale_of

__all__ = ["MAX_ALPHA", "MIN_ALPHA", "Adapter", "Scale", "check_beside", "scale_of"]
