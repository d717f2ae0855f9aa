"""Forms of checkpoints as tests ask for them."""

from __future__ import annotations

from tests.running import Argument
from tests.small import World

FORMS = ["ranks", "checkpoint2", "unified", "huggingface"]


def to(form: str, world: World) -> list[Argument]:
    """The options that write a form, cut as the target strategy where it has one."""
    words: list[Argument] = ["--to", form]
    if form in ("ranks", "checkpoint2"):
        words += ["--dst-strategy", world.new]
    return words
