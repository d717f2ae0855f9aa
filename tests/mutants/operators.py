"""Mutants of a module: one operator, constant or loop changed.

A mutant is numbered among all places of its module where something can be changed. Nothing is written: a mutant
is made when its module is imported, by `install`, in a process of its own.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import CodeType
from typing import NamedTuple, TypeVar

from tests.corpus import ROOT

_OPERATORS: dict[type, type] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_COMPARISONS: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_Node = TypeVar("_Node", bound=ast.AST)


class Mutant(NamedTuple):
    """A change.

    Attributes:
        module: the module's name.
        number: of the place in it.
        line: the place's line.
        change: what is changed, in words.
    """

    module: str
    number: int
    line: int
    change: str


class _Changer(ast.NodeTransformer):
    """Counts the places that can be changed, and changes one of them."""

    def __init__(self, module: str, chosen: int | None = None) -> None:
        self.found: list[Mutant] = []
        self._module, self._chosen = module, chosen

    def _is_chosen(self, node: ast.AST, change: str) -> bool:
        number = len(self.found)
        self.found.append(Mutant(self._module, number, getattr(node, "lineno", 0), change))
        return number == self._chosen

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        # Neither decorators nor annotations nor docstrings.
        node.body = [created for child in node.body for created in [self.visit(child)] if created is not None]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is not None:
            node.value = self.visit(node.value)
        return node

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        other = _OPERATORS.get(type(node.op))
        if other is not None and self._is_chosen(node, f"{type(node.op).__name__} to {other.__name__}"):
            node.op = other()
        return self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        other = _OPERATORS.get(type(node.op))
        if other is not None and self._is_chosen(node, f"{type(node.op).__name__}= to {other.__name__}="):
            node.op = other()
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        for place, operator in enumerate(node.ops):
            other = _COMPARISONS.get(type(operator))
            if other is not None and self._is_chosen(node, f"{type(operator).__name__} to {other.__name__}"):
                node.ops[place] = other()
        return self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        if self._is_chosen(node, "and and or swapped"):
            node.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        return self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, (ast.Not, ast.USub)) and self._is_chosen(node, f"{type(node.op).__name__} left out"):
            return node.operand
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if type(node.value) is int and node.value < 1 << 20 and self._is_chosen(node, f"{node.value} one higher"):
            return ast.copy_location(ast.Constant(node.value + 1), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if (
            isinstance(node.func, ast.Attribute)
            and node.func.attr == "arange"
            and self._is_chosen(node, "counted down")
        ):
            return _mirrored(node, is_array=True)
        if isinstance(node.func, ast.Name):
            if node.func.id == "reversed" and self._is_chosen(node, "not reversed"):
                return node.args[0]
            if node.func.id in _CALLS and self._is_chosen(node, f"{node.func.id} to {_CALLS[node.func.id]}"):
                node.func.id = _CALLS[node.func.id]
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        step = node.slice.step if isinstance(node.slice, ast.Slice) else None
        if isinstance(step, ast.UnaryOp) and self._is_chosen(node, "[::-1] left out"):
            return node.value
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        if self._is_chosen(node, "loop mirrored"):
            node.iter = _mirrored(node.iter)
        return self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> ast.AST:
        if self._is_chosen(node.iter, "comprehension mirrored"):
            node.iter = _mirrored(node.iter)
        return self.generic_visit(node)


def _mirrored(iterable: ast.expr, is_array: bool = False) -> ast.expr:
    whole = iterable if is_array else ast.Call(ast.Name("list", ast.Load()), [iterable], [])
    backwards = ast.Slice(None, None, ast.UnaryOp(ast.USub(), ast.Constant(1)))
    return ast.copy_location(ast.Subscript(whole, backwards, ast.Load()), iterable)


def _path(module: str) -> Path:
    return ROOT / (module.replace(".", "/") + ".py")


def mutants_of(module: str) -> list[Mutant]:
    """All mutants of a module."""
    changer = _Changer(module)
    changer.visit(ast.parse(_path(module).read_text()))
    return changer.found


def line_of(mutant: Mutant) -> str:
    """The line of a change."""
    return _path(mutant.module).read_text().splitlines()[mutant.line - 1]


class _Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with a change in it; no byte code is written or read."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(_path(mutant.module)))
        self._mutant = mutant

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(Path(self.path).read_text())
        changed = _Changer(fullname, self._mutant.number).visit(tree)
        return compile(ast.fix_missing_locations(changed), self.path, "exec")


class _Planted(importlib.machinery.SourceFileLoader):
    """Loads a module with another text in place of one that it has once."""

    def __init__(self, module: str, old: str, new: str) -> None:
        super().__init__(module, str(_path(module)))
        self._old, self._new = old, new

    def get_code(self, fullname: str) -> CodeType:
        text = Path(self.path).read_text()
        assert text.count(self._old) == 1, f"{self.path}: has another text than {self._old}"
        return compile(text.replace(self._old, self._new), self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, loader: importlib.machinery.SourceFileLoader) -> None:
        self._loader = loader

    def find_spec(
        self, fullname: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self._loader) if fullname == self._loader.name else None


def install(mutant: Mutant) -> None:
    """Have a mutant imported in place of its module, which must not be imported yet."""
    assert mutant.module not in sys.modules
    sys.meta_path.insert(0, _Finder(_Loader(mutant)))


def plant(module: str, old: str, new: str) -> None:
    """Have a module imported with another text in place of one, likewise."""
    assert module not in sys.modules
    sys.meta_path.insert(0, _Finder(_Planted(module, old, new)))
