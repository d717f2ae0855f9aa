"""The CRC-32 of a file that several threads write in pieces.

A CRC is a remainder of polynomials over GF(2), so the CRC of a concatenation follows from those of
its parts: the first one times x to the number of bits behind it, plus the second one.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

# The polynomial of CRC-32 (ISO-HDLC) with its bits in reverse, x**31 in the lowest bit.
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
_X_TO_8 = 1 << 23


def joined_crc(pieces: Iterable[tuple[int, int, int]]) -> int:
    """The CRC-32 of pieces put together.

    Args:
        pieces: (offset, bytes, CRC-32) of each, without gaps from offset 0, in any order.

    Raises:
        ValueError: there is a gap or an overlap.
    """
    crc = position = 0
    for offset, length, own in sorted(pieces):
        if offset != position:
            raise ValueError(f"bytes {position} to {offset} have no checksum")
        crc = _times(crc, _shift(length)) ^ own
        position += length
    return crc


@functools.lru_cache(maxsize=1024)
def _shift(length: int) -> int:
    """X to the number of bits in ``length`` bytes."""
    power, factor = _ONE, _X_TO_8
    while length:
        if length & 1:
            power = _times(power, factor)
        factor = _times(factor, factor)
        length >>= 1
    return power


def _times(one: int, other: int) -> int:
    """The product of two polynomials modulo that of CRC-32."""
    product = 0
    bit = _ONE
    while bit:
        if one & bit:
            product ^= other
        other = other >> 1 ^ (_POLYNOMIAL if other & 1 else 0)
        bit >>= 1
    return product
