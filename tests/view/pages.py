"""Reading the data of a page without a browser and without the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


def data_of(page: Path) -> dict[str, Any]:
    """The data of a page."""
    (content,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text("utf-8"), re.S)
    data: dict[str, Any] = json.loads(content)
    return data


def repeated(actual: Sequence[Any]) -> list[Any]:
    return [value for value, count in zip(actual[::2], actual[1::2]) for _ in range(count)]


def names_of(data: dict[str, Any]) -> list[str]:
    """The names of all tensors, in the page's order."""
    names: list[str] = []
    for shared, rest in zip(repeated(data["names"]["shared"]), data["names"]["rest"]):
        names.append(".".join([*(names[-1].split(".")[:shared] if shared else []), rest]))
    return names


def columns(data: dict[str, Any]) -> Iterator[tuple[str, int, int]]:
    """Name, number of the type and of the layout of every tensor."""
    return zip(names_of(data), data["parameters"]["type"], data["parameters"]["layout"])


def places(data: dict[str, Any]) -> dict[tuple[int, str], tuple[int, int]]:
    """Offset and bytes by file and parameter."""
    actual = {}
    structures, names = data["structures"], names_of(data)
    for number, files in enumerate(structures["files"]):
        parameter, end = 0, 0
        columns = (repeated(structures[key][number]) for key in ("parameters", "gaps", "bytes"))
        for step, gap, nbytes in zip(*columns):
            parameter += step
            for file in files:
                actual[file, names[parameter]] = (end + gap, nbytes)
            end += gap + nbytes
    return actual


def pairs(moves: dict[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """Source, target, bytes and requests of every pair; values that are copied have pairs of their own."""
    for relation in (moves["parameters"], moves["copied"]):
        for target, (source, number) in enumerate(zip(relation["first"], repeated(relation["pattern"]))):
            if number >= 0:
                first, *others = moves["patterns"][number]
                yield (source, target, *moves["values"][first])
                for distance, value in zip(others[::2], others[1::2]):
                    source += distance
                    yield (source, target, *moves["values"][value])
