"""Layout algebra: device matrices, tensor maps, slices and how two layouts overlap.

Without files, dtypes and bytes. `Layout` cuts a parameter over the devices of a stage; `Grid` is its geometry for a
tensor of a given shape; `Overlap` lists the source slices of a target slice; `View` is a tensor of strided boxes of
others, and `ViewOverlap` lists their source slices.
"""

from reshard.layout.grid import Box, Grid, boxes_of_range, inside, intersection, placed, shape_of, volume_of, whole_box
from reshard.layout.layout import Layout, whole
from reshard.layout.overlap import Cell, Overlap, ViewOverlap, stand_in_shape
from reshard.layout.views import ZEROS, Loop, Region, View

__all__ = [
    "ZEROS",
    "Box",
    "Cell",
    "Grid",
    "Layout",
    "Loop",
    "Overlap",
    "Region",
    "View",
    "ViewOverlap",
    "boxes_of_range",
    "inside",
    "intersection",
    "placed",
    "shape_of",
    "stand_in_shape",
    "volume_of",
    "whole",
    "whole_box",
]
