"""The key of encrypted `.ckpt` files, and decryption of files.

The key comes from a file or from standard input. It is never printed, recorded, or sent to another process: workers
get the file's name and read the key from it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, Optional

from reshard.checkpoints.encrypted import CipherKey, DecryptedFile, EncryptedBlocks
from reshard.errors import EncryptedCheckpointError, InputError, UsageError
from reshard.storage import ReadableFile, read_range
from reshard.storage.other_files import MARK_SIZE, cipher_of

STANDARD_INPUT = "-"

_KEY_SIZES = {"AES-GCM": (16, 24, 32), "AES-CBC": (16, 24, 32), "SM4-CBC": (16,)}
_LONGEST_KEY = max(map(max, _KEY_SIZES.values()))
_LINE_ENDS = (b"\r\n", b"\n")
_OPTION = "--decrypt-key-file"
_CONTENT = "it must contain the raw bytes of MindSpore's enc_key, neither hexadecimal digits nor quotes"


class Decryption:
    """A key, and the required mode of encryption.

    Pickled, it is the name of the key's file; unpickling reads the key from that file.

    Attributes:
        key_file: the key's file, or `STANDARD_INPUT`.
        mode: MindSpore's name of the mode; None for the mode of each file.
        key: 16, 24 or 32 bytes.
    """

    def __init__(self, key_file: str, mode: Optional[str] = None) -> None:
        """Read the key.

        Args:
            key_file: a file that contains only the key and perhaps the end of a line, or `STANDARD_INPUT`.
            mode: ``AES-GCM``, ``AES-CBC`` or ``SM4-CBC``, or None.

        Raises:
            InputError: the key is missing.
        """
        self.key_file = key_file
        self.mode = mode
        self.key = _read_key(key_file)

    def files(self) -> DecryptedFiles:
        """A new opener of files, encrypted or not."""
        return DecryptedFiles(self)

    def __repr__(self) -> str:
        return f"Decryption(mode={self.mode!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Decryption, (self.shared_file, self.mode)

    @property
    def shared_file(self) -> str:
        """Absolute path of the key's file, for other processes, which do not get the key.

        Raises:
            UsageError: the file is missing.
        """
        if self.key_file == STANDARD_INPUT:
            raise UsageError(
                f"{_OPTION} - and --scheduler exclude each other: the key is not sent to Dask's workers",
                hint="pass a file with the key that has the same path on all workers",
            )
        return os.path.join(os.getcwd(), self.key_file)


def _read_key(key_file: str) -> bytes:
    # Messages omit the option's value: a user may have passed the key itself.
    try:
        with contextlib.ExitStack() as stack:
            # Pipes such as the shell's <(...) are allowed.
            file = sys.stdin.buffer if key_file == STANDARD_INPUT else stack.enter_context(open(key_file, "rb"))
            data = file.read(_LONGEST_KEY + len(_LINE_ENDS[0]) + 1)
    except FileNotFoundError as error:
        hint = "the option takes the name of a file that holds the key, not the key"
        raise InputError(f"{_OPTION}: the file does not exist", hint=hint) from error
    except OSError as error:
        raise InputError(f"{_OPTION}: the file cannot be read: {error.strerror or error}") from error
    sizes = _KEY_SIZES["AES-GCM"]
    for end in (b"", *_LINE_ENDS):
        if data.endswith(end) and len(data) - len(end) in sizes:
            return data[: len(data) - len(end)]
    where = "standard input" if key_file == STANDARD_INPUT else "the file"
    amount = f"more than {_LONGEST_KEY}" if len(data) > _LONGEST_KEY else str(len(data))
    raise InputError(f"{_OPTION}: {where} holds no key: a key has 16, 24 or 32 bytes, here are {amount}", hint=_CONTENT)


class DecryptedFiles:
    """Opens files and decrypts encrypted ones on reading; thread-safe.

    Caches the blocks of files by path; callers make sure that a path stays one version.

    Args:
        decryption: the key.
    """

    def __init__(self, decryption: Decryption) -> None:
        self._decryption = decryption
        self._keys: dict[str, CipherKey] = {}
        # None for files that are not encrypted.
        self._known: dict[str, Optional[EncryptedBlocks]] = {}

    def open(self, file: ReadableFile) -> ReadableFile:
        """The file, decrypted if it is encrypted.

        Raises:
            DamagedCheckpointError: it is encrypted, and truncated or damaged.
            EncryptedCheckpointError: it cannot be decrypted with this key and mode.
            InputError: a package is missing.
            OSError: reading failed.
        """
        if file.path not in self._known:
            self._known[file.path] = self._find(file)
        blocks = self._known[file.path]
        return file if blocks is None else DecryptedFile(file, blocks)

    def _find(self, file: ReadableFile) -> Optional[EncryptedBlocks]:
        if not file.status().regular:
            return None
        mode = cipher_of(read_range(file, 0, min(file.size(), MARK_SIZE)))
        if mode is None:
            return None
        key, required_mode = self._decryption.key, self._decryption.mode
        if required_mode not in (mode, None):
            raise EncryptedCheckpointError(
                f"{file.path}: is encrypted with {mode}, not with {required_mode}",
                file=file.path,
                hint="remove --decrypt-mode to use the mode of each file",
            )
        if len(key) not in _KEY_SIZES[mode]:
            raise EncryptedCheckpointError(
                f"{file.path}: is encrypted with {mode}, which needs a key of 16 bytes; this key has {len(key)}",
                file=file.path,
                hint=f"name a file with the right key: {_OPTION} FILE",
            )
        cipher_key = self._keys.get(mode) or self._keys.setdefault(mode, CipherKey(mode, key, file.path))
        return EncryptedBlocks(file, cipher_key)
