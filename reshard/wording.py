"""Numbers and names the way people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def number_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs written short: ``0-3,7``."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def rank_ranges(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-3,7``."""
    numbers = sorted(set(ranks))
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {number_ranges(numbers)}"


def some_names(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list and how many more there are."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def plural(count: int, noun: str) -> str:
    """``1 file``, ``3 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def byte_size(size: int) -> str:
    """A number of bytes in binary units: ``1.5 GiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def printable(text: str) -> str:
    """Text with control characters escaped, because names in files may hold anything; newlines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
