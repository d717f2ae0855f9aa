"""The sizes of a model that rules need: heads, groups, experts, layers.

A table defines every size by keys of config.json, in order of precedence, with simple products such as
``hidden_size/num_attention_heads``. Keys that are absent or null are skipped. Using a size without a value is an
error: it is never guessed from shapes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from reshard.errors import NamesError
from reshard.text.messages import quoted
from reshard.text.names import near_names
from reshard.text.products import Product, SizeError

_LARGEST = 1 << 62


@dataclass(frozen=True)
class ModelSize:
    """A size of a table.

    Attributes:
        name: its name in rules.
        products: products of keys of config.json; the first with values for all keys wins.
    """

    name: str
    products: tuple[Product, ...]

    @property
    def text(self) -> str:
        return " or ".join(one.text for one in self.products)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of all its products."""
        return tuple(key for one in self.products for key in one.names)


class Configuration(dict[str, object]):
    """The content of a config.json, or arguments of a training under its keys.

    Attributes:
        path: the file.
        arguments: the argument for each of its keys, where it is made of these; empty for a config.json.
    """

    def __init__(self, content: Mapping[str, object], path: str, arguments: Mapping[str, str] = {}) -> None:
        super().__init__(content)
        self.path = path
        self.arguments = arguments


_VOCABULARY, _PADDED, _MULTIPLE = "vocab_size", "padded_vocab_size", "make_vocab_size_divisible_by"


def merged(recorded: Mapping[str, object], stated: Configuration | None, keys: Iterable[str]) -> Mapping[str, object]:
    """The configuration that a checkpoint records, with what a config.json adds.

    Args:
        recorded: by the checkpoint, with every key for the same size.
        stated: of the model's config.json, if any.
        keys: the keys that tables read.

    Raises:
        NamesError: the two contradict each other in what tables read.
    """
    if stated is None:
        return recorded
    place = str(getattr(recorded, "path", "the checkpoint"))
    for key in sorted(keys):
        one, other = (config_value(config, key) for config in (stated, recorded))
        differ, text = None not in (one, other) and one != other, quoted(str(other))
        hint = "name the model's config.json with --config, or correct it"
        if key == _VOCABULARY and isinstance(one, int):
            # Further rows are padding, which is cut; fewer rows than tokens would lose trained ones.
            least, most = _tokens(recorded)
            differ, text = not least <= one <= most, f"{most}" if one > most else f"at least {least}"
            if one < least:
                hint += f'; if the run had fewer tokens: --args FILE with {{"{key}": {one}}}'
        if differ:
            raise NamesError(
                f"{stated.path}: {key} is {quoted(str(one))}, and {place} records {text}",
                file=stated.path,
                hint=hint,
            )
    known = {key: value for key, value in stated.items() if value is not None}
    return Configuration({**recorded, **known}, stated.path)


def _tokens(recorded: Mapping[str, object]) -> tuple[float, float]:
    """The fewest and the most rows without padding that a recorded configuration allows; a run may count padding."""
    size, padded, multiple = (config_value(recorded, key) for key in (_VOCABULARY, _PADDED, _MULTIPLE))
    if not isinstance(padded, int):
        return (size, size) if isinstance(size, int) else (0, math.inf)
    if isinstance(size, int):
        return size, padded
    return (padded - multiple + 1 if isinstance(multiple, int) else 0), padded


class ModelSizes:
    """The sizes of one model.

    Args:
        sizes: of the table.
        config: the content of config.json, if any.
        stated: values of numeric options.
    """

    def __init__(
        self, sizes: Sequence[ModelSize], config: Mapping[str, object] | None, stated: Mapping[str, int] = {}
    ) -> None:
        self._sizes = {size.name: size for size in sizes}
        self._config = config
        self._known: dict[str, int | None] = dict(stated)

    @property
    def source(self) -> str:
        return str(getattr(self._config, "path", "config.json"))

    @property
    def used(self) -> dict[str, int]:
        """The sizes of the table that rules have used, by name."""
        return {name: value for name in self._sizes if (value := self._known.get(name)) is not None}

    def __contains__(self, name: str) -> bool:
        return name in self._sizes or name in self._known

    def known(self, name: str) -> int | None:
        """A size of the table; None if the configuration does not determine it."""
        if name not in self._known:
            self._known[name] = self._stated_value(self._sizes[name])
        return self._known[name]

    def __getitem__(self, name: str) -> int:
        """A size of the table."""
        value = self.known(name)
        if value is None:
            size = self._sizes[name]
            if self._config is None:
                raise NamesError(
                    f"the rules need the size {name} from config.json ({size.text}), which is missing",
                    hint="add --config FILE with the model's config.json",
                )
            near = [near_key for key in size.keys for near_key in near_names(key, self._config)]
            of_keys = getattr(self._config, "arguments", {})
            argument = next((of_keys[key] for key in size.keys if key in of_keys), None)
            named = f'add "{argument}", as the arguments name it' if argument else "add it"
            raise NamesError(
                f"{self.source} does not give the size {name}: it has no {size.text}"
                + (f", but {quoted(near[0])}" if near else ""),
                file=getattr(self._config, "path", None),
                hint=f"{named}, or name {'another file' if argument is None else 'config.json'} with --config FILE",
            )
        return value

    def value(self, expression: Product) -> int:
        """The value of a product of sizes."""
        return expression.whole(self)

    def value_if_known(self, expression: Product) -> int | None:
        return None if any(self.known(name) is None for name in expression.names) else self.value(expression)

    def _stated_value(self, size: ModelSize) -> int | None:
        for expression in size.products:
            keys = {key: value for key in expression.names if (value := self._key(key)) is not None}
            if len(keys) == len(expression.names):
                try:
                    return expression.whole(keys)
                except SizeError as error:
                    raise NamesError(f"{self.source}: size {size.name}: {error}") from error
        return None

    def _key(self, key: str) -> int | None:
        value = config_value(self._config, key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _LARGEST:
            raise NamesError(f"{self.source}: {key} is {quoted(str(value))}, which is not a size")
        return value


def config_value(config: Mapping[str, object] | None, key: str) -> object | None:
    """The value of a key of a configuration; a dot separates nested keys. None if it is absent or null."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value  # type: ignore[no-any-return]


def solved(expressions: Sequence[Product], shape: Sequence[int], known_sizes: Mapping[str, int]) -> dict[str, int]:
    """The sizes for which expressions are equal to a shape.

    Raises:
        SizeError: the shape contradicts the expressions, or does not determine them.
    """
    expected = "[" + ", ".join(one.text for one in expressions) + "]"
    if len(expressions) != len(shape):
        raise SizeError(f"shape {list(shape)} is not {expected}")
    sizes = {name: known_sizes[name] for one in expressions for name in one.names if name in known_sizes}

    def contradiction(names: Iterable[str]) -> SizeError:
        sizes_text = ", ".join(f"{name} {sizes[name]}" for name in names)
        return SizeError(f"shape {list(shape)} is not {expected}{' with ' if sizes_text else ''}{sizes_text}")

    unsolved = list(zip(expressions, shape))
    while unsolved:
        remaining = []
        for expression, length in unsolved:
            unknown = [(name, power) for name, power in expression.powers if name not in sizes]
            if not unknown:
                if expression.whole(sizes) != length:
                    raise contradiction(expression.names)
            elif len(unknown) == 1 and abs(unknown[0][1]) == 1:
                name, power = unknown[0]
                others = [(other, times) for other, times in expression.powers if other != name]
                factor = expression.number * math.prod(Fraction(sizes[other]) ** times for other, times in others)
                if not factor or (power < 0 and not length):
                    raise SizeError(f"shape {list(shape)} does not determine {name} of {expected}")
                value = Fraction(length) / factor if power > 0 else factor / length
                if value.denominator != 1:
                    raise contradiction(other for other, _ in others)
                sizes[name] = int(value)
            else:
                remaining.append((expression, length))
        if len(remaining) == len(unsolved):
            raise SizeError(f"shape {list(shape)} does not determine the sizes in {expected}")
        unsolved = remaining
    return sizes
