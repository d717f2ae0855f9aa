"""The minimums that pyproject.toml declares are the versions that `make matrix` tests."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.version import Version

from tests.corpus import ROOT

OLDEST_PYTHON = {"python_version": "3.10", "python_full_version": "3.10.0"}


def needed(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**OLDEST_PYTHON, "extra": extra})


def only_version(requirement: Requirement, operator: str) -> Version:
    (specifier,) = requirement.specifier
    assert specifier.operator == operator, requirement
    return Version(specifier.version)


def test_the_oldest_dependencies_that_are_tested_are_the_declared_minimums() -> None:
    declared = [Requirement(line) for line in metadata.requires("reshard") or []]
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    tested = [Requirement(line) for line in lines if not line.startswith("#")]
    minimums = {item.name: only_version(item, ">=") for item in declared if needed(item, "test")}
    assert "numpy" in minimums and "pytest" in minimums
    assert {item.name: only_version(item, "==") for item in tested if needed(item, "")} == minimums


def test_the_oldest_dependencies_of_a_newer_python_are_no_older() -> None:
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    of_python = {}
    for python in ("3.10", "3.11", "3.12", "3.13"):
        mine = [pin for pin in pins if pin.marker is None or pin.marker.evaluate({"python_version": python})]
        of_python[python] = {pin.name: only_version(pin, "==") for pin in mine}
        assert len(mine) == len(of_python[python]), f"two pins of one name for Python {python}"
        assert all(of_python[python][name] >= least for name, least in of_python["3.10"].items()), python
