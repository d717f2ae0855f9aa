"""Writing a part of the files of a group: block by block through a buffer per file, in one thread.

The file system copies long runs of bytes that are contiguous in source and target, where that saves work: a server
copies them without sending them here, or both files share blocks on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Callable, Union

from reshard.checkpoints import Data, FileHandles, Literal
from reshard.checkpoints.formats.tensors import file_ranges
from reshard.execute.parts import SharedRows, TensorShare
from reshard.execute.reader import Worker
from reshard.execute.runs import Run, is_transposed, runs_of_box
from reshard.execute.writing import PartBuffer, TargetWriter
from reshard.layout import boxes_of_range, volume_of
from reshard.plan.pieces import TargetTensor

# Minimum bytes of a run: shorter runs are as fast through memory, many in one write.
_MIN_COPIED_RUN = 1 << 20
# Minimum bytes that are read to several places in one request: each request costs some microseconds of Python.
_MIN_SCATTERED = 256 << 10
# Maximum bytes of decoded or cast elements that are written at a time: they are still in the cache then.
_MAX_COMPUTED = 2 << 20


class PartWriter:
    """Writes parts.

    Args:
        worker: reads the tensors.
        handles: open source files.
        stopped: returns whether to stop in the middle of a part, which is then incomplete.
        wrote: counts bytes of tensors that are done.
        copied: counts those that the file system has copied.
    """

    def __init__(
        self,
        worker: Worker,
        handles: FileHandles,
        stopped: Callable[[], bool],
        wrote: Callable[[int], None],
        copied: Callable[[int], None],
    ) -> None:
        self._worker = worker
        self._handles = handles
        self._stopped = stopped
        self._wrote = wrote
        self._copied = copied

    def write(self, part: Sequence[TensorShare], writers: Sequence[TargetWriter]) -> None:
        """Write a part, given a writer per file.

        Raises:
            UnwritableError: a file cannot be written, and no other could.
            ReshardError: a source file cannot be read.
        """
        block = self._worker.block
        share = len(block) // len(writers)
        buffers = [
            PartBuffer(block[number * share : (number + 1) * share], writer) for number, writer in enumerate(writers)
        ]
        for stretch in (share.stretch() for share in part):
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
            if buffer.writer.copies:
                first += self._copy(tensor, first, last, buffer)
            if is_transposed(tensor):
                self._write_transposed(tensor, first, last, buffer)
                continue
            computed = all(
                piece.region is None and (piece.source.decoding is not None or piece.dtype is not None)
                for piece in tensor.pieces
            )
            step = min(buffer.size, _MAX_COMPUTED if computed else self._most_at_a_time(tensor, first, last))
            most = max(1, step // tensor.item_size)
            for box in boxes_of_range(tensor.shape, first, last, most):
                if self._stopped():
                    return
                count = volume_of(box) * tensor.item_size
                self._worker.fill(tensor, box, buffer.reserve(count))
                if computed or buffer.pending >= step:
                    buffer.flush()
                self._wrote(count)

    def _most_at_a_time(self, tensor: TargetTensor, first: int, last: int) -> int:
        """Maximum bytes of elements to read before they are written: runs are still in the cache then."""
        most = self._worker.copied_bytes
        for box in boxes_of_range(tensor.shape, first, last, last - first):
            runs = self._worker.runs(tensor, box)
            if runs is None:
                return len(self._worker.block)
            most = max(most, _MIN_SCATTERED * sum(run.number > 1 for run in runs))
        return most

    def _write_transposed(self, tensor: TargetTensor, first: int, last: int, buffer: PartBuffer) -> None:
        """Write elements while they are in the cache."""
        for box in boxes_of_range(tensor.shape, first, last, last - first):
            for part, fill in self._worker.filler.steps(tensor, box, buffer.size):
                if self._stopped():
                    return
                count = volume_of(part) * tensor.item_size
                fill(buffer.reserve(count))
                buffer.flush()
                self._wrote(count)

    def _copy(self, tensor: TargetTensor, first: int, last: int, buffer: PartBuffer) -> int:
        """Have the file system copy elements of a tensor, from the first one on; returns their number."""
        copied = 0
        for box in boxes_of_range(tensor.shape, first, last, last - first):
            runs = runs_of_box(tensor, box)
            count = volume_of(box) * tensor.item_size
            if runs is None or min(run.length for run in runs) < _MIN_COPIED_RUN:
                break
            buffer.flush()
            if not all(self._copy_run(run, buffer) for run in runs):
                # The box, and the rest of the file, go through memory.
                buffer.writer.copies = False
                break
            buffer.skip(count)
            self._wrote(count)
            self._copied(count)
            copied += volume_of(box)
        return copied

    def _copy_run(self, run: Run, buffer: PartBuffer) -> bool:
        """Have the file system copy a run; False after any failure: a read and a write then give the reason."""
        place = buffer.position + run.offset
        try:
            for offset, length in file_ranges(run.source.extents, run.start, run.length):
                with self._handles.borrow(run.source.path) as file:
                    if file.descriptor is None:
                        return False
                    if not buffer.writer.copy(file.descriptor, offset, place, length):
                        return False
                place += length
        except OSError:
            return False
        return True

    def _write_shared(self, shared: SharedRows, buffers: Sequence[PartBuffer]) -> None:
        if shared.first == shared.last:
            return
        most = min(
            self._worker.filler.most_shared_rows(shared),
            *(buffer.size // row for buffer, row in zip(buffers, shared.row_bytes)),
        )
        if most < 1:
            # A row of all members does not fit the buffers: write each member alone.
            for tensor, row, buffer in zip(shared.tensors, shared.row_bytes, buffers):
                data = Data(buffer.position, 0, shared.first * row, shared.last * row)
                self._write_alone([data], (tensor,), buffer)
            return
        for rows in boxes_of_range(shared.outer_shape, shared.first, shared.last, most):
            if self._stopped():
                return
            count = volume_of(rows)
            rooms = [buffer.reserve(count * row) for buffer, row in zip(buffers, shared.row_bytes)]
            self._worker.filler.fill_shared(shared, rows, rooms)
            self._wrote(sum(len(room) for room in rooms))
