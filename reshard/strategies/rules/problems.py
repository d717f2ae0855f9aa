"""What does not follow from rules: parameters grouped, with the lines that would settle it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from reshard.errors import StrategyError
from reshard.storage.toml_tables import one_or_list
from reshard.strategies.rules.tensors import patterns_for
from reshard.text.messages import Message, joined, listing
from reshard.text.wording import plural

_MOST_GROUPS = 8


@dataclass(frozen=True)
class Unsettled:
    """What is not known of parameters.

    Attributes:
        problem: in words.
        settled_by: per way to settle it the lines of a rule, without its match; none where rules cannot.
        comment: what is said above these lines.
        options: each of which settles it, where it is true of the run; then no lines are printed.
    """

    problem: str
    settled_by: tuple[tuple[str, ...], ...] = ()
    comment: str = ""
    options: tuple[str, ...] = ()


class UnsettledError(Exception):
    """Something of one parameter does not follow.

    Attributes:
        unsettled: what.
    """

    def __init__(
        self,
        problem: str,
        settled_by: Iterable[Sequence[str]] = (),
        comment: str = "",
        options: Iterable[str] = (),
    ) -> None:
        super().__init__(problem)
        self.unsettled = Unsettled(problem, tuple(map(tuple, settled_by)), comment, tuple(options))


@dataclass
class Problems:
    """Problems by kind, each with the parameters that have it."""

    found: dict[Unsettled, list[str]] = field(default_factory=dict)

    def add(self, name: str, error: UnsettledError) -> None:
        """Note a parameter's problem."""
        self.found.setdefault(error.unsettled, []).append(name)

    def raise_if_any(self, path: str, known: Sequence[str], where: str) -> None:
        """End here if something does not follow.

        Args:
            path: the rules.
            known: all parameters, so that patterns fit no others.
            where: where the lines are to be put.

        Raises:
            StrategyError: names every group and prints the lines that would settle it.
        """
        if not self.found:
            return
        count = sum(map(len, self.found.values()))
        texts: list[str] = [f"{path} does not settle {plural(count, 'parameter')}:"]
        for unsettled, names in self.found.items():
            lines = "".join(f"\n    {line}" for line in _lines(unsettled, names, known))
            texts.append(f"{unsettled.problem}: {plural(len(names), 'parameter')}: " + listing(names) + lines)
        left = len(self.found) - _MOST_GROUPS
        shown = joined("\n", texts[: _MOST_GROUPS + 1])
        if left > 0:
            shown += f"\nand {plural(left, 'more group')} of parameters"
        hints = []
        options = dict.fromkeys(option for unsettled in self.found for option in unsettled.options)
        if options:
            hints.append(f"add the option that is true of the run: {' or '.join(options)}")
        if any(one.settled_by and not one.options for one in self.found):
            hints.append(f"put the lines that are true into {where}")
        raise StrategyError(
            Message(shown, joined("\n", texts).full, shown.shortened or left > 0),
            file=path,
            parameter=next(iter(self.found.values()))[0],
            hint="\n".join(hints) or None,
        )


def _lines(unsettled: Unsettled, names: Sequence[str], known: Sequence[str]) -> list[str]:
    if unsettled.options:
        return []
    match = f"match = {one_or_list(patterns_for(names, known))}"
    lines: list[str] = []
    for number, way in enumerate(unsettled.settled_by):
        comment = unsettled.comment if number == 0 else "or"
        lines += [*([f"# {comment}"] if comment else []), "[[parameter]]", match, *way]
    return lines
