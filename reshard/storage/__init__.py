"""Files and directories: whether they are there, and reading them as what anybody may have written.

Nothing here knows what files mean.
"""

from reshard.storage.look import (
    exists,
    is_directory,
    is_regular_file,
    link_at,
    look_error,
    names_in,
    status_at,
    too_long,
)
from reshard.storage.read import (
    LocalFile,
    ReadableFile,
    UnfitError,
    cut_short,
    fill,
    opened_regular,
    read_range,
    read_small,
)

__all__ = [
    "LocalFile",
    "ReadableFile",
    "UnfitError",
    "cut_short",
    "exists",
    "fill",
    "is_directory",
    "is_regular_file",
    "link_at",
    "look_error",
    "names_in",
    "opened_regular",
    "read_range",
    "read_small",
    "status_at",
    "too_long",
]
