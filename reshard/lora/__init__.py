"""Low-rank adapters: merging them into their base model."""

from reshard.lora.adapter import Adapter, check_beside
from reshard.lora.scale import MAX_ALPHA, MIN_ALPHA, Scale, scale_of
