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
    names_in_each,
    status_at,
    status_of_each,
    too_long,
)
from reshard.storage.once import asked_once, asks_once
from reshard.storage.opened import opened_regular, read_small
from reshard.storage.read import ReadableFile, UnfitError, cut_short, fill, read_each, read_range
from reshard.storage.status import FileStatus
from reshard.storage.store import (
    Entry,
    NewFile,
    OpenFile,
    Store,
    absolute,
    common_directory,
    entries_of_each,
    for_each,
    in_object_store,
    is_absolute,
    make_directory,
    new_file,
    real,
    remove_file,
    storage_of,
    store_of,
    use_endpoint,
    write_whole,
)

__all__ = [
    "Entry",
    "FileStatus",
    "LocalFile",
    "NewFile",
    "OpenFile",
    "ReadableFile",
    "Store",
    "UnfitError",
    "absolute",
    "asked_once",
    "asks_once",
    "common_directory",
    "cut_short",
    "entries_of_each",
    "exists",
    "fill",
    "for_each",
    "in_object_store",
    "is_absolute",
    "is_directory",
    "is_regular_file",
    "leads_to_directory",
    "leads_to_file",
    "link_at",
    "look_error",
    "make_directory",
    "names_in",
    "names_in_each",
    "new_file",
    "opened_regular",
    "read_each",
    "read_range",
    "read_small",
    "real",
    "remove_file",
    "status_at",
    "status_of_each",
    "storage_of",
    "store_of",
    "too_long",
    "use_endpoint",
    "write_whole",
]
