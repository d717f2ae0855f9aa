"""Messages that name parameters: many as a few patterns, and all of them on request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Optional

from reshard.text.wording import one_line, quoted

#: Lines of a list in a message.
MAX_LINES = 12
# Lists up to this length are printed in full.
_FEW = 3


class Message(str):
    """A text in which lists of names are folded; text may be put before and after it with ``+``.

    Attributes:
        full: the text with every name.
        shortened: whether patterns or lines are omitted.
    """

    full: str
    shortened: bool

    def __new__(cls, text: str, full: Optional[str] = None, shortened: bool = False) -> Message:
        """Args: full: the text with every name, where that is another one."""
        message = super().__new__(cls, text)
        message.full = text if full is None else full
        message.shortened = shortened
        return message

    def __add__(self, after: str) -> Message:
        return joined("", (self, after))

    def __radd__(self, before: str) -> Message:
        return joined("", (before, self))


def full_text(text: str) -> str:
    """A text with every name, whether or not it is a `Message`."""
    return text.full if isinstance(text, Message) else text


def is_shortened(text: str) -> bool:
    """Whether a text omits patterns or lines of its full text."""
    return isinstance(text, Message) and text.shortened


def listing(names: Collection[str], most: int = 5) -> Message:
    """Names in quotes, many of them as patterns with their numbers: ``'blocks.{0-31}.w' (32), 'b' and 12 more``.

    Args:
        names: the names, each once.
        most: maximum number of patterns.
    """
    full = ", ".join(f"'{one_line(name)}'" for name in names)
    if len(names) <= _FEW:
        return Message(", ".join(map(quoted, names)), full)
    # Loaded only here: most messages name few parameters.
    from reshard.text.name_patterns import name_patterns

    patterns = name_patterns(names)
    shown = [quoted(text) if size == 1 else f"{quoted(text)} ({size})" for text, size in patterns[:most]]
    omitted = sum(size for _, size in patterns[most:])
    return Message(", ".join(shown) + (f" and {omitted} more" if omitted else ""), full, omitted > 0)


def joined(separator: str, texts: Iterable[str]) -> Message:
    """Texts in a row, folded and in full."""
    texts = list(texts)
    return Message(separator.join(texts), separator.join(map(full_text, texts)), any(map(is_shortened, texts)))


def block(headline: str, lines: Sequence[str], most: int = MAX_LINES) -> Message:
    """A headline and up to ``most`` lines below it, then the number of omitted lines; the full text has all lines."""
    omitted = len(lines) - most
    shown = joined("\n", [headline, *(lines if omitted <= 0 else [*lines[:most], f"... and {omitted} more lines"])])
    return Message(shown, joined("\n", [headline, *lines]).full, shown.shortened or omitted > 0)
