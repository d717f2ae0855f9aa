"""Names that `save_pretrained` of transformers gives the tensors of a model, by its config.json.

``published.toml`` contains conversions by model type and class: names in a model become those in published files, and
tensors too, where a model joins what is published apart, or has apart what is published joined. Applied to the names
of a checkpoint they are a table of rules like any other. Where the names could be wrong, there is a reason instead.
"""

from __future__ import annotations

import collections
import functools
import itertools
import json
import os
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from reshard.errors import NamesError
from reshard.names.operations import Shape
from reshard.names.rules import HUB_SIDE, NameRules
from reshard.names.tables import FUSED, FUSED_EXPERTS, parse_rules, published_experts, rules_named
from reshard.storage.toml_tables import TomlFile
from reshard.text.messages import listing, quoted
from reshard.text.names import fused_expert, state_prefix

PATH = os.path.join(os.path.dirname(__file__), "published.toml")
"""The conversions of transformers."""

# The number of an expert while names are converted: no model has as many.
_EXPERT = "987654321"
_NUMBER = re.compile("[0-9]+")
# Characters that have a meaning in patterns of rules.
_SPECIAL = frozenset("{}*")
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_MODELS = ("", "text_config.", "thinker_config.text_config.")


class UnknownNamesError(Exception):
    """Why the published names of a model are not known."""


def published_table(config: Mapping[str, object] | None, shapes: Mapping[str, Shape]) -> NameRules | None:
    """The rules from the names of a model to those that `save_pretrained` writes; None where names stay.

    Args:
        config: the model's config.json, if any.
        shapes: of all tensors, by their names in the model.

    Raises:
        UnknownNamesError: the published names are not known.
        NamesError: likewise, and experts are fused, which only transformers 5 loads.
    """
    fused = fused_expert(shapes)
    experts = None if fused is None else published_experts(config)
    if experts not in (None, FUSED):
        return rules_named(FUSED_EXPERTS)
    try:
        if config is None:
            raise UnknownNamesError("no config.json shows the model")
        return _published().table(config, shapes)
    except UnknownNamesError as error:
        if fused is None or experts is not None:
            raise
        hint = "for published names, write the model with save_pretrained of transformers"
        if config is None:
            hint = "add --config DIR with the config.json of the model"
        raise NamesError(
            f"{quoted(fused)} holds all experts of a layer, as in transformers 5, and published models have other "
            f"names: {error}",
            parameter=fused,
            hint=f"{hint}; or keep these names, which transformers 5 loads too: --names none",
        ) from error


def may_rename(config: Mapping[str, object] | None) -> bool:
    """Whether published files may have other names than the model of a config.json."""
    return config is not None and _published().renames(config)


class _Conversion(NamedTuple):
    """A conversion of names, and of tensors if it has operations.

    Attributes:
        prefixes: beginnings of the names that it is for; the first that a name has is not searched.
        patterns: of names in the model, one for each tensor that the operations take.
        targets: published names in their place; with a star, one for each expert.
        operations: as in rules.
    """

    prefixes: tuple[str, ...]
    patterns: tuple[re.Pattern[str], ...]
    targets: tuple[str, ...]
    operations: tuple[Mapping[str, Any], ...]

    def replaced(self, name: str) -> tuple[str, int] | None:
        """The name with the first target in place of what a pattern matches, and the number of the pattern."""
        prefix = next((each for each in self.prefixes if name.startswith(each)), None)
        if prefix is None:
            return None
        rest = name[len(prefix) :]
        for number, each in enumerate(self.patterns):
            match = each.search(rest)
            if match is not None:
                target = self.targets[0]
                if r"\1" in target:
                    target = target.replace(r"\1", match[1])
                return prefix + rest.replace(match[0], target, 1), number
        return None


class Named(NamedTuple):
    """Tensors of a model that become published ones.

    Attributes:
        sources: their names.
        targets: the published names; one with `_EXPERT` is for all experts.
        operations: as in rules; none where only the name changes.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    operations: tuple[Mapping[str, Any], ...] = ()


class Published:
    """The conversions of a version of transformers.

    Args:
        data: the content of ``published.toml``.
    """

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._library = f"transformers {data['version']}"
        self._plain = frozenset(data["plain"])
        self._conversions = data["conversions"]
        self._models = data["models"]

    def renames(self, config: Mapping[str, object]) -> bool:
        """Whether names of a model may change."""
        return config.get("model_type") in self._models

    def table(self, config: Mapping[str, object], shapes: Mapping[str, Shape]) -> NameRules | None:
        """See `published_table`."""
        model_type = str(config.get("model_type"))
        if model_type in self._plain:
            for key, part in model_types(config):
                # A model without conversions applies those of the models that it contains.
                if part not in self._plain:
                    raise UnknownNamesError(
                        f"{key} in config.json is a {quoted(part)}, with which {model_type} is not known"
                    )
            return None
        classes = self._models.get(model_type)
        if classes is None:
            raise UnknownNamesError(f"{self._library} has no names for model_type {quoted(model_type)}")
        architectures = config.get("architectures")
        # Without them, all classes that the names fit have to agree.
        names = [str(each) for each in architectures] if isinstance(architectures, list) else []
        tables: dict[str, str] = {}
        problems: list[str] = []
        for name in names or classes:
            try:
                tables.setdefault(self._text(classes, name, config, shapes), name)
            except UnknownNamesError as problem:
                problems.append(str(problem))
        if not tables or (names and problems):
            raise UnknownNamesError("; ".join(dict.fromkeys(problems)))
        if len(tables) > 1:
            raise UnknownNamesError(
                f"names fit {listing([*tables.values()])}, and no architectures in config.json decide"
            )
        (text,) = tables
        return parse_rules(text, f"published by {self._library}") if text else None

    def _text(
        self, classes: Mapping[str, Any], name: str, config: Mapping[str, object], shapes: Mapping[str, Shape]
    ) -> str:
        """The table of a class, as TOML; empty where names stay."""
        entry = classes.get(name)
        if entry is None:
            raise UnknownNamesError(f"{self._library} has no class {quoted(name)} of this model_type")
        if "left_out" in entry:
            raise UnknownNamesError(f"the names of {name} are not known: {entry['left_out']}")
        for key, part in model_types(config):
            expected = entry["parts"].get(key)
            if part != expected and (expected is not None or part not in self._plain):
                raise UnknownNamesError(f"{key} in config.json is a {quoted(part)}, with which {name} is not known")
        # Optimizer state follows its weight.
        names = [each for each in shapes if not state_prefix(each, shapes)]
        modules, words = entry["modules"], entry.get("words", 2)
        other = next((each for each in names if key_of(each, words) not in modules), None)
        if other is not None:
            raise UnknownNamesError(f"{quoted(other)} is no tensor of {name}, the class of the model")
        return text_of_table(self.named(entry, names), shapes, entry.get("counted", True))

    def named(self, entry: Mapping[str, Any], names: Sequence[str]) -> list[Named]:
        """The tensors of a model with their published names.

        Args:
            entry: the class, in ``published.toml``.
            names: of all tensors in the model.

        Raises:
            UnknownNamesError: of tensors that become one, some are missing.
        """
        conversions = [
            _Conversion(
                tuple(prefixes or ("",)),
                tuple(map(re.compile, each["from"])),
                tuple(each["to"]),
                tuple(each.get("do", ())),
            )
            for key, *prefixes in entry["apply"]
            for each in self._conversions[key]
        ]
        joined = [each for each in conversions if each.operations]
        renamed = [each for each in conversions if not each.operations]
        groups: dict[tuple[str, int | None], dict[int, str]] = {}
        for name in names:
            fits = ((number, each.replaced(name)) for number, each in enumerate(joined))
            place, fit = next(((number, each) for number, each in fits if each is not None), (None, (name, 0)))
            groups.setdefault((fit[0], place), {})[fit[1]] = name
        result = []
        for (new, place), sources in groups.items():
            targets, step = [new], None if place is None else joined[place]
            if step is not None:
                if len(sources) != len(step.patterns):
                    raise UnknownNamesError(f"tensors beside {listing([*sources.values()])} are missing")
                before, _, after = new.partition(step.targets[0])
                targets = [before + part.replace("*", _EXPERT) + after for part in step.targets]
            for each in renamed:
                targets = [name if (found := each.replaced(name)) is None else found[0] for name in targets]
            operations = () if step is None else step.operations
            result.append(Named(tuple(sources[number] for number in sorted(sources)), tuple(targets), operations))
        return result


@functools.cache
def _published() -> Published:
    file = TomlFile(PATH, NamesError)
    return Published(file.parse(file.read()))


def key_of(name: str, words: int = 2) -> str:
    """The first modules of a name, at most ``words``, with 0 for each number; they identify the class."""
    parts = name.split(".")
    return _NUMBER.sub("0", ".".join(parts[: min(words, max(1, len(parts) - 1))]))


def model_types(config: Mapping[str, object], place: str = "") -> Iterator[tuple[str, str]]:
    """The types of the models that a configuration contains, by their keys."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            if value.get("model_type"):
                yield place + key, str(value["model_type"])
            yield from model_types(value, f"{place}{key}.")


def text_of_table(named: Sequence[Named], shapes: Mapping[str, Shape], counted: bool = True) -> str:
    """Rules for the tensors that change, as TOML; empty if none does. Names that differ in numbers share a rule.

    Args:
        named: all tensors.
        shapes: their shapes.
        counted: whether there are as many experts as config.json states.

    Raises:
        UnknownNamesError: a name cannot be in a rule.
    """
    groups: dict[tuple[tuple[str, ...], tuple[str, ...], str], list[Named]] = {}
    for each in named:
        texts = [_inline(_with_parts(step, each.sources, shapes)) for step in each.operations]
        kind = (_without_numbers(each.sources), _without_numbers(each.targets), ", ".join(texts))
        groups.setdefault(kind, []).append(each)
    kinds = collections.Counter(skeleton for sources, *_ in groups for skeleton in {*sources})
    rules = []
    for (skeletons, _, steps), group in groups.items():
        if all(each.sources == each.targets and not each.operations for each in group):
            continue
        # A number in a pattern would also match names of the other group.
        shared = None if any(kinds[skeleton] > 1 for skeleton in skeletons) else _pattern(group)
        for each in [shared] if shared is not None else group:
            sources, targets = (json.dumps(names).replace(_EXPERT, "{expert}") for names in each[:2])
            rules.append(f"[[rule]]\nfrom = {sources}\nto = {targets}\ndo = [{steps}]\n")
    if not rules:
        return ""
    special = next((each for of in named for each in of.sources if _SPECIAL.intersection(each)), None)
    if special is not None:
        raise UnknownNamesError(f"{quoted(special)} has a character that rules cannot have")
    sizes = json.dumps([model + key for model, key in itertools.product(_MODELS, _EXPERTS)])
    return "\n".join(
        [
            f'sides = ["transformers", "{HUB_SIDE}"]',
            'direction = "forward"',
            'others = "keep"',
            *([f"sizes = {{ experts = {sizes} }}", 'numbers = { expert = "experts" }'] if counted else ()),
            *rules,
        ]
    )


def _with_parts(step: Mapping[str, Any], sources: Sequence[str], shapes: Mapping[str, Shape]) -> Mapping[str, Any]:
    """A concatenation with the sizes of its parts, which may differ."""
    return {**step, "parts": [shapes[name][step["concat"]] for name in sources]} if "concat" in step else step


def _inline(step: Mapping[str, Any]) -> str:
    return "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in step.items()) + " }"


def _without_numbers(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(_NUMBER.sub("0", name) for name in names)


def _pattern(group: Sequence[Named]) -> Named | None:
    """Tensors whose names differ in numbers, with patterns for them; None if the names need more than that."""
    places = [*zip(*(_NUMBER.findall("\n".join((*each.sources, *each.targets))) for each in group))]
    varying = dict.fromkeys(place for place in places if len({*place}) > 1)
    letters = {place: f"{{{letter}}}" for place, letter in zip(varying, string.ascii_lowercase)}
    if len(letters) < len(varying) or any(number != str(int(number)) for place in varying for number in place):
        return None
    texts = iter(letters.get(place, place[0]) for place in places)
    sources, targets = (tuple(_NUMBER.sub(lambda _: next(texts), name) for name in names) for names in group[0][:2])
    if any(name.count(letter) != 1 for name in (*sources, *targets) for letter in letters.values()):
        return None
    return Named(sources, targets)
