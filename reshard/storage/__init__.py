"""Files and directories: whether they are there, and reading them as what anybody may have written.

Nothing here knows what files mean.
"""

from reshard.storage.local import LocalFile
from reshard.storage.look import (
    exists,
    is_directory,
    is_regular_file,
    leads_to_directory,
    leads_to_file,
    link_at,
    look_error,
    names_in,
    status_at,
    too_long,
)
from reshard.storage.opened import opened_regular, read_small
from reshard.storage.read import ReadableFile, UnfitError, cut_short, fill, read_each, read_range
from reshard.storage.status import FileStatus
from reshard.storage.store import (
    Entry,
    OpenFile,
    Store,
    absolute,
    common_directory,
    entries_of_each,
    in_object_store,
    is_absolute,
    real,
    refuse_object_store,
    storage_of,
    store_of,
    use_endpoint,
)

__all__ = [
    "Entry",
    "FileStatus",
    "LocalFile",
    "OpenFile",
    "ReadableFile",
    "Store",
    "UnfitError",
    "absolute",
    "common_directory",
    "cut_short",
    "entries_of_each",
    "exists",
    "fill",
    "in_object_store",
    "is_absolute",
    "is_directory",
    "is_regular_file",
    "leads_to_directory",
    "leads_to_file",
    "link_at",
    "look_error",
    "names_in",
    "opened_regular",
    "read_each",
    "read_range",
    "read_small",
    "real",
    "refuse_object_store",
    "status_at",
    "storage_of",
    "store_of",
    "too_long",
    "use_endpoint",
]
