"""Writes `reshard/names/published.toml`: the names that transformers' `save_pretrained` gives the tensors of a model.

Run it in the environment of `make conformance-transformers`, from the top of the repository::

    .venv-conformance-transformers/bin/python -m tests.conformance.make_published_names

Facts come from the library's objects alone: conversions by model type and class, turned around as for saving, and the
names of every class's default model. A class of which the written conversions do not make exactly the names that the
library saves is left out, with the reason.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import conversion_mapping
from transformers.core_model_loading import (
    GroupWeightRename,
    Inkling2IndexOffsetWeightRename,
    LayerPairCollapse,
    PrefixChange,
    revert_weight_conversion,
)
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from reshard.errors import ReshardError
from reshard.names import apply_rules, parse_rules
from reshard.names.published import Named, Published, UnknownNamesError, key_of, model_types, text_of_table

_PATH = Path(__file__).parents[2] / "reshard" / "names" / "published.toml"
_HEAD = """\
# Written by `python -m tests.conformance.make_published_names` from transformers {version}; do not edit.
#
# How `save_pretrained` names the tensors of a model that was not loaded. Prefixes that the library adds or removes
# only where the loaded files lacked or had them are not here.
#
# plain: model types whose names stay.
# conversions: from a name in the model (a regular expression, searched) to a published one; {reader} reads it.
# models: by type and class. modules: the beginnings of names, of two modules or of `words` modules.
# parts: types of nested configurations with conversions of their own. apply: conversions in order, each with the
# prefixes of the names that it is for.
# counted = false: there are more or fewer experts than config.json states. left_out: why a class is not here.
"""
# Conversions that saving ignores: without a record of loading, or because they change nothing that is saved.
_NOT_FOR_SAVING = (PrefixChange, LayerPairCollapse)


class LeftOutError(Exception):
    """A conversion needs more than our operations."""


def main() -> None:
    keys: dict[int, str] = {}
    kept: list[Any] = []
    original = conversion_mapping.get_checkpoint_conversion_mapping

    def recording(key: str) -> Any:
        found = original(key)
        for each in found or ():
            keys[id(each)] = key
            kept.append(each)
        return found

    conversion_mapping.get_checkpoint_conversion_mapping = recording
    conversions: dict[str, Any] = {}
    models: dict[str, dict[str, Any]] = {}
    for model_type in CONFIG_MAPPING:
        for name in _classes_of(model_type):
            kept.clear()
            keys.clear()
            try:
                with torch.device("meta"):
                    model = getattr(transformers, name)(CONFIG_MAPPING[model_type]())
            except Exception:
                # The default configuration is none of a model, or the model needs another library.
                continue
            models.setdefault(model_type, {})[name] = _described(model_type, model, keys, conversions)
    unmade = {
        model_type
        for model_type in CONFIG_MAPPING.keys() - models.keys()
        if not any(map(original, (model_type, *_classes_of(model_type))))
    }
    changed = {model_type for model_type, classes in models.items() if any(map(_changes, classes.values()))}
    plain = sorted({*models, *unmade} - changed)
    used = {key for classes in models.values() for each in classes.values() for key, *_ in each.get("apply", ())}
    data = {
        "version": transformers.__version__,
        "plain": plain,
        "conversions": {key: conversions[key] for key in sorted(used)},
        "models": {model_type: models[model_type] for model_type in sorted(changed)},
    }
    _keep_right_ones(data)
    _PATH.write_text(_text(data))


def _classes_of(model_type: str) -> list[str]:
    classes: dict[str, None] = {}
    for mapping in filter(re.compile("MODEL.*_MAPPING_NAMES").fullmatch, dir(modeling_auto)):
        names = getattr(modeling_auto, mapping).get(model_type, ())
        classes.update(dict.fromkeys([names] if isinstance(names, str) else names))
    return sorted(classes)


_Shapes = dict[str, tuple[int, ...]]
# Of each model type and class: the tensors of its default model, the saved ones, and the configuration.
_SAVED: dict[tuple[str, str], tuple[_Shapes, _Shapes, dict[str, Any]]] = {}


def _described(model_type: str, model: Any, keys: Mapping[int, str], conversions: dict[str, Any]) -> dict[str, Any]:
    state = model.state_dict()
    found = conversion_mapping.get_model_conversion_mapping(model, add_legacy=False)
    found = [each for each in found if not isinstance(each, _NOT_FOR_SAVING)]
    saved = revert_weight_conversion(model, state)
    shapes, saved_shapes = ({name: tuple(each.shape) for name, each in of.items()} for of in (state, saved))
    apply: list[list[str]] = []
    try:
        for each in reversed(found):
            key = keys[id(each)]
            entry = [key, *_prefixes(each)]
            if entry not in apply:
                apply.append(entry)
            if key not in conversions:
                of_key = [other for other in found if keys[id(other)] == key and _prefixes(other) == _prefixes(each)]
                conversions[key] = [_conversion(other.reverse_transform()) for other in reversed(of_key)]
    except LeftOutError as error:
        return {"left_out": str(error)}
    config = model.config.to_dict()
    _SAVED[model_type, type(model).__name__] = shapes, saved_shapes, config
    parts = dict(model_types(config))
    return {"modules": sorted({*map(key_of, state)}), "parts": parts, "apply": apply}


def _changes(entry: Mapping[str, Any]) -> bool:
    return "left_out" in entry or bool(entry["apply"])


def _prefixes(conversion: Any) -> list[str]:
    """The prefixes of the names that it is for, the first that a name has; none for all names."""
    if conversion.scope_prefix is None:
        return []
    scope, base = (f"{each}." if each else "" for each in (conversion.scope_prefix, conversion.base_model_prefix))
    return [base + scope, scope]


def _conversion(reverse: Any) -> dict[str, Any]:
    if isinstance(reverse, (GroupWeightRename, Inkling2IndexOffsetWeightRename)):
        raise LeftOutError(f"needs {type(reverse).__name__}")
    branches = reverse.compiled_sources.groupindex
    patterns = [text.replace("*.", r".*\.") for text in reverse.source_patterns]
    patterns = [text + r"(?!\w)" if re.search(r"[a-zA-Z0-9]$", text) else text for text in patterns]
    assert all(f"(?P<g{number}>{text})" in reverse.compiled_sources.pattern for number, text in enumerate(patterns))
    assert len(branches) == len(patterns)
    operations = [each for operation in getattr(reverse, "operations", ()) for each in _operations(operation)]
    steps = {"do": operations} if operations else {}
    return {"from": patterns, "to": list(reverse.target_patterns), **steps}


def _operations(operation: Any) -> list[Any]:
    kind, values = type(operation).__name__, vars(operation)
    if values.get("num_shards_attribute"):
        raise LeftOutError(f"needs {kind} with {values['num_shards_attribute']}")
    if kind == "Transpose":
        if values["check_dims"]:
            # Saved tensors have the shapes of the model.
            return []
        order = [0, 1, 2][: max(values["dim0"], values["dim1"]) + 1]
        order[values["dim0"]], order[values["dim1"]] = values["dim1"], values["dim0"]
        return [{"transpose": order}]
    if kind == "Interleave" and values["inverse"]:
        return [{"split": values["dim"], "into": 2}, {"interleave": values["dim"]}]
    words = {"Concatenate": "concat", "Chunk": "split", "SplitModulelist": "unstack"}
    if kind not in words:
        raise LeftOutError(f"needs {kind}")
    return [{"unstack": "expert"} if kind == "SplitModulelist" else {words[kind]: values["dim"]}]


def _keep_right_ones(data: dict[str, Any]) -> None:
    """Remove parts whose names stay, and replace classes of which the written conversions make other names."""
    published = Published(data)
    for model_type, classes in data["models"].items():
        for name, entry in classes.items():
            if "left_out" in entry:
                continue
            shapes, saved, config = _SAVED[model_type, name]
            entry["parts"] = {key: part for key, part in entry["parts"].items() if part not in data["plain"]}
            try:
                made = _made(published, entry, shapes, {})
                problem = "" if made == saved else "its conversions make other names"
            except (UnknownNamesError, ReshardError) as error:
                problem = str(error)
            if problem:
                print(model_type, name, problem)
                classes[name] = {"left_out": problem}
                continue
            _distinguish(published, entry, shapes, saved)
            try:
                _made(published, entry, shapes, config)
            except ReshardError as error:
                # Such as experts without weights.
                print(model_type, name, error)
                entry["counted"] = False


def _distinguish(published: Published, entry: dict[str, Any], shapes: _Shapes, saved: _Shapes) -> None:
    """Raise ``words`` until the modules tell published names, as of a model of transformers 4, from those of the class.

    Names that stay need no more words.
    """
    while any(each.sources != each.targets or each.operations for each in _named(published, entry, saved)):
        words = entry.get("words", 2)
        if any(key_of(name, words) not in entry["modules"] for name in saved):
            return
        assert words < 9
        entry["words"] = words + 1
        entry["modules"] = sorted({key_of(name, words + 1) for name in shapes})


def _named(published: Published, entry: Mapping[str, Any], saved: _Shapes) -> list[Named]:
    try:
        return published.named(entry, [*saved])
    except UnknownNamesError:
        return []


def _made(
    published: Published, entry: Mapping[str, Any], shapes: _Shapes, config: Mapping[str, Any]
) -> dict[str, tuple[int, ...]]:
    """The shapes of the published tensors, by name."""
    text = text_of_table(published.named(entry, [*shapes]), shapes)
    if not text:
        return shapes
    applied = apply_rules(parse_rules(text, "published names"), shapes, config)
    return {new: view.shape for new, _, view in applied.views()}


def _text(data: Mapping[str, Any]) -> str:
    return "".join(_lines(data))


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield _HEAD.format(version=data["version"], reader="`published.py`")
    yield f"\nversion = {_toml(data['version'])}\nplain = {_list(map(_toml, data['plain']))}\n\n[conversions]\n"
    for key, steps in data["conversions"].items():
        yield f"{key} = {_list(map(_toml, steps))}\n"
    for model_type, classes in data["models"].items():
        yield f"\n[models.{_key(model_type)}]\n"
        for name, entry in classes.items():
            yield f"{name} = {_toml(entry)}\n"


def _list(items: Any) -> str:
    return "[\n" + "".join(f"    {each},\n" for each in items) + "]"


def _key(text: str) -> str:
    return text if re.fullmatch("[A-Za-z0-9_-]+", text) else json.dumps(text)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        inner = ", ".join(f"{_key(key)} = {_toml(each)}" for key, each in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, str) and "\\" in value:
        assert "'" not in value
        return f"'{value}'"
    return json.dumps(value)


if __name__ == "__main__":
    main()
