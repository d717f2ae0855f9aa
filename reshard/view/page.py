"""The page of `reshard view`: one HTML file that loads nothing, and its data, made from headers and strategies.

The data are tables of types and layouts, and columns of indices into them: a checkpoint has thousands of tensors and
ranks but tens of layouts, types and file structures, so that the page of 10,000 parameters on 4,096 ranks is small.
Tensors are in the natural order of their names; each name is what it adds to the one before. `page.js` and `page.css`
are the script and the style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from reshard._version import __version__
from reshard.checkpoints import files_alike
from reshard.checkpoints.checkpoint import Checkpoint, GlobalTensor, Sharding
from reshard.errors import InputError, ReshardError
from reshard.forms.form import Form
from reshard.forms.recorded import ChunkedCheckpoint
from reshard.inspection.checkpoint import Inspected, InspectedFile, Problem
from reshard.numbers.widening import ONE
from reshard.storage import absolute
from reshard.strategies import SAME, Strategy
from reshard.text.messages import one_line, plural
from reshard.text.names import is_weight, kind_of, natural_key

MARK = "<!-- reshard view -->"
"""A mark near the beginning of every page; only files with it are replaced."""


Numbers = npt.NDArray[np.int64]

MAX_PLACES = 300_000
"""Maximum number of places of tensors in a page; files with equal headers share theirs."""


class Table:
    """Distinct values, numbered in the order of insertion."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[object, int] = {}

    def number(self, key: object, value: Any = None) -> int:
        """The number of a value; equal values have equal keys, by default the value is its own key."""
        if key not in self._numbers:
            self._numbers[key] = len(self.values)
            self.values.append(key if value is None else value)
        return self._numbers[key]

    def __contains__(self, key: object) -> bool:
        return key in self._numbers


def page_data(inspected: Inspected, problems: Sequence[Problem], strategy: Strategy | None = None) -> dict[str, Any]:
    """The page's data on a checkpoint, as JSON; the strategy describes layouts that its form does not record."""
    strategy = strategy or recorded_strategy(inspected)
    entries = Entries(inspected, strategy)
    return {
        **described(inspected, problems, strategy, entries),
        "names": names_data(entries.names),
        "parameters": entries.columns,
        "structures": _structures(inspected.shown.checkpoint, entries.names),
    }


def described(
    inspected: Inspected, problems: Sequence[Problem], strategy: Strategy | None, entries: Entries
) -> dict[str, Any]:
    """What is on the page beside the entries: the checkpoint, its steps and files, and tables of types and layouts."""
    shown, paths, config = inspected.shown, _paths(entries.files), _configuration(inspected.path)
    return {
        "source": inspected.path,
        "titles": [title_of(inspected.path)],
        "about": _about(inspected, config),
        "prediction": _prediction(config),
        "block": _block(config),
        "unit": inspected.form.options.unit,
        "step": shown.step,
        "complete": shown.complete,
        "state": state_words(inspected),
        "problems": [each._asdict() for each in sorted(problems, key=lambda problem: problem.level)],
        "steps": _steps(inspected),
        "cluster": cluster_of(strategy),
        "files": {
            "base": paths[1],
            "path": paths[0],
            **files_data(entries.files),
            "same": repeats(entries.replicas()),
            "aliases": list(entries.aliases.items()),
        },
        "types": entries.types.values,
        "layouts": entries.layouts.layouts.values,
    }


def files_data(files: Sequence[InspectedFile]) -> dict[str, list[Any]]:
    """Numbers, sizes and states of files."""
    return {
        "number": [file.number for file in files],
        "bytes": repeats(file.nbytes for file in files),
        "state": repeats(file.state for file in files),
    }


_NUMBERED = re.compile(r"(step|iter|global_step|checkpoint)[-_]?\d+")


def title_of(path: str) -> str:
    """The last part of a path, after its parent's name if it is a step or ``checkpoint``."""
    *before, last = absolute(path).rstrip("/").split("/")
    known = last in ("checkpoint", "checkpoints") or _NUMBERED.fullmatch(last)
    return f"{before[-1]}/{last}" if known and before and before[-1] else last or path


def state_words(inspected: Inspected) -> str:
    """Whether a checkpoint is complete, in a few words."""
    if inspected.shown.complete is not False:
        return "complete" if inspected.shown.complete else "not checked"
    absent = len(inspected.shown.absent)
    return f"not complete: {plural(absent, 'rank')} missing" if absent else "not complete"


def _about(inspected: Inspected, config: Mapping[str, object]) -> list[str]:
    """The form, the model's class and the step, as far as they are known."""
    step, steps = inspected.shown.step, len(_steps(inspected))
    which = f" ({'newest' if step == _newest(inspected) else 'one'} of {steps})" if steps > 1 else ""
    words = [inspected.form.options.title, _architecture(config), None if step is None else f"step {step}{which}"]
    return [each for each in words if each]


def _newest(inspected: Inspected) -> str | None:
    if inspected.form.options.by_rank:
        return inspected.steps[0].step if inspected.steps else None
    return str(inspected.iterations[-1].number) if inspected.iterations else None


def recorded_strategy(inspected: Inspected) -> Strategy | None:
    """The strategy that a checkpoint records; the devices of chunks in a table of places are no ranks."""
    checkpoint = inspected.shown.checkpoint
    cut = None if checkpoint is None else inspected.form.cut(checkpoint)
    if cut is None or isinstance(checkpoint, ChunkedCheckpoint):
        return None
    with suppress(InputError):
        return cut.strategy()
    return None


def cluster_of(strategy: Strategy | None) -> dict[str, Any] | None:
    """The ranks of a strategy: first rank and devices of each stage, and sizes of axes if layouts determine them.

    The slices of weights tell mp, where all weights outside of experts have the same number or one; the rest of a
    stage's ranks is dp.
    """
    if strategy is None or strategy.is_placeholder or strategy.device_count < 2:
        return None
    stages = [[stage.first_rank, stage.device_count] for stage in strategy.stages]
    axes: list[list[Any]] = []
    devices, *others = {stage.device_count for stage in strategy.stages}
    slices = {
        math.prod(layout.tensor_cuts)
        for stage in strategy.stages
        for name, layout in stage.layouts.items()
        if "expert" not in name and is_weight(name, stage.layouts)
    }
    mp = max(slices, default=0)
    # Where mp and optimizer shards together cut over all ranks, recorded layouts do not show which of them cuts.
    known = mp < devices or strategy.path != SAME
    if mp and known and slices <= {1, mp} and not others and devices % mp == 0:
        sizes = {"dp": devices // mp, "mp": mp, "pp": len(stages)}
        axes += [[name, size] for name, size in sizes.items() if size > 1]
    words = " × ".join(f"{name} {size}" for name, size in axes)
    return {"ranks": strategy.device_count, "stages": stages, "axes": axes, "words": words}


def _configuration(path: str) -> Mapping[str, object]:
    """The config.json of a checkpoint; nothing without one that can be read."""
    # Loaded only here: most pages have none.
    from reshard.names import config_beside

    with suppress(ReshardError):
        return config_beside(path) or {}
    return {}


def _architecture(config: Mapping[str, object]) -> str | None:
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else None


def _prediction(config: Mapping[str, object]) -> list[int] | None:
    """The first layer that predicts further tokens, and their number."""
    layers, more = config.get("num_hidden_layers"), config.get("num_nextn_predict_layers")
    return [layers, more] if isinstance(layers, int) and isinstance(more, int) and more else None


def _block(config: Mapping[str, object]) -> list[int] | None:
    """Rows and columns that share a scale."""
    quantisation = config.get("quantization_config")
    block = quantisation.get("weight_block_size") if isinstance(quantisation, dict) else None
    return block if isinstance(block, list) and len(block) == 2 and all(type(each) is int for each in block) else None


def names_data(names: Sequence[str]) -> dict[str, list[Any]]:
    """For each name the number of leading dotted parts that it shares with the one before, and the rest."""
    shared, rest = [], []
    before: list[str] = []
    for name in names:
        parts = name.split(".")
        same = next((n for n, (one, other) in enumerate(zip(parts[:-1], before)) if one != other), None)
        shared.append(min(len(parts) - 1, len(before)) if same is None else same)
        rest.append(".".join(parts[shared[-1] :]))
        before = parts
    return {"shared": repeats(shared), "rest": rest}


def _steps(inspected: Inspected) -> list[dict[str, Any]]:
    """All steps, newest first; bytes are None where sizes were not read."""
    if not inspected.form.options.by_rank:
        states = {None: "unknown whether it is finished", False: "not finished", True: "finished"}
        steps = [(str(each.number), None, states[each.finished]) for each in reversed(inspected.iterations)]
        return [
            {"step": step, "nbytes": nbytes, "state": state, "shown": step == inspected.shown.step}
            for step, nbytes, state in steps
        ]
    states = {None: "not checked", False: "not complete", True: "complete"}
    return [
        {
            "step": each.step,
            "nbytes": each.nbytes,
            "state": "ambiguous" if each.ambiguous else states[each.complete],
            "shown": each is inspected.shown,
        }
        for each in inspected.steps
    ]


def _paths(files: Sequence[InspectedFile]) -> tuple[list[str | None], str]:
    """Paths relative to the directory of all, and this directory with its separator."""
    directories = [f"{os.path.dirname(file.path)}/" for file in files if file.path is not None]
    # Not commonpath: paths may be addresses of objects.
    base = os.path.commonprefix(directories)  # noqa: RUF071
    base = base[: base.rfind("/") + 1]
    return [None if file.path is None else file.path[len(base) :] for file in files], base


def _aliases(checkpoint: Checkpoint | None, files: Sequence[InspectedFile]) -> dict[int, int]:
    """The number of the file by further holder numbers: a file with several chunks of a tensor has several."""
    if checkpoint is None:
        return {}
    numbers = {file.path: file.number for file in files if file.number is not None}
    shown = set(numbers.values())
    further = {number: index.path for number, index in checkpoint.indexes.items() if number not in shown}
    return {number: numbers[path] for number, path in further.items() if path in numbers}


class Entries:
    """All entries of a checkpoint, in natural order: the number of the type and of the layout, -1 where there is none.

    A type is the dtype, the shapes, bytes of the full tensor, bytes in files, number of files and kind.
    """

    def __init__(self, inspected: Inspected, strategy: Strategy | None) -> None:
        checkpoint, contents = inspected.shown.checkpoint, inspected.shown.contents
        self.files = inspected.shown.with_missing()
        self.aliases = _aliases(checkpoint, self.files)
        self.types = Table()
        self.layouts = _Layouts(inspected.form, checkpoint, strategy)
        self.names: list[str] = []
        self.columns: dict[str, list[int]] = {"type": [], "layout": []}
        stored = {} if contents is None else {item.name: item for item in contents.stored}
        tensors: Mapping[str, GlobalTensor] = {} if checkpoint is None else checkpoint.tensors
        for name in by_parts({*stored, *tensors}):
            item, tensor = stored.get(name), tensors.get(name)
            in_files = (0, 0) if item is None else (item.nbytes, item.files)
            if tensor is not None:
                nbytes = tensor.nbytes
                kind = kind_of(name, math.prod(tensor.shape), tensors) if item is None else item.kind
                self._add(name, (tensor.dtype, (tensor.shape,), nbytes, *in_files, kind), self.layouts.of(tensor))
            elif item is not None:
                self._add(name, (",".join(item.dtypes), item.shapes, None, *in_files, item.kind), -1)

    def _add(self, name: str, type: tuple[Any, ...], layout: int) -> None:
        self.names.append(name)
        self.columns["type"].append(self.types.number(type))
        self.columns["layout"].append(layout)

    def replicas(self) -> list[int | None]:
        """Per file the first file with the same slices by the layouts; None where layouts are unknown."""
        numbers = [file.number for file in self.files]
        if not self.layouts.holding or None in numbers:
            return [None] * len(numbers)
        slices_of_file: dict[int, list[tuple[int, int]]] = {}
        for way, holders in enumerate(self.layouts.holding):
            for slice_number, files in enumerate(holders):
                for file in files:
                    slices_of_file.setdefault(self.aliases.get(file, file), []).append((way, slice_number))
        first: dict[object, int | None] = {}
        return [first.setdefault(tuple(slices_of_file.get(number or 0, (number,))), number) for number in numbers]


class _Layouts:
    """The layouts of tensors, each once, and every way in which slices are held, as lists of files per slice."""

    def __init__(self, form: Form, checkpoint: Checkpoint | None, strategy: Strategy | None) -> None:
        self.layouts = Table()
        self._checkpoint = checkpoint
        self._cut_of_form = None if checkpoint is None else form.cut(checkpoint)
        self._stages = () if strategy is None else strategy.stages
        self._holders = Table()
        self.holding: list[tuple[tuple[int, ...], ...]] = self._holders.values
        self._present = Table()
        # Tensors share shardings. Keeping these prevents that a new object gets the identity of a deleted one.
        self._known: dict[tuple[int, ...], tuple[Sequence[Sharding], tuple[Any, ...]]] = {}

    def of(self, tensor: GlobalTensor) -> int:
        assert self._checkpoint is not None
        present = self._checkpoint.present(tensor)
        key = tuple(map(id, tensor.shardings))
        if key not in self._known:
            self._known[key] = (tensor.shardings, tuple(map(self._cut, tensor.shardings)))
        cuts = self._known[key][1]
        split, shards = self._split(tensor.name)
        layout_key = (split, shards, tuple((*cut, self._present.number(files)) for cut, files in zip(cuts, present)))
        if layout_key in self.layouts:
            return self.layouts.number(layout_key)
        shardings = []
        for (counts, edges, holders), files in zip(cuts, present):
            lacking = sorted({file for each in self.holding[holders] for file in each}.difference(files))
            shardings.append(
                {
                    "cuts": counts,
                    "edges": dict(edges),
                    "slices": self.holding[holders],
                    "absent": lacking,
                }
            )
        return self.layouts.number(layout_key, {"split": split, "shards": shards, "shardings": shardings})

    def _cut(self, sharding: Sharding) -> tuple[Any, ...]:
        """Cuts per dimension, the edges of those that are not cut evenly, and the number of its holders."""
        grid = sharding.grid
        uneven = tuple(
            (dimension, edges)
            for dimension, edges in enumerate(grid.edges)
            if edges != tuple(range(0, edges[-1] + 1, max(1, edges[1])))[: len(edges)] or len(edges) < 2
        )
        holders = tuple(tuple(sharding.holders(number)) for number in range(grid.slice_count))
        return grid.cuts, uneven, self._holders.number(holders)

    def _split(self, name: str) -> tuple[tuple[int, ...], int]:
        """Cuts per dimension by the tensor map, and optimizer shards; none where no layout is recorded."""
        layout = next((stage.layouts[name] for stage in self._stages if name in stage.layouts), None)
        if layout is None and self._cut_of_form is not None and not self._stages:
            saved = self._cut_of_form.saved_layout(name)
            layout = None if saved is None else saved.layout
        return ((), 1) if layout is None else (layout.tensor_cuts, layout.shards)


def by_parts(names: Iterable[str]) -> list[str]:
    """Names with a common beginning together, numbers ascending: the order of a tree by the dots of names."""
    return sorted(names, key=lambda name: [(natural_key(part), part) for part in name.split(".")])


def _structures(checkpoint: Checkpoint | None, names: Sequence[str]) -> dict[str, Any] | None:
    """Places of tensors in files: per structure its files, and by parameter the offset and size of its slice.

    Offsets are counted from the end of the previous entry. None beyond `MAX_PLACES`.
    """
    if checkpoint is None:
        return {"files": [], "parameters": [], "gaps": [], "bytes": []}
    alike = [(checkpoint.indexes[files[0]], files) for files in files_alike(checkpoint.indexes)]
    if sum(len(index.tensors) for index, _ in alike) > MAX_PLACES:
        return None
    numbers = {name: number for number, name in enumerate(names)}
    structures: dict[str, list[Any]] = {"files": [], "parameters": [], "gaps": [], "bytes": []}
    for index, files in alike:
        end, last = 0, 0
        parameters, gaps, sizes = [], [], []
        for tensor in index.tensors.values():
            if not tensor.extents:
                continue
            offset = tensor.extents[0][0]
            parameters.append(numbers[tensor.name] - last)
            gaps.append(offset - end)
            sizes.append(tensor.nbytes)
            last, end = numbers[tensor.name], offset + tensor.nbytes
        structures["files"].append(files)
        structures["parameters"].append(repeats(parameters))
        structures["gaps"].append(repeats(gaps))
        structures["bytes"].append(repeats(sizes))
    return structures


def repeats(values: Iterable[Any]) -> list[Any]:
    """Values as ``[value, count, value, count ...]``."""
    runs: list[Any] = []
    for value in values:
        if runs and runs[-2] == value:
            runs[-1] += 1
        else:
            runs += [value, 1]
    return runs


def levels(magnitudes: Numbers | None) -> list[Any] | None:
    """Counts by binary exponent as the lowest exponent and a digit from 0 to 8 for each, relative to the largest.

    A digit is 0 only for exponents without elements. None without counts.
    """
    present: Any = np.flatnonzero(magnitudes) if magnitudes is not None else []
    if magnitudes is None or not len(present):
        return None
    low, high = int(present[0]), int(present[-1])
    counts = magnitudes[low : high + 1]
    digits = np.ceil(counts * (8 / int(counts.max()))).astype(np.int64)
    return [low - ONE, "".join(map(str, digits.tolist()))]


def page(data: Mapping[str, Any]) -> bytes:
    """The page as HTML, UTF-8.

    The script and the style lose what only their readers need: indentation, and lines of comments.

    Names come from untrusted files: in the data every ``<`` is escaped, and the script writes texts as text nodes only.
    The policy permits this script and this style by their hashes, and nothing else.
    """
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    # Lone surrogates, from names that are not UTF-8, stay escapes.
    text = json.dumps({**data, "foot": _foot(data)}, separators=(",", ":")).replace("<", "\\u003c")
    title = html.escape(one_line(" and ".join(data.get("titles", ()))))
    parts = [
        f'<!doctype html>\n{MARK}\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
        '<meta name="color-scheme" content="light dark">\n',
        f"<title>{title} - reshard view</title>\n<style>{style}</style>\n</head>\n<body>\n",
        "<noscript>This page needs JavaScript.</noscript>\n",
        f'<script type="application/json" id="data">{text}</script>\n<script>{script}</script>\n</body>\n</html>\n',
    ]
    return "".join(parts).encode()


def _foot(data: Mapping[str, Any]) -> str:
    """What the page was made from."""
    compared = data.get("compared")
    if data.get("statistics") or (compared and compared["values"]):
        read = "from the contents of all tensors"
    else:
        read = "from names, sizes, headers and strategies; "
        read += "types and shapes were compared, values were not" if compared else "contents were not compared"
    return f"reshard {__version__}; {read}; 1 KiB is 1,024 bytes"


def _asset(name: str) -> str:
    lines = map(str.strip, resources.files("reshard.view").joinpath(name).read_text(encoding="utf-8").splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("//"))


def _hash(text: str) -> str:
    """The hash by which a Content-Security-Policy permits an inline script or style."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
