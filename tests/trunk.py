"""What a plain conversion executes: lines inside functions, and the modules that contain them.

A reader must hold this much to follow a conversion. `tests/test_trunk.py` keeps it from growing;
``python -m tests.trunk`` prints it, ``--modules`` with the lines of each module.
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
    """Run the program in this process, and print the executed lines inside functions as ``LINES FILE``."""
    lines: set[tuple[str, int]] = set()

    def in_function(frame: FrameType, event: str, _: Any) -> Callable[..., Any]:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return in_function

    def at_call(frame: FrameType, _: str, __: Any) -> Callable[..., Any] | None:
        return in_function if is_function(frame.f_code) else None

    def is_function(code: CodeType) -> bool:
        # Bodies of modules and classes are not optimized.
        return bool(code.co_flags & inspect.CO_OPTIMIZED) and code.co_filename.startswith(PACKAGE)

    def report(status: int) -> None:
        sys.settrace(None)
        for file in sorted({file for file, _ in lines}):
            first = first_lines(file)
            count = len({first.get(line, line) for name, line in lines if name == file})
            print(count, Path(file).relative_to(ROOT).as_posix())
        sys.exit(status)

    threading.settrace(at_call)
    sys.settrace(at_call)
    from reshard import entry, signals

    signals.leave = report  # type: ignore[assignment]
    sys.argv = ["reshard", *arguments]
    entry.main()


def plain_conversion() -> Counter[str]:
    """The lines that a conversion of 8 ranks to 4 by one job executes, by module."""
    demo = FIXTURES / "demo"
    with tempfile.TemporaryDirectory() as directory:
        command = ["convert", str(demo / "src_checkpoints"), f"{directory}/out", "--jobs=1", "--quiet"]
        command += [f"--src-strategy={demo}/src_strategy.ckpt", f"--dst-strategy={demo}/dst_strategy.ckpt"]
        code = f"from tests.trunk import trace_program; trace_program({command!r})"
        result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    rows = (line.split(" ", 1) for line in result.stdout.splitlines())
    return Counter({file: int(count) for count, file in rows})


if __name__ == "__main__":
    by_module = plain_conversion()
    if "--modules" in sys.argv:
        for name, number in by_module.most_common():
            print(f"{number:5} {name}")
    print(f"a plain conversion executes {sum(by_module.values()):,} lines inside functions of {len(by_module)} modules")
