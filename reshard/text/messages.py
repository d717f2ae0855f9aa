"""Numbers and names as people read them, messages in which lists of names are folded, and reports of warnings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

# Maximum number of characters of a name in a message; MindSpore's longest names have about 120.
_MAX_SHOWN = 240
#: Lines of a list in a message.
MAX_LINES = 12
# Lists up to this length are printed in full.
_FEW = 3


def number_ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers with runs written short: ``0-3,7``."""
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in _runs(numbers))


def stepped_ranges(numbers: Iterable[int], most: int = 12) -> str:
    """Ascending numbers with regular gaps written short: ``0-504 step 8``, ``0-3..504-507 step 8``.

    Only the count of numbers follows after ``most`` ranges.
    """
    runs = _runs(numbers)
    ranges: list[str] = []
    first = 0
    while first < len(runs) and len(ranges) < most:
        start, stop = runs[first]
        last = first
        step = runs[first + 1][0] - start if first + 1 < len(runs) else 0
        while last + 1 < len(runs) and runs[last + 1] == (runs[last][0] + step, runs[last][0] + step + stop - start):
            last += 1
        if last < first + 2:
            ranges.append(str(start) if start == stop else f"{start}-{stop}")
            last = first
        elif start == stop:
            ranges.append(f"{start}-{runs[last][0]} step {step}")
        else:
            ranges.append(f"{start}-{stop}..{runs[last][0]}-{runs[last][1]} step {step}")
        first = last + 1
    omitted = sum(stop - start + 1 for start, stop in runs[first:])
    return ",".join(ranges) + (f" and {omitted} more" if omitted else "")


def _runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of neighbours, ascending."""
    runs: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return runs


def rank_ranges(ranks: Iterable[int], noun: str = "rank") -> str:
    """``rank 3`` or ``ranks 0-3,7``; ``noun``: the unit of the numbers."""
    numbers = sorted(set(ranks))
    return f"{noun if len(numbers) == 1 else noun + 's'} {number_ranges(numbers)}"


def stepped_rank_ranges(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 0-504 step 8``, for people."""
    numbers = set(ranks)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {stepped_ranges(numbers)}"


def counted_ranks(ranks: Collection[int], noun: str = "rank") -> str:
    """``2 ranks (0-1)``; ``noun``: the unit of the numbers."""
    return f"{plural(len(ranks), noun)} ({number_ranges(ranks)})"


def are(ranks: Collection[int]) -> str:
    """``is`` or ``are``, after `rank_ranges`."""
    return "is" if len(ranks) == 1 else "are"


def left_alone(ranks: Collection[int]) -> str:
    """``left as it is``, or ``left as they are``."""
    return "left as it is" if len(ranks) == 1 else "left as they are"


def step_words(step: object | None) -> str:
    """``step 3_10``, or ``the checkpoint`` for names without a step."""
    return "the checkpoint" if step is None else f"step {step}"


def some_numbers(numbers: Sequence[int]) -> str:
    """The first numbers of a list and the count of the others."""
    return some_names([str(number) for number in numbers], 16)


def some_names(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list and the count of the others."""
    shown = ", ".join(names[:most])
    return f"{shown} and {len(names) - most} more" if len(names) > most else shown


def plural(count: int, noun: str) -> str:
    """``1 file``, ``3 files``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def byte_size(size: int) -> str:
    """A number of bytes in binary units: ``1.5 GiB``."""
    amount = float(size)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def printable(text: str) -> str:
    """Text with control characters escaped, because names in files may hold anything; newlines stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def one_line(text: str) -> str:
    """Printable text with newlines escaped as well."""
    return printable(text).replace("\n", "\\n")


def quoted(name: str) -> str:
    """A parameter's name in a message: in quotes, on one line, shortened in the middle if very long."""
    shown = one_line(name)
    if len(shown) > _MAX_SHOWN:
        shown = f"{shown[: _MAX_SHOWN // 2]}...{shown[-_MAX_SHOWN // 4 :]}"
    return f"'{shown}'"


def as_glob(name: str) -> str:
    """The pattern of --include and --exclude for a parameter."""
    # Special characters in brackets; ? for characters that a shell cannot pass.
    return "".join(f"[{c}]" if c in "*?[" else c if c.isprintable() and c != "'" else "?" for c in name)


def as_pattern(name: str) -> str:
    """The same, quoted for a shell."""
    return f"'{as_glob(name)}'"


class Message(str):
    """A text in which lists of names are folded; text may be put before and after it with ``+``.

    Attributes:
        full: the text with every name.
        shortened: whether patterns or lines are omitted.
    """

    full: str
    shortened: bool

    def __new__(cls, text: str, full: str | None = None, shortened: bool = False) -> Message:
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
    # Imported here, because that module imports this one.
    from reshard.text.names import name_patterns

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


class Report:
    """Warnings and notes without repetition, passed to a listener at once.

    Attributes:
        warnings: possible problems of the result, with the name of every parameter.
        notes: decisions, in the same form.
        next_command: the command that continues a conversion that has failed.
    """

    def __init__(self, listener: Callable[[str, str], None] | None = None) -> None:
        """Args: listener: called with ``"warning"`` or ``"note"`` and the text."""
        self.warnings: list[str] = []
        self.notes: list[str] = []
        self.next_command: str | None = None
        self._listener = listener

    def warn(self, text: str) -> None:
        self._add("warning", self.warnings, text)

    def note(self, text: str) -> None:
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
        words: makes a text for the log from one for the command line.
    """
    import logging

    log = logging.getLogger("reshard")
    return Report(lambda kind, text: log.log(logging.WARNING if kind == "warning" else logging.INFO, "%s", words(text)))
