"""Objects other than tensors in PyTorch's checkpoints, for display: unpickled as inert data."""

from __future__ import annotations

import contextlib
from typing import Any

from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.formats.pickles import NAMESPACE, NotPlain, PickleError, among, plain, read_pickle
from reshard.errors import InputError
from reshard.storage import read_range, reading_error

MAX_SHOWN = 1 << 20
"""Bytes of an object that is read to be shown."""

_ALLOWED = among([*FROM_TORCH, NAMESPACE])


def shown_object(handles: FileHandles, stored: StoredObject) -> Any:
    """An object as a JSON value.

    Raises:
        NotPlain: it holds more than numbers, text, lists and dictionaries, or is damaged.
        ReshardError: reading failed.
    """
    if stored.length > MAX_SHOWN:
        raise NotPlain("it is too large to be shown")
    try:
        with contextlib.closing(handles.open_file(stored.path)) as file:
            if stored.archived:
                return plain(Archive(file, stored.offset, stored.length).pickled(_ALLOWED))
            return plain(read_pickle(read_range(file, stored.offset, stored.length), _ALLOWED))
    except (PickleError, InputError) as error:
        # A pickle that names classes is intact: no advice for damaged files.
        if isinstance(error, InputError) and isinstance(error.__cause__, PickleError):
            raise NotPlain(error.message) from error
        raise NotPlain(str(error)) from error
    except OSError as error:
        raise reading_error(stored.path, error) from error
