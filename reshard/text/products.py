"""Products of named sizes, as rules of names and of strategies write them: ``heads*head_dim/2``, ``dp*cp/ep``."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol


class ExpressionError(ValueError):
    """A text that is no product of sizes."""


class SizeError(ExpressionError):
    """A size is missing or contradicts another one or a shape, or a product is not a whole number."""


class SizeLookup(Protocol):
    """A function from a name to its size; its errors go through."""

    def __getitem__(self, name: str, /) -> int:
        """The size."""


@dataclass(frozen=True)
class Product:
    """Numbers and named sizes multiplied, some of them divided by.

    Attributes:
        number: the numbers in it.
        powers: the exponent of each size; negative for divisors.
    """

    number: Fraction
    powers: tuple[tuple[str, int], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The sizes in it."""
        return tuple(name for name, _ in self.powers)

    @property
    def text(self) -> str:
        """As it is written in rules."""
        above = [name for name, power in self.powers for _ in range(power)]
        below = [f"/{name}" for name, power in self.powers for _ in range(-power)]
        if self.number.numerator != 1 or not above:
            above.insert(0, str(self.number.numerator))
        if self.number.denominator != 1:
            below.insert(0, f"/{self.number.denominator}")
        return "*".join(above) + "".join(below)

    def value(self, sizes: SizeLookup) -> Fraction:
        """Its value for some sizes.

        Raises:
            SizeError: it divides by nothing.
        """
        found = self.number
        for name, power in self.powers:
            size = sizes[name]
            if not size and power < 0:
                raise SizeError(f"{self.text} divides by {name}, which is 0")
            found *= Fraction(size) ** power
        return found

    def whole(self, sizes: SizeLookup) -> int:
        """The number that it is for some sizes.

        Raises:
            SizeError: it is no whole number.
        """
        found = self.value(sizes)
        if found.denominator != 1:
            raise SizeError(f"{self.text} is {found}, no whole number")
        return int(found)


def read_product(text: str, name: re.Pattern[str], number: re.Pattern[str], example: str) -> Product:
    """Read a product.

    Args:
        text: as it is written, with blanks around names and numbers or without.
        name: expression that names match.
        number: expression that numbers match.
        example: an example product for messages.

    Raises:
        ExpressionError: the text is none.
    """
    multiplied = Fraction(1)
    powers: Counter[str] = Counter()
    power = 1
    for index, part in enumerate(re.split(r"([*/])", text)):
        part = part.strip()
        if index % 2:
            power = -1 if part == "/" else 1
        elif name.fullmatch(part):
            powers[part] += power
        elif number.fullmatch(part) and (power > 0 or int(part)):
            multiplied *= Fraction(int(part)) ** power
        else:
            raise ExpressionError(f"{text!r} is not a product of sizes such as {example}")
    return Product(multiplied, tuple((each, count) for each, count in powers.items() if count))
