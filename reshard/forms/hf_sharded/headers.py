"""What headers of sharded safetensors record of their entries: which part of which tensor each is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Optional

from reshard.checkpoints.formats.tensors import CheckpointIndex, Tensor
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.storage.json_text import JsonError, parse_json
from reshard.text.wording import quoted

INFO = "DCP_SHARDING_INFO"
"""The key of a header's metadata for the places of the file's tensors."""
OFFSETS, FULL_SHAPE = "saved_offsets", "global_shape"
# What newer headers call the tensor that an entry is a chunk of, where entries have names of their own.
_NAMES = ("fqn", "logical_fqn")
_LARGEST_NUMBER = 1 << 63


class HeaderEntry(NamedTuple):
    """What a header says of an entry.

    Attributes:
        name: the tensor.
        offsets: where the chunk begins.
        shape: of the full tensor; None where that is not recorded.
        sizes: of the chunk.
    """

    name: str
    offsets: tuple[int, ...]
    shape: Optional[tuple[int, ...]]
    sizes: tuple[int, ...]

    @property
    def whole(self) -> bool:
        """Whether the chunk seems to be all of the tensor."""
        return not any(self.offsets) and self.shape in (None, self.sizes)


def entries_of(index: CheckpointIndex) -> Iterator[tuple[HeaderEntry, Tensor]]:
    """Every entry of a file, and what its header says of it.

    Raises:
        CheckpointError: the header says nothing of one, or what is no place in a tensor.
    """
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
        said = info.get(key)
        if not isinstance(said, dict) or OFFSETS not in said:
            raise _wrong(index.path, key, f"has no {OFFSETS} in {INFO}")
        strange = sorted(said.keys() - {OFFSETS, FULL_SHAPE, *_NAMES})
        if strange:
            raise _wrong(index.path, key, f"has {quoted(strange[0])} in {INFO}, which this version does not know")
        offsets, shape = said[OFFSETS], said.get(FULL_SHAPE)
        for what, numbers in ((OFFSETS, offsets), (FULL_SHAPE, shape)):
            if numbers is not None and not _are_numbers(numbers, len(stored.shape)):
                raise _wrong(index.path, key, f"of shape {list(stored.shape)} has {what} {str(numbers)[:80]}")
        names = {said[word] for word in _NAMES if word in said}
        if any(not isinstance(name, str) or not name for name in names) or len(names) > 1:
            raise _wrong(index.path, key, f"has no one name in {INFO}")
        name = next(iter(names), key)
        yield HeaderEntry(name, tuple(offsets), None if shape is None else tuple(shape), stored.shape), stored


def sharding_info(index: CheckpointIndex) -> Optional[dict[str, Any]]:
    """What a header records of the places of its tensors; None where it records nothing.

    Raises:
        DamagedCheckpointError: it is no JSON object.
    """
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


def _are_numbers(found: object, count: int) -> bool:
    return (
        isinstance(found, list)
        and len(found) == count
        and all(type(each) is int and 0 <= each < _LARGEST_NUMBER for each in found)
    )


def _wrong(path: str, name: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: {quoted(name)} {what}",
        file=path,
        parameter=name,
        hint="take the files of one save; a newer version of reshard may know more of these headers",
    )
