"""`typing.NamedTuple`, which takes 0.04 instead of 0.1 ms to define a class: each start defines a hundred.

It does not check annotations: mypy does. They are strings, of modules that import annotations from `__future__`.
"""

from __future__ import annotations

from collections import namedtuple
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing import NamedTuple as NamedTuple
else:
    _KEPT = frozenset(vars(namedtuple("Empty", ()))) - {"__doc__", "__repr__", "__module__"} | {"__init__"}

    class _Definition(type):
        """Turns the body of a class that inherits `NamedTuple` into a named tuple."""

        def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> type:
            if len(bases) > 1:
                raise TypeError(f"{name} inherits more than NamedTuple")
            annotations = body.pop("__annotations__")
            fields = list(annotations)
            defaults = [field for field in fields if field in body]
            if defaults != fields[len(fields) - len(defaults) :]:
                raise TypeError(f"{name} has a field without a default after one with a default")
            values = [body.pop(field) for field in defaults]
            made = namedtuple(name, fields, defaults=values, module=body.pop("__module__"))
            made.__annotations__ = annotations
            for attribute, value in body.items():
                if attribute in _KEPT:
                    raise AttributeError(f"{name} defines {attribute}, which named tuples define")
                setattr(made, attribute, value)
            return made

    NamedTuple = type.__new__(_Definition, "NamedTuple", (), {})
