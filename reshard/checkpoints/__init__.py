"""Checkpoint files: per name the type, the shape and the byte ranges, and the layout of new files.

Reading: `read_index` reads the headers of one file. Writing: `lay_out_ckpt` and `lay_out_safetensors` place every
byte of a new file before a tensor is read. This room does not depend on strategies or forms, and keeps no tensor in
memory.
"""

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.dtypes import can_hold, mindspore_reads
from reshard.checkpoints.formats.headers import format_of, read_index
from reshard.checkpoints.formats.output import (
    Data,
    Literal,
    OutputLayout,
    OutputTensor,
    lay_out_ckpt,
    lay_out_copy,
    lay_out_safetensors,
)
from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor, files_alike, tensors_named, unchecked
