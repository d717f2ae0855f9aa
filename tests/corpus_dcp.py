"""Distributed checkpoints that PyTorch's libraries wrote, and their contents."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from tests.corpus import FIXTURES, ROOT

CORPUS_DCP = ROOT.parent / "shared" / "corpus_dcp"
"""The whole collection; it lies beside the repository where the project is developed."""

_FORMS = ("dcp_", "bad_", "hyper_", "mcore_")


class Case(NamedTuple):
    """A checkpoint.

    Attributes:
        name: of the case.
        path: its directory.
        tensors: per name type, shape and SHA-256 of the bytes of the whole tensor.
        objects: per name the value of what is no tensor.
        refused: it must be refused.
        may_refuse: it may be.
    """

    name: str
    path: Path
    tensors: dict[str, tuple[str, tuple[int, ...], str]]
    objects: dict[str, Any]
    refused: bool = False
    may_refuse: bool = False


def fixtures(directory: str = "dcp") -> list[Case]:
    """The cases in the fixtures."""
    actual = []
    for place in sorted((FIXTURES / directory).iterdir()):
        answer = json.loads((place / "expected.json").read_text())
        tensors = {name: (dtype, tuple(shape), digest) for name, (dtype, shape, digest) in answer["tensors"].items()}
        actual.append(Case(place.name, place / "checkpoint", tensors, answer["objects"]))
    return actual


def corpus() -> list[Case]:
    """All cases of the collection; none if it is absent."""
    actual = []
    for place in sorted(CORPUS_DCP.iterdir()) if CORPUS_DCP.is_dir() else ():
        if place.name.startswith(_FORMS):
            answer = json.loads((place / "expected.json").read_text())
            tensors = {
                name: (value["dtype"], tuple(value["shape"]), value["sha256"])
                for name, value in answer["tensors"].items()
            }
            refused = answer.get("expect") == "refuse"
            may = bool(answer.get("may_refuse") or answer.get("may_convert"))
            actual.append(Case(place.name, place / "checkpoint", tensors, answer.get("objects", {}), refused, may))
    return actual


def held_in(directory: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """What the safetensors files of a directory hold, as `Case.tensors` has it; read by nothing of the package."""
    actual: dict[str, tuple[str, tuple[int, ...], str]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = path.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                assert name not in actual
                begin, end = entry["data_offsets"]
                digest = hashlib.sha256(data[start + begin : start + end]).hexdigest()
                actual[name] = entry["dtype"], tuple(entry["shape"]), digest
    return actual
