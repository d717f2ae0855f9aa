"""Layout algebra: device matrices, tensor maps, slices and how two layouts overlap.

Without files, dtypes and bytes. `Layout` cuts a parameter over the devices of a stage; `Grid` is its geometry for a
tensor of a given shape; `Overlap` lists the source slices of a target slice. Few conversions load `views`: a `View` is
a tensor of strided boxes of others, and `ViewOverlap` lists their source slices.
"""

from reshard.layout.grid import (
    Box,
    Cell,
    Grid,
    Overlap,
    boxes_of_range,
    inside,
    intersection,
    placed,
    shape_of,
    volume_of,
    whole_box,
)
from reshard.layout.layout import Layout, stand_in_shape, whole
