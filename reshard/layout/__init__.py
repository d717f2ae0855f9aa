"""Layout algebra: device matrices, tensor maps, slices and how two layouts overlap.

This room knows nothing of files, dtypes or bytes. `Layout` says how one parameter is cut over the
devices of a stage; `Overlap` says which source slices a target slice is made of.
"""

from reshard.layout.layout import Layout
from reshard.layout.overlap import Cell, Overlap, stand_in_shape

__all__ = ["Cell", "Layout", "Overlap", "stand_in_shape"]
