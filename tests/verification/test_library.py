"""Verification also reads with the safetensors library: a disagreement is a difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors

from reshard.checkpoints.formats.dtypes import FROM_SAFETENSORS, SAFETENSORS_NAMES
from tests.running import Argument, done, fails
from tests.small import World
from tests.trees import Value, value

FULL: dict[str, Value] = {
    "w": value("w", (8, 6), "BFloat16"),
    "v": value("v", (4,)),
    "m.w": value("m.w", (8, 6), "Float16"),
}
FORMS: dict[str, list[Argument]] = {
    "ranks": ["--format", "safetensors"],
    "checkpoint2": [],
    "unified": [],
    "huggingface": [],
}


def words(form: str, world: World) -> list[Argument]:
    strategy: list[Argument] = ["--dst-strategy", world.new] if form in ("ranks", "checkpoint2") else []
    return [world.src, world.dst, "--src-strategy", world.old, "--to", form, *strategy, *FORMS[form]]


def compared(form: str, world: World) -> list[Argument]:
    strategy: list[Argument] = ["--dst-strategy", world.new] if form in ("ranks", "checkpoint2") else []
    return [world.dst, "--src", world.src, "--src-strategy", world.old, *strategy]


@pytest.mark.deep
@pytest.mark.parametrize("form", FORMS)
def test_verify_finds_a_mistake_common_to_writer_and_reader(
    form: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two swapped dtypes are restored by a second swap."""
    world.save(FULL)
    for one, other in (("Float16", "BFloat16"), ("BFloat16", "Float16")):
        monkeypatch.setitem(SAFETENSORS_NAMES, one, {"Float16": "F16", "BFloat16": "BF16"}[other])
        monkeypatch.setitem(FROM_SAFETENSORS, {"Float16": "F16", "BFloat16": "BF16"}[one], other)
    message = ["the safetensors library reads", "'m.w'", "'w'"]
    fails(4, "convert", *words(form, world), "--verify", "--checksum", "crc32", texts=message)
    assert message[0] in fails(4, "verify", world.dst).out


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_the_library_refuses_is_a_difference(
    form: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.save(FULL)
    done("convert", *words(form, world), "--verify", "--checksum", "crc32")
    done("verify", world.dst)

    def refuse(path: str, framework: str) -> Any:
        raise safetensors.SafetensorError(f"{Path(path).name}: InvalidHeader")

    monkeypatch.setattr(safetensors, "safe_open", refuse)
    assert "does not open it" in fails(4, "verify", world.dst).out
    assert "InvalidHeader" in fails(4, "verify", *compared(form, world)).out


def test_dtypes_unknown_to_the_library_are_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    full = {**FULL, "v": value("v", (4,), "F8_E4M3")}
    world.save(full, "rank_{rank}/net-1_10.safetensors")
    monkeypatch.setattr(safetensors, "safe_open", lambda path, framework: pytest.fail("asked"))
    done("convert", *words("unified", world), "--verify", "--exclude", "global_step")
