"""Writing a part of the files of a group: block by block through a buffer per file, in one thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Union

from reshard.checkpoints import Data, Literal
from reshard.execute.filling import boxes_of_range
from reshard.execute.parts import FilesPart, SharedRows
from reshard.execute.reader import Worker
from reshard.execute.writing import PartBuffer, TargetWriter
from reshard.layout import volume_of
from reshard.plan.pieces import TargetTensor


class PartWriter:
    """Writes parts.

    Args:
        worker: reads what they are made of.
        stopped: whether to end in the middle of a part, which is then not written.
        wrote: told how many bytes of tensors are done.
    """

    def __init__(self, worker: Worker, stopped: Callable[[], bool], wrote: Callable[[int], None]) -> None:
        self._filler = worker.filler
        self._block = worker.block
        self._stopped = stopped
        self._wrote = wrote

    def write(self, part: FilesPart, writers: Sequence[TargetWriter]) -> None:
        """Write a part, given a writer per file.

        Raises:
            UnwritableError: a file cannot be written, and no other could.
            ReshardError: a source file cannot be read.
        """
        share = len(self._block) // len(writers)
        buffers = [
            PartBuffer(self._block[number * share : (number + 1) * share], writer, offset)
            for number, (writer, offset) in enumerate(zip(writers, part.offsets))
        ]
        for stretch in part.stretches:
            if stretch.shared is None:
                for buffer, writer, segments in zip(buffers, writers, stretch.segments):
                    self._write_alone(segments, writer.target.tensors, buffer)
            else:
                for buffer, segments in zip(buffers, stretch.segments):
                    for segment in segments:
                        buffer.expect(segment.offset)
                        if isinstance(segment, Literal):
                            buffer.put(segment.data)
                self._write_shared(stretch.shared, buffers)
            if self._stopped():
                return
        for buffer in buffers:
            buffer.flush()

    def _write_alone(
        self, segments: Sequence[Union[Literal, Data]], tensors: Sequence[TargetTensor], buffer: PartBuffer
    ) -> None:
        for segment in segments:
            buffer.expect(segment.offset)
            if isinstance(segment, Literal):
                buffer.put(segment.data)
                continue
            tensor = tensors[segment.tensor]
            first, last = segment.start // tensor.item_size, segment.stop // tensor.item_size
            most = max(1, buffer.size // tensor.item_size)
            for box in boxes_of_range(tensor.shape, first, last, most):
                if self._stopped():
                    return
                count = volume_of(box) * tensor.item_size
                self._filler.fill(tensor, box, buffer.reserve(count))
                self._wrote(count)

    def _write_shared(self, shared: SharedRows, buffers: Sequence[PartBuffer]) -> None:
        most = min(
            self._filler.most_shared_rows(shared),
            *(buffer.size // row for buffer, row in zip(buffers, shared.row_bytes)),
        )
        if most < 1:
            # Not even a row fits for everyone at once: each member by itself.
            for tensor, row, buffer in zip(shared.tensors, shared.row_bytes, buffers):
                data = Data(buffer.position, 0, shared.first * row, shared.last * row)
                self._write_alone([data], (tensor,), buffer)
            return
        for rows in boxes_of_range(shared.outer_shape, shared.first, shared.last, most):
            if self._stopped():
                return
            count = volume_of(rows)
            rooms = [buffer.reserve(count * row) for buffer, row in zip(buffers, shared.row_bytes)]
            self._filler.fill_shared(shared, rows, rooms)
            self._wrote(sum(len(room) for room in rooms))
