"""Decryption of `.ckpt` files that MindSpore encrypted, into plain ones.

With ``enc_key``, MindSpore encrypts a `.ckpt` in blocks of 64 MiB, and writes these one after the other:

    mark (4 bytes, of the mode), with AES-GCM a tag (16), length of all that follows (4),
    length of the IV (4), IV (16), length of the cipher text (4), cipher text

Numbers are little-endian. AES-GCM uses the first 12 bytes of the IV; the tag covers its block. AES-CBC and SM4-CBC pad
the last 16 bytes (PKCS #7) and have no authentication. A CRC of zero may follow the last block, without meaning.
"""

from __future__ import annotations

import contextlib
import os
import struct
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from reshard.checkpoints import FileHandles
from reshard.checkpoints.formats.ckpt_index import CRC_MARK, TRAILER_SIZE, read_ckpt_index
from reshard.errors import (
    CheckpointError,
    DamagedCheckpointError,
    EncryptedCheckpointError,
    InputError,
    TargetError,
    UsageError,
    one_error,
)
from reshard.execute.destination import check_disjoint
from reshard.storage import (
    LocalFile,
    ReadableFile,
    is_directory,
    is_regular_file,
    names_in,
    new_file,
    read_range,
    reading,
    status_at,
    store_of,
    writing,
)
from reshard.storage.files import CIPHERS, MARK_SIZE, cipher_of, is_ckpt
from reshard.text.messages import Report

_GCM, _SM4 = "AES-GCM", "SM4-CBC"
_KEY_SIZES = (16, 24, 32)
_SM4_KEY_SIZE = 16
_STANDARD_INPUT = "-"
_OPTION = "--key-file"
_CKPT = ".ckpt"
_CHUNK = 256 << 10
_UNIT = 16
_NONCE_SIZE = 12
# Mark, tag, length of the rest, length of the IV, IV, length of the cipher text.
_GCM_HEADER = struct.Struct("<4s16sII16sI")
_CBC_HEADER = struct.Struct("<4s0sII16sI")
_REST_OF_HEADER = 4 + 16 + 4
# File systems keep times in nanoseconds, in seconds, or in between.
_SECOND = 10**9


class _Block(NamedTuple):
    """A block of an encrypted file."""

    offset: int
    size: int
    iv: bytes
    tag: bytes


def read_key(key_file: str) -> bytes:
    """The key in a file that contains nothing else, but perhaps the end of a line; ``-`` is standard input."""
    # Messages omit the option's value: a user may have passed the key itself.
    try:
        with contextlib.ExitStack() as stack:
            # Pipes such as the shell's <(...) are allowed.
            file = sys.stdin.buffer if key_file == _STANDARD_INPUT else stack.enter_context(open(key_file, "rb"))
            data = file.read(_KEY_SIZES[-1] + 3)
    except FileNotFoundError as error:
        hint = "the option takes the name of a file that holds the key, not the key"
        raise InputError(f"{_OPTION}: the file does not exist", hint=hint) from error
    except OSError as error:
        raise InputError(f"{_OPTION}: the file cannot be read: {error.strerror or error}") from error
    for end in (b"", b"\r\n", b"\n"):
        if data.endswith(end) and len(data) - len(end) in _KEY_SIZES:
            return data[: len(data) - len(end)]
    raise InputError(
        f"{_OPTION}: holds no key: a key has 16, 24 or 32 bytes",
        hint="it must contain the raw bytes of MindSpore's enc_key, neither hexadecimal digits nor quotes",
    )


def decrypt(src: str, dst: str, key: bytes, report: Report) -> tuple[int, int]:
    """Write the `.ckpt` files of a file or a rank tree to a directory, decrypted; plain ones are copied.

    A written file has its source's time of modification, in seconds: by it, another run finds it finished.

    Returns:
        The numbers of written files and of finished ones from earlier runs.

    Raises:
        UsageError: SRC and DST overlap, or DST is no directory on a file system.
        CheckpointError: no file is encrypted, a file is damaged, or the key is wrong.
        TargetError: a target exists and was not made of its source.
    """
    if dst.endswith(_CKPT) or not store_of(dst).special_files:
        raise UsageError(f"DST {dst} is not a directory on a file system", file=dst, hint="decrypted files keep names")
    root = src if is_directory(src) else os.path.dirname(src)
    targets = {os.path.join(dst, name): os.path.join(root, name) for name in _names(src)}
    check_disjoint(src, targets.values(), dst, targets)
    written, damaged = 0, []
    with FileHandles() as handles:
        if not any(_cipher(path, handles) for path in targets.values()):
            raise CheckpointError(f"{src}: holds no encrypted .ckpt file", file=src, hint="use it as it is")
        for directory in {os.path.dirname(target) for target in targets}:
            store_of(directory).remove_dead(directory)
        # Only the owner may read decrypted files.
        mask = os.umask(0o077)
        try:
            for target, path in targets.items():
                try:
                    if _write_plain(path, target, key, handles):
                        report.note(f"wrote {target}")
                        written += 1
                except DamagedCheckpointError as error:
                    report.warn(f"{error.message}; the other files are decrypted")
                    damaged.append(error)
        finally:
            os.umask(mask)
    if damaged:
        raise one_error(damaged, f"{len(damaged)} files are damaged")
    return written, len(targets) - written


def _names(src: str) -> Sequence[str]:
    if is_regular_file(src):
        return [os.path.basename(src)]
    if not is_directory(src):
        raise CheckpointError(f"{src}: does not exist, or is neither a file nor a directory", file=src)
    directories = ["", *(name for name in names_in(src) if is_directory(os.path.join(src, name)))]
    paths = [
        os.path.join(directory, name) for directory in directories for name in names_in(os.path.join(src, directory))
    ]
    return [path for path in paths if path.endswith(_CKPT) and is_regular_file(os.path.join(src, path))]


def _cipher(path: str, handles: FileHandles) -> str | None:
    with reading(path), handles.borrow(path) as file:
        return cipher_of(read_range(file, 0, min(file.size(), MARK_SIZE)))


def _write_plain(path: str, target: str, key: bytes, handles: FileHandles) -> bool:
    """Write a file unless it is finished; whether it was written."""
    mode = _cipher(path, handles)
    with reading(path), handles.borrow(path) as file:
        size, modified = file.size(), file.status().modified // _SECOND
        blocks = [] if mode is None else list(_blocks(file, mode, size))
        most = size if mode is None else sum(block.size for block in blocks)
        existing = status_at(target, through_links=False)
        if existing is not None:
            padding = 0 if mode in (None, _GCM) else len(blocks) * _UNIT
            if (
                existing.regular
                and existing.modified // _SECOND == modified
                and most - padding <= existing.size <= most
            ):
                return False
            raise TargetError(
                f"{target}: exists, and was not made of {path}", file=target, hint="remove it, or choose another DST"
            )
        pieces = _read(file, 0, size) if mode is None else _decrypted(file, mode, blocks, key)
        with writing(target), contextlib.closing(new_file(target, most)) as new:
            try:
                assert new.descriptor is not None
                offset = 0
                for piece in pieces:
                    new.write(offset, memoryview(piece))
                    offset += len(piece)
                if mode is not None:
                    _check_index(LocalFile(new.descriptor, path), mode)
                handles.check_unchanged([path])
                os.utime(new.descriptor, (modified, modified))
                new.finish()
                new.publish()
            finally:
                new.discard()
    return True


def _read(file: ReadableFile, offset: int, size: int) -> Iterator[bytes]:
    with reading(file.path):
        for position in range(offset, offset + size, _CHUNK):
            yield read_range(file, position, min(_CHUNK, offset + size - position))


def _blocks(file: ReadableFile, mode: str, size: int) -> Iterator[_Block]:
    """The blocks of a file, whose headers fit its size."""
    header = _GCM_HEADER if mode == _GCM else _CBC_HEADER
    position = 0
    while position < size:
        if size - position == TRAILER_SIZE and read_range(file, position, len(CRC_MARK)) == CRC_MARK:
            break
        if size - position < header.size:
            raise _damaged(file, f"its last block has no more than {size - position} bytes: it is truncated")
        mark, tag, rest, iv_size, iv, length = header.unpack(read_range(file, position, header.size))
        if (
            CIPHERS.get(mark) != mode
            or (iv_size, rest) != (len(iv), _REST_OF_HEADER + length)
            or (mode != _GCM and length % _UNIT)
        ):
            raise _damaged(file, f"at byte {position} no block of {mode} begins as MindSpore writes it")
        if not 0 < length <= size - position - header.size:
            raise _damaged(file, f"its block at byte {position} has {length} bytes, but fewer follow: it is truncated")
        yield _Block(position + header.size, length, iv, tag)
        position += header.size + length


def _decrypted(file: ReadableFile, mode: str, blocks: Sequence[_Block], key: bytes) -> Iterator[bytes]:
    """The plain text of all blocks; the end of a block comes after its check, by tag or padding."""
    decryptor_of, wrong_tag, unpadder_of = _ciphers(mode, key, file.path)
    begun = False
    for number, block in enumerate(blocks, 1):
        decryptor = decryptor_of(block)
        unpadder = None if mode == _GCM else unpadder_of()
        for data in _read(file, block.offset, block.size):
            plain = decryptor.update(data)
            # A wrong key decrypts to noise.
            if not begun and not is_ckpt(plain[:_UNIT]):
                raise EncryptedCheckpointError(
                    f"{file.path}: cannot be decrypted with {mode}: the key is wrong, or the file is damaged",
                    file=file.path,
                    hint=f"check the file of {_OPTION}",
                )
            begun = True
            yield plain if unpadder is None else unpadder.update(plain)
        try:
            rest = decryptor.finalize()
            if unpadder is not None:
                yield unpadder.update(rest) + unpadder.finalize()
        except (wrong_tag, ValueError) as error:
            problem = "tag" if mode == _GCM else "padding"
            raise _damaged(file, f"the {problem} of block {number} of {len(blocks)} is wrong ({mode})") from error


def _ciphers(mode: str, key: bytes, path: str) -> tuple[Callable[[_Block], Any], type[Exception], Callable[[], Any]]:
    """The function that creates a block's decryptor, the exception for a wrong tag, and the unpadder's function."""
    if mode == _SM4 and len(key) != _SM4_KEY_SIZE:
        raise EncryptedCheckpointError(
            f"{path}: is encrypted with {mode}, which needs a key of 16 bytes; this key has {len(key)}", file=path
        )
    try:
        from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
        from cryptography.hazmat.primitives.padding import PKCS7
    except ModuleNotFoundError as error:
        raise InputError(
            f"{path}: is encrypted; decryption needs the package cryptography, which is not installed",
            file=path,
            hint="pip install cryptography",
        ) from error

    def decryptor_of(block: _Block) -> Any:
        how: Any = modes.GCM(block.iv[:_NONCE_SIZE], block.tag) if mode == _GCM else modes.CBC(block.iv)
        try:
            # Versions before 35 have no SM4 name.
            return Cipher((algorithms.SM4 if mode == _SM4 else algorithms.AES)(key), how).decryptor()
        except (AttributeError, UnsupportedAlgorithm) as error:
            raise InputError(
                f"{path}: is encrypted with {mode}, which the OpenSSL of the package cryptography lacks here",
                file=path,
                hint="install a newer cryptography, or one whose OpenSSL has SM4",
            ) from error

    return decryptor_of, InvalidTag, PKCS7(8 * _UNIT).unpadder


def _check_index(file: LocalFile, mode: str) -> None:
    """Check the structure of the plain text: no mode detects missing blocks, and CBC no damage."""
    try:
        read_ckpt_index(file, file.size())
    except DamagedCheckpointError as error:
        error.message += f" (after decryption with {mode}: damaged, or the key is wrong)"
        raise


def _damaged(file: ReadableFile, problem: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{file.path}: is damaged: {problem}", file=file.path)
