"""What loaders find in a written directory, whatever order or file it lies in.

Files that an index, a map or metadata names are read through it, by the names of tensors: loaders look for these, and
for nothing else. So which tensors share a file, the order of entries, of JSON members and of records do not count.
"""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Tensors = Callable[[Path], tuple[object, Mapping[str, object]]]
"""Reads a file: its metadata, and type, shape and elements of each tensor."""


class _Inert:
    """An instance or a call of any class or function of a pickle."""

    kind = ""
    args: tuple[object, ...]
    state: list[Any]

    def __new__(cls, *args: object) -> _Inert:
        self = super().__new__(cls)
        self.args, self.state = args, [dict[object, object]()]
        return self

    def __setstate__(self, state: Any) -> None:
        self.state.append(state)

    def __setitem__(self, key: object, value: object) -> None:
        self.state[0][key] = value

    def append(self, value: object) -> None:
        self.state.append({"append": value})


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Inert,), {"kind": f"{module}.{name}"})

    def persistent_load(self, key: Any) -> Any:
        return _plain(key)


def _plain(value: object) -> str:
    """A text of a value, the same for dictionaries and lists, which are of chunks, in another order."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{_plain(key)}: {_plain(each)}" for key, each in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        each = map(_plain, value)
        return f"{type(value).__name__}({', '.join(sorted(each) if isinstance(value, list) else each)})"
    if isinstance(value, _Inert):
        return f"{value.kind}{_plain(value.args)}{_plain(tuple(value.state))}"
    return value.kind if isinstance(value, type) and issubclass(value, _Inert) else repr(value)


def _unpickled(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


def _archived(data: bytes) -> Mapping[str, object]:
    """The entries of an archive of torch; of its pickle, what it holds."""
    found: dict[str, object] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            with archive.open(name) as entry:
                # Of elements no CRC is recorded, and torch compares none.
                entry._expected_crc = None  # type: ignore[attr-defined]
                content = entry.read()
            found[name] = _plain(_unpickled(content)) if name.endswith("/data.pkl") else content
    return found


def loaded(files: Mapping[str, Path], tensors: Tensors) -> dict[object, object]:
    """What loaders find in the files of a directory, by their names in it.

    Raises:
        Exception: an index names something that is not there.
    """
    found: dict[object, Any] = {}
    remaining = dict(files)
    for name, path in files.items():
        if path.name in ("model.safetensors.index.json", "param_name_map.json"):
            places = {tensor: path.parent / file for tensor, file in json.loads(path.read_text())["weight_map"].items()}
            held = {place: tensors(place) for place in set(places.values())}
            found |= {("weights", tensor): (held[place][0], held[place][1][tensor]) for tensor, place in places.items()}
            if sum(len(each) for _, each in held.values()) > len(places):
                found[name] = "tensors that are not in the index"
        elif path.name == "metadata.json" and b"storage_data" in path.read_bytes():
            held = {each: tensors(each) for each in path.parent.glob("*.safetensors")}
            found[name] = _of_checkpoint2(path, held)
        elif path.name == ".metadata":
            held = {each: tensors(each) for each in path.parent.glob("*.safetensors")}
            found[name] = _of_dcp(path, held)
            held |= dict.fromkeys([*path.parent.glob("*.distcp"), *path.parent.glob("*.bytes")])  # type: ignore[arg-type]
        else:
            continue
        remaining = {each: place for each, place in remaining.items() if place not in held and place != path}
    for name, path in remaining.items():
        if path.name == "model.safetensors":
            # By itself, it needs no index.
            metadata, held_here = tensors(path)
            found |= {("weights", tensor): (metadata, each) for tensor, each in held_here.items()}
        elif path.suffix == ".json":
            found[name] = json.loads(path.read_text())
        elif path.suffix == ".pt":
            found[name] = _archived(path.read_bytes())
        elif path.suffix in (".ckpt", ".safetensors"):
            metadata, entries = tensors(path)
            chunks = metadata.pop("DCP_SHARDING_INFO", {}) if isinstance(metadata, dict) else {}
            others = dict(entries)
            # torch reads every file and places its chunks by what the file records: the number of the file is a name,
            # and a chunk without elements of a tensor that has some fills nothing.
            for tensor, place in chunks.items():
                chunk: Any = others.pop(tensor)
                if 0 not in chunk[1] or 0 in place["global_shape"]:
                    found.setdefault((tensor, json.dumps(place, sort_keys=True)), []).append(chunk)
            found[name] = metadata, others
        else:
            found[name] = path.read_bytes()
    return found


def _of_checkpoint2(path: Path, held: Mapping[Path, tuple[object, Mapping[str, object]]]) -> object:
    """Descriptions and slices by name and number, and the entries that metadata.json does not list.

    MindFormers reads neither replica_id nor the names of axes, and any file of a slice.
    """
    content = json.loads(path.read_text())
    entries = {(file, name): value for file, (_, tensors) in held.items() for name, value in tensors.items()}
    for description in content["state_dict_metadata"].values():
        description["chunk"].sort(key=str)
        del description["properties"]["replica_id"], description["layout"]["alias_name"]
        cuts = description["layout"]["tensor_map"]
        description["layout"]["tensor_map"] = [axes if isinstance(axes, list) else [axes] for axes in cuts]
    slices = {}
    for key, holders in content["storage_data"].items():
        name = key[2 : key.rindex(key[1])]
        places = [(path.parent / each.pop("file_name"), name) for each in holders]
        for each, place in zip(holders, places):
            each["rank_group"].sort()
            each["slice"] = entries.pop(place)
        slices[key] = holders
    others = sorted((name, str(value), "opt-" in file.name) for (file, name), value in entries.items())
    return content["state_dict_metadata"], slices, others, [metadata for metadata, _ in held.values()]


def _of_dcp(path: Path, held: Mapping[Path, tuple[object, Mapping[str, object]]]) -> object:
    """Descriptions and contents by name and offset."""
    metadata = _unpickled(path.read_bytes()).state[1]
    contents: dict[str, object] = {}
    for index, place in metadata.pop("storage_data").items():
        fields = place.state[1]
        # The place of a chunk in a list is a hint only.
        index.state[1].pop("index")
        file, start, length = path.parent / fields["relative_path"], fields["offset"], fields["length"]
        if fields.get("tensor_key"):
            contents[_plain(index)] = held[file][0], held[file][1][fields["tensor_key"]]
        else:
            data = file.read_bytes()[start : start + length]
            contents[_plain(index)] = _archived(data) if file.suffix == ".distcp" else _plain(_unpickled(data))
    return _plain(metadata), contents
