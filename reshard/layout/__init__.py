"""Layout algebra: device matrices, tensor maps, slices and how two layouts overlap.

This room knows nothing of files, dtypes or bytes. `Layout` says how one parameter is cut over the
devices of a stage; `Grid` is the geometry of it, for a tensor of a given shape; `Overlap` says which
source slices a target slice is made of; `View` is a tensor made of strided boxes of others.
"""

from reshard.layout.boxes import Covering, covering
from reshard.layout.grid import Box, Grid, inside, intersection, shape_of, volume_of, whole_box
from reshard.layout.layout import Layout, whole
from reshard.layout.overlap import Cell, Overlap, stand_in_shape
from reshard.layout.view_overlap import ViewOverlap
from reshard.layout.views import ZEROS, Loop, Region, View

__all__ = [
    "ZEROS",
    "Box",
    "Cell",
    "Covering",
    "Grid",
    "Layout",
    "Loop",
    "Overlap",
    "Region",
    "View",
    "ViewOverlap",
    "covering",
    "inside",
    "intersection",
    "shape_of",
    "stand_in_shape",
    "volume_of",
    "whole",
    "whole_box",
]
