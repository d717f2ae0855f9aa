"""Requests for forms of checkpoints."""

from __future__ import annotations

from tests.running import Argument
from tests.small import World

FORMS = ["ranks", "checkpoint2", "hf-sharded", "dcp", "hyper-parallel", "unified", "huggingface"]
FINISHED = ["checkpoint2", "unified", "huggingface"]
"""Those that something beside the files of tensors makes complete, or whose files' size can be chosen."""


def to(form: str, world: World) -> list[Argument]:
    """The options that write a form, cut as the target strategy where it has one."""
    words: list[Argument] = ["--to", form]
    if form in ("ranks", "checkpoint2", "hf-sharded", "dcp", "hyper-parallel"):
        words += ["--dst-strategy", world.new]
    if form in ("dcp", "hyper-parallel"):
        # Trainers look for names that begin with "model."; those of the strategies do not.
        words += ["--rename", "*=*"]
    return words


def in_safetensors(form: str) -> list[Argument]:
    """The option for files of safetensors, where the form has others."""
    return [] if form == "dcp" else ["--format", "safetensors"]
