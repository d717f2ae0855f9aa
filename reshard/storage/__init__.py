"""Files and directories: status, reading, writing. Every content is treated as untrusted.

This room does not interpret files.
"""

from reshard.storage.files import (
    CHANGED,
    UnfitError,
    between,
    changed_meanwhile,
    cut_short,
    directories_in,
    exists,
    fill,
    inspecting,
    is_directory,
    is_regular_file,
    leads_to,
    names_in,
    new_file,
    opened_regular,
    read_each,
    read_json,
    read_range,
    read_small,
    reading,
    reading_error,
    remove_file,
    scatter,
    status_at,
    status_of_each,
    write_parts,
    write_whole,
    writing,
    writing_error,
)
from reshard.storage.local import LocalFile
from reshard.storage.registry import (
    STORES,
    absolute,
    common_directory,
    costs_of,
    for_each,
    is_absolute,
    real,
    same_store,
    store_of,
    use_endpoint,
)
from reshard.storage.store import DirectoryEntry, FileStatus, NewFile, Notify, OpenFile, ReadableFile, Sending, Store
