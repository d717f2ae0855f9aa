"""Low-rank adapters: merging them into the weights that they were trained beside.

`pairs` finds which matrices belong to which weight, `scale` what they are multiplied with (by `module_patterns`
for modules that have an alpha of their own), `low_rank` adds the
product of two to a weight as it is written, and `adapter` puts these together for the plan. `beside` looks at whole
weights beside the matrices.
"""

from reshard.lora.adapter import Adapter, read_adapter
from reshard.lora.beside import check_beside
from reshard.lora.scale import MAX_ALPHA, MIN_ALPHA, Scale, scale_of

__all__ = ["MAX_ALPHA", "MIN_ALPHA", "Adapter", "Scale", "check_beside", "read_adapter", "scale_of"]
