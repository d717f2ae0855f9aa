"""Classes of `reshard.classes` behave as those of the standard library."""

from __future__ import annotations

import ast
import dataclasses
import pickle
import typing
from functools import cached_property
from pathlib import Path
from typing import Any, Callable, Optional

import pytest

from reshard import classes

PACKAGE = Path(classes.__file__).parent


def made(decorate: Callable[..., Any], **options: bool) -> Any:
    """A class with all kinds of fields, by a decorator for dataclasses."""

    class Sample:
        """Fields of all kinds."""

        name: str
        size: int = 1
        parts: list[int] = dataclasses.field(default_factory=list)
        host: str = dataclasses.field(default="here", compare=False, repr=False)
        total: int = dataclasses.field(default=0, init=False)

        @cached_property
        def double(self) -> int:
            return 2 * self.size

    Sample.__qualname__ = "Sample"
    return decorate(**options)(Sample)


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "eq": False}])
def test_a_dataclass_behaves_as_the_standard_one(options: dict[str, bool]) -> None:
    ours, standard = made(classes.dataclass, **options), made(dataclasses.dataclass, **options)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        (("a",), {}),
        (("a", 2, [3], "there"), {}),
        (("a",), {"host": "there", "parts": [1, 2]}),
        ((), {"size": 4, "name": "b"}),
        ((), {}),
        (("a", 1, [], "", 0), {}),
        (("a",), {"name": "b"}),
        (("a",), {"total": 1}),
        (("a",), {"other": 1}),
    ]
    for args, named in calls:
        first, second = outcome(ours, *args, **named), outcome(standard, *args, **named)
        assert first == second, (args, named)
    one, other = ours("a", 2), ours("a", 2, host="there")
    same, different = standard("a", 2), standard("a", 2, host="there")
    assert (one == other) == (same == different)
    assert (one == ours("b", 2)) == (same == standard("b", 2))
    assert one != same
    assert outcome(hash, one)[0] == outcome(hash, same)[0]
    assert one.double == 4 and repr(one) == repr(same)
    assert dataclasses.asdict(one) == dataclasses.asdict(same) and dataclasses.astuple(one) == dataclasses.astuple(same)
    assert dataclasses.asdict(dataclasses.replace(one, size=7)) == dataclasses.asdict(dataclasses.replace(same, size=7))
    for change in (lambda value: setattr(value, "size", 3), lambda value: delattr(value, "size")):
        assert outcome(change, ours("a", 2)) == outcome(change, standard("a", 2))


def outcome(function: Callable[..., Any], *args: Any, **named: Any) -> tuple[object, object]:
    """The type of a result or of an exception, and the fields of a result."""
    try:
        result = function(*args, **named)
    except Exception as error:
        return type(error), None
    return type(result).__name__, dataclasses.asdict(result) if hasattr(result, "name") else None


def test_fields_without_a_default_that_are_no_arguments_are_set_after_the_others() -> None:
    @classes.dataclass
    class Rectangle:
        width: int
        area: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.area = self.width**2

    assert Rectangle(3).area == 9


def test_a_dataclass_inherits_fields_and_keeps_its_own_methods() -> None:
    @classes.dataclass
    class Base:
        name: str
        size: int = 1

    @classes.dataclass
    class Derived(Base):
        size: int = 2
        step: Optional[int] = None

        def __repr__(self) -> str:
            return "derived"

    assert dataclasses.astuple(Derived("a")) == ("a", 2, None) and repr(Derived("a")) == "derived"
    assert Base("a", 2) != Derived("a", 2)


class Run(classes.NamedTuple):
    """A named tuple with a method and a default."""

    start: int
    stop: int = 5

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


class StandardRun(typing.NamedTuple):
    """The same."""

    start: int
    stop: int = 5

    @property
    def length(self) -> int:
        """Elements."""
        return self.stop - self.start


def test_a_named_tuple_behaves_as_the_standard_one() -> None:
    assert tuple(Run(2)) == tuple(StandardRun(2)) == (2, 5) and Run(2).length == 3 and Run(2)._replace(stop=3) == (2, 3)
    assert Run._fields == StandardRun._fields and Run._field_defaults == StandardRun._field_defaults
    assert repr(Run(1)) == "Run(start=1, stop=5)" and Run(1)._asdict() == StandardRun(1)._asdict()
    assert pickle.loads(pickle.dumps(Run(1, 2))) == Run(1, 2) and isinstance(pickle.loads(pickle.dumps(Run(1))), Run)
    assert Run.__doc__ == "A named tuple with a method and a default." and Run.__module__ == __name__
    for args in ((), (1, 2, 3)):
        with pytest.raises(TypeError):
            Run(*args)


@pytest.mark.parametrize("name", ["dataclass", "NamedTuple"])
def test_every_module_of_the_package_uses_the_quick_classes(name: str) -> None:
    original = {"dataclass": "dataclasses", "NamedTuple": "typing"}[name]
    slow = [
        str(path)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == original and path.name != "classes.py"
        if any(alias.name == name for alias in node.names)
    ]
    assert not slow, f"import {name} from reshard.classes"
