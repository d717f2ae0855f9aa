"""Advice on a pattern of --include, --exclude or --cast that matches nothing: the most similar one that does."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from reshard.text.globs import Filters, Glob, pattern_of
from reshard.text.names import ACCUMULATED_GRADIENTS, GRADIENTS, OPTIMIZER_STATE, STATE_PREFIXES, kind_of
from reshard.text.near_names import near_names
from reshard.text.report import Report
from reshard.text.wording import plural, quoted

_MAX_BEGINNINGS = 6
# Limit of patterns with their own advice.
_MAX_ADVISED = 8
# Limit of parameters whose optimizer state a pattern is compared with.
_MAX_EXAMPLES = 500


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
        unmatched = [pattern for pattern in dict.fromkeys(patterns) if not any(map(Glob(pattern).matches, all_names))]
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
    """A similar pattern that matches, or the beginnings of all names.

    Args:
        option: the option of the pattern.
        pattern: it matches none of the names.
        all_names: all names that it may match.
        ending: text behind the pattern in the option's value.
    """
    names = sorted(all_names)
    # The names, and what they begin with: model.*, model.layers.*
    parts = [name.split(".") for name in names]
    beginnings = {pattern_of(".".join(each[:count])) + ".*": None for each in parts for count in range(1, len(each))}
    for similar in near_names(pattern, [*beginnings, *map(pattern_of, names)])[:1]:
        return f"{option} {quoted(similar + ending)} would match {sum(map(Glob(similar).matches, names))}"
    counts = Counter(name[: name.find(".") + 1] or name for name in names)
    shown = [
        quoted(beginning) + (f" ({count})" if count > 1 else "")
        for beginning, count in counts.most_common(_MAX_BEGINNINGS)
    ]
    more = len(counts) - len(shown)
    return f"the checkpoint's names begin with {', '.join(shown)}" + (f" and {plural(more, 'other')}" if more else "")
