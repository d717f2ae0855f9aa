"""A class name means one thing in the whole package."""

from __future__ import annotations

import re
from collections import defaultdict

from tests.corpus import ROOT

# Verification has its own, as of a source and as a protocol.
TWICE = frozenset({"Adapter", "Progress"})


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / "reshard").rglob("*.py")):
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE):
            places[name].append(str(path.relative_to(ROOT)))
    # Private classes are read in their own module only.
    twice = {name: actual for name, actual in places.items() if len(actual) > 1 and not name.startswith("_")}
    assert {name: actual for name, actual in twice.items() if name not in TWICE} == {}
