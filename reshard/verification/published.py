"""The names that transformers publishes, computed again: each name alone, by the conversions, without rules."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from reshard.errors import CheckpointError, NamesError
from reshard.names.published import PATH
from reshard.storage.toml_tables import TomlFile
from reshard.text.messages import quoted
from reshard.text.names import state_prefix

if TYPE_CHECKING:
    from reshard.names import Applied, AppliedStep

_Conversion = tuple[Sequence[str], Mapping[str, Any]]
"""Beginnings of names, and the conversion of those."""

_KINDS = {"concat": "join", "interleave": "join", "split": "cut"}


def check_published(config: Mapping[str, object], applied: Applied, names: Collection[str]) -> None:
    """Compare the names and operations of applied rules with the conversions of the model's class.

    Args:
        config: the model's config.json.
        applied: the rules, applied to all tensors.
        names: of all tensors.

    Raises:
        CheckpointError: they differ.
    """
    file = TomlFile(PATH, NamesError)
    data = file.parse(file.read())
    classes = data["models"][config["model_type"]]
    architectures = config.get("architectures")
    wrong = None
    for name in architectures if isinstance(architectures, list) and architectures else classes:
        if "apply" not in classes.get(name, {}):
            continue
        conversions = [(own, each) for key, *own in classes[name]["apply"] for each in data["conversions"][key]]
        wrong = next((step for step in applied.steps if not _is_right(step, conversions, names)), None)
        if wrong is None:
            return
    assert wrong is not None
    raise CheckpointError(
        f"{quoted(wrong.targets[0])} is not what transformers publishes of {quoted(wrong.sources[0])}",
        parameter=wrong.targets[0],
        hint="this is a fault of reshard: please report it",
    )


def _is_right(step: AppliedStep, conversions: Sequence[_Conversion], names: Collection[str]) -> bool:
    kinds = [each.kind for each in step.operations]
    for source in step.sources:
        prefix = state_prefix(source, names)
        name = source[len(prefix) :]
        joined = next((each for each in conversions if "do" in each[1] and _new(name, each, "") is not None), None)
        targets: list[str | None] = [name]
        operations: list[str] = []
        if joined is not None:
            parts = joined[1]["to"]
            experts = range(len(step.targets) // len(parts))
            targets = [_new(name, joined, part.replace("*", str(number))) for part in parts for number in experts]
            operations = [_KINDS.get(key, key) for do in joined[1]["do"] for key in [*do][:1]]
        for each in conversions:
            if "do" not in each[1]:
                target = each[1]["to"][0]
                targets = [old if (new := _new(str(old), each, target)) is None else new for old in targets]
        if tuple(f"{prefix}{target}" for target in targets) != step.targets or operations != kinds:
            return False
    return True


def _new(name: str, conversion: _Conversion, target: str) -> str | None:
    """The name with a target in place of what a conversion finds; None if it finds nothing."""
    prefixes, each = conversion
    beginning = next((prefix for prefix in prefixes or [""] if name.startswith(prefix)), None)
    if beginning is None:
        return None
    searched = name[len(beginning) :]
    found = next(filter(None, (re.search(pattern, searched) for pattern in each["from"])), None)
    if found is None:
        return None
    if r"\1" in target:
        target = target.replace(r"\1", found.group(1))
    before, _, after = searched.partition(found.group())
    return f"{beginning}{before}{target}{after}" if found.group() else beginning + target + searched
