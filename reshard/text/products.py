"""Products of named sizes, as rules of names and of strategies write them: ``heads*head_dim/2``, ``dp*cp/ep``."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Protocol

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")


class ExpressionError(ValueError):
    """A text is not a product of sizes."""


class SizeError(ExpressionError):
    """A size is missing or contradicts another one or a shape, or a product is not a whole number."""


class SizeLookup(Protocol):
    """A function from a name to its size; its errors go through."""

    def __getitem__(self, name: str, /) -> int:
        """The size."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product of numbers and named sizes, some of them divisors; equal ones may have another order of sizes.

    Attributes:
        number: the product of its numbers.
        powers: the exponent of each size; negative for divisors.
    """

    number: Fraction
    powers: tuple[tuple[str, int], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Product) and (self.number, {*self.powers}) == (other.number, {*other.powers})

    def __hash__(self) -> int:
        return hash((self.number, frozenset(self.powers)))

    def __mul__(self, other: Product) -> Product:
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + power
        return Product(self.number * other.number, tuple((name, power) for name, power in powers.items() if power))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.powers)

    @property
    def text(self) -> str:
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
            SizeError: it divides by 0.
        """
        value = self.number
        for name, power in self.powers:
            size = sizes[name]
            if not size and power < 0:
                raise SizeError(f"{self.text} divides by {name}, which is 0")
            value *= Fraction(size) ** power
        return value

    def whole(self, sizes: SizeLookup) -> int:
        """Its value for some sizes, a whole number.

        Raises:
            SizeError: the value is not a whole number.
        """
        value = self.value(sizes)
        if value.denominator != 1:
            raise SizeError(f"{self.text} is {value}, no whole number")
        return int(value)


@lru_cache(maxsize=1024)
def product(text: str) -> Product:
    """Read a product; blanks around names and numbers are ignored.

    Raises:
        ExpressionError: the text is not a product.
    """
    multiplied = Fraction(1)
    powers: Counter[str] = Counter()
    power = 1
    for index, part in enumerate(re.split(r"([*/])", text)):
        part = part.strip()
        if index % 2:
            power = -1 if part == "/" else 1
        elif _NAME.fullmatch(part):
            powers[part] += power
        elif _NUMBER.fullmatch(part) and (power > 0 or int(part)):
            multiplied *= Fraction(int(part)) ** power
        else:
            raise ExpressionError(f"{text!r} is not a product of sizes such as heads*head_dim or dp*cp/ep")
    return Product(multiplied, tuple((each, count) for each, count in powers.items() if count))
