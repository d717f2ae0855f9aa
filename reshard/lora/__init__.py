"""Low-rank adapters: merging them into the weights that they were trained beside.

`pairs` finds which matrices belong to which weight, `scale` what they are multiplied with, `low_rank` adds the
product of two to a weight as it is written, and `adapter` puts these together for the plan.
"""

from reshard.lora.adapter import Adapter, read_adapter
from reshard.lora.scale import Scale, scale_of

__all__ = ["Adapter", "Scale", "read_adapter", "scale_of"]
