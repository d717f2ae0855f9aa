"""Convert and verify with mutants; print the result of each as JSON.

    python -m tests.mutants.run [--every N] [--first N] [--module NAME] [--change REGEX] [--conversion NAME] [--show]

Each runs in a process of its own that is forked from this one, which imports nothing that may be changed.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from tests.corpus import ROOT
from tests.mutants.operators import Mutant, install, line_of, mutants_of

MODULES = (
    *(f"reshard.layout.{name}" for name in ("layout", "grid", "views")),
    "reshard.checkpoints.formats.elements",
    *(f"reshard.quantised.{name}" for name in ("values", "decoding")),
    *(f"reshard.execute.{name}" for name in ("filling", "parts", "reader", "run", "runs", "casts")),
    *(f"reshard.forms.megatron.{name}" for name in ("blocks", "bucket_state", "buckets", "parameters")),
    *(
        f"reshard.forms.megatron.{name}"
        for name in ("gathered", "legacy", "legacy_state", "live", "placing", "rank_files", "stages")
    ),
    # Writers.
    *(
        f"reshard.forms.megatron.{name}"
        for name in ("arguments", "legacy_written", "model", "origin", "training", "written")
    ),
    *(f"reshard.forms.pytorch.{name}" for name in ("chunk_headers", "dcp_written", "shards")),
    *(f"reshard.forms.{name}" for name in ("checkpoint2.written_files", "full.beside", "full.written_files")),
    *(f"reshard.forms.{name}" for name in ("target", "writing")),
    *(f"reshard.checkpoints.formats.{name}" for name in ("archives", "output", "pickles")),
    *(f"reshard.plan.{path.stem}" for path in sorted((ROOT / "reshard" / "plan").glob("[a-z]*.py"))),
)
# Changes that write something else, which no loader takes for another thing: module, change, and in which line.
HARMLESS = {
    # torch's loaders read type and shape of the properties, no memory format.
    ("reshard.forms.pytorch.dcp_written", "0 one higher", "_MEM_FORMAT_ENCODING"),
}
REFUSED, SAME, FOUND, CERTIFIED, ENDLESS = "refused", "same", "found", "certified", "endless"
_WORST = (SAME, REFUSED, ENDLESS, FOUND, CERTIFIED)
_MEMORY = 3 << 30
# A mutant that never ends or dies is tried again with the remaining conversions, at most so often.
_MAX_ENDLESS = 2
# The bits of infinity.
_INFINITE = {"Float64": 0x7FF << 52, "Float32": 0xFF << 23, "Float16": 0x1F << 10, "BFloat16": 0xFF << 7}
_T = TypeVar("_T")


def _files(out: Path) -> dict[str, Path]:
    """What a conversion wrote, records aside; a rank's file by its directory, since any name does."""
    paths = [path for path in sorted(out.rglob("*")) if path.is_file() and ".reshard" not in path.parts]
    files = Counter(path.parent for path in paths)
    alone = {path for path in paths if path.parent.name.startswith("rank_") and files[path.parent] == 1}
    return {
        str((path.parent if path in alone else path).relative_to(out)): path
        for path in paths
        if path.name != "reshard-manifest.json"
    }


def _is_right(out: Path, right: Path, cast: bool) -> bool:
    """Whether a conversion wrote what loaders of the right one find."""
    files, expected = _files(out), _files(right)
    if files.keys() == expected.keys() and all(
        path.read_bytes() == expected[name].read_bytes() for name, path in files.items()
    ):
        return True
    from tests.mutants.loaded import loaded

    try:
        return loaded(files, partial(_tensors, cast=cast)) == loaded(expected, partial(_tensors, cast=cast))
    except Exception:
        return False


def _tensors(path: Path, cast: bool) -> tuple[object, dict[str, tuple[object, ...]]]:
    """The metadata of a file, and type, shape and elements of each tensor; of cast ones, NaN may have any bits."""
    import numpy as np

    from tests.trees import read_checkpoint

    if path.suffix == ".pt":
        return None, {"": (read_pt(path),)}
    assert path.suffix in (".ckpt", ".safetensors")
    metadata = None
    if path.suffix == ".safetensors":
        data = path.read_bytes()
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]).get("__metadata__", {})
        # Loaders take a missing key for False.
        metadata.setdefault("remove_redundancy", "False")
        # The places of chunks are JSON within JSON.
        metadata = {key: json.loads(text) if text.startswith("{") else text for key, text in metadata.items()}
    tensors: dict[str, tuple[object, ...]] = {}
    for name, (dtype, array) in read_checkpoint(path).items():
        if cast and dtype in _INFINITE:
            without_sign = array & ((1 << (8 * array.dtype.itemsize - 1)) - 1)
            array = np.where(without_sign > _INFINITE[dtype], _INFINITE[dtype] + 1, array)
        tensors[name] = dtype, array.shape, array.tobytes()
    return metadata, tensors


def read_pt(path: Path) -> object:
    """What a file of torch.save holds, with types, shapes and bytes of tensors; no loader sees the order of names."""
    from reshard.checkpoints import FileHandles
    from reshard.checkpoints.formats.archives import Archive, is_tensor
    from reshard.checkpoints.formats.pickles import PickledInstance

    data = path.read_bytes()
    with FileHandles() as handles, handles.borrow(str(path)) as file:
        archive = Archive(file, 0, len(data))

        def plain(value: object) -> object:
            if is_tensor(value):
                at = archive.tensor(value)
                assert at.in_order
                return at.dtype, at.shape, data[at.offset : at.entry.offset + at.entry.size]
            if isinstance(value, PickledInstance):
                return value.name, plain(value.args), plain(value.state)
            if isinstance(value, dict):
                return {key: plain(each) for key, each in value.items()}
            return [plain(each) for each in value] if isinstance(value, (list, tuple)) else value

        return plain(archive.pickled(lambda name: True))


def _convert(words: list[str], out: Path) -> int:
    """The exit status of a conversion; any of a traceback is 1."""
    from reshard.cli.main import main

    if "then" in words:
        at = words.index("then")
        return _convert(words[:at], out) or _convert(words[at + 1 :], out)
    sys.argv = ["reshard", *(str(out) if word == "OUT" else word for word in words)]
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            main()
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        return 1
    return 0


def _judge(commands: Mapping[str, list[str]], right: Path, place: Path) -> Iterator[tuple[str, str]]:
    """The outcome of every conversion."""
    for name, words in commands.items():
        status = _convert(words, place / name)
        cast = not {"--cast", "--dequantize"}.isdisjoint(words)
        same = (place / name).is_dir() and _is_right(place / name, right / name, cast)
        shutil.rmtree(place / name, ignore_errors=True)
        if status == 0:
            yield name, SAME if same else CERTIFIED
        else:
            # A difference that is none, where the output is right, is no harm.
            yield name, FOUND if status == 4 else REFUSED


def _in_child(
    work: Path, limit: int, mutant: Mutant | None, task: Callable[[Path], Iterable[tuple[str, _T]]]
) -> dict[str, _T]:
    """Run a task in a process of its own, with a mutant; its results until it took too long or too much.

    The limit is one of processor time; a deadlock takes ten times as long.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(read)
            os.setsid()
            signal.alarm(10 * limit)
            resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
            if mutant is not None:
                install(mutant)
            for result in task(work):
                os.write(write, json.dumps(result).encode() + b"\n")
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        output = pipe.read()
    os.waitpid(child, 0)
    shutil.rmtree(work, ignore_errors=True)
    return dict(map(json.loads, output.splitlines()))


def run(chosen: Sequence[Mutant], limit: int, jobs: int, conversions: Collection[str] = ()) -> dict[str, object]:
    """What became of some mutants, in some conversions or all."""
    # Slow imports that do not change are done before the children start.
    for name in ("numpy", "click", "safetensors", "google.protobuf.descriptor_pool", "reshard.storage"):
        importlib.import_module(name)
    # Memory, where there is some: each conversion flushes what it writes.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as directory:
        root = Path(directory)

        def plain(work: Path) -> Iterable[tuple[str, list[str]]]:
            # Imported only here, in a child: it loads parts of `reshard`.
            from tests.mutants.conversions import build

            built = build(root)
            commands = {name: words for name, words in built.items() if not conversions or name in conversions}
            for name, words in commands.items():
                assert _convert(words, root / "right" / name) == 0, name
            return commands.items()

        commands = _in_child(root / "none", 120, None, plain)
        assert commands, "without a mutant a conversion fails"

        def of(numbered: tuple[int, Mutant]) -> dict[str, object]:
            number, mutant = numbered
            began = time.monotonic()
            work = root / f"work{number}"
            work.mkdir()
            actual: dict[str, str] = {}
            while len(actual) < len(commands):
                remaining = {name: words for name, words in commands.items() if name not in actual}
                if [*actual.values()].count(ENDLESS) == _MAX_ENDLESS:
                    actual.update(dict.fromkeys(remaining, ENDLESS))
                    break
                work.mkdir(exist_ok=True)
                actual.update(_in_child(work, limit, mutant, partial(_judge, remaining, root / "right")))
                actual.update((name, ENDLESS) for name in [name for name in remaining if name not in actual][:1])
            worst = max(actual.values(), key=_WORST.index)
            return {**mutant._asdict(), "outcome": worst, "conversions": actual, "seconds": time.monotonic() - began}

        with ThreadPoolExecutor(jobs) as pool:
            outcomes = [*pool.map(of, enumerate(chosen))]
    counts = Counter(str(one["outcome"]) for one in outcomes)
    each = Counter(status for one in outcomes for status in dict(one["conversions"]).values())  # type: ignore[call-overload]
    return {"run": len(outcomes), "outcomes": counts, "conversions": each, "each": outcomes}


def is_harmless(mutant: Mutant) -> bool:
    return any(
        (mutant.module, mutant.change) == (module, change) and text in line_of(mutant)
        for module, change, text in HARMLESS
    )


def main() -> None:
    """Print the results of the mutants."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--limit", type=int, default=15, help="seconds of processor time for a mutant")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--module", action="append")
    parser.add_argument("--change", default="", help="only changes in whose words this regular expression is found")
    parser.add_argument("--conversion", action="append", default=[])
    parser.add_argument("--show", action="store_true", help="only what is certified, and the counts")
    arguments = parser.parse_args()
    chosen = [mutant for module in arguments.module or MODULES for mutant in mutants_of(module)]
    chosen = [each for each in chosen if re.search(arguments.change, each.change) and not is_harmless(each)]
    result = run(chosen[arguments.first :: arguments.every], arguments.limit, arguments.jobs, arguments.conversion)
    if arguments.show:
        each = result.pop("each")
        assert isinstance(each, list)
        for one in each:
            if one["outcome"] == CERTIFIED:
                wrong = [name for name, status in one["conversions"].items() if status == CERTIFIED]
                print(f"certified: {one['module']}:{one['line']}: {one['change']} (number {one['number']}): {wrong}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
