"""Headers of safetensors files that record which parts of tensors they hold, as torch.distributed.checkpoint does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.messages import quoted

INFO = "DCP_SHARDING_INFO"
"""The key of a header's metadata for the places of the file's tensors."""
VERSION_KEY = "DCP_VERSION"

OFFSETS, FULL_SHAPE = "saved_offsets", "global_shape"
# Keys of newer headers for the name of the tensor, where an entry has another name.
_NAMES = ("fqn", "logical_fqn")


class HeaderEntry(NamedTuple):
    """The place of an entry in a tensor.

    Attributes:
        name: the tensor.
        offsets: where the chunk begins.
        shape: of the full tensor; None where that is not recorded.
        stored: the entry.
    """

    name: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...] | None
    stored: Tensor

    @property
    def whole(self) -> bool:
        """Whether the chunk seems to be all of the tensor."""
        return not any(self.offsets) and self.shape in (None, self.stored.shape)


def entries_of(index: CheckpointIndex) -> Iterator[HeaderEntry]:
    """Every entry of a file, and its place in a tensor; an error if its header has none, or an impossible one."""
    info = sharding_info(index)
    if info is None:
        raise CheckpointError(
            f"{index.path}: its header has no {INFO}, so nothing records which parts of tensors it holds",
            file=index.path,
            hint="copy the file again from where it was saved",
        )
    unknown = [key for key in info if key not in index.tensors]
    if unknown:
        raise _wrong(index.path, unknown[0], f"is in {INFO}, and the file does not hold it")
    for key, stored in index.tensors.items():
        place = info.get(key)
        if not isinstance(place, dict) or OFFSETS not in place:
            raise _wrong(index.path, key, f"has no {OFFSETS} in {INFO}")
        strange = sorted(place.keys() - {OFFSETS, FULL_SHAPE, *_NAMES})
        if strange:
            raise _wrong(index.path, key, f"has {quoted(strange[0])} in {INFO}, which this version does not support")
        offsets, shape = place[OFFSETS], place.get(FULL_SHAPE)
        for field, numbers in ((OFFSETS, offsets), (FULL_SHAPE, shape)):
            if numbers is not None and not _are_numbers(numbers, len(stored.shape)):
                raise _wrong(index.path, key, f"of shape {list(stored.shape)} has {field} {str(numbers)[:80]}")
        names = {place[word] for word in _NAMES if word in place}
        if any(not isinstance(name, str) or not name for name in names) or len(names) > 1:
            raise _wrong(index.path, key, f"has no one name in {INFO}")
        name = next(iter(names), key)
        yield HeaderEntry(name, tuple(offsets), None if shape is None else tuple(shape), stored)


def sharding_info(index: CheckpointIndex) -> dict[str, Any] | None:
    text = index.metadata.get(INFO)
    if text is None:
        return None
    try:
        info = parse_json(text.encode())
    except JsonError as error:
        raise DamagedCheckpointError(f"{index.path}: {INFO} is damaged: {error}", file=index.path) from None
    if not isinstance(info, dict):
        raise DamagedCheckpointError(f"{index.path}: {INFO} is no object", file=index.path)
    return info


def _are_numbers(numbers: object, count: int) -> bool:
    return (
        isinstance(numbers, list) and len(numbers) == count and all(type(each) is int and each >= 0 for each in numbers)
    )


def _wrong(path: str, name: str, problem: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {quoted(name)} {problem}",
        file=path,
        parameter=name,
        hint="take the files of one save; a newer version of reshard may read more of these headers",
    )
