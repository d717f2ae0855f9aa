"""Advice on a pattern of --include or --exclude that matches nothing.

People type regular expressions (``adam.*``), braces as in a shell (``{adam_m,adam_v}.*``), lists, a name's beginning
without a star (``adam``), other separators (``adam_m_*``), other capitals, another optimizer's names, and they mistype.
Each of these habits gives other patterns; the first match becomes the advice.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from fnmatch import translate
from itertools import product
from typing import NamedTuple, Optional

from reshard.text.globs import Glob, Globs
from reshard.text.name_filters import Filters
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
# Limit of patterns from one, as by braces.
_MOST_PATTERNS = 6
_MOST_BEGINNINGS = 6
_MOST_STARS = 4
# Limit of patterns with their own advice.
_MOST_ADVISED = 8
# Names that a pattern for optimizer state is tried with.
_MOST_EXAMPLES = 500
# To compare longer names, or more words with each other, would take minutes.
_LONGEST_NAME = 300
_LONGEST_WORD = 60
_MOST_WORDS = 5000
_ANY_OPTIMIZER = re.compile(r"\W*(opt|optim|optimi[sz]ers?|moments?|momentum|states?)\W*", re.IGNORECASE)
# Translated patterns, without anchors.
_TRANSLATED = re.compile(r"\(\?s:(.*)\)\\[zZ]", re.DOTALL)
_STATE = "the checkpoint's optimizer state"

_Patterns = tuple[str, ...]


class Meant(NamedTuple):
    """Patterns that match, and probably the intended ones.

    Attributes:
        patterns: the patterns.
        matched: names that one of them matches.
        habit: why they were not typed, in words; empty where that is plain to see.
    """

    patterns: _Patterns
    matched: int
    habit: str = ""


def warn_of_unmatched(filters: Filters, names: Iterable[Iterable[str]], report: Report) -> None:
    """Warn of every pattern that matches nothing, with a pattern that does.

    Args:
        filters: the patterns.
        names: everything that a pattern may match, from several places.
        report: gets the warnings.
    """
    if not filters.include and not filters.exclude:
        return
    known = set().union(*names)
    for option, patterns in (("--include", filters.include), ("--exclude", filters.exclude)):
        unmatched = _unmatched(patterns, known)
        more = unmatched[_MOST_ADVISED:]
        if more:
            report.warn(
                f"{plural(len(unmatched), 'pattern')} of {option} match no parameter or value of the checkpoint; "
                f"besides those below {', '.join(map(quoted, more[:_MOST_ADVISED]))}"
                + (" ..." if len(more) > _MOST_ADVISED else "")
            )
        for pattern in unmatched[:_MOST_ADVISED]:
            # No warning of --exclude 'adam_*' for a checkpoint without optimizer state.
            if option == "--include" or not _is_for_absent_kind(pattern, known):
                advice = _advice(option, pattern, known)
                report.warn(f"{option} {quoted(pattern)} matches no parameter or value of the checkpoint; {advice}")


def _unmatched(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """The patterns that none of the names fits, each once."""
    left = dict.fromkeys(patterns)
    globs = Globs(left)
    for name in names:
        for pattern in globs.matching(name):
            left.pop(pattern, None)
        if not left:
            break
    return list(left)


def _is_for_absent_kind(pattern: str, known: Collection[str]) -> bool:
    """Whether a pattern is for optimizer state or accumulated gradients, and the checkpoint holds none of that kind."""
    kinds = {kind_of(name, 2, known) for name in known}
    fits = Glob(pattern).matches
    examples = list(itertools.islice(known, _MOST_EXAMPLES))
    return any(
        kind not in kinds and any(fits(prefix + name) for prefix in prefixes for name in examples)
        for kind, prefixes in ((OPTIMIZER_STATE, STATE_PREFIXES), (GRADIENTS, (ACCUMULATED_GRADIENTS,)))
    )


def _advice(option: str, pattern: str, known: Iterable[str]) -> str:
    names = sorted(name for name in known if len(name) <= _LONGEST_NAME)
    meant = meant_by(pattern, names)
    if meant is not None:
        options = " ".join(f"{option} {quoted(found)}" for found in meant.patterns)
        return f"{options} would match {meant.matched}" + (f" ({meant.habit})" if meant.habit else "")
    beginnings = Counter(name[: name.find(".") + 1] or name for name in names)
    said = [
        quoted(beginning) + (f" ({count})" if count > 1 else "")
        for beginning, count in beginnings.most_common(_MOST_BEGINNINGS)
    ]
    more = len(beginnings) - len(said)
    return f"the checkpoint's names begin with {', '.join(said)}" + (f" and {plural(more, 'other')}" if more else "")


def meant_by(pattern: str, names: Collection[str]) -> Optional[Meant]:
    """The probable intention of a pattern that matches no name; None without a guess."""
    known = frozenset(names)
    state = tuple(
        sorted({f"{state_prefix(name, known)}*" for name in names if kind_of(name, 2, known) == OPTIMIZER_STATE})
    )
    if _ANY_OPTIMIZER.fullmatch(pattern) and 0 < len(state) <= _MOST_PATTERNS:
        return Meant(state, _count(state, names), _STATE)
    for patterns, habit in _readings(pattern):
        for way in (_with_stars, _loosely, _spelled):
            found = way(patterns, names)
            if found:
                return Meant(found, _count(found, names), habit)
    if state_prefix(pattern, known) and 0 < len(state) <= _MOST_PATTERNS:
        return Meant(state, _count(state, names), _STATE)
    return None


def _readings(pattern: str) -> Iterator[tuple[_Patterns, str]]:
    """The pattern as typed, and its other readings, such as a regular expression."""
    unquoted = pattern.strip("'\" ")
    listed = tuple(part for part in re.split(r"[,;\s]+", unquoted) if part)
    if "{" in pattern:
        yield _without_braces(unquoted), "braces are not expanded"
    elif 1 < len(listed) <= _MOST_PATTERNS:
        yield listed, "one pattern for each option"
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
    made: list[str] = []
    for alternative in _alternatives(pattern):
        text = re.sub(r"^\^|\$$", "", alternative)
        text = re.sub(r"(\.|\\[dwsS]|\[[^]]*\])([*+]\??|\{[^}]*\})", "*", text)
        text = re.sub(r"\\d", "[0-9]", text)
        text = re.sub(r"\\(.)", r"\1", text)
        made.append(re.sub(r"\*{2,}", "*", text))
    return tuple(dict.fromkeys(made[:_MOST_PATTERNS]))


def _alternatives(expression: str) -> Iterable[str]:
    """``a(b|c)|d`` as ``ab``, ``ac``, ``d``; groups within groups are left as they are."""
    parts = re.split(r"\((?:\?:)?([^()]*)\)", expression)
    choices = [[part] if at % 2 == 0 else part.split("|") for at, part in enumerate(parts)]
    grouped = _products(choices) or (expression,)
    return [part for text in grouped for part in text.split("|")]


def _products(choices: Sequence[Sequence[str]]) -> _Patterns:
    """Every row of choices as one text; none where they are too many."""
    count = 1
    for choice in choices:
        count *= len(choice)
    return tuple("".join(row) for row in product(*choices)) if count <= _MOST_PATTERNS else ()


def _with_stars(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """The patterns that match, where need be with stars before and behind."""
    return tuple(found for found in (_first(_starred(pattern), names) for pattern in patterns) if found is not None)


def _starred(pattern: str) -> Iterator[str]:
    yield pattern
    bare = pattern.strip("*")
    # The beginning of a name first: that is where optimizers and modules put theirs.
    yield from (f"{bare}*", f"*{bare}", f"*{bare}*") if bare else ()


def _first(patterns: Iterable[str], names: Collection[str]) -> Optional[str]:
    """The first that matches some names, and not all of them."""
    for pattern in patterns:
        fits = Glob(pattern).matches
        count = sum(1 for name in names if fits(name))
        if 0 < count < len(names) or count == len(names) == 1:
            return pattern
    return None


def _loosely(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """Patterns like these in other capitals and with other separators, as the names that match have them."""
    found: dict[str, None] = {}
    for pattern in patterns:
        # An expression with many stars could take for ever.
        for starred in _starred(pattern) if pattern.count("*") <= _MOST_STARS else ():
            literals, expression = _loose_expression(starred)
            kinds = Counter(match.groups() for match in map(expression.fullmatch, names) if match)
            if kinds and sum(kinds.values()) < max(2, len(names)):
                found.update(dict.fromkeys(_filled(literals, texts) for texts, _ in kinds.most_common(2)))
                break
    return tuple(found)


def _loose_expression(pattern: str) -> tuple[list[str], re.Pattern[str]]:
    """The literal and wildcard parts of a pattern, and an expression with a group for each literal part."""
    parts = re.split(r"([*?]|\[[^]]*\])", pattern)
    said = []
    for at, part in enumerate(parts):
        if at % 2:
            said.append(".*?" if part == "*" else _TRANSLATED.sub(r"\1", translate(part)))
        else:
            said.append("(" + "".join(f"[{_SEPARATORS}]" if c in _SEPARATORS else re.escape(c) for c in part) + ")")
    return parts, re.compile("".join(said), re.IGNORECASE | re.DOTALL)


def _filled(parts: Sequence[str], texts: Sequence[str]) -> str:
    return "".join(part if at % 2 else texts[at // 2] for at, part in enumerate(parts))


def _spelled(patterns: _Patterns, names: Collection[str]) -> _Patterns:
    """Similar patterns with words from the names."""
    # Loaded only here: needed only where something is wrong.
    from difflib import get_close_matches

    words = {word for name in names for word in re.split(r"[./:]", name) if 0 < len(word) <= _LONGEST_WORD}
    if len(words) > _MOST_WORDS:
        return ()
    made = []
    for pattern in patterns:
        parts = re.split(r"([./:*?]|\[[^]]*\])", pattern)
        for at in range(0, len(parts), 2):
            if parts[at] and parts[at] not in words and len(parts[at]) <= _LONGEST_WORD:
                near = get_close_matches(parts[at], sorted(words), n=1, cutoff=0.75)
                parts[at] = near[0] if near else parts[at]
        made.append("".join(parts))
    return _with_stars(tuple(made), names) if tuple(made) != patterns else ()


def _count(patterns: _Patterns, names: Collection[str]) -> int:
    """How many names one of the patterns matches."""
    globs = Globs(patterns)
    return sum(1 for name in names if globs.match(name))
