"""Zip archives that ``torch.save`` writes: where in one the elements of its tensors lie.

``data.pkl`` lists the tensors: per tensor a storage, where in it the first element is, a shape and
strides. The storages are the entries ``data/0``, ``data/1`` and so on, stored and never compressed. An archive
is a file, or a record within one. Nothing of it is run, and no entry but ``data.pkl`` is read to find this out.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional

from reshard.checkpoints.formats.dtypes import FROM_TORCH, ITEM_SIZES
from reshard.checkpoints.formats.pickles import Global, PickledInstance, PickleError, among, read_pickle, sizes_of
from reshard.errors import CheckpointError, DamagedCheckpointError
from reshard.named_tuple import NamedTuple
from reshard.storage import ReadableFile, fill, read_range
from reshard.text.wording import quoted

MAX_PICKLE = 16 << 20
"""Bytes of ``data.pkl``; it holds some hundred for every tensor."""

_MAX_DIRECTORY = 64 << 20
# Both ends of a small archive are read at once, and of a large one enough for its directory and its first entries.
_NEAR_END = 4 << 10
_LOCAL = struct.Struct("<4s5H3I2H")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_LOCATOR_64 = struct.Struct("<4sIQI")
_UNKNOWN_32, _UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
# Flags: encrypted; lengths and CRC are in the directory, and follow the content; names are UTF-8.
_ENCRYPTED, _FOLLOWED, _UTF8 = 0x0001, 0x0008, 0x0800
# An entry without content, in attributes of MS-DOS.
_IS_DIRECTORY = 0x10
# Names and padding of torch's local headers are mostly shorter.
_NEAR_HEADER = 192

HEAD = b"PK\x03\x04"
"""The first bytes of an archive."""

STORAGES = {
    "torch.BoolStorage": "Bool",
    "torch.CharStorage": "Int8",
    "torch.ByteStorage": "UInt8",
    "torch.ShortStorage": "Int16",
    "torch.IntStorage": "Int32",
    "torch.LongStorage": "Int64",
    "torch.HalfStorage": "Float16",
    "torch.BFloat16Storage": "BFloat16",
    "torch.FloatStorage": "Float32",
    "torch.DoubleStorage": "Float64",
    "torch.ComplexFloatStorage": "Complex64",
    "torch.ComplexDoubleStorage": "Complex128",
}
"""The type of the elements of a storage; tensors of other types have untyped storages."""

UNTYPED = "torch.storage.UntypedStorage"
REBUILD, REBUILD_TYPED = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"

TENSOR_NAMES = frozenset({*FROM_TORCH, *STORAGES, UNTYPED, REBUILD, REBUILD_TYPED, _PARAMETER})
"""Names in the pickle of a tensor."""


class ArchiveEntry(NamedTuple):
    """An entry of an archive.

    Attributes:
        offset: where its bytes begin in the file.
        size: how many there are.
        crc: their CRC-32 as recorded; 0 where none is, None in a format without any.
    """

    offset: int
    size: int
    crc: Optional[int]


class Elements(NamedTuple):
    """Where the elements of a tensor lie in a file.

    Attributes:
        dtype: MindSpore's name of their type.
        shape: elements per dimension.
        strides: elements from one to the next, per dimension.
        offset: where in the file the first element begins.
        entry: the bytes around them that have a CRC.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    entry: ArchiveEntry

    @property
    def in_order(self) -> bool:
        """Whether they lie in C order without gaps."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.strides)):
            if size != 1 and stride != expected:
                return not math.prod(self.shape)
            expected *= size
        return True


class Archive:
    """An archive that lies in a file.

    Args:
        file: the file.
        offset: where the archive begins.
        length: its bytes.

    Raises:
        DamagedCheckpointError: it is no archive, or damaged.
        CheckpointError: it is compressed or encrypted.
        OSError: reading failed.
    """

    def __init__(self, file: ReadableFile, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._tail = read_range(file, offset + length - min(length, _NEAR_END), min(length, _NEAR_END))
        # Per entry where its header begins in the archive, its bytes, its CRC, its flags and its name.
        self._entries: dict[str, tuple[int, int, int, int, bytes]] = {}
        self._read_directory()

    def _damaged(self, problem: str) -> NoReturn:
        path = self._file.path
        where = f" (record at byte {self._offset})" if self._offset else ""
        raise DamagedCheckpointError(f"{path}: is damaged{where}: {problem}", file=path)

    def _bytes(self, position: int, count: int) -> bytes:
        """Bytes of the archive; of its end without reading again."""
        if position < 0 or count < 0 or position + count > self._length:
            self._damaged("its directory points outside of it")
        begin = position - (self._length - len(self._tail))
        if begin >= 0:
            return self._tail[begin : begin + count]
        return read_range(self._file, self._offset + position, count)

    def _read_directory(self) -> None:
        end = self._length - _END.size
        if end < 0:
            self._damaged("it is too short for an archive of torch.save")
        signature, *disks, count_here, count, size, start, comment = _END.unpack(self._bytes(end, _END.size))
        if signature != b"PK\x05\x06" or comment or any(disks) or count_here != count:
            self._damaged("it does not end like an archive of torch.save")
        if _UNKNOWN_32 in (size, start) or count == _UNKNOWN_16:
            locator = end - _LOCATOR_64.size
            signature, _, place, _ = _LOCATOR_64.unpack(self._bytes(locator, _LOCATOR_64.size))
            if signature != b"PK\x06\x07":
                self._damaged("the end of its directory is missing")
            signature, _, _, _, _, _, _, count, size, start = _END_64.unpack(self._bytes(place, _END_64.size))
            if signature != b"PK\x06\x06":
                self._damaged("the end of its directory is missing")
        if size > _MAX_DIRECTORY or count * _ENTRY.size > size:
            self._damaged("its directory is larger than any")
        self._list(self._bytes(start, size), count)

    def _list(self, directory: bytes, count: int) -> None:
        position = 0
        for _ in range(count):
            if position + _ENTRY.size > len(directory):
                self._damaged("its directory ends early")
            fields = _ENTRY.unpack_from(directory, position)
            signature, _, _, flags, method, _, _, crc, packed, size, name_size, extra_size, comment = fields[:13]
            disk, _, attributes, header = fields[13:]
            position += _ENTRY.size
            if signature != b"PK\x01\x02" or disk or flags & ~(_ENCRYPTED | _FOLLOWED | _UTF8):
                self._damaged("its directory is no list of entries")
            name_bytes = directory[position : position + name_size]
            name = name_bytes.decode("utf-8", "replace")
            extra = directory[position + name_size : position + name_size + extra_size]
            position += name_size + extra_size + comment
            size, packed, header = self._large(extra, size, packed, header)
            if flags & _ENCRYPTED or method or size != packed:
                raise CheckpointError(
                    f"{self._file.path}: {quoted(name)} in it is compressed or encrypted, which torch.save never does",
                    file=self._file.path,
                    hint="save the checkpoint again, without anything that packs its files",
                )
            if attributes & _IS_DIRECTORY:
                self._damaged(f"its entry {quoted(name)} is a directory")
            # All names begin with the name of the archive and a slash.
            inner = name.partition("/")[2]
            if inner in self._entries:
                self._damaged(f"it has two entries called {quoted(name)}")
            self._entries[inner] = (header, size, crc, flags, name_bytes)
        if position != len(directory):
            self._damaged("its directory has more than its entries")

    def _large(self, extra: bytes, *numbers: int) -> list[int]:
        """Numbers of an entry, those of more than 32 bits from its extra field."""
        result = list(numbers)
        position = 0
        while position + 4 <= len(extra) and _UNKNOWN_32 in result:
            kind, size = struct.unpack_from("<2H", extra, position)
            if kind == 1:
                at = position + 4
                for place, number in enumerate(result):
                    if number == _UNKNOWN_32:
                        if at + 8 > len(extra):
                            self._damaged("a number of its directory is missing")
                        (result[place],) = struct.unpack_from("<Q", extra, at)
                        at += 8
            position += 4 + size
        return result

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> ArchiveEntry:
        """An entry, by its name within the archive such as ``data/0``.

        Raises:
            DamagedCheckpointError: there is none.
            OSError: reading failed.
        """
        if name not in self._entries:
            self._damaged(f"it has no entry {quoted(name)}")
        header, size, crc, flags, full_name = self._entries[name]
        local = self._bytes(header, min(_NEAR_HEADER, self._length - header))
        if len(local) < _LOCAL.size:
            self._damaged("its directory points outside of it")
        signature, _, local_flags, method, _, _, local_crc, *sizes, name_size, extra_size = _LOCAL.unpack_from(local)
        extra = _LOCAL.size + name_size
        begin = extra + extra_size
        if signature != HEAD or header + begin + size > self._length:
            self._damaged(f"its entry {quoted(name)} does not lie in it")
        if begin > len(local):
            local = self._bytes(header, begin)
        # A wrong length in the header would move all elements.
        agrees = local[_LOCAL.size : extra] == full_name and (local_flags, method) == (flags, 0)
        if not flags & _FOLLOWED:
            agrees &= [local_crc, *self._large(local[extra:begin], *sizes)] == [crc, size, size]
        if not agrees or not _is_divided(local[extra:begin]):
            self._damaged(f"the header of its entry {quoted(name)} contradicts its directory")
        begin += header
        return ArchiveEntry(self._offset + begin, size, crc)

    def pickle(self) -> bytes:
        """The bytes of ``data.pkl``.

        Raises:
            DamagedCheckpointError: they are damaged.
        """
        entry = self.entry("data.pkl")
        if entry.size > MAX_PICKLE:
            self._damaged(f"its data.pkl has {entry.size:,} bytes")
        data = read_range(self._file, entry.offset, entry.size)
        if entry.crc and zlib.crc32(data) != entry.crc:
            self._damaged("the CRC-32 of its data.pkl is another one")
        return data

    def check(self, buffer: memoryview, on_block: Callable[[int], None] = lambda count: None) -> None:
        """Compare all entries with their headers and CRCs.

        Args:
            buffer: filled again and again.
            on_block: called with the bytes of storages that were checked since the last time.

        Raises:
            DamagedCheckpointError: one differs.
            OSError: reading failed.
        """
        for name in self._entries:
            counted = on_block if name.startswith("data/") else lambda count: None
            if not check_entry(self._file, self.entry(name), buffer, counted):
                self._damaged(f"the CRC-32 of its entry {quoted(name)} is another one")

    def pickled(self, allowed: Callable[[str], bool]) -> Any:
        """The contents of ``data.pkl``; tensors are instances of `REBUILD` and the like.

        Args:
            allowed: as for `read_pickle`.

        Raises:
            CheckpointError: it holds what is not read.
            DamagedCheckpointError: it is damaged.
        """
        data = self.pickle()
        try:
            return read_pickle(data, allowed, persistent=True)
        except PickleError as error:
            path = self._file.path
            raise DamagedCheckpointError(f"{path}: its data.pkl {error}", file=path) from error

    def tensor(self, value: Any) -> Elements:
        """Where the elements of a tensor lie that ``data.pkl`` describes.

        Raises:
            CheckpointError: it is something else, or lies there in a way that is not read.
        """
        if isinstance(value, PickledInstance) and value.name == _PARAMETER and value.args:
            value = value.args[0]
        if not isinstance(value, PickledInstance) or value.name not in (REBUILD, REBUILD_TYPED) or len(value.args) < 6:
            self._damaged(f"it holds {getattr(value, 'name', '') or 'something else'} where a tensor is expected")
        storage, first, shape, strides, *_ = value.args
        entry_name, dtype, count = self._storage(storage)
        typed = dtype is not None
        more = value.args[6:]
        if value.name == REBUILD_TYPED:
            dtype_global = more[0] if more else None
            dtype = FROM_TORCH.get(dtype_global.name) if isinstance(dtype_global, Global) else None
            more = more[1:]
        if dtype is None:
            self._damaged("the type of its elements is unknown")
        if more and more[0]:
            self._damaged("its tensor is a conjugate or negated view, which is not read")
        if not (None not in map(sizes_of, ([first, count], shape, strides)) and len(shape) == len(strides)):
            self._damaged("the shape or strides of its tensor are none")
        if "byteorder" in self and self._small("byteorder") != b"little":
            self._damaged("its bytes are in big-endian order, which is not read")
        item = ITEM_SIZES[dtype]
        entry = self.entry(entry_name)
        if count * (item if typed else 1) != entry.size:
            self._damaged(f"its storage {entry_name} has {entry.size} bytes, and {count} elements by its data.pkl")
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides)) if math.prod(shape) else -1
        if (last + 1) * item > entry.size:
            self._damaged(f"its tensor of shape {list(shape)} does not lie in the {entry.size} bytes of {entry_name}")
        return Elements(dtype, tuple(shape), tuple(strides), entry.offset + first * item, entry)

    def _small(self, name: str) -> bytes:
        entry = self.entry(name)
        return read_range(self._file, entry.offset, min(entry.size, 16))

    def _storage(self, reference: Any) -> tuple[str, Optional[str], int]:
        """Name of the entry, type and size of a storage."""
        identity = (
            reference.args[0]
            if isinstance(reference, PickledInstance) and not reference.name and reference.args
            else None
        )
        if (
            not isinstance(identity, tuple)
            or len(identity) < 5
            or identity[0] != "storage"
            or not isinstance(identity[1], Global)
        ):
            self._damaged("the storage of its tensor is none")
        _, kind, key, _, count, *_ = identity
        if (kind.name not in STORAGES and kind.name != UNTYPED) or not isinstance(key, str):
            self._damaged(f"its tensor has a {kind.name}")
        return f"data/{key}", STORAGES.get(kind.name), count


def _is_divided(extra: bytes) -> bool:
    """Whether an extra field of a header consists of whole parts, and zeros for alignment, fewer than a part has."""
    position = 0
    while position + 4 <= len(extra):
        position += 4 + int.from_bytes(extra[position + 2 : position + 4], "little")
    return position <= len(extra) and not any(extra[position:])


def archived_tensor(file: ReadableFile, offset: int, length: int) -> Elements:
    """Where the elements of a tensor lie that is an archive of its own.

    Raises:
        CheckpointError: it is no such archive, or damaged.
        OSError: reading failed.
    """
    archive = Archive(file, offset, length)
    return archive.tensor(archive.pickled(among(TENSOR_NAMES)))


def archived_tensors(file: ReadableFile, names: Sequence[str]) -> Mapping[str, Elements]:
    """Likewise of some tensors of a dictionary, which a file holds.

    Raises:
        CheckpointError: it is no such archive, or damaged, or has no such tensors.
        OSError: reading failed.
    """
    archive = Archive(file, 0, file.size())
    state = archive.pickled(among(TENSOR_NAMES))
    missing = [name for name in names if not isinstance(state, dict) or name not in state]
    if missing:
        raise DamagedCheckpointError(
            f"{file.path}: does not hold {quoted(missing[0])}", file=file.path, parameter=missing[0]
        )
    return {name: archive.tensor(state[name]) for name in names}


def check_entry(file: ReadableFile, entry: ArchiveEntry, buffer: memoryview, on_block: Callable[[int], None]) -> bool:
    """Whether the CRC of an entry fits its bytes; true without a CRC.

    Args:
        file: the file.
        entry: the entry.
        buffer: filled again and again.
        on_block: called with the bytes checked since the last time.

    Raises:
        ReshardError: the file became shorter.
        OSError: reading failed.
    """
    if not entry.crc:
        on_block(entry.size)
        return True
    crc = checked = 0
    while checked < entry.size:
        block = buffer[: entry.size - checked]
        fill(file, entry.offset + checked, block)
        crc = zlib.crc32(block, crc)
        on_block(len(block))
        checked += len(block)
    return crc == entry.crc
