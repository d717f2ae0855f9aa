"""Worker processes: writing parts of target files that a conversion requests."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from reshard.checkpoints import FileHandles
from reshard.errors import RetryableError
from reshard.execute.budget import Budget
from reshard.execute.parts import FileGroup, write_part
from reshard.execute.reader import BoxReader, FileReader
from reshard.execute.writing import TargetWriter
from reshard.layout import whole_box
from reshard.plan.pieces import TargetFile
from reshard.processes import Notify
from reshard.storage import FileStatus
from reshard.storage.local import WrittenFile

TargetOf = Callable[[int], TargetFile]
"""Plans a target file, given its number."""

PartRequest = tuple[Sequence[tuple[int, bool, bool]], int, bool]
"""Per file its number, whether the request has a descriptor of it, and whether it is written through maps; the number
of the part, and whether to compute checksums. A file without a descriptor is not written."""


class _ServingThread(threading.local):
    """State of a thread of a worker process."""

    def __init__(self) -> None:
        self.reader: FileReader | None = None
        self.notify: Notify = lambda message: None
        # The files of the last request, cut into parts; and the number of its part.
        self.group: FileGroup | None = None
        self.number = -1


class PartServer:
    """Writes parts in worker processes.

    It sends these messages before an answer: ``("wrote", bytes)``, ``("overflowed", name, count)``, and ``("last",)``
    when no part follows the requested one.
    """

    def __init__(self, target_of: TargetOf, handles: FileHandles, budget: Budget) -> None:
        self._target_of = target_of
        self._handles = handles
        self._budget = budget
        self._thread = _ServingThread()
        self._reader = BoxReader(handles, budget, lambda *count: self._thread.notify(("overflowed", *count)))

    def load_for(self, files: Iterable[TargetFile]) -> None:
        """Load NumPy, and ml_dtypes, if files like these need them: else each worker would, and take more memory."""
        reader = self._reader.new_reader()
        kept = not self._budget.through_maps
        for tensor in itertools.chain.from_iterable(file.tensors for file in files):
            if tensor.nbytes and reader.runs(tensor, whole_box(tensor.shape), kept) is None:
                _ = reader.filler
                if tensor.dtype is not None or any(piece.source.decoding is not None for piece in tensor.pieces):
                    import ml_dtypes  # noqa: F401
                return

    def __call__(
        self, request: PartRequest, descriptors: Sequence[int], notify: Notify
    ) -> tuple[list[Any], dict[str, FileStatus]]:
        """Write a part.

        Returns:
            The `TargetWriter.result` of each file, and the versions of source files that were first opened here.
        """
        members, number, checksum = request
        remaining = iter(descriptors)
        with contextlib.ExitStack() as stack:
            files = [WrittenFile(next(remaining)) if is_open else None for _, is_open, _ in members]
            for file in files:
                if file is not None:
                    stack.callback(file.close)
            thread = self._thread
            thread.notify = notify
            if thread.reader is None:
                thread.reader = self._reader.new_reader()
            group = self._group([rank for rank, _, _ in members], number)
            known_sources = self._handles.seen
            part, last = group.take(number)
            if last:
                notify(("last",))
            writers = [
                TargetWriter(target, None, checksum, file=file, mapped=mapped)
                for target, file, (_, _, mapped) in zip(group.files, files, members)
            ]
            for writer, file in zip(writers, files):
                if file is None:
                    writer.fail(RetryableError(f"{writer.target.path}: was given up", file=writer.target.path))
            if part is not None:
                # Once per part: a message for each write would take a tenth of its time.
                notify(("wrote", sum(write_part(part, writers, thread.reader))))
            return [writer.result for writer in writers], self._handles.seen_after(known_sources)

    def _group(self, ranks: list[int], number: int) -> FileGroup:
        """The files with their parts from part ``number`` on; parts are cut in order."""
        thread = self._thread
        if thread.group is None or thread.number >= number or [file.rank for file in thread.group.files] != ranks:
            thread.group = FileGroup([self._target_of(rank) for rank in ranks], self._budget.threads)
        thread.number = number
        return thread.group
