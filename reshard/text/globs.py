"""Patterns of names: the options that select parameters, and warnings of patterns without a match."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from fnmatch import translate

from reshard.errors import UsageError
from reshard.text.messages import Report, listing, quoted, some_names
from reshard.text.names import ACCUMULATED_GRADIENTS, STATE_PREFIXES, did_you_mean, state_prefix

# Without the guards, `*{number}` would match only the 2 of x12.
_NUMBER = r"(?<![0-9])([0-9]+)(?![0-9])"
# Limit of names that a pattern is compared with, each with every prefix of optimizer state.
_MAX_EXAMPLES = 500
_TOKEN = re.compile(r"\*+|\[!?]?[^]]*]|.", re.DOTALL)


def pattern_of(text: str) -> str:
    """The pattern that matches only this text."""
    return re.sub(r"[*?[]", r"[\g<0>]", text)


class Glob:
    """One pattern.

    Args:
        pattern: the pattern.
        number: a placeholder for a whole number; none if empty.

    Raises:
        UsageError: it has a set that is not one in every shell.
    """

    def __init__(self, pattern: str, number: str = "") -> None:
        self.pattern = pattern
        self._match = _compiled([pattern], number).match

    def matches(self, text: str) -> bool:
        return self._match(text) is not None

    def numbers(self, text: str) -> list[tuple[int, int]] | None:
        """The positions of the numbers in a text, in order; None if it does not match.

        Stars are greedy, the first one first.
        """
        match = self._match(text)
        return None if match is None else [match.span(group + 1) for group in range(match.re.groups)]


def matcher(patterns: Iterable[str]) -> Callable[[str], bool]:
    """A function that returns whether a text matches any of some patterns.

    Raises:
        UsageError: as `Glob`.
    """
    every = set(patterns)
    literals = {pattern for pattern in every if not re.search(r"[*?[]", pattern)}
    match = _compiled(sorted(every - literals)).match
    return lambda text: text in literals or match(text) is not None


class Filters:
    """Patterns that select the parameters to write; they never decide the step.

    Args:
        include: of the written parameters; empty for all.
        exclude: of skipped parameters; exclusion wins.

    Raises:
        UsageError: as `Glob`.
    """

    def __init__(self, include: Sequence[str] = (), exclude: Sequence[str] = ()) -> None:
        self.include = include
        self.exclude = exclude
        self._included = matcher(include)
        self._excluded = matcher(exclude)

    def admit(self, name: str) -> bool:
        if self.exclude and self._excluded(name):
            return False
        return not self.include or self._included(name)


def _compiled(patterns: Sequence[str], number: str = "") -> re.Pattern[str]:
    for pattern in patterns:
        if re.search(r"\[\^[^]]*]", pattern):
            raise UsageError(
                f"{quoted(pattern)}: [^...] is a set with ^ in some shells, and everything else in others",
                hint="write [!...] for any other character",
            )
    expressions = [_numbered(pattern, number) if number else translate(pattern) for pattern in patterns]
    try:
        return re.compile("|".join(expressions) or r"(?!)")
    except re.error as error:
        # Older Pythons refuse ranges such as z-a.
        raise UsageError(f"{', '.join(map(quoted, patterns))}: cannot be matched: {error}") from error


def _numbered(pattern: str, number: str) -> str:
    """The regular expression of a pattern with placeholders, a group for each."""
    texts = pattern.split(number)
    return rf"(?s:{_NUMBER.join(''.join(map(_expression, _TOKEN.findall(text))) for text in texts)})\Z"


def _expression(token: str) -> str:
    if token.startswith("*"):
        return ".*"
    # Without the mark of the end, which differs between Pythons.
    return translate(token)[:-2]


def warn_of_unmatched(filters: Filters, names: Iterable[Iterable[str]], report: Report) -> None:
    """Warn of the patterns of each option that match none of the names: the checkpoint's, then those of strategies."""
    if not filters.include and not filters.exclude:
        return
    stored, *listed = map(frozenset, names)
    all_names = stored.union(*listed)
    for option, patterns in (("--include", filters.include), ("--exclude", filters.exclude)):
        unmatched = [pattern for pattern in dict.fromkeys(patterns) if not any(map(Glob(pattern).matches, all_names))]
        if option == "--exclude":
            unmatched = [pattern for pattern in unmatched if not _is_for_absent_state(pattern, all_names)]
        if unmatched:
            shown = some_names(list(map(quoted, unmatched)))
            report.warn(
                f"no parameter or value of the checkpoint matches {option} {shown}; "
                f"{advice_on_unmatched(unmatched[0], stored)}"
            )


def _is_for_absent_state(pattern: str, names: Collection[str]) -> bool:
    """Whether a pattern is for optimizer state or gradients, as in scripts for any checkpoint, and there are none."""
    prefixes = [ACCUMULATED_GRADIENTS]
    if not any(state_prefix(name, names) for name in names):
        prefixes += STATE_PREFIXES
    fits = Glob(pattern).matches
    return any(fits(prefix + name) for name in itertools.islice(names, _MAX_EXAMPLES) for prefix in prefixes)


def advice_on_unmatched(pattern: str, names: Collection[str]) -> str:
    """Names that are similar to a pattern without a match, or all names in short."""
    return did_you_mean(pattern, names) or f"the checkpoint contains {listing(sorted(names))}"
