"""Reading the headers of many files, each once; many at a time where every request takes a round trip."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Union

from reshard.checkpoints.files import FileHandles
from reshard.checkpoints.formats.alike import KnownStructures
from reshard.checkpoints.formats.open import read_index
from reshard.checkpoints.formats.tensors import CheckpointIndex
from reshard.errors import CheckpointError, DamagedCheckpointError, RetryableError
from reshard.storage import exists, storage_of

# Reading headers from network storage is waiting, whatever the number of CPUs.
_IN_FLIGHT = 16

Header = Union[CheckpointIndex, DamagedCheckpointError]


def read_headers(
    handles: FileHandles, files: Mapping[int, str], known: KnownStructures, holder: str = "rank"
) -> Iterator[tuple[int, Header]]:
    """What files hold, or why they are damaged, by holder number in the order given.

    Args:
        handles: where to borrow the files from.
        files: path by holder number.
        known: structures of files read before; these files' are added.
        holder: what the numbers are called in messages.

    Raises:
        CheckpointError: a file cannot be read, is encrypted, or is no checkpoint.
        RetryableError: reading failed in a way that may pass, or a file vanished.
    """

    def read(number: int) -> Header:
        path = files[number]
        try:
            return read_index(handles, path, known)
        except DamagedCheckpointError as error:
            return error
        except CheckpointError as error:
            if exists(path):
                raise
            raise RetryableError(
                f"{path}: vanished while the checkpoint was read ({holder} {number})",
                file=path,
                rank=number,
                hint="keep the job that saves checkpoints from removing this step, then give the same command again",
            ) from error

    numbers = list(files)
    # The first file is read alone, so that others that are built like it are only compared with it.
    for number in numbers[:1]:
        yield number, read(number)
    if len(numbers) < 2:
        return
    storage = storage_of(files[numbers[0]])
    if not storage.remote:
        for number in numbers[1:]:
            yield number, read(number)
        return
    with ThreadPoolExecutor(max(_IN_FLIGHT, storage.in_flight)) as pool:
        coming = [(number, pool.submit(read, number)) for number in numbers[1:]]
        try:
            for number, future in coming:
                yield number, future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
