"""Zip archives that ``torch.save`` writes: where in one the elements of its tensors lie.

``data.pkl`` lists the tensors: per tensor a storage, where in it the first element is, a shape and
strides. The storages are the entries ``data/0``, ``data/1`` and so on, stored and never compressed. An archive
is a file, or a record within one. Nothing of it is run, and no entry but ``data.pkl`` is read to find this out.

Files are written as records, one for each tensor. The CRC-32 of elements is zero, as torch writes it with
``set_crc32_options(False)``: computing it takes a third of the time of a copy. Where checksums are requested, writers
fill it in at `OutputLayout.entries`. Elements begin at a multiple of 64 bytes of the record: they can be mapped.
"""

from __future__ import annotations

import functools
import io
import math
import os
import struct
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from reshard.checkpoints.formats.dtypes import FROM_TORCH, ITEM_SIZES, TORCH_NAMES
from reshard.checkpoints.formats.output import CheckedEntry, OutputLayout, OutputTensor, WrittenRecord
from reshard.checkpoints.formats.pickles import (
    MAX_PICKLE,
    Global,
    PickledInstance,
    PickleError,
    among,
    inert,
    inert_class,
    pickled,
    read_pickle,
    sizes_of,
)
from reshard.errors import CheckpointError, DamagedCheckpointError, ReshardError
from reshard.storage import ReadableFile, fill, read_range
from reshard.text.messages import quoted

# Ends and headers are read this much at a time: mostly a directory, and all that is before the elements of a record.
_NEAR = 4 << 10
_LOCAL = struct.Struct("<4s5H3I2H")
# Of an entry of the directory, and where in it the lengths of its name, of more fields and of a comment are.
_ENTRY_SIZE, _ENTRY_LENGTHS = 46, 28
_END = struct.Struct("<4s4H2IH")
_UNKNOWN_32, _UNKNOWN_16 = 0xFFFFFFFF, 0xFFFF
# Flags: encrypted; lengths and CRC are in the directory, and follow the content; names are UTF-8.
_ENCRYPTED, _FOLLOWED, _UTF8 = 0x0001, 0x0008, 0x0800
# Bytes that follow a content with lengths of 32, and of 64 bits.
_DESCRIPTOR, _LARGE_DESCRIPTOR = 16, 24
# An entry without content, in attributes of MS-DOS.
_IS_DIRECTORY = 0x10

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
_NPU = "torch_npu.utils.storage._rebuild_npu_tensor"
_PARAMETERS = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
# A tensor or parameter with attributes of its own: the function, the class, arguments, and the attributes.
_WITH_ATTRIBUTES = "torch._tensor._rebuild_from_type_v2"
_CLASSES = frozenset({"torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"})

TENSOR_NAMES = frozenset({*FROM_TORCH, *STORAGES, UNTYPED, REBUILD, REBUILD_TYPED, _PARAMETERS[0]})
"""Names in the pickle of a tensor."""

_ALIGNMENT = 64
_NAME = "archive/"
# Offsets of the CRC in an entry's header, and in its entry of the directory.
_LOCAL_CRC, _DIRECTORY_CRC = 14, 16
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}
_ORDERED = inert("collections.OrderedDict")


class ArchiveEntry(NamedTuple):
    """An entry of an archive.

    Attributes:
        offset: where its bytes begin in the file.
        size: how many there are.
        crc: their CRC-32 as recorded; 0 where none is, None in a format without any.
    """

    offset: int
    size: int
    crc: int | None


def c_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Elements from one to the next, per dimension, in C order."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


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


class _Part(io.RawIOBase):
    """A part of a file as a file for `zipfile`; its end, where the directory is, is read once."""

    def __init__(self, file: ReadableFile, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self._length = length
        self._position = 0
        near = min(length, _NEAR)
        self.end = read_range(file, offset + length - near, near)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        position = offset + (0, self._position, self._length)[whence]
        if position < 0:
            raise ValueError("a place before the beginning")
        self._position = position
        return position

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer)[: max(0, self._length - self._position)]
        inside = self._position - (self._length - len(self.end))
        if inside >= 0:
            out[:] = self.end[inside : inside + len(out)]
        else:
            fill(self._file, self._offset + self._position, out)
        self._position += len(out)
        return len(out)


class Archive:
    """An archive of ``length`` bytes that lies in a file.

    Raises:
        DamagedCheckpointError: it is no archive, or damaged.
        CheckpointError: it is compressed or encrypted.
    """

    def __init__(self, file: ReadableFile, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        part = _Part(file, offset, length)
        self._stream = io.BufferedReader(part, _NEAR)
        if length < _END.size:
            self._damaged("it is too short for an archive of torch.save")
        # With a comment, zipfile would look for the end elsewhere, and take failed reads for damage.
        signature, disk, first_disk, here, count, size, _, comment = _END.unpack(part.end[-_END.size :])
        if signature != b"PK\x05\x06" or comment or disk or first_disk or here != count:
            self._damaged("it does not end like an archive of torch.save")
        try:
            directory = zipfile.ZipFile(self._stream)
        except (OSError, ReshardError):
            raise
        except Exception as error:
            self._damaged(f"its directory is no list of entries: {quoted(str(error))}")
        if count not in (len(directory.infolist()), _UNKNOWN_16):
            self._damaged("its directory has more than its entries")
        self._directory = directory
        self._directory_end = directory.start_dir + size
        # Per entry its description, and where the next one begins.
        self._entries: dict[str, tuple[zipfile.ZipInfo, int]] = {}
        infos = sorted(directory.infolist(), key=lambda info: info.header_offset)
        for info, stop in zip(infos, [*(info.header_offset for info in infos[1:]), directory.start_dir]):
            if info.flag_bits & _ENCRYPTED or info.compress_type or info.compress_size != info.file_size:
                raise CheckpointError(
                    f"{file.path}: {quoted(info.filename)} in it is compressed or encrypted, which torch.save never "
                    "does",
                    file=file.path,
                    hint="save the checkpoint again, without anything that packs its files",
                )
            if info.external_attr & _IS_DIRECTORY or info.volume or not 0 <= info.header_offset <= directory.start_dir:
                self._damaged(f"its entry {quoted(info.filename)} is a directory, or lies elsewhere")
            # All names begin with the name of the archive and a slash.
            inner = info.orig_filename.partition("/")[2]
            if inner in self._entries:
                self._damaged(f"it has two entries called {quoted(info.filename)}")
            self._entries[inner] = info, stop

    def _damaged(self, problem: str) -> NoReturn:
        path = self._file.path
        where = f" (record at byte {self._offset})" if self._offset else ""
        raise DamagedCheckpointError(f"{path}: is damaged{where}: {problem}", file=path)

    def _bytes(self, position: int, count: int) -> bytes:
        """Bytes of the archive; fewer at its end."""
        self._stream.seek(position)
        return self._stream.read(count)

    def _content(self, entry: ArchiveEntry) -> bytes:
        return self._bytes(entry.offset - self._offset, entry.size)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def entry(self, name: str) -> ArchiveEntry:
        """An entry, by its name within the archive such as ``data/0``; a missing one is damage."""
        if name not in self._entries:
            self._damaged(f"it has no entry {quoted(name)}")
        info, stop = self._entries[name]
        size, followed = info.file_size, info.flag_bits & _FOLLOWED
        header = self._bytes(info.header_offset, _LOCAL.size).ljust(_LOCAL.size, b"\0")
        signature, _, flags, method, _, _, crc, *sizes, name_size, extra_size = _LOCAL.unpack(header)
        local_name, extra = self._stream.read(name_size), self._stream.read(extra_size)
        large = size >= _UNKNOWN_32
        agrees = (signature, flags, method) == (HEAD, info.flag_bits, 0) and local_name == _name_bytes(info)
        if not followed:
            agrees &= [crc, *sizes] == [info.CRC, *[min(size, _UNKNOWN_32)] * 2]
            agrees &= not large or struct.pack("<2H2Q", 1, 16, size, size) in extra
        # A wrong length in the header would move all elements.
        begin = info.header_offset + _LOCAL.size + name_size + extra_size
        descriptor = _LARGE_DESCRIPTOR if large or info.header_offset >= _UNKNOWN_32 else _DESCRIPTOR
        if not agrees or begin + size + (descriptor if followed else 0) != stop:
            self._damaged(f"the header of its entry {quoted(name)} contradicts its directory")
        return ArchiveEntry(self._offset + begin, size, info.CRC)

    def pickle(self) -> bytes:
        """The bytes of ``data.pkl``."""
        entry = self.entry("data.pkl")
        if entry.size > MAX_PICKLE:
            self._damaged(f"its data.pkl has {entry.size:,} bytes")
        data = self._content(entry)
        if entry.crc and zlib.crc32(data) != entry.crc:
            self._damaged("the CRC-32 of its data.pkl is another one")
        return data

    def check(self, buffer: memoryview, on_block: Callable[[int], None] = lambda count: None) -> None:
        """Compare all entries with their headers and CRCs; ``on_block`` gets the bytes of checked storages."""
        for last in self._directory.infolist()[-1:]:
            # zipfile takes an end within the last entry of a directory, as other readers do not.
            lengths = len(_name_bytes(last)), len(last.extra), len(last.comment)
            begin = self._directory_end - _ENTRY_SIZE - sum(lengths)
            if self._bytes(begin + _ENTRY_LENGTHS, 6) != struct.pack("<3H", *lengths):
                self._damaged("its directory ends early")
        for name in self._entries:
            counted = on_block if name.startswith("data/") else lambda count: None
            if not check_entry(self._file, self.entry(name), buffer, counted):
                self._damaged(f"the CRC-32 of its entry {quoted(name)} is another one")

    def pickled(self, allowed: Callable[[str], bool]) -> Any:
        """The contents of ``data.pkl``; tensors are instances of `REBUILD` and the like. See `read_pickle`."""
        data = self.pickle()
        try:
            return read_pickle(data, allowed, persistent=True)
        except PickleError as error:
            path = self._file.path
            raise DamagedCheckpointError(f"{path}: its data.pkl {error}", file=path) from error

    def tensor(self, value: Any) -> Elements:
        """Where the elements of a tensor lie that ``data.pkl`` describes."""
        value = plain_tensor(value)
        if not is_tensor(value) or len(value.args) < 6:
            self._damaged(f"it holds {getattr(value, 'name', '') or 'something else'} where a tensor is expected")
        storage, first, shape, strides, *_ = value.args
        entry_name, dtype, count = self._storage(storage)
        typed = dtype is not None
        # The last argument of an NPU's tensor is the format that it had there.
        more = () if value.name == _NPU else value.args[6:]
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
        if "byteorder" in self and self._content(self.entry("byteorder")) != b"little":
            self._damaged("its bytes are in big-endian order, which is not read")
        item = ITEM_SIZES[dtype]
        entry = self.entry(entry_name)
        if count * (item if typed else 1) != entry.size:
            self._damaged(f"its storage {entry_name} has {entry.size} bytes, and {count} elements by its data.pkl")
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides)) if math.prod(shape) else -1
        if (last + 1) * item > entry.size:
            self._damaged(f"its tensor of shape {list(shape)} does not lie in the {entry.size} bytes of {entry_name}")
        return Elements(dtype, tuple(shape), tuple(strides), entry.offset + first * item, entry)

    def _storage(self, reference: Any) -> tuple[str, str | None, int]:
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


def plain_tensor(value: Any) -> Any:
    """A tensor in a pickle without its attributes and those of a parameter; another value as it is."""
    while isinstance(value, PickledInstance) and value.args:
        if value.name in _PARAMETERS:
            value = value.args[0]
        elif value.name == _WITH_ATTRIBUTES and len(value.args) > 2 and getattr(value.args[1], "name", "") in _CLASSES:
            function, _, args = value.args[:3]
            if not isinstance(function, Global) or not isinstance(args, tuple):
                return value
            value = inert(function.name, *args)
        else:
            break
    return value


def is_tensor(value: Any) -> bool:
    """Whether a value of a pickle, as `plain_tensor` gives it, is a tensor that is read."""
    return isinstance(value, PickledInstance) and value.name in (REBUILD, REBUILD_TYPED, _NPU)


def _name_bytes(info: zipfile.ZipInfo) -> bytes:
    return info.orig_filename.encode("utf-8" if info.flag_bits & _UTF8 else "cp437")


def archived_tensor(file: ReadableFile, offset: int, length: int) -> Elements:
    """Where the elements of a tensor lie that is an archive of its own."""
    archive = Archive(file, offset, length)
    return archive.tensor(archive.pickled(among(TENSOR_NAMES)))


def archived_tensors(file: ReadableFile, names: Sequence[str]) -> Mapping[str, Elements]:
    """Where the elements of some tensors of a dictionary lie, which a file holds."""
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


def lay_out_archives(tensors: Sequence[OutputTensor]) -> OutputLayout:
    """Lay out a file with an archive for every tensor."""
    layout = OutputLayout()
    layout.entries, layout.records = entries, records = [], []
    pending = b""
    offset = 0
    for index, tensor in enumerate(tensors):
        head, tail, crc_places = _around(tensor.dtype, tensor.dims, tensor.nbytes)
        pending += head
        if tensor.nbytes:
            layout.add(pending, index, 0, tensor.nbytes)
            pending = b""
        pending += tail
        length = len(head) + tensor.nbytes + len(tail)
        if tensor.nbytes:
            first = offset + len(head)
            places = tuple(offset + place for place in crc_places)
            entries.append(CheckedEntry(first, first + tensor.nbytes, places))
        records.append(WrittenRecord(tensor, offset, length))
        offset += length
    layout.add(pending)
    return layout


Added = Callable[[str, bytes], PickledInstance]
"""Adds a small tensor of one element to an archive, by its type and bytes; for `lay_out_archive`."""


def lay_out_archive(
    tensors: Sequence[OutputTensor],
    shapes: Sequence[tuple[int, ...]],
    describe: Callable[[Sequence[PickledInstance], Added], Any],
) -> OutputLayout:
    """Lay out a file of ``torch.save`` that holds several tensors, each in a storage of its own.

    Args:
        tensors: the tensors.
        shapes: the shape of each in the pickle, of the same number of elements.
        describe: the object to pickle; gets the tensors, as they are in it.
    """
    more: list[tuple[str, bytes]] = []

    def add(dtype: str, data: bytes) -> PickledInstance:
        more.append((dtype, data))
        return _rebuilt(dtype, (), len(data), str(len(tensors) + len(more) - 1))

    described = [
        _rebuilt(tensor.dtype, shape, tensor.nbytes, str(number))
        for number, (tensor, shape) in enumerate(zip(tensors, shapes))
    ]
    layout = OutputLayout()
    archive = _Archive()
    archive.add("data.pkl", pickled(describe(described, add)))
    archive.add("byteorder", b"little")
    begins = []
    for number, tensor in enumerate(tensors):
        name = f"data/{number}"
        if not tensor.nbytes:
            archive.add(name, b"")
            continue
        head = archive.begin(name, tensor.nbytes)
        layout.add(head, number, 0, tensor.nbytes)
        begins.append((layout.size - tensor.nbytes, layout.size))
    for number, (_, data) in enumerate(more, len(tensors)):
        archive.add(f"data/{number}", data)
    archive.add("version", b"3\n")
    layout.add(archive.end())
    layout.entries = [
        CheckedEntry(first, last, places) for (first, last), places in zip(begins, archive.places_of_crcs)
    ]
    return layout


def archive_of_pickle(data: bytes) -> bytes:
    """The archive of an object without tensors, of which the pickle is given."""
    archive = _Archive()
    archive.add("data.pkl", data)
    archive.add("byteorder", b"little")
    archive.add("version", b"3\n")
    return archive.end()


@functools.lru_cache(maxsize=4096)
def _around(dtype: str, shape: tuple[int, ...], nbytes: int) -> tuple[bytes, bytes, tuple[int, ...]]:
    """The bytes before and after the content of an archive of one tensor, and where its CRC is in the archive."""
    archive = _Archive()
    archive.add("data.pkl", _described(dtype, shape, nbytes))
    archive.add("byteorder", b"little")
    head = archive.begin("data/0", nbytes)
    archive.add("version", b"3\n")
    tail = archive.end()
    return head, tail, archive.places_of_crcs[0]


def _described(dtype: str, shape: tuple[int, ...], nbytes: int) -> bytes:
    """The pickle of a tensor that is all of the storage ``0``."""
    return pickled(_rebuilt(dtype, shape, nbytes, "0"))


def _rebuilt(dtype: str, shape: tuple[int, ...], nbytes: int, key: str) -> PickledInstance:
    """A tensor in a pickle that is all of a storage."""
    typed = _STORAGE_OF.get(dtype)
    elements = math.prod(shape) if typed else nbytes
    storage = PickledInstance(("storage", inert_class(typed or UNTYPED), key, "cpu", elements))
    args = (storage, 0, shape, c_strides(shape), False, _ORDERED)
    return inert(REBUILD, *args) if typed else inert(REBUILD_TYPED, *args, inert_class(TORCH_NAMES[dtype]))


class _Archive:
    """Puts entries together; contents may be left out, and then lie where the pieces are joined.

    Attributes:
        places_of_crcs: where the CRC of each such content is in the archive, twice, once it is complete.
    """

    def __init__(self) -> None:
        self.places_of_crcs: list[tuple[int, int]] = []
        self._bytes = bytearray()
        self._position = 0
        self._directory = bytearray()
        self._count = 0

    def add(self, name: str, data: bytes) -> None:
        self._header(name, len(data), zlib.crc32(data))
        self._put(data)

    def begin(self, name: str, size: int) -> bytes:
        """All bytes before the content of an entry; the content is written by others."""
        self.places_of_crcs.append((self._position + _LOCAL_CRC, len(self._directory) + _DIRECTORY_CRC))
        self._header(name, size, 0)
        head = bytes(self._bytes)
        self._bytes.clear()
        self._position += size
        return head

    def _put(self, data: bytes) -> None:
        self._bytes += data
        self._position += len(data)

    def _header(self, name: str, size: int, crc: int) -> None:
        full = (_NAME + name).encode()
        start = self._position
        large = size >= _UNKNOWN_32
        extra = struct.pack("<2H2Q", 1, 16, size, size) if large else b""
        before = start + 30 + len(full) + len(extra)
        # Padding as torch has it, in a field of its own.
        padding = -(before + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
        stored = _UNKNOWN_32 if large else size
        self._put(
            struct.pack(
                "<4s5H3I2H", b"PK\3\4", 45 if large else 0, _UTF8, 0, 0, 0, crc, stored, stored, len(full), len(extra)
            )
        )
        self._put(full + extra)
        far = start >= _UNKNOWN_32
        numbers = [*([size, size] if large else []), *([start] if far else [])]
        more = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
        self._directory += struct.pack(
            "<4s6H3I5H2I",
            b"PK\1\2",
            45 if numbers else 0,
            45 if numbers else 0,
            _UTF8,
            0,
            0,
            0,
            crc,
            stored,
            stored,
            len(full),
            len(more),
            0,
            0,
            0,
            0,
            _UNKNOWN_32 if far else start,
        )
        self._directory += full + more
        self._count += 1

    def end(self) -> bytes:
        """The remaining bytes, with the directory."""
        start, size, count = self._position, len(self._directory), self._count
        self.places_of_crcs = [(local, start + place) for local, place in self.places_of_crcs]
        ending = bytes(self._bytes + self._directory)
        # Readers take the number of entries from these records where it does not fit the last one.
        if start >= _UNKNOWN_32 or count >= _UNKNOWN_16:
            ending += struct.pack("<4sQ2H2I4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
            ending += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
        counts = [min(count, _UNKNOWN_16)] * 2
        return ending + struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, *counts, size, min(start, _UNKNOWN_32), 0)
