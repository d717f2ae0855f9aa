"""What is no tensor in a checkpoint of PyTorch's side, for people: read as data, shown where it is plain."""

from __future__ import annotations

import contextlib
from typing import Any

from reshard.checkpoints.checkpoint import StoredObject
from reshard.checkpoints.files import FileHandles, reading_error
from reshard.checkpoints.formats.archives import Archive
from reshard.checkpoints.formats.dtypes import FROM_TORCH
from reshard.checkpoints.formats.pickles import NAMESPACE, NotPlain, PickleError, among, plain, read_pickle
from reshard.errors import InputError
from reshard.storage import read_range

MAX_SHOWN = 1 << 20
"""Bytes of an object that is read to be shown."""

_ALLOWED = among([*FROM_TORCH, NAMESPACE])


def shown_object(handles: FileHandles, held: StoredObject) -> Any:
    """An object as JSON has it.

    Raises:
        NotPlain: it is more than numbers, text, lists and dictionaries, or damaged.
        ReshardError: reading failed.
    """
    if held.length > MAX_SHOWN:
        raise NotPlain("it is too large to be shown")
    try:
        with contextlib.closing(handles.open_file(held.path)) as file:
            if held.archived:
                return plain(Archive(file, held.offset, held.length).pickled(_ALLOWED))
            return plain(read_pickle(read_range(file, held.offset, held.length), _ALLOWED))
    except (PickleError, InputError) as error:
        raise NotPlain(str(error)) from error
    except OSError as error:
        raise reading_error(held.path, error) from error
