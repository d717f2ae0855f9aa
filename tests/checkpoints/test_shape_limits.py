"""Limits of dimensions and elements: tensors up to them work, tensors over them are errors."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from reshard.checkpoints.formats.tensors import MAX_DIMENSIONS, MAX_ELEMENTS
from tests.running import Argument, done, fails

COMMANDS: list[list[Argument]] = [
    ["stats", "{}"],
    ["diff", "{}", "{}"],
    ["get", "{}", "w"],
    ["fingerprint", "{}"],
    ["inspect", "{}"],
    ["convert", "{}", "hf", "--to", "huggingface", "--verify"],
    ["convert", "{}", "c2", "--to", "checkpoint2", "--dst-strategy", "none", "--verify"],
]


def words(command: list[Argument], path: Path) -> list[Argument]:
    """A command with its paths and its strategy option."""
    named = [path if word == "{}" else path.parent / str(word) if word in ("hf", "c2") else word for word in command]
    option = {"convert": ["--src-strategy", "none"], "inspect": []}.get(str(command[0]), ["--strategy", "none"])
    return [*named, *option]


def write(path: Path, shape: list[int], nbytes: int) -> Path:
    header = json.dumps({"w": {"dtype": "F32", "shape": shape, "data_offsets": [0, nbytes]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\1" * nbytes)
    return path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("shape", "nbytes"),
    [
        ([1] * (MAX_DIMENSIONS - 1) + [2], 8),
        ([1, 2] * (MAX_DIMENSIONS // 2 - 10) + [1] * 20, 128),
        ([0] * MAX_DIMENSIONS, 0),
        ([0, MAX_ELEMENTS], 0),
        ([1 << 20, 0, 1 << 20], 0),
    ],
)
def test_shapes_up_to_the_limits_are_accepted(
    shape: list[int], nbytes: int, command: list[Argument], tmp_path: Path
) -> None:
    done(*words(command, write(tmp_path / "w.safetensors", shape, nbytes)))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("shape", "nbytes", "texts"),
    [
        ([1] * 64, 4, "64 dimensions"),
        ([0] * 64, 0, "64 dimensions"),
        ([1] * (MAX_DIMENSIONS + 1), 4, f"supports {MAX_DIMENSIONS}"),
        ([0, 1 << 62], 0, f"supports {MAX_ELEMENTS:,} elements"),
        ([1 << 31, 0, 1 << 31, 1 << 31], 0, f"supports {MAX_ELEMENTS:,} elements"),
    ],
)
def test_shapes_over_the_limits_are_errors_that_name_the_limit(
    shape: list[int], nbytes: int, texts: str, command: list[Argument], tmp_path: Path
) -> None:
    path = write(tmp_path / "w.safetensors", shape, nbytes)
    fails(3, *words(command, path), texts=[path, "'w'", texts])
