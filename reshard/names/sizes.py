"""What rules need to know of a model besides its tensors: heads, groups, experts, layers.

A table names every size by the keys of config.json that tell it, in the order in which they are asked, with simple
products such as ``hidden_size/num_attention_heads``. A key that is absent or null goes to the next. What no key tells
is an error where it is needed, and never guessed from shapes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Optional

from reshard.errors import NamesError
from reshard.text.near_names import near_names
from reshard.text.products import Product, SizeError, read_product
from reshard.text.wording import quoted

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
_LARGEST = 1 << 62
_NONE: Mapping[str, int] = {}


def product(text: str) -> Product:
    """Read a product.

    Raises:
        ExpressionError: the text is none.
    """
    return read_product(text, _KEY, _NUMBER, "heads*head_dim")


@dataclass(frozen=True)
class ModelSize:
    """A size that a table names.

    Attributes:
        name: its name in rules.
        told_by: products of keys of config.json, of which the first that is told holds.
    """

    name: str
    told_by: tuple[Product, ...]

    @property
    def text(self) -> str:
        """What tells it, for messages."""
        return " or ".join(one.text for one in self.told_by)


class Configuration(dict[str, object]):
    """What a config.json says.

    Attributes:
        path: the file.
    """

    def __init__(self, content: Mapping[str, object], path: str) -> None:
        super().__init__(content)
        self.path = path


class ModelSizes:
    """The sizes of one model.

    Args:
        sizes: what the table names.
        config: what config.json says, if there is one.
        stated: sizes that were said otherwise.
    """

    def __init__(
        self, sizes: Sequence[ModelSize], config: Optional[Mapping[str, object]], stated: Mapping[str, int] = _NONE
    ) -> None:
        self._sizes = {size.name: size for size in sizes}
        self._config = config
        self._known: dict[str, Optional[int]] = dict(stated)

    @property
    def source(self) -> str:
        """Where they are from, for messages."""
        return str(getattr(self._config, "path", "config.json"))

    def __contains__(self, name: str) -> bool:
        return name in self._sizes or name in self._known

    def known(self, name: str) -> Optional[int]:
        """A size that the table names, if the configuration tells it.

        Raises:
            NamesError: the configuration says something that is no size.
        """
        if name not in self._known:
            self._known[name] = self._told(self._sizes[name])
        return self._known[name]

    def __getitem__(self, name: str) -> int:
        """A size that the table names.

        Raises:
            NamesError: nothing tells it.
        """
        found = self.known(name)
        if found is None:
            size = self._sizes[name]
            if self._config is None:
                raise NamesError(
                    f"the rules need the size {name}, which config.json tells ({size.text}), and there is none",
                    hint="--config FILE names the model's config.json",
                )
            keys = [key for one in size.told_by for key in one.names]
            near = [found for key in keys for found in near_names(key, self._config)]
            raise NamesError(
                f"{self.source} does not tell the size {name}: it has no {size.text}"
                + (f", but {quoted(near[0])}" if near else ""),
                file=getattr(self._config, "path", None),
                hint="add it, or name another file with --config FILE",
            )
        return found

    def value(self, expression: Product) -> int:
        """The number that a product of sizes is.

        Raises:
            NamesError: a size is not told.
            SizeError: it is no whole number.
        """
        return expression.whole(self)

    def value_if_known(self, expression: Optional[Product]) -> Optional[int]:
        """The number that a product of sizes is, where all are told."""
        if expression is None or any(self.known(name) is None for name in expression.names):
            return None
        return self.value(expression)

    def _told(self, size: ModelSize) -> Optional[int]:
        for expression in size.told_by:
            found = [self._key(key) for key in expression.names]
            if None in found:
                continue
            keys = dict(zip(expression.names, found))
            try:
                return expression.whole({key: size or 0 for key, size in keys.items()})
            except SizeError as error:
                raise NamesError(f"{self.source}: size {size.name}: {error}") from error
        return None

    def _key(self, key: str) -> Optional[int]:
        value = config_value(self._config, key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise NamesError(f"{self.source}: {key} is {quoted(str(value))}, which is no size")
        return value


def config_value(config: Optional[Mapping[str, object]], key: str) -> Optional[object]:
    """What a configuration says of a key; a dot leads into an object. None where it is absent or null."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, Mapping):
            return None
        found = found.get(part)
    return found  # type: ignore[no-any-return]


def solved(expressions: Sequence[Product], shape: Sequence[int], known: Mapping[str, int]) -> dict[str, int]:
    """The sizes that make expressions a shape.

    Args:
        expressions: one per dimension.
        shape: elements per dimension.
        known: sizes that are told; others follow from the shape.

    Returns:
        All sizes in the expressions.

    Raises:
        SizeError: they contradict the shape, or do not follow from it.
    """
    said = "[" + ", ".join(one.text for one in expressions) + "]"
    if len(expressions) != len(shape):
        raise SizeError(f"shape {list(shape)} is not {said}")
    sizes = {name: known[name] for one in expressions for name in one.names if name in known}
    open_ones = list(zip(expressions, shape))
    while open_ones:
        left = []
        for expression, length in open_ones:
            unknown = [(name, power) for name, power in expression.powers if name not in sizes]
            if not unknown:
                if expression.whole(sizes) != length:
                    told = ", ".join(f"{name} {sizes[name]}" for name in expression.names)
                    raise SizeError(f"shape {list(shape)} is not {said}{' with ' if told else ''}{told}")
            elif len(unknown) == 1 and abs(unknown[0][1]) == 1:
                name, power = unknown[0]
                rest = expression.number * math.prod(
                    Fraction(sizes[other]) ** times for other, times in expression.powers if other != name
                )
                if not rest or (power < 0 and not length):
                    raise SizeError(f"shape {list(shape)} does not tell {name} of {said}")
                found = Fraction(length) / rest if power > 0 else rest / length
                if found.denominator != 1:
                    told = ", ".join(f"{other} {sizes[other]}" for other in expression.names if other != name)
                    raise SizeError(f"shape {list(shape)} is not {said}{' with ' if told else ''}{told}")
                sizes[name] = int(found)
            else:
                left.append((expression, length))
        if len(left) == len(open_ones):
            raise SizeError(f"shape {list(shape)} does not tell the sizes in {said}")
        open_ones = left
    return sizes
