"""Devices per kind of parallelism, and products of them in rules: ``dp*cp/ep``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from reshard.defaults import MAX_DEVICES, MAX_STAGES
from reshard.errors import UsageError
from reshard.text import products
from reshard.text.products import ExpressionError
from reshard.threads import cached_property

STAGES = "pp"
EXPERTS = "ep"
NAMES = ("dp", "mp", "pp", "cp", "ep")
"""Data, model (tensor), pipeline, context and expert parallel: 1 by default."""

_WRITTEN = ("dp", "cp", "mp", "ep", "pp")
_NAME = re.compile(r"[a-z][a-z0-9_]*")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")
_ELSEWHERE = {
    **{"tp": "mp", "tensor": "mp", "model": "mp", "model_parallel": "mp", "data": "dp", "data_parallel": "dp"},
    **{"pipeline": "pp", "pipeline_stage": "pp", "sp": "cp", "context_parallel": "cp", "expert_parallel": "ep"},
}
# Other programs' names for the division of layers among stages, which is not a kind of parallelism.
_OF_LAYERS = ("vpp", "vp", "vp_size", "pp_interleave_num", "num_layer_list", "offset")


class NoCandidateError(ExpressionError):
    """Cuts that are impossible for a matrix at any sizes."""


@dataclass(frozen=True)
class AxisSizes:
    """Devices per kind of parallelism.

    Attributes:
        stated: the stated sizes, by name; axes of a model's own may have any other name.
    """

    stated: tuple[tuple[str, int], ...]

    @cached_property
    def _by_name(self) -> Mapping[str, int]:
        return {**dict.fromkeys(NAMES, 1), **dict(self.stated)}

    def __getitem__(self, name: str) -> int:
        """The size of an axis.

        Raises:
            ExpressionError: no axis has this name.
        """
        if name not in self._by_name:
            usual_name = _ELSEWHERE.get(name)
            hint = f"write {usual_name}" if usual_name is not None else f"add --sizes {name}=N"
            raise ExpressionError(f"{name} has no size; {hint}")
        return self._by_name[name]

    @property
    def named(self) -> Mapping[str, int]:
        """All sizes."""
        return self._by_name

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage; expert parallelism uses the devices of other kinds."""
        return math.prod(size for name, size in self._by_name.items() if name not in (STAGES, EXPERTS))

    @property
    def stages(self) -> int:
        """Pipeline stages."""
        return self[STAGES]

    @property
    def text(self) -> str:
        """``dp=2,mp=4``, as typed."""
        return ",".join(f"{name}={size}" for name, size in self.stated)


def parse_sizes(text: str) -> AxisSizes:
    """Sizes as typed: ``dp=2,mp=4``.

    Raises:
        UsageError: the text is invalid.
    """
    sizes_by_name: dict[str, int] = {}
    for part in text.split(","):
        name, _, number = (word.strip() for word in part.partition("="))
        if not _NAME.fullmatch(name) or not re.fullmatch(r"[0-9]{1,9}", number):
            raise UsageError(f"{text!r} is not a list of sizes such as dp=2,mp=4")
        if name in _ELSEWHERE:
            raise UsageError(f"{text!r}: write {_ELSEWHERE[name]} for {name}")
        if name in _OF_LAYERS:
            raise UsageError(
                f"{text!r}: {name} is not a number of devices: use --layers-per-stage with the layers of each "
                "stage, in rounds of all stages where they are interleaved: 2,2,2,2 for two stages in two rounds"
            )
        if name in sizes_by_name:
            raise UsageError(f"{text!r}: {name} is given twice")
        sizes_by_name[name] = int(number)
        if not 1 <= sizes_by_name[name] <= (MAX_STAGES if name == STAGES else MAX_DEVICES):
            raise UsageError(f"{text!r}: {name}={number} is not a number of devices")
    sizes = AxisSizes(tuple(sizes_by_name.items()))
    if sizes.stage_devices * sizes.stages > MAX_DEVICES:
        raise UsageError(f"{text!r} is more than {MAX_DEVICES} devices")
    return sizes


def _order(power: tuple[str, int]) -> tuple[int, str]:
    """Usual order of sizes, then others by name."""
    name = power[0]
    return _WRITTEN.index(name) if name in _WRITTEN else len(_WRITTEN), name


class AxisProduct(products.Product):
    """A product of sizes and numbers, with divisors: ``dp*cp/ep``; equal products have one order of sizes."""

    def __mul__(self, other: products.Product) -> AxisProduct:
        powers = dict(self.powers)
        for name, power in other.powers:
            powers[name] = powers.get(name, 0) + power
        return AxisProduct(
            self.number * other.number, tuple(sorted(((n, power) for n, power in powers.items() if power), key=_order))
        )


@lru_cache(maxsize=1024)
def product(text: str) -> AxisProduct:
    """Read a product.

    Raises:
        ExpressionError: the text is invalid.
    """
    return AxisProduct(Fraction(1), ()) * products.read_product(text, _NAME, _NUMBER, "dp*cp/ep")
