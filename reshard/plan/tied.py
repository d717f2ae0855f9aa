"""Whether tensors that rules take for one, such as a tied embedding, really are equal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

from reshard.checkpoints import FileHandles, Tensor, reading_error
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor
from reshard.checkpoints.formats.tensors import file_ranges
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
        alike = list(_held_alike(checkpoint, checkpoint.tensors[one], checkpoint.tensors[other]))
        for here, there in alike:
            first, second = checkpoint.indexes[here].tensors[one], checkpoint.indexes[there].tensors[other]
            path, beside = checkpoint.files[here], checkpoint.files[there]
            if first.dtype != second.dtype or any(
                _read(first, at, path, handles) != _read(second, at, beside, handles) for at in _places(first)
            ):
                raise _differ(one, other, beside)
        if not alike:
            report.warn(
                f"{quoted(one)} is taken for {quoted(other)} too, as a tied model has it; they are cut in different "
                "ways, so whether they are equal was not looked at"
            )


def _held_alike(checkpoint: Checkpoint, one: GlobalTensor, other: GlobalTensor) -> Iterator[tuple[int, int]]:
    """Files that hold the same slice of two tensors, for each slice in which both are cut."""
    here, there = checkpoint.present(one), checkpoint.present(other)
    for (sharding, present), (second, held) in product(zip(one.shardings, here), zip(other.shardings, there)):
        for number in range(sharding.grid.slice_count):
            same = second.grid.number_of(sharding.grid.slice_box(number))
            if same is None:
                continue
            holders = [holder for holder in sharding.holders(number) if holder in present]
            others = [holder for holder in second.holders(same) if holder in held]
            if holders and others:
                yield holders[0], others[0]


def _places(tensor: Tensor) -> Iterable[int]:
    """Where samples begin, in bytes of the tensor."""
    step = max(_BYTES, tensor.nbytes // _SAMPLES)
    return range(0, tensor.nbytes, step)


def _read(tensor: Tensor, start: int, path: str, handles: FileHandles) -> bytes:
    """A sample of a tensor's bytes, however it is spread over extents."""
    ranges = file_ranges(tensor.extents, start, min(_BYTES, tensor.nbytes - start))
    try:
        with handles.borrow(path) as file:
            return b"".join(read_range(file, offset, length) for offset, length in ranges)
    except OSError as error:
        raise reading_error(path, error) from error


def _differ(one: str, other: str, path: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {quoted(one)} and {quoted(other)} differ, but the rules take them for one tensor",
        file=path,
        parameter=other,
        hint="this model does not tie them: see that config.json says so (tie_word_embeddings)",
    )
