"""Warnings and notes of all rooms, for whatever output shows them."""

from __future__ import annotations

from typing import Callable, Optional

from reshard.text.messages import full_text


class Report:
    """Collects warnings and notes without repetition, and passes them on as they come.

    Attributes:
        warnings: possible problems of the result, with the name of every parameter.
        notes: decisions, in the same form.
    """

    def __init__(self, listener: Optional[Callable[[str, str], None]] = None) -> None:
        """Args: listener: called with ``"warning"`` or ``"note"`` and the text."""
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self._listener = listener

    def warn(self, text: str) -> None:
        """Warn of a possible problem of the result."""
        self._say("warning", self.warnings, text)

    def note(self, text: str) -> None:
        """Note a decision."""
        self._say("note", self.notes, text)

    def _say(self, kind: str, said: list[str], text: str) -> None:
        if full_text(text) in said:
            return
        said.append(full_text(text))
        if self._listener is not None:
            self._listener(kind, text)


def logged(words: Callable[[str], str] = str) -> Report:
    """A report to the logger ``reshard``; Python shows its warnings by default.

    Args:
        words: translates texts to the caller's terms.
    """
    import logging

    log = logging.getLogger("reshard")
    return Report(lambda kind, text: log.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", words(text)))
