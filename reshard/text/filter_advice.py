"""Advice on a pattern of --include, --exclude or --cast that matches nothing.

Frequent mistakes: regular expressions (``adam.*``), braces as in a shell (``{adam_m,adam_v}.*``), lists, a name's
beginning without a star (``adam``), other separators (``adam_m_*``), other capitals, another optimizer's names, typing
errors. The correction of each gives other patterns; the first match becomes the advice.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import product
from typing import Optional

from reshard.named_tuple import NamedTuple
from reshard.text.globs import Filters, Glob, Globs, expression_of
from reshard.text.names import (
    ACCUMULATED_GRADIENTS,
    GRADIENTS,
    OPTIMIZER_STATE,
    STATE_PREFIXES,
    kind_of,
    state_prefix,
)
from reshard.text.report import Report
from reshard.text.wording import plural, quoted

_SEPARATORS = "._/:-"
# Limit of patterns made from one with braces or alternatives.
_MAX_PATTERNS = 6
_MAX_BEGINNINGS = 6
_MAX_STARS = 4
# Limit of patterns with their own advice.
_MAX_ADVISED = 8
# Limit of parameters whose optimizer state a pattern is compared with.
_MAX_EXAMPLES = 500
# Comparing longer names, or more words with each other, takes minutes.
_MAX_NAME_LENGTH = 300
_MAX_WORD_LENGTH = 60
_MAX_WORDS = 5000
_ANY_OPTIMIZER = re.compile(r"\W*(opt|optim|optimi[sz]ers?|moments?|momentum|states?)\W*", re.IGNORECASE)
_STATE = "the checkpoint's optimizer state"

_Patterns = tuple[str, ...]


class Correction(NamedTuple):
    """Patterns that match, probably the intended ones.

    Attributes:
        patterns: the patterns.
        matched: number of names that one of them matches.
        reason: an explanation of the mistake; empty where the correction shows it.
    """

    patterns: _Patterns
    matched: int
    reason: str = ""


def warn_of_unmatched(filters: Filters, names: Iterable[Iterable[str]], report: Report) -> None:
    """Warn of every pattern that matches nothing, with a pattern that does.

    Args:
        filters: the patterns.
        names: all names that a pattern may match, from several sources.
        report: gets the warnings.
    """
    if not filters.include and not filters.exclude:
        return
    all_names = set().union(*names)
    for option, patterns in (("--include", filters.include), ("--exclude", filters.exclude)):
        unmatched = _unmatched(patterns, all_names)
        more = unmatched[_MAX_ADVISED:]
        if more:
            report.warn(
                f"{plural(len(unmatched), 'pattern')} of {option} match no parameter or value of the checkpoint; "
                f"besides those below {', '.join(map(quoted, more[:_MAX_ADVISED]))}"
                + (" ..." if len(more) > _MAX_ADVISED else "")
            )
        for pattern in unmatched[:_MAX_ADVISED]:
            # No warning of --exclude 'adam_*' for a checkpoint without optimizer state.
            if option == "--include" or not _is_for_absent_kind(pattern, all_names):
                advice = advice_on_unmatched(option, pattern, all_names)
                report.warn(f"{option} {quoted(pattern)} matches no parameter or value of the checkpoint; {advice}")


def _unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The patterns that match none of the names, each once."""
    unmatched = dict.fromkeys(patterns)
    globs = Globs(unmatched)
    for name in names:
        for pattern in globs.matching(name):
            unmatched.pop(pattern, None)
        if not unmatched:
            break
    return list(unmatched)


def _is_for_absent_kind(pattern: str, names: Collection[str]) -> bool:
    """Whether a pattern is for optimizer state or accumulated gradients, and the checkpoint holds none of that kind."""
    kinds = {kind_of(other, 2, names) for other in names}
    fits = Glob(pattern).matches
    examples = list(itertools.islice(names, _MAX_EXAMPLES))
    return any(
        kind not in kinds and any(fits(prefix + other) for prefix in prefixes for other in examples)
        for kind, prefixes in ((OPTIMIZER_STATE, STATE_PREFIXES), (GRADIENTS, (ACCUMULATED_GRADIENTS,)))
    )


def advice_on_unmatched(option: str, pattern: str, all_names: Iterable[str], ending: str = "") -> str:
    """Patterns that match, probably the intended ones, or the beginnings of all names.

    Args:
        option: the option of the pattern.
        pattern: it matches none of the names.
        all_names: all names that it may match.
        ending: text behind the pattern in the option's value.
    """
    names = sorted(name for name in all_names if len(name) <= _MAX_NAME_LENGTH)
    correction = _correction(pattern, names)
    if correction is not None:
        options = " ".join(f"{option} {quoted(matching + ending)}" for matching in correction.patterns)
        return f"{options} would match {correction.matched}" + (f" ({correction.reason})" if correction.reason else "")
    beginnings = Counter(name[: name.find(".") + 1] or name for name in names)
    shown = [
        quoted(beginning) + (f" ({count})" if count > 1 else "")
        for beginning, count in beginnings.most_common(_MAX_BEGINNINGS)
    ]
    more = len(beginnings) - len(shown)
    return f"the checkpoint's names begin with {', '.join(shown)}" + (f" and {plural(more, 'other')}" if more else "")


def _correction(pattern: str, names: Collection[str]) -> Optional[Correction]:
    """The probable correction of a pattern that matches no name; None without a guess."""
    parameters = frozenset(names)
    state_names = (name for name in names if kind_of(name, 2, parameters) == OPTIMIZER_STATE)
    state = tuple(sorted({f"{state_prefix(name, parameters)}*" for name in state_names}))
    if _ANY_OPTIMIZER.fullmatch(pattern) and 0 < len(state) <= _MAX_PATTERNS:
        return Correction(state, _count(state, names), _STATE)
    for patterns, reason in _readings(pattern):
        for method in (_with_stars, _loosely, _spelled):
            matching = method(patterns, names)
            if matching:
                return Correction(matching, _count(matching, names), reason)
    if state_prefix(pattern, parameters) and 0 < len(state) <= _MAX_PATTERNS:
        return Correction(state, _count(state, names), _STATE)
    return None


def _readings(pattern: str) -> Iterator[tuple[_Patterns, str]]:
    """The pattern as typed, and its other readings, such as a regular expression."""
    unquoted = pattern.strip("'\" ")
    parts = tuple(part for part in re.split(r"[,;\s]+", unquoted) if part)
    if "{" in pattern:
        yield _without_braces(unquoted), "braces are not expanded"
    elif 1 < len(parts) <= _MAX_PATTERNS:
        yield parts, "one pattern for each option"
    expression = (_from_expression(unquoted), "patterns are as in a shell, no regular expressions")
    # A point and a star may be literal.
    yield from (expression, ((unquoted,), "")) if re.search(r"[\\^$|()]", unquoted) else (((unquoted,), ""), expression)


def _without_braces(pattern: str) -> _Patterns:
    """``{a,b}.{0-3}`` as ``a.*`` and ``b.*``, as in the tool's own messages."""
    parts = re.split(r"\{([^{}]*)\}", pattern)
    choices = [
        [part] if at % 2 == 0 else ["*"] if re.fullmatch(r"[0-9][^,]*(,[0-9].*)?", part) else part.split(",")
        for at, part in enumerate(parts)
    ]
    return _products(choices) or (pattern,)


def _from_expression(pattern: str) -> _Patterns:
    """A regular expression as patterns; only the usual syntax for names."""
    if not re.search(r"\.[*+]|\\|^\^|\$$|[|()]|\]\+", pattern):
        return (pattern,)
    patterns: list[str] = []
    for alternative in _alternatives(pattern):
        text = re.sub(r"^\^|\$$", "", alternative)
        text = re.sub(r"(\.|\\[dwsS]|\[[^]]*\])([*+]\??|\{[^}]*\})", "*", text)
        text = re.sub(r"\\d", "[0-9]", text)
        text = re.sub(r"\\(.)", r"\1", text)
        patterns.append(re.sub(r"\*{2,}", "*", text))
    return tuple(dict.fromkeys(patterns[:_MAX_PATTERNS]))


def _alternatives(expression: str) -> Iterable[str]:
    """``a(b|c)|d`` as ``ab``, ``ac``, ``d``; groups within groups are unchanged."""
    parts = re.split(r"\((?:\?:)?([^()]*)\)", expression)
    choices = [[part] if at % 2 == 0 else part.split("|") for at, part in enumerate(parts)]
    grouped = _products(choices) or (expression,)
    return [part for text in grouped for part in text.split("|")]


def _products(choices: Sequence[Sequence[str]]) -> _Patterns:
    """Every row of choices as one text; none beyond the limit."""
    count = 1
    for choice in choices:
        count *= len(choice)
    return tuple("".join(row) for row in product(*choices)) if count <= _MAX_PATTERNS else ()


def _with_stars(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """The patterns that match, if necessary with stars before and behind."""
    return tuple(first for first in (_first(_starred(pattern), names) for pattern in patterns) if first is not None)


def _starred(pattern: str) -> Iterator[str]:
    yield pattern
    bare = pattern.strip("*")
    # Optimizers and modules are prefixes, so the beginning of a name is the first guess.
    yield from (f"{bare}*", f"*{bare}", f"*{bare}*") if bare else ()


def _first(patterns: Iterable[str], names: Collection[str]) -> Optional[str]:
    """The first pattern that matches some names, and not all of them."""
    for pattern in patterns:
        fits = Glob(pattern).matches
        count = sum(1 for name in names if fits(name))
        if 0 < count < len(names) or count == len(names) == 1:
            return pattern
    return None


def _loosely(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """These patterns with the capitals and separators of the names that match when both are ignored."""
    patterns_of_names: dict[str, None] = {}
    for pattern in patterns:
        # An expression with many stars takes exponential time.
        for starred in _starred(pattern) if pattern.count("*") <= _MAX_STARS else ():
            literals, expression = _loose_expression(starred)
            kinds = Counter(match.groups() for match in map(expression.fullmatch, names) if match)
            if kinds and sum(kinds.values()) < max(2, len(names)):
                patterns_of_names.update(dict.fromkeys(_filled(literals, texts) for texts, _ in kinds.most_common(2)))
                break
    return tuple(patterns_of_names)


def _loose_expression(pattern: str) -> tuple[list[str], re.Pattern[str]]:
    """The literal and wildcard parts of a pattern, and an expression with a group for each literal part."""
    parts = re.split(r"([*?]|\[[^]]*\])", pattern)
    expressions = []
    for at, part in enumerate(parts):
        if at % 2:
            expressions.append(".*?" if part == "*" else expression_of(part))
        else:
            characters = (f"[{_SEPARATORS}]" if c in _SEPARATORS else re.escape(c) for c in part)
            expressions.append(f"({''.join(characters)})")
    return parts, re.compile("".join(expressions), re.IGNORECASE | re.DOTALL)


def _filled(parts: Sequence[str], texts: Sequence[str]) -> str:
    return "".join(part if at % 2 else texts[at // 2] for at, part in enumerate(parts))


def _spelled(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """Similar patterns with words from the names."""
    # Loaded only here: a run without mistakes does not need it.
    from difflib import get_close_matches

    words = {word for name in names for word in re.split(r"[./:]", name) if 0 < len(word) <= _MAX_WORD_LENGTH}
    if len(words) > _MAX_WORDS:
        return ()
    corrected = []
    for pattern in patterns:
        parts = re.split(r"([./:*?]|\[[^]]*\])", pattern)
        for at in range(0, len(parts), 2):
            if parts[at] and parts[at] not in words and len(parts[at]) <= _MAX_WORD_LENGTH:
                similar = get_close_matches(parts[at], sorted(words), n=1, cutoff=0.75)
                parts[at] = similar[0] if similar else parts[at]
        corrected.append("".join(parts))
    return _with_stars(tuple(corrected), names) if tuple(corrected) != patterns else ()


def _count(patterns: _Patterns, names: Collection[str]) -> int:
    """The number of names that one of the patterns matches."""
    globs = Globs(patterns)
    return sum(1 for name in names if globs.match(name))
