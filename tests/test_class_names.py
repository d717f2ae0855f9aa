"""A class name means one thing in the whole package."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.corpus import ROOT

# Names of rules of names, of rules of strategies and of verification that are still given twice; none may be added.
TWICE = frozenset(
    {
        "Adapter",
        "Condition",
        "Contents",
        "Copy",
        "Cut",
        "Edits",
        "Entry",
        "Made",
        "Place",
        "Problems",
        "Product",
        "Progress",
        "Reading",
        "Rule",
        "Rules",
        "Sizes",
        "Source",
        "Stored",
        "Target",
        "Written",
    }
)


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "reshard").rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(ROOT)))
    # Private classes are read in their own module only.
    twice = {name: found for name, found in places.items() if len(found) > 1 and not name.startswith("_")}
    assert {name: found for name, found in twice.items() if name not in TWICE} == {}
