"""Named tuples of the program are those of `typing`."""

from __future__ import annotations

import ast
import copy
import pickle
import typing
from pathlib import Path
from typing import Any, Optional

import pytest

import reshard
from reshard.named_tuple import NamedTuple


class Ours(NamedTuple):
    """A record.

    Attributes:
        name: its name.
    """

    name: str
    sizes: tuple[int, ...] = ()
    parent: Optional[Ours] = None

    @property
    def number(self) -> int:
        """The number of sizes."""
        return len(self.sizes)

    @classmethod
    def of(cls, name: str) -> Ours:
        return cls(name)

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    def renamed(self, name: str) -> Ours:
        return self._replace(name=name)

    def __str__(self) -> str:
        return f"the record {self.name}"


class Theirs(typing.NamedTuple):
    """A record.

    Attributes:
        name: its name.
    """

    name: str
    sizes: tuple[int, ...] = ()
    parent: Optional[Theirs] = None

    @property
    def number(self) -> int:
        """The number of sizes."""
        return len(self.sizes)

    @classmethod
    def of(cls, name: str) -> Theirs:
        return cls(name)

    @staticmethod
    def twice(number: int) -> int:
        return 2 * number

    def renamed(self, name: str) -> Theirs:
        return self._replace(name=name)

    def __str__(self) -> str:
        return f"the record {self.name}"


@pytest.mark.parametrize("kind", [Ours, Theirs])
def test_records_behave_as_those_of_typing(kind: Any) -> None:
    record = kind("w", parent=kind("model"))
    assert record == ("w", (), ("model", (), None)) and hash(record) == hash(tuple(record))
    assert (record.name, record.sizes, record.parent.name, record.number) == ("w", (), "model", 0)
    assert kind("w", (1, 2)).number == 2 and kind.of("v") == kind("v") and kind.twice(2) == 4
    assert record.renamed("v") == record._replace(name="v") == kind("v", (), kind("model"))
    assert type(record.renamed("v")) is kind
    assert str(record) == "the record w" and repr(kind("w")) == f"{kind.__name__}(name='w', sizes=(), parent=None)"
    assert kind._make(["w", (), None])._asdict() == {"name": "w", "sizes": (), "parent": None}
    assert pickle.loads(pickle.dumps(record)) == copy.deepcopy(record) == record
    assert type(pickle.loads(pickle.dumps(record))) is kind
    assert not hasattr(record, "__dict__")
    wrong: list[tuple[list[Any], dict[str, Any]]] = [([], {}), (["w", (), None, 1], {}), (["w"], {"size": 1})]
    for words, named in wrong:
        with pytest.raises(TypeError):
            kind(*words, **named)
    for attribute in ("name", "other", "number"):
        with pytest.raises(AttributeError):
            setattr(record, attribute, "v")
    with pytest.raises((TypeError, ValueError)):
        record._replace(size=1)


def test_classes_are_described_as_those_of_typing() -> None:
    def described(kind: Any) -> dict[str, Any]:
        named = ("__module__", "__doc__", "__bases__", "__slots__", "_fields", "_field_defaults", "__match_args__")
        return {
            "members": set(dir(kind)) - {"__orig_bases__"},
            "type": type(kind),
            "names": (kind.__name__ == kind.__qualname__, kind.number.__doc__, kind.name.__doc__),
            "hints": str(typing.get_type_hints(kind)).replace(kind.__name__, "Record"),
            "annotated": list(kind.__annotations__),
            **{name: getattr(kind, name, None) for name in named},
        }

    assert described(Ours) == described(Theirs)


def test_classes_in_functions_have_their_qualified_name() -> None:
    class Inner(NamedTuple):
        name: str

    assert Inner.__qualname__.endswith("<locals>.Inner") and Inner.__name__ == "Inner"


@pytest.mark.parametrize(
    "body",
    ["a: int = 1\n    b: int", "_a: int", "a: int\n    def __new__(cls): ...", "a: int\n    _fields = ()"],
    ids=["a field without a default", "an underscore", "its own __new__", "its own _fields"],
)
@pytest.mark.parametrize("base", [NamedTuple, typing.NamedTuple], ids=["ours", "theirs"])
def test_invalid_classes_are_refused(base: Any, body: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        exec(f"from __future__ import annotations\nclass X(Base):\n    {body}", {"Base": base, "__name__": "x"})


def test_no_other_class_can_be_inherited() -> None:
    with pytest.raises(TypeError):
        exec("class X(Base, Other):\n    a: int", {"Base": NamedTuple, "Other": Exception, "__name__": "x"})


def test_modules_with_named_tuples_have_annotations_that_are_strings() -> None:
    package = Path(reshard.__file__).parent
    for path in package.rglob("*.py"):
        text = path.read_text()
        if "(NamedTuple)" in text:
            assert "from __future__ import annotations" in text, path
            imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
            names = [node.module for node in imported if "NamedTuple" in [alias.name for alias in node.names]]
            assert names == ["reshard.named_tuple"], path
