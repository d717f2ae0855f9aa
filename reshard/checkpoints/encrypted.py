"""Encrypted `.ckpt` files: random access to their blocks in constant memory.

MindSpore encrypts a `.ckpt` in blocks of 64 MiB, and writes these one after the other:

    mark (4 bytes, of the mode), with AES-GCM a tag (16), length of all that follows (4),
    length of the IV (4), IV (16), length of the cipher text (4), cipher text

Numbers are little-endian. A CRC of zero may follow the last block, without meaning.

* AES-GCM uses the first 12 bytes of the IV. Its cipher text is that of counter mode, so any range can be decrypted
  by itself, but a tag covers a whole block. So a block is read once to check its tag, before its first use.
* AES-CBC and SM4-CBC pad the last 16 bytes (PKCS #7). Every 16 bytes are decrypted with the 16 before them, so any
  range can be decrypted by itself, too. They have no authentication.
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from typing import Any, Callable, Optional

from reshard.checkpoints.formats.ckpt_index import CRC_MARK, TRAILER_SIZE
from reshard.errors import CheckpointError, DamagedCheckpointError, EncryptedCheckpointError, InputError
from reshard.storage import FileStatus, ReadableFile, fill, read_range
from reshard.storage.other_files import CIPHERS, GCM, is_ckpt
from reshard.threads import ThreadLock

SM4 = "SM4-CBC"

# Bytes decrypted at a time; each thread has two buffers.
_CHUNK = 256 << 10
_UNIT = 16
_IV_SIZE = 16
_NONCE_SIZE = 12
# The tag uses counter 1.
_FIRST_COUNTER = 2
# Mark, tag, length of the rest, length of the IV, IV, length of the cipher text.
_GCM_HEADER = struct.Struct("<4s16sII16sI")
_CBC_HEADER = struct.Struct("<4s0sII16sI")
_TAG_BEFORE_CIPHER_TEXT = _GCM_HEADER.size - 4
_REST_OF_HEADER = 4 + _IV_SIZE + 4
# 64 TiB in MindSpore's blocks.
_MOST_BLOCKS = 1 << 20


class CipherKey:
    """A key for one mode; thread-safe.

    Args:
        mode: MindSpore's name of it.
        key: of a length that the mode accepts.
        path: the file, for messages.

    Raises:
        InputError: a package is missing, or lacks the mode.
    """

    def __init__(self, mode: str, key: bytes, path: str) -> None:
        try:
            from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        except ModuleNotFoundError as error:
            raise InputError(
                f"{path}: is encrypted; decryption needs the package cryptography, which is not installed",
                file=path,
                hint="pip install 'reshard[crypto]'; in the clone of reshard: pip install '.[crypto]'",
            ) from error
        self.mode = mode
        self._modes = modes
        self._cipher: Callable[..., Any] = Cipher
        self._wrong_tag = InvalidTag
        try:
            # Versions before 35 have no SM4 name.
            self._algorithm = (algorithms.SM4 if mode == SM4 else algorithms.AES)(key)
            self.cbc(bytes(_IV_SIZE))
        except (AttributeError, UnsupportedAlgorithm) as error:
            raise InputError(
                f"{path}: is encrypted with {mode}, which the OpenSSL of the package cryptography lacks here",
                file=path,
                hint="install a newer cryptography, or one whose OpenSSL has SM4",
            ) from error
        # Free buffers for threads.
        self._buffers: list[tuple[memoryview, memoryview]] = []

    def cbc(self, iv: bytes) -> Any:
        """A decryptor of whole units of 16 bytes; ``iv`` is the unit before them."""
        return self._cipher(self._algorithm, self._modes.CBC(iv)).decryptor()

    def counter(self, iv: bytes, unit: int) -> Any:
        """A decryptor of AES-GCM's cipher text from a unit of 16 bytes on, ignoring its tag."""
        start = iv[:_NONCE_SIZE] + (_FIRST_COUNTER + unit).to_bytes(_UNIT - _NONCE_SIZE, "big")
        return self._cipher(self._algorithm, self._modes.CTR(start)).decryptor()

    def has_tag(self, file: ReadableFile, offset: int, size: int, iv: bytes, tag: bytes) -> bool:
        """Whether cipher text of AES-GCM in a file fits its tag."""
        decryptor = self._cipher(self._algorithm, self._modes.GCM(iv[:_NONCE_SIZE], tag)).decryptor()
        for _ in self.plain(decryptor, file, offset, size):
            pass
        try:
            decryptor.finalize()
        except self._wrong_tag:
            return False
        return True

    def plain(self, decryptor: Any, file: ReadableFile, offset: int, size: int) -> Iterator[memoryview]:
        """The plain text of a range of a file, in pieces that are valid until the next piece.

        Args:
            decryptor: of `cbc`, for a range of whole units; of `counter`; or one that checks a tag.
            file: the file.
            offset: of the cipher text in it.
            size: bytes.
        """
        try:
            buffers = self._buffers.pop()
        except IndexError:
            # The package requires a buffer larger than its output.
            buffers = memoryview(bytearray(_CHUNK)), memoryview(bytearray(_CHUNK + _UNIT))
        cipher_text, plain = buffers
        try:
            for position in range(0, size, _CHUNK):
                count = min(_CHUNK, size - position)
                fill(file, offset + position, cipher_text[:count])
                decryptor.update_into(cipher_text[:count], plain)
                yield plain[:count]
        finally:
            self._buffers.append(buffers)


class EncryptedBlocks:
    """The places of a file's blocks, and the compared tags; thread-safe.

    Attributes:
        size: bytes of plain text.
        mode: of encryption.
    """

    def __init__(self, file: ReadableFile, key: CipherKey) -> None:
        """Find the blocks by their headers.

        Args:
            file: the file.
            key: the key to try.

        Raises:
            DamagedCheckpointError: the file is truncated, or damaged.
            EncryptedCheckpointError: the key seems to be wrong.
        """
        self.size = 0
        self.mode = key.mode
        self._path = file.path
        self._key = key
        # Per block: the start of its plain text, the offset of its cipher text in the file, and its IV.
        self._starts = array("Q")
        self._places = array("Q")
        self._ivs = bytearray()
        self._find(file)
        self._sound = bytearray(len(self._starts))
        self._lock = ThreadLock()
        self._turns: dict[int, ThreadLock] = {}
        # The only check of modes without tags.
        if self.mode != GCM and not self._begins_well(file):
            raise self._failed(file, "the result is not a checkpoint")

    def _find(self, file: ReadableFile) -> None:
        size = file.size()
        header = _GCM_HEADER if self.mode == GCM else _CBC_HEADER
        position = 0
        while position < size:
            if size - position == TRAILER_SIZE and read_range(file, position, len(CRC_MARK)) == CRC_MARK:
                break
            if len(self._starts) == _MOST_BLOCKS:
                raise self._damaged(f"it has more than {_MOST_BLOCKS} encrypted blocks")
            if size - position < header.size:
                raise self._damaged(f"its last block has no more than {size - position} bytes: it is truncated")
            mark, _, length_after_tag, iv_size, iv, length = header.unpack(read_range(file, position, header.size))
            units = self.mode == GCM or length % _UNIT == 0
            if (
                CIPHERS.get(mark) != self.mode
                or (iv_size, length_after_tag) != (_IV_SIZE, _REST_OF_HEADER + length)
                or not units
            ):
                raise self._damaged(f"at byte {position} no block of {self.mode} begins as MindSpore writes it")
            position += header.size
            if not length or length > size - position:
                raise self._damaged(
                    f"its block at byte {position - header.size} has {length} bytes, but only {size - position} "
                    "follow: it is truncated"
                )
            self._starts.append(self.size)
            self._places.append(position)
            self._ivs += iv
            self.size += length if self.mode == GCM else self._without_padding(file, length)
            position += length

    def _without_padding(self, file: ReadableFile, length: int) -> int:
        """Bytes of plain text in the last block of CBC so far; ``length`` counts its cipher text."""
        number = len(self._starts) - 1
        last = self._some(file, number, length - _UNIT, _UNIT)
        padding = last[-1]
        if not 1 <= padding <= _UNIT or last[_UNIT - padding :] != bytes([padding]) * padding:
            raise self._failed(file, "the end of a block has invalid padding")
        return length - padding

    def read_into(self, file: ReadableFile, offset: int, out: memoryview) -> int:
        """Fill ``out`` with plain text from an offset on; returns the bytes, fewer at the end.

        Raises:
            DamagedCheckpointError: a tag is wrong.
            EncryptedCheckpointError: a tag is wrong, and the key seems to be wrong.
            RetryableError: the file became shorter.
            OSError: reading failed.
        """
        count = max(0, min(len(out), self.size - offset))
        filled = 0
        while filled < count:
            number = bisect_right(self._starts, offset + filled) - 1
            inside = offset + filled - self._starts[number]
            length = min(self._length(number) - inside, count - filled)
            if self.mode == GCM:
                self._check(file, number)
            self._copy(file, number, inside, out[filled : filled + length])
            filled += length
        return count

    def _length(self, number: int) -> int:
        """Bytes of plain text in a block."""
        stop = self._starts[number + 1] if number + 1 < len(self._starts) else self.size
        return stop - self._starts[number]

    def _copy(self, file: ReadableFile, number: int, inside: int, out: memoryview) -> None:
        """Fill ``out`` with a block's plain text, from an offset in it on."""
        skip = inside % _UNIT
        size = skip + len(out)
        if self.mode != GCM:
            size = -(-size // _UNIT) * _UNIT
        filled = 0
        for piece in self._units(file, number, inside - skip, size):
            piece = piece[skip : skip + len(out) - filled]
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
            skip = 0

    def _units(self, file: ReadableFile, number: int, inside: int, size: int) -> Iterator[memoryview]:
        """The plain text of a range of a block; it begins at a unit, and in CBC ends at one."""
        iv = bytes(self._ivs[number * _IV_SIZE : (number + 1) * _IV_SIZE])
        place = self._places[number] + inside
        if self.mode == GCM:
            decryptor = self._key.counter(iv, inside // _UNIT)
        else:
            decryptor = self._key.cbc(iv if inside == 0 else read_range(file, place - _UNIT, _UNIT))
        return self._key.plain(decryptor, file, place, size)

    def _some(self, file: ReadableFile, number: int, inside: int, size: int) -> bytes:
        return b"".join(map(bytes, self._units(file, number, inside, size)))

    def check_all(self, file: ReadableFile, on_block: Callable[[int], None]) -> None:
        """Check every tag that was not checked before.

        Args:
            file: the file, encrypted with AES-GCM.
            on_block: called after every block with its number of bytes.

        Raises:
            DamagedCheckpointError: a tag is wrong.
        """
        for number in range(len(self._starts)):
            self._check(file, number)
            on_block(self._length(number))

    def _check(self, file: ReadableFile, number: int) -> None:
        """Check the tag of a block of AES-GCM, once."""
        if self._sound[number]:
            return
        with self._lock:
            turn = self._turns.setdefault(number, ThreadLock())
        # One thread checks a block while others wait for its result; other blocks are checked meanwhile.
        with turn:
            if not self._sound[number]:
                place = self._places[number]
                iv = bytes(self._ivs[number * _IV_SIZE : (number + 1) * _IV_SIZE])
                tag = read_range(file, place - _TAG_BEFORE_CIPHER_TEXT, _UNIT)
                if not self._key.has_tag(file, place, self._length(number), iv, tag):
                    raise self._failed(file, f"the tag of block {number + 1} of {len(self._starts)} is wrong")
                self._sound[number] = True
        with self._lock:
            self._turns.pop(number, None)

    def _begins_well(self, file: ReadableFile) -> bool:
        """Whether the plain text begins like a checkpoint, which tests the key."""
        size = min(_UNIT, self._length(0)) if self.mode == GCM else _UNIT
        return is_ckpt(self._some(file, 0, 0, size))

    def _failed(self, file: ReadableFile, problem: str) -> CheckpointError:
        """The error of a failed decryption: wrong key, or damaged file."""
        if self._begins_well(file):
            return self._damaged(f"{problem} ({self.mode})")
        return EncryptedCheckpointError(
            f"{self._path}: cannot be decrypted with {self.mode}: {problem}; the key is wrong, or the file is damaged",
            file=self._path,
            hint="check the file of --decrypt-key-file; if the key is right, restore the checkpoint from a copy, or "
            "move it away to count as absent",
        )

    def _damaged(self, problem: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self._path}: is damaged: {problem}", file=self._path)


class DecryptedFile:
    """The plain text of an encrypted file, with the methods of a file.

    Args:
        file: the encrypted file.
        blocks: its blocks.
    """

    descriptor: Optional[int] = None

    def __init__(self, file: ReadableFile, blocks: EncryptedBlocks) -> None:
        self.path = file.path
        self.cipher: Optional[str] = blocks.mode
        self._file = file
        self._blocks = blocks

    def size(self) -> int:
        """Bytes of plain text."""
        return self._blocks.size

    def status(self) -> FileStatus:
        """The encrypted file's status in its store."""
        return self._file.status()

    def read(self, offset: int, count: int) -> bytes:
        """Bytes from an offset on; fewer at the end."""
        out = memoryview(bytearray(max(0, min(count, self._blocks.size - offset))))
        self.read_into(offset, out)
        return bytes(out)

    def read_into(self, offset: int, out: memoryview) -> int:
        """Likewise into ``out``; returns the bytes."""
        return self._blocks.read_into(self._file, offset, out)

    def check(self, on_block: Callable[[int], None]) -> None:
        """Check all tags.

        Raises:
            DamagedCheckpointError: a tag is wrong.
        """
        self._blocks.check_all(self._file, on_block)
