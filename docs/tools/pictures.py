"""The pictures of docs/formats.md: which elements of one small tensor lie in which file of every form.

Nothing in them is drawn from memory: a checkpoint of four ranks is converted to every form, and the files are opened.
The tensor's elements are 0, 1, 2 and so on, so that what is found in a file tells which they are.
"""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from docs.tools import svg
from docs.tools.pages import ROOT

PLACE = ROOT / "docs" / "pictures"

_TENSOR, _SHAPE = "w", (4, 6)
_MOMENT, _STEP = "adam_m.w", 10
# Rows are cut over the last axis of two; the first one makes replicas.
_CUT = {"dev_matrix": [2, 2], "tensor_map": [0, -1], "tensor_shape": _SHAPE}
_WHOLE = {**_CUT, "tensor_map": [-1, -1]}
_LAYOUTS = {_TENSOR: _CUT, _MOMENT: _CUT, "v": _WHOLE}
_RANKS, _SLICES = 4, 2

_FORMS: dict[str, tuple[str, list[str]]] = {
    "ranks": ("Rank directories: every rank's file holds its slice", []),
    "checkpoint2": ("Checkpoint 2.0: every slice once, and metadata.json tells where", ["--dst-strategy", "same"]),
    "unified": ("Unified weights: whole tensors, and a map", ["--exclude", "adam_*", "--max-shard-size", "100B"]),
    "huggingface": ("Hugging Face: whole tensors, and an index", ["--exclude", "adam_*", "--max-shard-size", "100B"]),
}

_WIDTH, _MARGIN, _GAP = 860.0, 16.0, 10.0
_CELL = 20.0
# Of a character of a file's name, which has many wide ones.
_NAME_WIDTH = 6.9
_CARD = _SHAPE[1] * _CELL + 2 * _GAP
_COLOURS = {
    "slice0": ("fill", "#cfe3fb", "#123f6d"),
    "slice1": ("fill", "#fde2c2", "#6b3d12"),
    "slice2": ("fill", "#d3efd8", "#17522c"),
    "slice3": ("fill", "#e6dcfb", "#44307a"),
}


class _Card(NamedTuple):
    """A file of a directory.

    Attributes:
        name: relative to the directory.
        elements: those of the tensor that are in it, by their numbers; None for a file of text.
        lines: what else is to be said of it.
    """

    name: str
    elements: Sequence[int] | None
    lines: Sequence[str]


def pictures(place: Path) -> dict[str, bytes]:
    """The content of every picture, by its file's name.

    Args:
        place: an empty directory.
    """
    _make_checkpoint(place)
    pictures = {}
    for form, (title, options) in _FORMS.items():
        directory = place / "ckpt" if form == "ranks" else place / form
        if form != "ranks":
            words = ["convert", "ckpt", form, "--src-strategy", "strategy.json", "--to", form, *options, "--quiet"]
            command = [sys.executable, "-m", "reshard", *words]
            subprocess.run(command, cwd=place, env=_environment(), check=True, capture_output=True)
        cards = [*_tensor_cards(directory), *_text_cards(form, place, directory)]
        pictures[f"form-{form}.svg"] = _drawn(title, cards)
    return pictures


def _make_checkpoint(place: Path) -> None:
    """A rank tree of four ranks below ``ckpt``, and its strategy."""
    layouts = {
        name: {**layout, "field": 0, "opt_weight_shard_step": 0, "opt_weight_shard_size": 0}
        for name, layout in _LAYOUTS.items()
    }
    layout = {"current_stage": 0, "parallel_layout_item": layouts}
    (place / "strategy.json").write_text(json.dumps(layout))
    full = np.arange(math.prod(_SHAPE), dtype="<f4").reshape(_SHAPE)
    rows = _SHAPE[0] // _SLICES
    for rank in range(_RANKS):
        first = rank % _SLICES * rows
        own = full[first : first + rows]
        tensors = {_TENSOR: own, "v": -full, _MOMENT: own / 100, "global_step": np.array([_STEP], "<i4")}
        _write(place / "ckpt" / f"rank_{rank}" / f"m-1_{_STEP}.safetensors", tensors)


def _write(path: Path, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    header, data = {}, b""
    for name, array in tensors.items():
        dtype = {"f": "F32", "i": "I32"}[array.dtype.kind]
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    encoded = json.dumps(header).encode()
    path.parent.mkdir(parents=True)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def _environment() -> dict[str, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    environment.pop("COLUMNS", None)
    return environment


def _tensor_cards(directory: Path) -> Iterator[_Card]:
    for path in sorted(directory.rglob("*.safetensors")):
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        others = sorted(set(header) - {"__metadata__", _TENSOR})
        elements: list[int] = []
        if _TENSOR in header:
            start, end = header[_TENSOR]["data_offsets"]
            elements = np.frombuffer(data[8 + length + start : 8 + length + end], "<f4").astype(int).tolist()
        yield _Card(path.relative_to(directory).as_posix(), elements, [", ".join(others)] if others else [])


def _text_cards(form: str, place: Path, directory: Path) -> list[_Card]:
    """The entries of the other files for the tensor."""
    if form == "ranks":
        strategy = json.loads((place / "strategy.json").read_text())["parallel_layout_item"][_TENSOR]
        text = f"{_TENSOR}: device matrix {strategy['dev_matrix']}, tensor map {strategy['tensor_map']}"
        return [_Card("the strategy file, which the job wrote elsewhere", None, [text])]
    if form == "checkpoint2":
        (metadata,) = directory.rglob("metadata.json")
        content = json.loads(metadata.read_text())
        described = content["state_dict_metadata"][_TENSOR]
        layout = described["layout"]
        lines = [
            f"{_TENSOR}: global_shape {described['global_shape']}, device_matrix {layout['device_matrix']}, "
            f"tensor_map {layout['tensor_map']}, rank_list {layout['rank_list']}"
        ]
        for key, stored in content["storage_data"].items():
            if key.startswith(f"('{_TENSOR}',"):
                (entry,) = stored
                lines.append(f"{key}: {entry['file_name']}, held by ranks {entry['rank_group']}")
        iteration = metadata.parent.name
        common = json.loads((metadata.parent / "common.json").read_text())
        tracker = directory / "latest_checkpointed_iteration.txt"
        return [
            _Card(f"{iteration}/metadata.json", None, lines),
            _Card(f"{iteration}/common.json", None, [f"global_step: {common['global_step']}"]),
            _Card(tracker.name, None, [tracker.read_text()]),
        ]
    (path,) = (path for path in directory.glob("*.json") if not path.name.startswith("reshard-"))
    where = json.loads(path.read_text())["weight_map"]
    return [_Card(path.name, None, [f"weight_map: {name}: {file}" for name, file in sorted(where.items())])]


def _drawn(title: str, cards: Sequence[_Card]) -> bytes:
    body = [svg.text(_MARGIN, 26, title, font_weight="600")]
    text = (
        f"{_TENSOR} is a tensor of shape {list(_SHAPE)}. A file holds the elements that are coloured, by ranks' slices."
    )
    parts, line = svg.paragraph(_MARGIN, 26 + svg.LINE_HEIGHT, text, _WIDTH - 2 * _MARGIN, "soft")
    body += parts
    files = [card for card in cards if card.elements is not None]
    place = os.path.commonpath([os.path.dirname(card.name) for card in files])
    if place:
        body.append(svg.text(_MARGIN, line + 4, f"{place}/", "ink"))
        line += svg.LINE_HEIGHT
    names = [os.path.relpath(card.name, place or ".") for card in files]
    width = max(_CARD, max(map(len, names)) * _NAME_WIDTH + 2 * _GAP)
    across = int((_WIDTH - 2 * _MARGIN + _GAP) / (width + _GAP))
    # All cards have the room that the one with most lines needs.
    texts = [svg.paragraph(0, 0, words, width - 2 * _GAP)[1] for card in files for words in _also(card)]
    height = 28 + _SHAPE[0] * _CELL + max(texts, default=0) + _GAP
    for number, (card, name) in enumerate(zip(files, names)):
        row, column = divmod(number, across)
        body += _tensor_file(card, name, _MARGIN + column * (width + _GAP), line + row * (height + _GAP), width, height)
    line += -(-len(files) // across) * (height + _GAP)
    for card in cards:
        if card.elements is None:
            parts, line = _text_file(card, line)
            body += parts
    return svg.document(_WIDTH, line + 4, title, body, _COLOURS)


def _tensor_file(card: _Card, name: str, x: float, top: float, width: float, height: float) -> list[str]:
    """A file of tensors: its name, the places of its elements in the tensor, and its other contents."""
    tensors = frozenset(card.elements or ())
    remaining, grid_top = x + _GAP, top + 28
    body = [svg.rectangle(x, top, width, height, "line", rx=4), svg.text(remaining, top + 18, name)]
    for number in range(math.prod(_SHAPE)):
        row, column = divmod(number, _SHAPE[1])
        at = remaining + column * _CELL, grid_top + row * _CELL
        if number in tensors:
            body.append(svg.rectangle(*at, _CELL, _CELL, f"slice{row * _SLICES // _SHAPE[0]}"))
            body.append(svg.text(at[0] + _CELL / 2, at[1] + 14, str(number), text_anchor="middle", font_size="10"))
        body.append(svg.rectangle(*at, _CELL, _CELL, "line"))
    line = grid_top + _SHAPE[0] * _CELL + 18
    for words in _also(card):
        parts, line = svg.paragraph(remaining, line, words, width - 2 * _GAP, "soft")
        body += parts
    return body


def _also(card: _Card) -> list[str]:
    """What else a file of tensors holds."""
    return [f"{'and ' if card.elements else ''}{words}" for words in card.lines]


def _text_file(card: _Card, top: float) -> tuple[list[str], float]:
    room = _WIDTH - 2 * _MARGIN
    body = [svg.text(_MARGIN + _GAP, top + 18, card.name)]
    line = top + 18 + svg.LINE_HEIGHT
    for words in card.lines:
        parts, line = svg.paragraph(_MARGIN + _GAP, line, words, room - 2 * _GAP, "soft")
        body += parts
    return [svg.rectangle(_MARGIN, top, room, line - 8 - top, "line", rx=4), *body], line + 4
