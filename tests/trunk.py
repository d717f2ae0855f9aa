"""The size of the trunk: what a plain conversion executes and makes objects of, circles of imports, hooks of forms.

A reader must hold this much to follow a conversion. `tests/test_trunk.py` keeps it from growing;
``python -m tests.trunk`` prints it, ``--names`` with the lines of each module, the classes and the largest circle.
"""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.corpus import FIXTURES, ROOT

PACKAGE = str(ROOT / "reshard")


def first_lines(file: str) -> dict[int, int]:
    """The first line of the statement on each line of a file: a statement counts once, however it is wrapped."""
    first: dict[int, int] = {}
    # Inner statements come after those that contain them.
    for node in ast.walk(ast.parse(Path(file).read_bytes())):
        if isinstance(node, (ast.stmt, ast.ExceptHandler)):
            first.update(dict.fromkeys(range(node.lineno, (node.end_lineno or node.lineno) + 1), node.lineno))
    return first


def trace_program(arguments: list[str]) -> None:
    """Run the program in this process, and print the executed lines inside functions as ``LINES FILE``.

    ``0 CLASS`` is printed for each class that objects are made of.
    """
    lines: set[tuple[str, int]] = set()
    classes: set[str] = set()

    def in_function(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return in_function

    def at_call(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        made = class_made(frame)
        if made is not None and made.__module__.startswith("reshard."):
            classes.add(f"{made.__module__}.{made.__qualname__}")
        return in_function if is_function(frame.f_code) else None

    def class_made(frame: FrameType) -> type | None:
        name, values = frame.f_code.co_name, frame.f_locals
        if name == "__init__":
            return type(values["self"]) if "self" in values else None
        # Named tuples are made by functions of generated modules.
        in_tuple = str(frame.f_globals.get("__name__")).startswith("namedtuple_")
        return values.get("_cls") if in_tuple and name in ("__new__", "<lambda>") else None

    def is_function(code: CodeType) -> bool:
        # Bodies of modules and classes are not optimized.
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(PACKAGE)

    def report(status: int) -> None:
        sys.settrace(None)
        for file in sorted({file for file, _ in lines}):
            first = first_lines(file)
            count = len({first.get(line, line) for name, line in lines if name == file})
            print(count, Path(file).relative_to(ROOT).as_posix())
        for name in sorted(classes):
            print(0, name)
        sys.exit(status)

    threading.settrace(at_call)
    sys.settrace(at_call)
    from reshard import entry, signals

    signals.leave = report  # type: ignore[assignment]
    sys.argv = ["reshard", *arguments]
    entry.main()


def plain_conversion() -> tuple[Counter[str], list[str]]:
    """Of a conversion of 8 ranks to 4 by one job: the executed lines by module, and the classes with objects."""
    demo = FIXTURES / "demo"
    with tempfile.TemporaryDirectory() as directory:
        command = ["convert", str(demo / "src_checkpoints"), f"{directory}/out", "--jobs=1", "--quiet"]
        command += [f"--src-strategy={demo}/src_strategy.ckpt", f"--dst-strategy={demo}/dst_strategy.ckpt"]
        code = f"from tests.trunk import trace_program; trace_program({command!r})"
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = [line.split(" ", 1) for line in result.stdout.splitlines()]
    by_module = Counter({name: int(count) for count, name in rows if count != "0"})
    return by_module, [name for count, name in rows if count == "0"]


def imports() -> dict[str, set[str]]:
    """The modules of the package that each of its modules imports, anywhere but for type checking."""
    files = {
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
        for file in Path(PACKAGE).rglob("*.py")
    }
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        found = graph[module] = set()
        waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
        while waiting:
            node = waiting.pop()
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                continue
            waiting += ast.iter_child_nodes(node)
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name if name in files else node.module for name in names)
        found.intersection_update(files.keys() - {module})
    return graph


def largest_circle() -> set[str]:
    """The largest set of modules of the package of which each one imports all others, directly or through others."""
    graph = imports()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = {start}
        while waiting:
            seen |= waiting
            waiting = {after for module in waiting for after in graph[module]} - seen
        return seen

    after = {module: reached(module) for module in graph}
    circles = ({other for other in after[module] if module in after[other]} for module in graph)
    return max(circles, key=len)


def hooks_of_forms() -> list[str]:
    """The functions and typed attributes that `Form`, the protocol of forms, declares."""
    tree = ast.parse(Path(PACKAGE, "forms", "form.py").read_bytes())
    (form,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Form")
    functions = [node.name for node in form.body if isinstance(node, ast.FunctionDef)]
    return functions + [ast.unparse(node.target) for node in form.body if isinstance(node, ast.AnnAssign)]


if __name__ == "__main__":
    by_module, made = plain_conversion()
    circle = largest_circle()
    if "--names" in sys.argv:
        for name, number in by_module.most_common():
            print(f"{number:5} {name}")
        print("classes:", *made)
        print("circle:", *sorted(circle))
    print(f"a plain conversion executes {sum(by_module.values()):,} lines inside functions of {len(by_module)} modules")
    print(f"and makes objects of {len(made)} classes; the largest circle of imports has {len(circle)} modules")
    print(f"the protocol of forms has {len(hooks_of_forms())} members")
