"""Whether tensors that rules take for one, such as a tied embedding, really are equal."""

from __future__ import annotations

from collections.abc import Iterable

from reshard.checkpoints import FileHandles, Tensor, reading_error
from reshard.checkpoints.checkpoint import Checkpoint
from reshard.errors import CheckpointError
from reshard.storage import read_range
from reshard.text.report import Report
from reshard.text.wording import quoted

# Looked at in each pair of slices: tensors that were trained apart differ almost everywhere.
_SAMPLES = 32
_BYTES = 64 << 10


def check_tied(checkpoint: Checkpoint, pairs: Iterable[tuple[str, str]], handles: FileHandles, report: Report) -> None:
    """Compare samples of tensors of which only the first is written.

    Args:
        checkpoint: the source.
        pairs: names of tensors that should be equal.
        handles: open source files.
        report: warned of what cannot be compared.

    Raises:
        CheckpointError: two differ.
        ReshardError: a file cannot be read.
    """
    for one, other in pairs:
        holders = _compared(checkpoint, one, other)
        for here, there in holders:
            first, second = checkpoint.indexes[here].tensors[one], checkpoint.indexes[there].tensors[other]
            path, beside = checkpoint.files[here], checkpoint.files[there]
            same = first.shape == second.shape and first.dtype == second.dtype
            if not same or any(
                _read(first, at, path, handles) != _read(second, at, beside, handles) for at in _places(first)
            ):
                raise _differ(one, other, beside)
        if not holders:
            report.warn(
                f"{quoted(one)} is taken for {quoted(other)} too, as a tied model has it; they are cut into different "
                "files, so whether they are equal was not looked at"
            )


def _compared(checkpoint: Checkpoint, one: str, other: str) -> list[tuple[int, int]]:
    """Files that hold slices of two tensors that should be equal."""
    here, there = checkpoint.holders(one), checkpoint.holders(other)
    both = sorted(set(here).intersection(there))
    if both:
        return [(holder, holder) for holder in both]
    cuts = [sharding.grid.slice_count for name in (one, other) for sharding in checkpoint.tensors[name].shardings]
    return [(here[0], there[0])] if here and there and set(cuts) == {1} else []


def _places(tensor: Tensor) -> Iterable[int]:
    """Where samples begin, in bytes of the tensor."""
    step = max(_BYTES, tensor.nbytes // _SAMPLES)
    return range(0, tensor.nbytes, step)


def _read(tensor: Tensor, start: int, path: str, handles: FileHandles) -> bytes:
    """A sample of a tensor's bytes, however it is spread over extents."""
    found = []
    left = min(_BYTES, tensor.nbytes - start)
    for offset, length in tensor.extents:
        if start >= length:
            start -= length
            continue
        count = min(left, length - start)
        try:
            with handles.borrow(path) as file:
                found.append(read_range(file, offset + start, count))
        except OSError as error:
            raise reading_error(path, error) from error
        start, left = 0, left - count
        if not left:
            break
    return b"".join(found)


def _differ(one: str, other: str, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {quoted(one)} and {quoted(other)} differ, but the rules take them for one tensor",
        file=path,
        parameter=other,
        hint="this model does not tie them: see that config.json says so (tie_word_embeddings)",
    )
