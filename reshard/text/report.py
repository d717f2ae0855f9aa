"""Warnings and notes of all rooms."""

from __future__ import annotations

from typing import Callable, Optional

from reshard.text.messages import full_text


class Report:
    """Warnings and notes without repetition, passed to a listener at once.

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
        self._add("warning", self.warnings, text)

    def note(self, text: str) -> None:
        """Note a decision."""
        self._add("note", self.notes, text)

    def _add(self, kind: str, earlier: list[str], text: str) -> None:
        if full_text(text) in earlier:
            return
        earlier.append(full_text(text))
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
